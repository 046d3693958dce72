"""Whether promises hold."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sottovoce_client.cli import completion
from sottovoce_client.cli.app import (
    MAX_COUNT,
    MAX_JOBS,
    SERVICE_FILES,
    BackendName,
    app,
    make_address_option,
    make_number_option,
    make_results_folder,
    make_results_option,
    prepare_run,
)
from sottovoce_client.cli.common_options import NETWORK_OPTIONS, get_common_options
from sottovoce_core.errors import SpecError
from sottovoce_core.text import escape_control

if TYPE_CHECKING:
    from sottovoce_client.auditing.audit import AuditRequest
    from sottovoce_core.experiment import PreparedRun
    from sottovoce_core.spec import RunSpec


_WRITES = ("audit.json", "audit.html")
_WHERE, _SWAP = "Where the runs come from", "The two worlds, and who listens"


@app.command(rich_help_panel="Privacy")
def audit(
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="SPEC",
            help="The run spec. Not needed with --captures.",
            show_default=False,
            autocompletion=completion.complete_spec_files,
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_COUNT, help="Runs of each of the two worlds.", show_default="1000; network, wiretap: 100"
        ),
    ] = None,
    learner: Annotated[
        str | None, typer.Option(help="Whose messages.", show_default="the one with the largest epsilon")
    ] = None,
    confidence: Annotated[
        float,
        make_number_option(min_value=0.5, max_value=0.999999, help="With which a correct learner is not refuted."),
    ] = 0.95,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed of the coins and the noise. On the network for tests only: whoever knows it knows the coins.",
            show_default="0; coins on the network: entropy",
        ),
    ] = None,
    out: Annotated[Path | None, make_results_option("audit")] = None,
    on: Annotated[
        Literal["simulator", "network", "wiretap"],
        typer.Option(
            help="network: real services and the relay, on this machine. wiretap: the same, encrypted; sizes and times alone.",
            rich_help_panel=_WHERE,
        ),
    ] = "simulator",
    captures: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Captures of earlier runs, in place of runs made here.", rich_help_panel=_WHERE
        ),
    ] = None,
    backend: BackendName = "processes",
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_JOBS, help="How many at a time.", show_default="one per core", rich_help_panel=_WHERE
        ),
    ] = None,
    record: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**53,
            help="Row of the learner's record to swap.",
            show_default="the swap that shows most",
            rich_help_panel=_SWAP,
        ),
    ] = None,
    replacement: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="For it: mirror, label, LEARNER:ROW, or a .json file.",
            show_default="mirror",
            rich_help_panel=_SWAP,
        ),
    ] = None,
    threat: Annotated[
        Literal["wire", "neighbour", "output"],
        typer.Option(help="Every message, those at one neighbour, or published decisions.", rich_help_panel=_SWAP),
    ] = "wire",
    neighbour: Annotated[
        str | None,
        typer.Option(help="At which neighbour.", show_default="the first that hears it", rich_help_panel=_SWAP),
    ] = None,
) -> None:
    """Try to refute what a run promises about one learner: many runs in two worlds that differ in one record.

    Writes audit.json and audit.html (of a wiretap: audit.json). Exits with 1 if the promise is refuted.
    """
    from sottovoce_core.spec import load_spec

    _require_heeded(captures, runs, on, backend, record, replacement, threat, neighbour)
    from sottovoce_client.auditing.audit import AuditRequest
    from sottovoce_core.privacy.guarantee import ThreatModel

    asked = AuditRequest(
        learner=learner,
        record=record,
        replacement=replacement or "mirror",
        threat=ThreatModel(threat),
        neighbour=neighbour,
        runs=runs or (1000 if on == "simulator" else 100),
        confidence=confidence,
        seed=seed or 0,
    )
    given = None if spec is None else load_spec(spec)
    if captures is not None:
        raise typer.Exit(_from(captures, asked, given, out))
    if given is None:
        raise SpecError("audit needs a SPEC, or --captures FOLDER")
    prepared = prepare_run(given)
    # Captures of other runs are what `--captures` would take for the audit's own.
    folder = make_results_folder("audit", out, [*_WRITES, *(["captures"] if on == "simulator" else SERVICE_FILES)])
    raise typer.Exit(_made(prepared, asked, folder, on, backend, jobs, seeded=seed is not None))


def _require_heeded(
    captures: str | None,
    runs: int | None,
    on: str,
    backend: str,
    record: int | None,
    replacement: str | None,
    threat: str,
    neighbour: str | None,
) -> None:
    """No option is passed over in silence.

    Raises:
        SpecError: one would be.
    """
    if captures is not None and (runs is not None or on != "simulator"):
        raise SpecError(
            "--captures audits the runs that there are: it goes with neither --runs nor --on network or wiretap"
        )
    if backend != "processes" and (captures is not None or on != "simulator"):
        raise SpecError(
            f"--backend works on simulated runs: it goes with neither --captures nor --on {on}, got {backend}"
        )
    if replacement is not None and record is None:
        raise SpecError("--replacement needs --record: which record of the learner is to be replaced?")
    if neighbour is not None and threat != "neighbour":
        raise SpecError(f"--neighbour goes with --threat neighbour, got --threat {threat}")


def _made(
    prepared: PreparedRun,
    asked: AuditRequest,
    folder: Path,
    on: Literal["simulator", "network", "wiretap"],
    backend: str,
    jobs: int | None,
    *,
    seeded: bool,
) -> int:
    """An audit of runs that are made for it; returns the exit code."""
    from sottovoce_client import terminal
    from sottovoce_client.auditing.audit import run_audit
    from sottovoce_client.runs.run_client import RunInterrupted

    try:
        if on == "wiretap":
            from sottovoce_client.auditing.network import run_ciphertext_audit

            code = run_ciphertext_audit(folder, prepared, asked, seeded_coins=seeded)
        elif on == "network":
            from sottovoce_client.auditing.network import audit_on_network

            code = run_audit(folder, prepared, asked, partial(audit_on_network, folder=folder, seeded_coins=seeded))
        else:
            from sottovoce_client.auditing.audit import audit_on_simulator
            from sottovoce_client.backends import open_mapper

            with open_mapper(backend, jobs) as mapper:
                code = run_audit(folder, prepared, asked, partial(audit_on_simulator, mapper=mapper))
        terminal.print_json_file_if_requested(folder / "audit.json")
        return code
    except RunInterrupted as stopped:  # which says in a line what there is
        print(f"sottovoce: {escape_control(str(stopped))}", file=sys.stderr)
        return 130


def _from(captures: str, asked: AuditRequest, spec: RunSpec | None, out: Path | None) -> int:
    from sottovoce_client import terminal
    from sottovoce_client.auditing.audit import report_audit
    from sottovoce_client.auditing.captures import audit_captures, load_captured_runs
    from sottovoce_client.auditing.network import audit_ciphertext, report_ciphertext_audit

    console = terminal.create_console()
    with terminal.show_progress_bar("reading captures") as say:
        plan, runs = load_captured_runs(captures, asked, prepare_run, say, spec=spec)
        if runs.is_ciphertext:
            told = partial(report_ciphertext_audit, audit_ciphertext(plan, runs, asked.seed, say), plan, runs)
        else:
            told = partial(report_audit, audit_captures(plan, runs, say))
    folder = make_results_folder("audit", out, _WRITES)
    code = told(asked.seed, folder, console)
    terminal.print_json_file_if_requested(folder / "audit.json")
    return code


@app.command(rich_help_panel="Privacy", common_options=("as_json", "allow_imports", "log_level", *NETWORK_OPTIONS))
def watch(
    capture: Annotated[
        str | None,
        typer.Argument(metavar="FOLDER", help="A capture's folder, or the run's that it is in.", show_default=False),
    ] = None,
    eavesdropper: Annotated[
        str | None, make_address_option(metavar="HOST:PORT", help="Fetch the capture of --run from this eavesdropper.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN_ID", help="Which run, its id or its beginning; with --eavesdropper.")
    ] = None,
    learner: Annotated[
        list[str] | None,
        typer.Option(help="Watch this learner; repeat for several. You need its records.", show_default="all"),
    ] = None,
    alpha: Annotated[
        float, make_number_option(min_value=1e-12, max_value=0.999999, help="The chance of a false alarm.")
    ] = 0.001,
    canaries: Annotated[
        Path | None,
        typer.Option("--canary-file", metavar="FILE", help="The run's canaries.json: guess its coins, too."),
    ] = None,
    commitment: Annotated[
        str | None, typer.Option(metavar="SHA256", help="Of FILE.", show_default="commitment.json beside it")
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Watch on after an alarm.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Do not wait for more than is there.")] = False,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Noise of this deployment's runs before, kept here: none may be said again."),
    ] = None,
    state: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="State folder of learners, whose logs say what they learned; repeatable. For live records: start learners with "
            "--keep-log.",
            show_default="data.source of the spec",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        make_address_option(listen=True, metavar="HOST:PORT", help="Serve e-values and alarms to Prometheus."),
    ] = None,
) -> None:
    """Watch a run while it goes on: is every learner's noise what is claimed? May be looked at in every round.

    Exits with 1 at the first alarm, which is a log line, too. You need the records: the spec's data.source must be here, or the
    learners' state folders (--state).
    """
    from sottovoce_client.watching.watch import WatchRequest, open_source
    from sottovoce_client.watching.watch import watch as follow
    from sottovoce_rpc.logs import configure_logs

    configure_logs(get_common_options().log_level or "info")
    logs = tuple(state or ())
    question = WatchRequest(
        alpha,
        tuple(learner or ()),
        canaries,
        commitment,
        keep_going,
        once,
        keys,
        logs,
        get_common_options().allow_imports,
    )
    source = open_source(capture, eavesdropper, run, get_common_options().credentials, once=once)
    raise typer.Exit(follow(source, question, prepare_run, metrics_address=metrics))
