"""Commands for guarantees and privacy budgets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sottovoce_client.cli import completion
from sottovoce_client.cli.app import (
    MAX_COUNT,
    SpecFile,
    app,
    make_number_option,
    make_results_folder,
    parse_privacy_levels,
    prepare_for_accounting,
    prepare_run,
)
from sottovoce_client.cli.common_options import get_common_options
from sottovoce_core.errors import SpecError

if TYPE_CHECKING:
    from sottovoce_core.spec import RunSpec


@app.command(rich_help_panel="Privacy", common_options=("as_json", "allow_imports"))
def ledger(
    state: Annotated[
        Path, typer.Option(envvar="SOTTOVOCE_STATE", help="State folder of the learner, with its ledger.")
    ] = Path("sottovoce-state"),
    learner: Annotated[
        str | None,
        typer.Option(
            help="Only this learner; with --repair and --adopt-copy: the learner whose ledger it is.",
            show_default="all",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the whole folder: checksums, chains, and every charge by its spec.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Charge the most that may have been spent if something is lost or damaged, permanently. The learner must be "
            "stopped.",
        ),
    ] = False,
    charge: Annotated[
        float | None,
        make_number_option(
            min_value=0.0,
            max_value=1e100,
            help="With --repair: charge at least this much epsilon, in addition to the known spending.",
            show_default="the lost spending",
        ),
    ] = None,
    adopt_copy: Annotated[
        bool,
        typer.Option(
            "--adopt-copy",
            help="Declare this copy of a state folder as complete, and as the only one in use from now on.",
        ),
    ] = False,
    delta: Annotated[
        float, make_number_option(min_value=0.0, max_value=1.0, help="Show epsilon at this delta; 0: pure.")
    ] = 0.0,
) -> None:
    """Show the spending of learners in all their runs, with algorithm and guarantee. Reads the state folder alone.

    With --verify, --repair or --adopt-copy: check the ledger, repair it, or continue from a copy.
    """
    from sottovoce_client.privacy.ledger import adopt_ledger, repair_ledger, show_ledger, verify_ledger

    if verify + repair + adopt_copy > 1:
        raise SpecError("--verify, --repair and --adopt-copy exclude each other: give one of them")
    if charge is not None and not repair:
        raise SpecError("--charge requires --repair")
    if delta and (repair or adopt_copy):
        raise SpecError("--delta is for showing and verifying a ledger")
    if not (repair or adopt_copy):
        show = verify_ledger if verify else show_ledger
        show(state, learner, delta=delta, allow_imports=get_common_options().allow_imports)
    elif learner is None:
        raise SpecError(f"{'--repair' if repair else '--adopt-copy'} requires --learner, the owner of the ledger")
    elif repair:
        repair_ledger(state, learner, charge)
    else:
        adopt_ledger(state, learner)


@app.command(rich_help_panel="Privacy")
def policy(
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="SPEC",
            help="A run spec: check whether a learner with this policy would take part.",
            show_default="none: print the policy",
            autocompletion=completion.complete_spec_files,
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            envvar="SOTTOVOCE_POLICY",
            help="The policy, a YAML file.",
            show_default="the default policy of learners without --policy",
        ),
    ] = None,
    learner: Annotated[
        str | None, typer.Option(help="With SPEC: learner to check.", show_default="required with SPEC")
    ] = None,
    features: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_COUNT, help="With SPEC: features of a record.", show_default="those of the spec's data"
        ),
    ] = None,
) -> None:
    """Print a learner's policy as YAML, with comments; or check a run against it. Nothing is run.

    With SPEC, exits with 1 if the learner would not take part.
    """
    from sottovoce_client.privacy.policy import check_policy, show_policy
    from sottovoce_core.runs.policy import Policy

    if spec is None:
        if learner is not None or features is not None:
            raise SpecError("--learner and --features require a SPEC")
        show_policy(policy)
        return
    if learner is None:
        raise SpecError("the check of a SPEC requires --learner, one of its learners")
    from sottovoce_client.privacy.budget import find_learner_index
    from sottovoce_core.runs.run import build_run
    from sottovoce_core.spec import load_spec

    own_policy, requested = Policy.load(policy), load_spec(spec)
    index = find_learner_index(requested, learner)
    if features is None:
        prepared = prepare_run(requested, live=True, needs_labels=False)
        run, features = prepared.run, prepared.data.n_features
    else:
        run = build_run(requested, features)
    raise typer.Exit(0 if check_policy(run, features, own_policy, index) else 1)


_FIT, _TRADE = "Write a spec calibrated to a budget", "Find the level that balances accuracy and privacy"


@app.command(rich_help_panel="Privacy")
def budget(
    spec: SpecFile,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Also epsilon at this delta; with --target and --tradeoff: the delta of their epsilons.",
            show_default="that of the spec",
        ),
    ] = None,
    learner: Annotated[
        list[str] | None, typer.Option(help="Show this learner; repeat for several.", show_default="all")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", min=1, max=MAX_COUNT, help="Also for this number of records of one learner."),
    ] = None,
    per_record: Annotated[
        bool, typer.Option("--per-record", help="Also epsilon per record, in all of its uses.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds", min=1, max=2**27, help="For live records: number of rounds.", show_default="those of the spec"
        ),
    ] = None,
    records: Annotated[
        float | None,
        typer.Option(
            "--records",
            help="For live records: assumed records per round; 0.1: one in ten rounds. Fewer cost more with algorithms that "
            "learn from means.",
            show_default="1",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for the results; none is replaced. With --target: the file of the spec.",
            show_default="sottovoce-runs/budget-TIME; with --target standard output",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="E|NAME=E",
            help="Epsilon of every learner, or of one; repeatable.",
            show_default="none",
            rich_help_panel=_FIT,
        ),
    ] = None,
    horizon: Annotated[
        str | None,
        typer.Option(
            metavar="ROUNDS|inf", help="Number of rounds.", show_default="all rounds of the run", rich_help_panel=_FIT
        ),
    ] = None,
    per: Annotated[
        Literal["record_use", "record"] | None,
        typer.Option(
            help="Unit of the target: one use of a record, or a record in all of its uses.",
            show_default="record_use",
            rich_help_panel=_FIT,
        ),
    ] = None,
    tradeoff: Annotated[
        str | None,
        typer.Option(
            metavar="E,E,E,...",
            help="Levels to simulate, at least three.",
            show_default="none",
            rich_help_panel=_TRADE,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Measure of the accuracy loss: error, or a metric of simulate.",
            show_default="average_loss",
            rich_help_panel=_TRADE,
        ),
    ] = None,
    weights: Annotated[
        tuple[float, float, float, float] | None,
        typer.Option(help="w1 to w4 of the utility of privacy.", show_default="0.02 6 9 1", rich_help_panel=_TRADE),
    ] = None,
    threshold: Annotated[
        float | None,
        make_number_option(
            min_value=-1e100,
            max_value=1e100,
            help="Largest acceptable loss.",
            show_default="that at the smallest level",
            rich_help_panel=_TRADE,
        ),
    ] = None,
    ceiling: Annotated[
        float | None,
        make_number_option(
            min_value=1e-100,
            max_value=1e100,
            help="Largest acceptable epsilon.",
            show_default="the largest level",
            rich_help_panel=_TRADE,
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            help="Independent repetitions at every level.",
            show_default="20",
            rich_help_panel=_TRADE,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the noise.", show_default="0", rich_help_panel=_TRADE)
    ] = None,
) -> None:
    """Show the guarantees of a run: epsilon of every learner, and its assumptions. Nothing is run.

    Writes budget.json and budget.html. With --target, write the spec with noise that meets these epsilons. With --tradeoff,
    simulate at several levels and find the one that best balances accuracy and privacy: writes tradeoff.json and tradeoff.html.

    Example: sottovoce budget wards.yaml --target 2 --target north=1 --out careful.yaml
    """
    from sottovoce_core.spec import load_spec

    report_options: dict[str, object] = {
        "--delta": delta,
        "--learner": learner,
        "--group-size": group_size,
        "--per-record": per_record or None,
    }
    live_options: dict[str, object] = {"--rounds": rounds, "--records": records}
    fit_options: dict[str, object] = {"--horizon": horizon, "--per": per}
    tradeoff_values: dict[str, Any] = {"metric": metric, "weights": weights, "threshold": threshold, "ceiling": ceiling}
    trade = {
        name: value
        for name, value in {**tradeoff_values, "replicas": replicas, "seed": seed}.items()
        if value is not None
    }
    tradeoff_options: dict[str, object] = {f"--{name}": value for name, value in trade.items()}
    if target and tradeoff is not None:
        raise SpecError("--target writes a spec and --tradeoff simulates at several levels: give one of the two")
    if tradeoff is not None:
        _require_absent("--tradeoff", {**report_options, "--delta": None} | live_options | fit_options)
        levels = parse_privacy_levels(tradeoff, 3, "--tradeoff")
        raise typer.Exit(_report_tradeoff(spec, levels, delta, out, **trade))
    if target:
        from sottovoce_client.privacy.calibrate import parse_horizon, parse_target, write_calibrated_spec

        _require_absent("--target", {**report_options, "--delta": None} | tradeoff_options)
        requested, horizon_rounds = load_spec(spec), parse_horizon(horizon)
        wanted = parse_target(requested, target, horizon_rounds, per or "record_use", _choose_delta(delta, requested))
        write_calibrated_spec(spec, prepare_for_accounting(requested, rounds, records, horizon_rounds), wanted, out)
        return
    _require_absent("", fit_options, "--target")
    _require_absent("", tradeoff_options, "--tradeoff")
    from sottovoce_client.privacy.budget import BudgetRequest
    from sottovoce_client.privacy.budget import report_budget as show

    prepared = prepare_for_accounting(load_spec(spec), rounds, records)
    rate = (1.0 if records is None else records) if prepared.run.spec.data.is_live else None
    folder = make_results_folder("budget", out, ["budget.json", "budget.html"])
    shown_delta = _choose_delta(delta, prepared.run.spec) or None
    raise typer.Exit(show(prepared, folder, learner or [], BudgetRequest(shown_delta, group_size, per_record, rate)))


def _choose_delta(delta: float | None, spec: RunSpec) -> float:
    """Return the delta of the option, or else that of the spec.

    Raises:
        SpecError: The option is not above 0 and below 1.
    """
    from sottovoce_core.budget.composition import require_delta

    return spec.privacy.delta if delta is None else require_delta(delta)


def _require_absent(option: str, options: Mapping[str, object], required: str = "") -> None:
    """Reject options that would be ignored.

    Raises:
        SpecError: An option was given.
    """
    if given := [name for name, value in options.items() if value not in (None, [])]:
        problem = f"requires {required}" if required else f"does not go with {option}"
        raise SpecError(f"{given[0]} {problem}")


def _report_tradeoff(
    spec: Path, epsilons: tuple[float, ...], delta: float | None, out: Path | None, **given: Any
) -> int:
    """Find the best privacy level; return the exit code."""
    from sottovoce_client.privacy.tradeoff import TradeoffRequest, report_tradeoff
    from sottovoce_core.budget.tradeoff import Utility
    from sottovoce_core.spec import load_spec

    if weights := given.pop("weights", None):
        given["utility"] = Utility(*weights)
    prepared = prepare_run(load_spec(spec))
    given["delta"] = _choose_delta(delta, prepared.run.spec)
    folder = make_results_folder("tradeoff", out, ["tradeoff.json", "tradeoff.html"])
    return report_tradeoff(prepared, folder, TradeoffRequest(epsilons, **given))
