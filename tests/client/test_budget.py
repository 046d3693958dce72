"""`budget`, also with `--target` and `--tradeoff`: what it prints, writes and refuses."""

from __future__ import annotations

import io
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_client.cli.app import parse_privacy_levels
from sottovoce_client.privacy.budget import BudgetRequest, _compute_line, report_budget
from sottovoce_client.privacy.calibrate import parse_horizon, parse_target
from sottovoce_client.privacy.tradeoff import TradeoffRequest, _measure, _Measurement, _solve
from sottovoce_core.budget.calibration import compute_epsilons
from sottovoce_core.budget.composition import MessageLosses, epsilon_for_delta
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import PreparedRun, prepare
from sottovoce_core.runs.run import build_run, find_first_round_above
from sottovoce_core.spec import load_spec

SMALL: dict[str, Any] = {"rounds": 15, "learners": ["a", "b", "c"], "algorithm": {"name": "ldp-dol", "sigma": 2.0}}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    features = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "records.npz", X=features, y=(features[:, 0] > 0).astype(int))
    return tmp_path / "records.npz"


def written(records: Path, name: str = "small", **changes: Any) -> Path:
    data = {"source": str(records), "reuse": True, **changes.pop("data", {})}
    path = records.parent / f"{name}.yaml"
    path.write_text(
        "# a comment\n" + yaml.safe_dump({"name": name, **SMALL, "data": data, **changes}), encoding="utf-8"
    )
    return path


def prepared_of(records: Path, **changes: Any) -> PreparedRun:
    return prepare(load_spec(written(records, **changes)))


