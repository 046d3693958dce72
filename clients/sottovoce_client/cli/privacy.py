"""What runs promise and cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sottovoce_client.cli.app import (
    MOST,
    AllowImports,
    AsJson,
    LiveRecords,
    LiveRounds,
    SpecFile,
    app,
    folder_for,
    ledger_app,
    levels,
    policy_app,
    prepared_from,
    priced_from,
    real,
    results_of,
)


@ledger_app.callback()
def ledger(
    context: typer.Context,
    state: Annotated[
        Path, typer.Option(envvar="SOTTOVOCE_STATE", help="Folder where the learner keeps its ledger.")
    ] = Path("sottovoce-state"),
    learner: Annotated[str | None, typer.Option(help="Only this one.")] = None,
    allow_imports: AllowImports = False,
    as_json: AsJson = False,
) -> None:
    """What learners have spent in all their runs, on what, and by which guarantee. Reads the state folder; no service needed."""
    from sottovoce_client.privacy.ledger import show_ledger

    if context.invoked_subcommand is None:
        show_ledger(state, learner, allow_imports=allow_imports)


State = Annotated[Path, typer.Argument(metavar="FOLDER", help="The state folder.", show_default=False)]


@ledger_app.command("verify")
def ledger_verify(
    state: State,
    learner: Annotated[str | None, typer.Option(help="Only this one.")] = None,
    allow_imports: AllowImports = False,
    as_json: AsJson = False,
) -> None:
    """Hold everything in a state folder against everything else: checksums, chains, and every charge against its spec."""
    from sottovoce_client.privacy.ledger import verify_ledger

    verify_ledger(state, learner, allow_imports=allow_imports)


@ledger_app.command("repair")
def ledger_repair(
    state: State,
    learner: Annotated[str, typer.Option(help="Whose ledger.")],
    charge: Annotated[
        float | None,
        real(least=0.0, most=1e100, help="Charge at least this much epsilon, beside what is still known."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Charge the most that may have been spent where something is lost or damaged, for ever. The learner must be stopped."""
    from sottovoce_client.privacy.ledger import repair_ledger

    repair_ledger(state, learner, charge)


@ledger_app.command("moved")
def ledger_moved(
    state: State,
    learner: Annotated[str, typer.Option(help="Whose ledger.")],
    as_json: AsJson = False,
) -> None:
    """Say that this copy of a state folder is whole, and the only one that will be used from now on."""
    from sottovoce_client.privacy.ledger import own_ledger

    own_ledger(state, learner)


