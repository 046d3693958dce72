"""`sottovoce policy`, and what `sottovoce learner --policy` refuses to start with."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from sottovoce_client.cli import app
from sottovoce_client.privacy.policy import check_policy, show_policy
from sottovoce_client.runs.local_services import LocalServices
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import prepare
from sottovoce_core.runs.policy import Policy
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import RunSpec, parse_spec
from tests.examples import ALLOWING, ALLOWING_FILE


def spec_of(**sections: Any) -> RunSpec:
    document = {"rounds": 10, "learners": ["ann", "ben"], "algorithm": {"name": "ldp-dol"}, "data": {"batch_size": 16}}
    return parse_spec({**document, **sections}, allow_imports=True)


def console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=120), out


def checked(spec: RunSpec, policy: Policy) -> tuple[bool, str]:
    to, out = console()
    return check_policy(build_run(spec, 31), 31, policy, 0, to), out.getvalue()


@pytest.mark.parametrize("path", [None, ALLOWING_FILE], ids=["default", "file"])
def test_a_policy_is_shown_whole(path: Path | None) -> None:
    to, out = console()
    show_policy(path, to)
    assert yaml.safe_load(out.getvalue()) == Policy.load(path).model_dump(mode="json")
    assert out.getvalue().count("# ") > len(Policy.model_fields)


def test_a_run_that_fits_is_told_clause_by_clause() -> None:
    fits, text = checked(spec_of(privacy={"budget": 5.0}), Policy(epsilon=40.0))
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert fits and "refused" not in text
    assert rows["epsilon_per_run"] == ["100", "5"] and rows["max_features"] == ["1000000", "31"]
    assert "ann would take part in run" in text
    assert "it stops when its ledger reaches epsilon 1,000 in 30 days or 40 in all runs" in text


def test_a_limit_of_all_runs_that_this_run_alone_reaches_is_told_with_the_round() -> None:
    _, text = checked(spec_of(), Policy(epsilon_per_run=None, epsilon_per_month=3.0, epsilon=1000.0))
    losses = (run := build_run(spec_of(), 31)).algorithm.accountant(0).losses(run.planned_counts(0))
    t = int(np.flatnonzero(np.cumsum(losses) > 3.0)[0])
    assert 0 < t < 10
    assert f"this run alone reaches epsilon 3 in 30 days: it sends no message from round {t} of 10 on" in text
    assert "reaches epsilon 1,000" not in text


def test_a_run_that_does_not_fit_is_told_by_what() -> None:
    fits, text = checked(spec_of(telemetry={"accuracy": True}, capture="mirror"), Policy(epsilon_per_run=0.5))
    refused = {line.split()[0] for line in text.splitlines() if line.rstrip().endswith("refused")}
    assert not fits and refused == {"telemetry", "epsilon_per_run"}
    assert re.search(r"telemetry +\[\] +\[accuracy\] +refused", text)
    assert re.search(r"capture_modes +\[relay, mirror, wiretap\] +\[mirror\] *\n", text)
    assert "ann would not take part in run" in text


def test_without_a_limit_nothing_is_priced() -> None:
    fits, text = checked(spec_of(algorithm={"name": "ldp-dol", "sigma": 1e-9}), ALLOWING)
    assert fits and "not priced" in text and "it stops" not in text


def command(*arguments: str) -> int:
    """Its exit code."""
    with pytest.raises(SystemExit) as end:
        app(list(arguments))
    assert isinstance(end.value.code, int)
    return end.value.code


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec_of(telemetry={"predict": True}).model_dump(mode="json")), encoding="utf-8")
    assert command("policy") == 0
    assert yaml.safe_load(capsys.readouterr().out) == Policy().model_dump(mode="json")
    assert command("policy", str(path), "--learner", "ben") == 1
    assert "ben would not take part in run" in capsys.readouterr().out
    assert command("policy", str(path), "--learner", "ben", "--policy", str(ALLOWING_FILE)) == 0
    path.write_text("{rounds: 5, learners: [ben], algorithm: ldp-dol, data: {source: theirs.csv}}", encoding="utf-8")
    assert command("policy", str(path), "--learner", "ben", "--features", "7") == 0  # by who has not their records
    assert re.search(r"max_features +1000000 +7", capsys.readouterr().out)
    with pytest.raises(SpecError, match="--learner must be one of ben, got zoe"):
        app(["policy", str(path), "--learner", "zoe"], standalone_mode=False)


@pytest.mark.parametrize(
    "command", [["policy", "--policy"], ["learner", "--name", "a", "--coordinator", "127.0.0.1:1", "--policy"]]
)
def test_a_bad_policy_starts_nothing(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "policy.yaml"
    for text in ("", "telemtry: []", "epsilon: much"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SpecError, match=r"policy\.yaml: "):
            app([*command, str(path)], standalone_mode=False)
    with pytest.raises(SpecError, match="cannot read the policy"):
        app([*command, str(tmp_path / "none.yaml")], standalone_mode=False)


def test_local_services_have_a_policy_for_their_spec_alone(tmp_path: Path) -> None:
    spec = spec_of(telemetry={"accuracy": True}, capture="relay")
    command = LocalServices(spec, tmp_path)._learner_command(["ann"])
    assert command[command.index("--policy") + 1] == str(tmp_path / "logs" / "policy.yaml")
    Policy.from_spec(spec).admit(spec, 31, 0)


def test_the_services_of_the_readme_and_the_examples_run_by_default() -> None:
    """Learners that are started without a policy, as these pages say."""
    checkout = Path(__file__).parents[2]
    wards = yaml.safe_load((checkout / "examples" / "wards.yaml").read_text(encoding="utf-8"))
    script = (checkout / "examples" / "services.py").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(script, "services.py", "exec"), namespace)  # noqa: S102 - our own
    for spec in (parse_spec(wards, allow_imports=False), namespace["experiment"]):
        run = prepare(spec)
        for i in range(run.run.spec.n_learners):
            refused = [each for each in Policy().findings(run.run, run.data.n_features, i) if not each.is_satisfied]
            assert not refused, json.dumps([str(each) for each in refused])


def test_the_run_of_the_readme_is_within_the_theory() -> None:
    wards = yaml.safe_load((Path(__file__).parents[2] / "examples" / "wards.yaml").read_text(encoding="utf-8"))
    prepared = prepare(parse_spec(wards, allow_imports=False))
    assert not prepared.run.warnings and not prepared.run.spec.data.reuse
    spent = [prepared.run.guarantee(i, np.diff(own.offsets)).epsilon() for i, own in enumerate(prepared.data.learners)]
    assert spent == pytest.approx([4, 4, 2], rel=1e-3)
