"""Whether promises hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from sottovoce.spec import load_spec
from sottovoce_client.cli.app import AllowImports, LogLevel, SpecFile, app, folder_for, prepared_from


@app.command(rich_help_panel="Privacy")
def audit(
    spec: SpecFile,
    runs: Annotated[int, typer.Option(min=10, help="Runs of each of the two worlds.")] = 1000,
    learner: Annotated[
        str | None, typer.Option(help="Whose messages.", show_default="the one with the largest epsilon")
    ] = None,
    record: Annotated[
        int | None,
        typer.Option(min=0, help="Row of the learner's record to swap.", show_default="the swap that shows most"),
    ] = None,
    replacement: Annotated[
        str, typer.Option(metavar="WHAT", help="For it: mirror, label, LEARNER:ROW, or a .json file.")
    ] = "mirror",
    threat: Annotated[Literal["wire", "neighbour", "output"], typer.Option(help="Who listens.")] = "wire",
    neighbour: Annotated[
        str | None, typer.Option(help="At which neighbour.", show_default="the first that hears it")
    ] = None,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999999, help="With which a correct learner is not refuted.")
    ] = 0.95,
    backend: Annotated[
        Literal["processes", "ray", "dask"], typer.Option(help="Where simulated runs are worked on.")
    ] = "processes",
    jobs: Annotated[int | None, typer.Option(min=1, help="How many at a time.", show_default="one per core")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the coins and the noise.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results.", show_default="sottovoce-runs/audit-TIME")
    ] = None,
) -> None:
    """Try to refute what a run promises about one learner: many runs in two worlds that differ in one record.

    Writes audit.json and audit.html. Exits with 1 if the promise is refuted.
    """
    from functools import partial

    from sottovoce.audit.audit import audit_simulated
    from sottovoce.privacy.guarantee import ThreatModel
    from sottovoce_client.auditing.audit import Question, audit_to
    from sottovoce_client.auditing.spread import spread_over

    asked = Question(learner, record, replacement, ThreatModel(threat), neighbour, runs, confidence, seed)
    prepared = prepared_from(load_spec(spec))
    with spread_over(backend, jobs) as spread:
        code = audit_to(folder_for("audit", out), prepared, asked, partial(audit_simulated, spread=spread))
    raise typer.Exit(code)


@app.command(rich_help_panel="Privacy")
def gallery(
    capture: Annotated[
        Path | None,
        typer.Option("--from", metavar="CAPTURE", help="Attack this capture, a folder, in place of simulated runs."),
    ] = None,
    epsilons: Annotated[
        str, typer.Option(metavar="E,E,...", help="Noise of the pictures: epsilon of a record over the whole run.")
    ] = "100000,10000,1000,100,1",
    runs: Annotated[int, typer.Option(min=10, help="Simulated runs in which membership is guessed.")] = 4000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of noise, coins and searches.")] = 0,
    allow_imports: AllowImports = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results.", show_default="sottovoce-runs/gallery-TIME")
    ] = None,
) -> None:
    """Show what an eavesdropper can rebuild of the records, in pictures, with and without noise.

    Writes gallery.json and gallery.html. Searching in a network's gradients needs the extra torch.
    """
    from sottovoce_client.gallery.gallery import gallery as show
    from sottovoce_client.gallery.gallery import gallery_of, levels

    folder = folder_for("gallery", out)
    if capture is None:
        show(folder, levels(epsilons), runs, seed)
    else:
        gallery_of(capture, folder, seed, os.environ.get("SOTTOVOCE_DATA"), allow_imports=allow_imports)


@app.command(rich_help_panel="Privacy")
def watch(
    capture: Annotated[
        str | None,
        typer.Argument(metavar="FOLDER", help="A capture's folder, or the run's that it is in.", show_default=False),
    ] = None,
    eavesdropper: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Fetch the capture of --run from this eavesdropper.")
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="RUN_ID", help="Which run; with --eavesdropper.")] = None,
    learner: Annotated[
        list[str] | None,
        typer.Option(help="Watch this learner; repeat for several. You need its records.", show_default="all"),
    ] = None,
    alpha: Annotated[float, typer.Option(help="The chance of a false alarm.")] = 0.001,
    canaries: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's canaries.json: guess its coins, too.")
    ] = None,
    commitment: Annotated[
        str | None, typer.Option(metavar="SHA256", help="Of FILE.", show_default="commitment.json beside it")
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Watch on after an alarm.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Do not wait for more than is there.")] = False,
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve e-values and alarms to Prometheus.")
    ] = None,
    log_level: LogLevel = "info",
) -> None:
    """Watch a run while it goes on: is every learner's noise what is claimed? May be looked at in every round.

    Exits with 1 at the first alarm, which is a log line, too. You need the records: the spec's data.source must be here.
    """
    from sottovoce_client.watching.watch import Question, where
    from sottovoce_client.watching.watch import watch as follow
    from sottovoce_rpc.logs import configure_logs

    configure_logs(log_level)
    question = Question(alpha, tuple(learner or ()), canaries, commitment, keep_going, once)
    raise typer.Exit(follow(where(capture, eavesdropper, run), question, prepared_from, metrics=metrics))