@policy_app.command("show")
def policy_show(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The policy, a YAML file.", show_default="the default policy")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a policy as YAML, with what each clause says: the default one is what a learner without --policy goes by."""
    from sottovoce_client.privacy.policy import show_policy

    show_policy(file)


@policy_app.command("check")
def policy_check(
    spec: SpecFile,
    learner: Annotated[str, typer.Option(help="Which learner of the spec.", show_default=False)],
    policy: Annotated[
        Path | None,
        typer.Option(envvar="SOTTOVOCE_POLICY", help="Its owner's policy.", show_default="the default policy"),
    ] = None,
    features: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Features of a record.", show_default="those of the spec's data")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a learner with a policy would take part in a run. Nothing is run; exits with 1 if it would not."""
    from sottovoce.running.policy import load_policy
    from sottovoce.running.run import build_run
    from sottovoce.spec import load_spec
    from sottovoce_client.privacy.budget import learner_index
    from sottovoce_client.privacy.policy import check_policy

    allowed, asked = load_policy(policy), load_spec(spec)
    index = learner_index(asked, learner)
    if features is None:
        prepared = prepared_from(asked, live=True, learned=False)
        run, features = prepared.run, prepared.data.n_features
    else:
        run = build_run(asked, features)
    raise typer.Exit(0 if check_policy(run, features, allowed, index) else 1)


@app.command(rich_help_panel="Privacy")
def budget(
    spec: SpecFile,
    delta: Annotated[float | None, typer.Option(help="Also epsilon at this delta (needs dp-accounting).")] = None,
    learner: Annotated[
        list[str] | None, typer.Option(help="Show this learner; repeat for several.", show_default="all")
    ] = None,
    group: Annotated[int | None, typer.Option(min=1, max=MOST, help="Also for so many records of one learner.")] = None,
    uses: Annotated[bool, typer.Option("--uses", help="Also per record, in all of its uses.")] = False,
    rounds: LiveRounds = None,
    records: LiveRecords = None,
    out: Annotated[Path | None, results_of("budget")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a run promises: epsilon of every learner, and what it rests on. Nothing is run.

    Writes budget.json and budget.html.
    """
    from sottovoce.spec import load_spec
    from sottovoce_client.privacy.budget import Question
    from sottovoce_client.privacy.budget import budget as show

    prepared = priced_from(load_spec(spec), rounds, records)
    rate = (1.0 if records is None else records) if prepared.run.spec.data.live else None
    folder = folder_for("budget", out, ["budget.json", "budget.html"])
    raise typer.Exit(show(prepared, folder, learner or [], Question(delta, group, uses, rate)))


@app.command(rich_help_panel="Privacy")
def calibrate(
    spec: SpecFile,
    epsilon: Annotated[float | None, typer.Option(help="What every learner may spend.")] = None,
    learner: Annotated[list[str] | None, typer.Option(metavar="NAME=E", help="What this one may; repeatable.")] = None,
    horizon: Annotated[
        str | None, typer.Option(metavar="ROUNDS|inf", help="Over so many rounds.", show_default="all of the run")
    ] = None,
    per: Annotated[
        Literal["event", "record"], typer.Option(help="For an event, or a record in all of its uses.")
    ] = "event",
    rounds: LiveRounds = None,
    records: LiveRecords = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write the spec to.", show_default="standard output")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a spec with the noise that a privacy budget asks for."""
    from sottovoce.spec import load_spec
    from sottovoce_client.privacy.calibrate import calibrate_to, horizon_of, target_of

    asked, covered = load_spec(spec), horizon_of(horizon)
    target = target_of(asked, epsilon, learner or [], covered, per)
    calibrate_to(spec, priced_from(asked, rounds, records, covered), target, out)


@app.command(rich_help_panel="Privacy")
def tradeoff(
    spec: SpecFile,
    epsilons: Annotated[str, typer.Option(metavar="E,E,E,...", help="Levels to simulate at, at least three.")],
    metric: Annotated[
        str, typer.Option(help="What accuracy lost means: error, or a metric of simulate.")
    ] = "average_loss",
    weights: Annotated[tuple[float, float, float, float], typer.Option(help="w1 to w4 of the worth of privacy.")] = (
        0.02,
        6.0,
        9.0,
        1.0,
    ),
    threshold: Annotated[
        float | None,
        real(least=-1e100, most=1e100, help="Largest acceptable loss.", show_default="that at the smallest level"),
    ] = None,
    ceiling: Annotated[
        float | None,
        real(least=1e-100, most=1e100, help="Largest acceptable epsilon.", show_default="the largest level"),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=MOST, help="Independent repetitions at every level.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    out: Annotated[Path | None, results_of("tradeoff")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the privacy level at which accuracy lost and privacy gained balance best, by simulated runs.

    Writes tradeoff.json and tradeoff.html.
    """
    from sottovoce.budget.tradeoff import Utility
    from sottovoce.spec import load_spec
    from sottovoce_client.privacy.tradeoff import Trade
    from sottovoce_client.privacy.tradeoff import tradeoff as run_tradeoff

    trade = Trade(levels(epsilons, 3), metric, Utility(*weights), threshold, ceiling, replicas, seed)
    prepared = prepared_from(load_spec(spec))
    folder = folder_for("tradeoff", out, ["tradeoff.json", "tradeoff.html"])
    raise typer.Exit(run_tradeoff(prepared, folder, trade))
