"""Commands that test claims: `sottovoce audit` and `sottovoce watch`."""

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
_SOURCE_PANEL, _WORLDS_PANEL = "Source of the runs", "The two worlds, and the adversary"


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
        str | None, typer.Option(help="The audited learner.", show_default="the one with the largest epsilon")
    ] = None,
    confidence: Annotated[
        float,
        make_number_option(
            min_value=0.5, max_value=0.999999, help="Probability that a correct learner is not refuted."
        ),
    ] = 0.95,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed of the coins and the noise. On the network for tests only: the seed determines the coins.",
            show_default="0; coins on the network: entropy",
        ),
    ] = None,
    delta: Annotated[
        float | None,
        make_number_option(
            min_value=0.0,
            max_value=1.0,
            help="Also test the claim at this delta; 0: the pure claim alone.",
            show_default="that of the spec",
        ),
    ] = None,
    out: Annotated[Path | None, make_results_option("audit")] = None,
    on: Annotated[
        Literal["simulator", "network", "wiretap"],
        typer.Option(
            help="network: real services and a relay, on this machine. wiretap: the same, encrypted; sizes and times alone.",
            rich_help_panel=_SOURCE_PANEL,
        ),
    ] = "simulator",
    captures: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Captures of earlier runs, instead of runs made here.", rich_help_panel=_SOURCE_PANEL
        ),
    ] = None,
    backend: BackendName = "processes",
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_JOBS,
            help="Maximum parallel tasks.",
            show_default="one per core",
            rich_help_panel=_SOURCE_PANEL,
        ),
    ] = None,
    record: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**53,
            help="Row of the learner's record to replace.",
            show_default="the worst-case record",
            rich_help_panel=_WORLDS_PANEL,
        ),
    ] = None,
    replacement: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="The other record: mirror, label, LEARNER:ROW, or a .json file.",
            show_default="mirror",
            rich_help_panel=_WORLDS_PANEL,
        ),
    ] = None,
    threat: Annotated[
        Literal["wire", "neighbour", "output"],
        typer.Option(
            help="All messages, those at one neighbour, or published decisions.", rich_help_panel=_WORLDS_PANEL
        ),
    ] = "wire",
    neighbour: Annotated[
        str | None,
        typer.Option(
            help="The neighbour that is the adversary.",
            show_default="the first that receives its messages",
            rich_help_panel=_WORLDS_PANEL,
        ),
    ] = None,
) -> None:
    """Try to refute the claim of a run about one learner: many runs in two worlds that differ in one record.

    Writes audit.json and audit.html (of a wiretap: audit.json). Exits with 1 if the claim is refuted.
    """
    from sottovoce_core.spec import load_spec

    _require_compatible_options(captures, runs, on, backend, record, replacement, threat, neighbour)
    from sottovoce_client.auditing.audit import AuditRequest
    from sottovoce_core.privacy.guarantee import ThreatModel

    request = AuditRequest(
        learner=learner,
        record=record,
        replacement=replacement or "mirror",
        threat=ThreatModel(threat),
        neighbour=neighbour,
        runs=runs or (1000 if on == "simulator" else 100),
        confidence=confidence,
        seed=seed or 0,
        delta=delta,
    )
    given = None if spec is None else load_spec(spec)
    if captures is not None:
        raise typer.Exit(_audit_captures(captures, request, given, out))
    if given is None:
        raise SpecError("audit needs a SPEC, or --captures FOLDER")
    prepared = prepare_run(given)
    # The folder must not have captures of other runs: `--captures` would take them for the audit's own.
    folder = make_results_folder("audit", out, [*_WRITES, *(["captures"] if on == "simulator" else SERVICE_FILES)])
    raise typer.Exit(_audit_new_runs(prepared, request, folder, on, backend, jobs, seeded=seed is not None))


def _require_compatible_options(
    captures: str | None,
    runs: int | None,
    on: str,
    backend: str,
    record: int | None,
    replacement: str | None,
    threat: str,
    neighbour: str | None,
) -> None:
    """Require that no given option would be ignored.

    Raises:
        SpecError: One would be.
    """
    if captures is not None and (runs is not None or on != "simulator"):
        raise SpecError(
            "--captures audits existing runs: it cannot be used with --runs, or with --on network or wiretap"
        )
    if backend != "processes" and (captures is not None or on != "simulator"):
        raise SpecError(
            f"--backend is for simulated runs: it cannot be used with --captures or --on {on}, got {backend}"
        )
    if replacement is not None and record is None:
        raise SpecError("--replacement needs --record, the record of the learner to replace")
    if neighbour is not None and threat != "neighbour":
        raise SpecError(f"--neighbour needs --threat neighbour, got --threat {threat}")