def shown(
    prepared: PreparedRun, folder: Path, *names: str, terminal: bool = False, **question: Any
) -> tuple[str, dict[str, Any]]:
    """What was printed, and budget.json."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    report_budget(prepared, folder, names, BudgetRequest(**question), console)
    return out.getvalue(), json.loads((folder / "budget.json").read_text(encoding="utf-8"))


def loaded_and_plots(path: Path) -> tuple[list[str], list[str]]:
    """What a page loads, and the plots on it."""
    loaded: list[str] = []
    plots: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            loaded.extend(value or "" for name, value in attrs if name in ("src", "href"))
            plots.extend(value or "" for name, value in attrs if name == "id" and (value or "").startswith("plot-"))

    Reader().feed(path.read_text(encoding="utf-8"))
    return loaded, plots


# ---- budget ----------------------------------------------------------------------------------------------------------


def test_every_number_is_that_of_the_guarantee(records: Path, tmp_path: Path) -> None:
    prepared = prepared_of(records)
    _, document = shown(prepared, tmp_path, delta=1e-3, group_size=2, include_per_record=True)
    assert [each["name"] for each in document["learners"]] == ["a", "b", "c"]
    for i, found in enumerate(document["learners"]):
        own = prepared.data.learners[i]
        counts = np.diff(own.offsets)
        promise = prepared.run.guarantee(i, counts)
        epsilon = found["epsilon"]
        assert epsilon["record_use"] == promise.epsilon()
        assert epsilon["paper"] == promise.paper_epsilon[-1]
        assert epsilon["infinite_horizon"] == promise.infinite_horizon_epsilon
        losses = promise.round_losses
        message_losses = MessageLosses(promise.mechanism, losses, promise.mechanism.sum_renyi(losses))
        assert epsilon["record_use_at_delta"] == epsilon_for_delta(1e-3, [message_losses]) < promise.epsilon()
        uses = [own.uses_by_round(row) for row in range(len(own.labels))]
        each = [prepared.run.guarantee(i, counts, replaced).epsilon() for replaced in uses if replaced.any()]
        assert epsilon["record"] == pytest.approx(max(max(each), promise.epsilon()), rel=1e-12)
        assert epsilon["record"] < epsilon["group"] <= 2 * epsilon["record"]
        assert epsilon["record_at_delta"] <= epsilon["record"]
        assert found["constants"]["clip_norm"]["enforced_by"]
    assert document["total_epsilon"] == pytest.approx(
        math.fsum(each["epsilon"]["record_use"] for each in document["learners"])
    )


def test_what_was_not_asked_for_is_not_computed(records: Path, tmp_path: Path) -> None:
    text, document = shown(prepared_of(records), tmp_path, "b")
    assert [each["name"] for each in document["learners"]] == ["b"]
    assert document["learners"][0]["epsilon"].keys() == {"record_use", "paper", "infinite_horizon"}
    assert "b: epsilon per record use" in text
    assert "a: " not in text.splitlines()[0]
    assert "total" not in text


def test_a_group_of_events_costs_as_many_events(records: Path) -> None:
    line = _compute_line(prepared_of(records), 0, BudgetRequest(group_size=3))
    assert line.epsilons["group"] == pytest.approx(3 * line.guarantee.epsilon(), rel=1e-15)
    whole = _compute_line(prepared_of(records, algorithm={"name": "pdop"}), 0, BudgetRequest(group_size=3))
    assert whole.epsilons["group"] == whole.epsilons["record_use"]  # an event replaces all records already


def test_the_table_and_the_lines_say_the_same(records: Path, tmp_path: Path) -> None:
    prepared = prepared_of(records)
    plain, _ = shown(prepared, tmp_path)
    table, _ = shown(prepared, tmp_path, terminal=True)
    for i, name in enumerate("abc"):
        epsilon = f"{prepared.run.guarantee(i).epsilon():.4g}"
        assert f"{name}: epsilon per record use {epsilon}" in plain
        assert any(name in line and epsilon in line for line in table.splitlines())
    for text in (plain, table):
        assert "proof: Chen & Wang 2025" in text
        assert "assumes clip_norm = 1: the loss" in text
        assert "one record use at each of these 3 learners, total" in text


def test_infinite_budgets_are_said_and_drawn_as_nothing(records: Path, tmp_path: Path) -> None:
    text, document = shown(
        prepared_of(records, algorithm={"name": "d-ogd"}), tmp_path, delta=1e-6, include_per_record=True, group_size=2
    )
    assert "a: epsilon per record use ∞, per record, all uses ∞, 2 records ∞, per record use at δ = 1e-06 ∞" in text
    assert document["learners"][0]["epsilon"]["record_use"] is None
    assert loaded_and_plots(tmp_path / "budget.html") == ([], [])


def test_published_decisions_are_shown_where_they_are_a_promise_of_their_own(records: Path, tmp_path: Path) -> None:
    algorithm = {"name": "pd-ftgl", "epsilon": 3.0, "noise_placement": "after_gossip", "block_length": 3}
    text, document = shown(prepared_of(records, algorithm=algorithm), tmp_path, "a")
    assert document["learners"][0]["epsilon"]["output"] == pytest.approx(3.0, rel=1e-6)
    assert "published decisions only 3" in text
    assert "warning: noise_placement after_gossip" in text


def test_shared_records_show_everywhere(records: Path, tmp_path: Path) -> None:
    algorithm = {"name": "dpsda-c", "clip": 0.5}
    text, _ = shown(prepared_of(records, algorithm=algorithm, data={"partition": "shared"}), tmp_path)
    assert "learners share records, so one record use affects the messages of all; total over these 3 learners" in text


def test_the_page_is_one_file(records: Path, tmp_path: Path) -> None:
    shown(prepared_of(records), tmp_path, delta=1e-3, include_per_record=True)
    assert loaded_and_plots(tmp_path / "budget.html") == ([], ["plot-budget"])


def test_curves_end_where_the_numbers_do(records: Path) -> None:
    line = _compute_line(prepared_of(records), 0, BudgetRequest(include_per_record=True))
    event, record = line.curve("record_use"), line.curve("record")
    assert event is not None and record is not None
    assert (event[-1], record[-1]) == pytest.approx((line.epsilons["record_use"], line.epsilons["record"]))
    assert line.curve("output") is None


def test_a_budget_that_ends_before_the_run_is_said_by_every_command_that_plans_it(
    records: Path, tmp_path: Path
) -> None:
    path = str(written(records, privacy={"budget": 3.0}))
    run = prepare(load_spec(Path(path))).run
    t = find_first_round_above(run.guarantee(0, np.ones(15, np.int64)).cumulative_epsilon, 3.0)
    assert t is not None and t > 0
    stop = f"a in round {t}, b in round {t}, c in round {t} (rounds count from 0) would exceed it and sends no message"
    commands = {
        "check": ["spec", "check", path],
        "budget": ["budget", path, "--out", str(tmp_path / "b")],
        "simulate": ["simulate", path, "--out", str(tmp_path / "s")],
        "calibrate": ["budget", path, "--target", "9", "--out", str(tmp_path / "louder.yaml")],
    }
    told = {name: CliRunner().invoke(app, command) for name, command in commands.items()}
    for name, result in told.items():
        text = " ".join((result.stdout + result.stderr).split())
        assert result.exit_code == 0 and "[BUDGET_ENDS]" in text and "what fits: rounds: " in text, name
        assert name == "calibrate" or (stop in text and f"rounds: {t}, privacy.budget: " in text), name
    document = json.loads((tmp_path / "b" / "budget.json").read_text(encoding="utf-8"))
    assert document["warnings"][-1]["code"] == "BUDGET_ENDS"
    assert "BUDGET_ENDS" in (tmp_path / "b" / "budget.html").read_text(encoding="utf-8")

    enough = str(written(records, "enough", privacy={"budget": 1000.0}))
    assert "BUDGET_ENDS" not in CliRunner().invoke(app, ["spec", "check", enough]).output


def test_what_owners_without_a_policy_refuse_is_said_by_spec_check(records: Path) -> None:
    dear = written(records, algorithm={"name": "ldp-dol", "sigma": 0.01})
    result = CliRunner().invoke(app, ["spec", "check", str(dear)])
    assert "the default policy allows epsilon_per_run 100, and the spec asks for " in result.output
    assert "[DEFAULT_POLICY]" in result.output
    assert "[DEFAULT_POLICY]" not in CliRunner().invoke(app, ["spec", "check", str(written(records))]).output


# ---- budget --target -------------------------------------------------------------------------------------------------


def test_calibrate_changes_the_noise_and_nothing_else(records: Path, tmp_path: Path) -> None:
    source, out = written(records, topology={"graph": "path"}), tmp_path / "calibrated.yaml"
    arguments = ["budget", str(source), "--target", "3", "--target", "b=1", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    before, after = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in (source, out))
    assert {**after["algorithm"], "sigma": 2.0} == before["algorithm"]
    assert {**after, "algorithm": before["algorithm"]} == before
    prepared = prepare(load_spec(out))
    for spent, target in zip(compute_epsilons(prepared.run, prepared.data), (3.0, 1.0, 3.0), strict=True):
        assert 0.999 * target <= spent <= target


def test_calibrate_replaces_no_file(records: Path, tmp_path: Path) -> None:
    source = written(records)
    before = source.read_text(encoding="utf-8")
    result = CliRunner().invoke(app, ["budget", str(source), "--target", "3", "--out", str(source)])
    assert isinstance(result.exception, SpecError) and "give another --out" in str(result.exception)
    assert source.read_text(encoding="utf-8") == before


def test_calibrate_takes_an_algorithm_by_its_name_alone(records: Path) -> None:
    source = written(records)
    document = {**yaml.safe_load(source.read_text(encoding="utf-8")), "algorithm": "ldp-dol"}
    source.write_text(yaml.safe_dump(document), encoding="utf-8")
    result = CliRunner().invoke(app, ["budget", str(source), "--target", "3"])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout)["algorithm"].keys() == {"name", "sigma"}


def test_a_target_writes_to_standard_output(records: Path) -> None:
    result = CliRunner().invoke(app, ["budget", str(written(records)), "--target", "3", "--per", "record"])
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["algorithm"]["sigma"] != 2.0
    assert "a: epsilon 2.99" in result.stderr


def test_targets(records: Path) -> None:
    spec = load_spec(written(records))
    assert parse_target(spec, ["2", "c=0.5"], math.inf, "record_use").epsilons == (2.0, 2.0, 0.5)
    assert parse_target(spec, ["a=1", "b=2", "c=3"], parse_horizon("7"), "record").horizon == 7
    for wanted, horizon, reason in (
        (["a=1"], None, "every learner needs a target, got none for b, c; give --target E"),
        (["1", "2"], None, "--target must be one epsilon for every learner, and NAME=E for others, got 1, 2"),
        (["1", "d=1"], None, "--target must be one of a, b, c, got d"),
        (["1", "a=much"], None, "must be a number, got 'much'"),
        (["1"], "1.5", "--horizon must be a whole number of rounds, or inf, got 1.5"),
        (["1"], "soon", "--horizon must be a number, got 'soon'"),
    ):
        with pytest.raises(SpecError, match=reason):
            parse_target(spec, wanted, parse_horizon(horizon), "record_use")


# ---- budget --tradeoff -----------------------------------------------------------------------------------------------


def test_levels() -> None:
    assert parse_privacy_levels("5, 1,2,1") == (1.0, 2.0, 5.0)
    wrong = {"1,2": "at least 3 different levels, got 2", "1,two,3": "numbers with commas", "": "numbers with commas"}
    wrong |= {"0,1,2": "above 0 and finite", "1,2,inf": "above 0 and finite"}
    for text, reason in wrong.items():
        with pytest.raises(SpecError, match=reason):
            parse_privacy_levels(text, 3)


def test_a_level_is_simulated_with_its_noise(records: Path) -> None:
    prepared, trade = prepared_of(records, rounds=60), TradeoffRequest((0.1, 5.0, 500.0), "tracking_error", replicas=8)
    found = [_measure(prepared, epsilon, trade) for epsilon in trade.epsilons]
    for each, target in zip(found, trade.epsilons, strict=True):
        assert 0.999 * target <= each.epsilon <= target
    assert found[0].loss > found[1].loss > found[2].loss
    assert all(each.error > 0 for each in found)
    wrong = TradeoffRequest((1.0,), "error", replicas=2)
    assert 0 <= _measure(prepared, 1.0, wrong).loss <= 1
    with pytest.raises(SpecError, match=r"--metric must be one of .*error.*, got luck"):
        _measure(prepared, 1.0, TradeoffRequest((1.0,), "luck"))


def test_by_default_only_simulated_levels_are_allowed() -> None:
    measured = [_Measurement(a, 0.2 * math.exp(-25 * a) + 0.1, math.nan) for a in (0.02, 0.1, 0.5, 1.0)]
    best = _solve(measured, TradeoffRequest(())).optimum
    assert best.min_alpha == pytest.approx(0.02, rel=1e-3)
    assert best.max_alpha == 1.0
    assert best.alpha == pytest.approx(0.1422, abs=1e-3)
    assert _solve(measured, TradeoffRequest((), threshold=0.11, ceiling=0.3)).optimum.min_alpha == pytest.approx(
        0.1198, rel=1e-2
    )


def test_tradeoff_writes_what_it_promises(records: Path, tmp_path: Path) -> None:
    source = str(written(records, rounds=40))
    more = ["--metric", "tracking_error", "--replicas", "8", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["budget", source, "--tradeoff", "0.2,2,20,200", *more])
    assert result.exit_code == 0, result.output
    assert "best: ε = " in result.output
    document = json.loads((tmp_path / "tradeoff.json").read_text(encoding="utf-8"))
    assert len(document["measurements"]) == 4
    assert document["optimum"]["min_alpha"] <= document["optimum"]["alpha"] <= document["optimum"]["max_alpha"]
    assert loaded_and_plots(tmp_path / "tradeoff.html") == ([], ["plot-balance", "plot-accuracy"])


LIVE = {**SMALL, "data": {"source": "live", "features": 2, "batch_size": 8}}


def live(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "live.yaml"
    path.write_text(yaml.safe_dump({**LIVE, **changes}), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("rate", "counts"), [(1, [1] * 15), (8, [8] * 15), (0.25, [1, 0, 0, 0] * 4), (1.5, [2, 1] * 8)]
)
def test_live_records_are_priced_by_how_many_come(rate: float, counts: list[int], tmp_path: Path) -> None:
    command = ["budget", live(tmp_path), "--records", str(rate), "--per-record", "--out", str(tmp_path)]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    come = "1 record arrives" if rate == 1 else f"{rate:g} records arrive"
    assert f"if {come} per round, in 15 rounds; fewer records cost more" in said.output
    document = json.loads((tmp_path / "budget.json").read_text())
    run = build_run(load_spec(Path(live(tmp_path))), 3)
    for i, learner in enumerate(document["learners"]):
        due = math.fsum(run.algorithm.accountant(i).losses(np.array(counts[:15])))
        assert learner["epsilon"]["record_use"] == learner["epsilon"]["record"] == pytest.approx(due, rel=1e-12)
    assert f"{come} per round, in 15 rounds; fewer" in (tmp_path / "budget.html").read_text()


@pytest.mark.parametrize("rate", [0.0, -1.0, 8.5, math.nan])
def test_no_more_come_than_a_round_takes(rate: float, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"records a round must be above 0 and at most data\.batch_size, 8, got"):
        CliRunner().invoke(app, ["budget", live(tmp_path), "--records", str(rate)], catch_exceptions=False)


def test_without_an_end_it_is_priced_for_as_many_rounds_as_asked_for(tmp_path: Path) -> None:
    source = live(tmp_path, rounds=None)
    with pytest.raises(SpecError, match=r"without a planned end needs the number of rounds to examine \(--rounds\)"):
        CliRunner().invoke(app, ["budget", source], catch_exceptions=False)
    said = CliRunner().invoke(app, ["budget", source, "--target", "1", "--rounds", "200", "--records", "4"])
    assert said.exit_code == 0, said.output
    found = yaml.safe_load(said.stdout)
    assert found["rounds"] is None
    run = build_run(load_spec(Path(live(tmp_path, rounds=200, algorithm=found["algorithm"]))), 3)
    assert math.fsum(run.algorithm.accountant(0).losses(np.full(200, 4))) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("planned", [{"rounds": None}, {}])
@pytest.mark.parametrize("rate", ["1", "3", "3.9"])
def test_a_promise_for_ever_needs_no_number_of_rounds(rate: str, planned: dict[str, Any], tmp_path: Path) -> None:
    """The rounds with the fewest records count, however seldom they are: 3 of 3.9 a round."""
    more = ["--horizon", "inf", "--records", rate]
    said = CliRunner().invoke(app, ["budget", live(tmp_path, **planned), "--target", "2", *more])
    assert said.exit_code == 0, said.output
    found = load_spec(Path(live(tmp_path, rounds=200, algorithm=yaml.safe_load(said.stdout)["algorithm"])))
    promised = build_run(found, 3).guarantee(0, np.full(200, int(float(rate))))
    assert promised.infinite_horizon_epsilon == pytest.approx(2.0, rel=1e-2)


@pytest.mark.parametrize("rate", ["0.1", "0.999"])
def test_there_is_none_where_a_round_may_bring_nothing(rate: str, tmp_path: Path) -> None:
    command = ["budget", live(tmp_path, rounds=None), "--target", "2", "--horizon", "inf", "--records", rate]
    with pytest.raises(SpecError, match="every round brings records"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_a_horizon_says_how_many_rounds_to_look_at(tmp_path: Path) -> None:
    asked = ["budget", live(tmp_path, rounds=None), "--target", "1"]
    said = [CliRunner().invoke(app, [*asked, more, "200"]) for more in ("--horizon", "--rounds")]
    assert said[0].exit_code == 0 and said[0].stdout == said[1].stdout
    with pytest.raises(SpecError, match="--rounds"):
        CliRunner().invoke(app, [*asked, "--horizon", "0"], catch_exceptions=False)


def test_records_of_a_file_are_counted_there(records: Path) -> None:
    with pytest.raises(SpecError, match=r"the source .* fixes the records of each round: leave out the rate"):
        CliRunner().invoke(app, ["budget", str(written(records)), "--records", "2"], catch_exceptions=False)


def test_what_goes_wrong_is_an_error_of_the_spec(records: Path, tmp_path: Path) -> None:
    """Which the command's `main` says in a line, with exit code 2."""
    source, out = str(written(records)), ["--out", str(tmp_path / "out")]
    for arguments, reason in (
        (["budget", source, "--target", "1", "--tradeoff", "1,2,3"], "give one of the two"),
        (["budget", source, "--target", "1", "--per-record"], "--per-record does not go with --target"),
        (["budget", source, "--tradeoff", "1,2,3", "--rounds", "9"], "--rounds does not go with --tradeoff"),
        (["budget", source, "--horizon", "inf"], "--horizon requires --target"),
        (["budget", source, "--replicas", "3"], "--replicas requires --tradeoff"),
        (["budget", source, "--learner", "d", *out], "--learner must be one of a, b, c, got d"),
        (["budget", source, "--delta", "0", *out], "delta must be above 0 and below 1, got 0.0"),
        (["budget", source, "--target", "b=1", *out], "every learner needs a target"),
        (["budget", source, "--tradeoff", "1,2", *out], "at least 3 different levels"),
        (["budget", source, "--tradeoff", "1,2,3", "--weights", "-1", "6", "9", "1", *out], "weights must be"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, SpecError)
        assert reason in str(result.exception)