def _audit_new_runs(
    prepared: PreparedRun,
    request: AuditRequest,
    folder: Path,
    on: Literal["simulator", "network", "wiretap"],
    backend: str,
    jobs: int | None,
    *,
    seeded: bool,
) -> int:
    """Audit runs that are made here, and return the exit code."""
    from sottovoce_client import terminal
    from sottovoce_client.auditing.audit import run_audit
    from sottovoce_client.runs.run_client import RunInterrupted

    try:
        if on == "wiretap":
            from sottovoce_client.auditing.network import run_ciphertext_audit

            code = run_ciphertext_audit(folder, prepared, request, seeded_coins=seeded)
        elif on == "network":
            from sottovoce_client.auditing.network import audit_on_network

            code = run_audit(folder, prepared, request, partial(audit_on_network, folder=folder, seeded_coins=seeded))
        else:
            from sottovoce_client.auditing.audit import audit_on_simulator
            from sottovoce_client.backends import open_mapper

            with open_mapper(backend, jobs) as mapper:
                code = run_audit(folder, prepared, request, partial(audit_on_simulator, mapper=mapper))
        terminal.print_json_file_if_requested(folder / "audit.json")
        return code
    except RunInterrupted as stopped:  # its text tells which runs there are
        print(f"sottovoce: {escape_control(str(stopped))}", file=sys.stderr)
        return 130


def _audit_captures(captures: str, request: AuditRequest, spec: RunSpec | None, out: Path | None) -> int:
    from sottovoce_client import terminal
    from sottovoce_client.auditing.audit import report_audit
    from sottovoce_client.auditing.captures import audit_captures, load_captured_runs
    from sottovoce_client.auditing.network import audit_ciphertext, report_ciphertext_audit

    console = terminal.create_console()
    with terminal.show_progress_bar("reading captures") as report_progress:
        plan, runs = load_captured_runs(captures, request, prepare_run, report_progress, spec=spec)
        if runs.is_ciphertext:
            done = audit_ciphertext(plan, runs, request.seed, report_progress)
            report = partial(report_ciphertext_audit, done, plan, runs)
        else:
            report = partial(report_audit, audit_captures(plan, runs, report_progress))
    folder = make_results_folder("audit", out, _WRITES)
    code = report(request.seed, folder, console)
    terminal.print_json_file_if_requested(folder / "audit.json")
    return code


@app.command(rich_help_panel="Privacy", common_options=("as_json", "allow_imports", "log_level", *NETWORK_OPTIONS))
def watch(
    capture: Annotated[
        str | None,
        typer.Argument(metavar="FOLDER", help="Folder of a capture, or of the run that has it.", show_default=False),
    ] = None,
    eavesdropper: Annotated[
        str | None, make_address_option(metavar="HOST:PORT", help="Fetch the capture of --run from this eavesdropper.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN_ID", help="Id of the run, or its beginning; with --eavesdropper.")
    ] = None,
    learner: Annotated[
        list[str] | None,
        typer.Option(help="Watch this learner; repeat for several. You need its records.", show_default="all"),
    ] = None,
    alpha: Annotated[float, make_number_option(min_value=1e-12, max_value=0.999999, help="False alarm rate.")] = 0.001,
    canaries: Annotated[
        Path | None,
        typer.Option("--canary-file", metavar="FILE", help="The run's canaries.json: test its coins, too."),
    ] = None,
    commitment: Annotated[
        str | None, typer.Option(metavar="SHA256", help="Of FILE.", show_default="commitment.json next to it")
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on after an alarm.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Do not wait for more data.")] = False,
    noise_history: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of the noise of earlier runs, updated here: none may be repeated."),
    ] = None,
    state: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="State folder of learners, whose logs have their records; repeatable. For live records: start learners with "
            "--keep-log.",
            show_default="data.source of the spec",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        make_address_option(listen=True, metavar="HOST:PORT", help="Serve e-values and alarms to Prometheus."),
    ] = None,
) -> None:
    """Watch a run while it goes on: test in every round whether every learner's noise is as claimed.

    Exits with 1 at the first alarm, which is a log line, too. The records are needed: the spec's data.source must be here, or the
    learners' state folders (--state).
    """
    from sottovoce_client.watching.watch import WatchRequest, open_source
    from sottovoce_client.watching.watch import watch as run_watch
    from sottovoce_rpc.logs import configure_logs

    configure_logs(get_common_options().log_level or "info")
    request = WatchRequest(
        alpha,
        tuple(learner or ()),
        canaries,
        commitment,
        keep_going,
        once,
        noise_history,
        tuple(state or ()),
        get_common_options().allow_imports,
    )
    source = open_source(capture, eavesdropper, run, get_common_options().credentials, once=once)
    raise typer.Exit(run_watch(source, request, prepare_run, metrics_address=metrics))
