"""The policy of a learner's owner: what fits is let through, and of what does not every clause is named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.algorithms.run_context import RunContext, RunWarning
from sottovoce_core.errors import SpecError
from sottovoce_core.privacy.accountant import PrecomputedAccountant
from sottovoce_core.privacy.guarantee import Adjacency, GuaranteeBasis, ThreatModel
from sottovoce_core.runs import policy as module
from sottovoce_core.runs import run as runs
from sottovoce_core.runs.policy import MAX_POLICY_BYTES, GuaranteeRequirements, Policy
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import RunSpec, parse_spec
from tests.examples import ALLOWING, small_run, small_spec
from tests.gossip import Gossip, GossipSpec

pytestmark = pytest.mark.each

LOSS = 0.25
"""Epsilon of a message of `Promising`."""


class PromisingSpec(GossipSpec):
    """Gossip that promises what its spec says."""

    event: Adjacency = Adjacency.RECORD_USE
    threat_model: ThreatModel = ThreatModel.WIRE
    proof: str = "not stated"

    def build(self, context: RunContext) -> tuple[Promising, tuple[RunWarning, ...]]:
        grounds = GuaranteeBasis(proof=self.proof, threat_model=self.threat_model)
        return Promising(context.dim, context.rounds, self.scale, self.step, event=self.event, grounds=grounds), ()


@dataclass(frozen=True)
class Promising(Gossip):
    event: Adjacency = Adjacency.RECORD_USE
    grounds: GuaranteeBasis = field(default_factory=GuaranteeBasis)

    def accountant(self, learner: int) -> PrecomputedAccountant:
        return PrecomputedAccountant(np.full(self.rounds, LOSS), adjacency=self.event, basis=self.grounds)


NAME = "tests.core.test_policy:PromisingSpec"


def promising(rounds: int = 10, learners: int = 3, **sections: Any) -> RunSpec:
    promised = sections.pop("promised", {})
    document = {"rounds": rounds, "learners": learners, "algorithm": {"name": NAME, **promised}, **sections}
    return parse_spec(document, allow_imports=True)


def refused(policy: Policy, spec: RunSpec, n_features: int = 3, **more: Any) -> str:
    """In which words."""
    with pytest.raises(SpecError) as refusal:
        policy.admit(spec, n_features, 0, **more)
    return str(refusal.value)


# ---- what is let through, and what is not ----------------------------------------------------------------------------

TOLD = {"accuracy": True, "predict": True}
WEAKER: dict[str, Callable[[RunSpec, int], Any]] = {
    "algorithms": lambda spec, n_features: ("ldp-dol", "tests.gossip:GossipSpec"),
    "epsilon_per_run": lambda spec, n_features: math.nextafter(LOSS * spec.rounds, 0.0),
    "telemetry": lambda spec, n_features: ("predict",),
    "capture_modes": lambda spec, n_features: ("mirror",),
    "max_features": lambda spec, n_features: n_features - 1,
    "max_parameters": lambda spec, n_features: n_features - 1,
    "max_rounds": lambda spec, n_features: spec.rounds - 1,
    "max_learners": lambda spec, n_features: spec.n_learners - 1,
    "guarantees.adjacency": lambda spec, n_features: Adjacency.LEARNER,
    "guarantees.threat_model": lambda spec, n_features: ThreatModel.WIRE,
    "guarantees.proof": lambda spec, n_features: True,
}
"""By clause: what it says where it just does not allow what `asking` asks for."""
SIZES = {"max_features", "max_parameters", "max_rounds", "max_learners"}
"""Clauses that are held against a run before it is built, and so without those about what it promises."""
PROMISES = {"epsilon_per_run", "guarantees.adjacency", "guarantees.threat_model", "guarantees.proof"}


def asking(rounds: int, learners: int) -> RunSpec:
    """Asks for something by every clause."""
    promised = {"event": "round", "threat_model": "neighbour"}
    return promising(rounds, learners, promised=promised, telemetry=TOLD, capture="relay")


def fitting(spec: RunSpec, n_features: int) -> dict[str, Any]:
    """All that it asks for, and no more."""
    return {
        "algorithms": (NAME,),
        "epsilon_per_run": LOSS * spec.rounds,
        "telemetry": ("accuracy", "predict"),
        "capture_modes": ("relay",),
        "max_features": n_features,
        "max_parameters": n_features,
        "max_rounds": spec.rounds,
        "max_learners": spec.n_learners,
        "guarantees.adjacency": Adjacency.ROUND,
        "guarantees.threat_model": ThreatModel.NEIGHBOUR,
        "guarantees.proof": False,
    }


WEIGHED = "; an owner who can answer for it sets other clauses in the file of --policy (`sottovoce policy` prints them)"


def made(clauses: dict[str, Any]) -> Policy:
    least = {name.partition(".")[2]: value for name, value in clauses.items() if "." in name}
    return Policy(
        guarantees=GuaranteeRequirements(**least), **{name: each for name, each in clauses.items() if "." not in name}
    )


@given(st.integers(2, 40), st.integers(2, 5), st.integers(2, 9), st.sets(st.sampled_from(sorted(WEAKER))))
def test_what_fits_is_let_through_and_every_clause_that_is_violated_is_named(
    rounds: int, learners: int, n_features: int, violated: set[str]
) -> None:
    spec = asking(rounds, learners)
    clauses = fitting(spec, n_features) | {name: WEAKER[name](spec, n_features) for name in violated}
    policy = made(clauses)
    if not violated:
        assert policy.admit(spec, n_features, learners - 1).spec == spec
        return
    text = refused(policy, spec, n_features)
    assert "\n" not in text and text.startswith("the owner's policy (the default one) allows ")
    named = set(re.findall(r"(?:allows|and) ([\w.]+) [^;]*?, the spec asks for ", text))
    assert named == (violated - PROMISES if violated & SIZES else violated)


def test_a_refusal_says_what_is_allowed_and_what_came(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("{telemetry: [predict], capture_modes: never, epsilon_per_run: 2}", encoding="utf-8")
    text = refused(Policy.load(path), promising(telemetry={"accuracy": True}, capture="relay"))
    assert text == (
        "the owner's policy (policy.yaml) allows telemetry [predict], the spec asks for [accuracy]; and capture_modes never, the "
        "spec asks for [relay]; and epsilon_per_run 2, the spec asks for 2.5" + WEIGHED
    )


def test_a_refusal_ends_in_the_line_that_allows_the_run(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("{telemetry: [predict], capture_modes: never, max_rounds: 5}", encoding="utf-8")
    spec = promising(6, telemetry={"accuracy": True}, capture="relay")
    end = refused(Policy.load(path), spec).partition("the spec asks for [relay]; ")[2]
    assert end == (
        "`max_rounds: 6` and `telemetry: [predict, accuracy]` and `capture_modes: [relay]` in the file of --policy allows it"
    )
    path.write_text("\n".join(re.findall(r"`([^`]+)`", end)), encoding="utf-8")
    Policy.load(path).admit(spec, 3, 0)


def test_each_promise_covers_the_weaker_ones() -> None:
    """An event of a round is any record of it; one of a learner is any round of it."""
    for least in Adjacency:
        fits = {each for each in Adjacency if _admits(GuaranteeRequirements(adjacency=least), {"event": each.value})}
        assert fits == {
            Adjacency.RECORD_USE: set(Adjacency),
            Adjacency.ROUND: {Adjacency.ROUND, Adjacency.LEARNER},
        }.get(least, {Adjacency.LEARNER})
    wire, neighbour, output = ThreatModel.WIRE, ThreatModel.NEIGHBOUR, ThreatModel.OUTPUT
    for model, enough in ((wire, {wire}), (neighbour, {wire, neighbour}), (output, {wire, neighbour, output})):
        fits_too = {
            each
            for each in ThreatModel
            if _admits(GuaranteeRequirements(threat_model=model), {"threat_model": each.value})
        }
        assert fits_too == enough


def _admits(least: GuaranteeRequirements, promised: dict[str, str]) -> bool:
    try:
        Policy(guarantees=least).admit(promising(promised=promised), 3, 0)
    except SpecError:
        return False
    return True


def test_a_proof_that_is_stated_is_told_from_none() -> None:
    stated = Policy(guarantees=GuaranteeRequirements(proof=True))
    stated.admit(promising(promised={"proof": "Lemma 3"}), 3, 0)
    assert "guarantees.proof true, the spec asks for not stated" in refused(stated, promising())


FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text("utf-8")
)


@pytest.mark.parametrize("changes", FIELD["runs"], ids=lambda run: str(run["name"]))
def test_every_built_in_algorithm_names_its_proof_and_holds_on_the_wire(changes: dict[str, Any]) -> None:
    """Those that hide nothing on the wire are refused by their price."""
    spec = parse_spec({**FIELD["common"], **changes}, allow_imports=False)
    ALLOWING.model_copy(update={"guarantees": GuaranteeRequirements(proof=True)}).admit(spec, 6, 0)


# ---- what it costs ---------------------------------------------------------------------------------------------------


def test_a_spec_whose_noise_is_all_but_switched_off_is_refused_by_default() -> None:
    text = refused(Policy(), small_spec(algorithm={"sigma": 1e-9}))
    assert re.search(rf"allows epsilon_per_run 100, the spec asks for \d\.\d+e\+1[01]{re.escape(WEIGHED)}$", text)


def test_where_nothing_is_promised_the_price_is_infinite() -> None:
    without = parse_spec(
        {"rounds": 3, "learners": 2, "algorithm": {"name": "tests.gossip:GossipSpec"}}, allow_imports=True
    )
    assert refused(Policy(), without).endswith("epsilon_per_run 100, the spec asks for inf" + WEIGHED)
    ALLOWING.admit(without, 3, 0)


def test_the_budget_of_the_spec_bounds_the_price() -> None:
    """A learner stops there, whatever its rounds would cost."""
    policy = Policy(epsilon_per_run=1.0)
    policy.admit(promising(10, privacy={"budget": 1.0}), 3, 0)
    assert refused(policy, promising(10, privacy={"budget": 1.5})).endswith(
        "epsilon_per_run 1, the spec asks for 1.5" + WEIGHED
    )
    assert refused(policy, promising(10, privacy={"budget": 3.0})).endswith(
        "epsilon_per_run 1, the spec asks for 2.5" + WEIGHED
    )


def test_every_learner_has_a_budget_of_its_own() -> None:
    spec = promising(10, learners=2, privacy={"budget": [0.5, 1.5]})
    policy = Policy(epsilon_per_run=1.0)
    policy.admit(spec, 3, 0)
    with pytest.raises(SpecError, match=r"epsilon_per_run 1, the spec asks for 1\.5"):
        policy.admit(spec, 3, 1)


def test_the_planned_price_is_that_of_the_guarantee() -> None:
    """By the numbers of records that the spec names; who is away pays as if it spoke, and nothing after its last round."""
    run = small_run(30, data={"batch_size": 4}, offline_intervals=[{"learner": "learner-1", "first_round": 20}])
    for i in range(3):
        counts = 4 * run.participation(i).mask().astype(np.int64)
        assert run.planned_loss(i).epsilon() == pytest.approx(run.guarantee(i, counts).epsilon(), rel=1e-12)
        assert run.planned_counts(i, 10).tolist() == counts[:10].tolist()


def test_of_a_long_run_only_the_first_rounds_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it goes on the limit holds in any case: a check that takes minutes helps nobody."""
    monkeypatch.setattr(runs, "MAX_ACCOUNTED_ROUNDS", 8)
    Policy(epsilon_per_run=LOSS * 8).admit(promising(10), 3, 0)
    assert refused(Policy(epsilon_per_run=LOSS * 7), promising(10)).endswith("the spec asks for 2" + WEIGHED)


# ---- what a spec asks for beside -------------------------------------------------------------------------------------


def test_a_mirror_is_asked_for_by_its_address_too() -> None:
    """A coordinator may name one, whatever the spec says."""
    policy, spec = Policy(capture_modes=("relay",)), promising()
    policy.admit(spec, 3, 0)
    assert "capture_modes [relay], the spec asks for [mirror]" in refused(policy, spec, is_mirrored=True)


def test_a_run_that_is_too_large_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*_: object) -> None:
        raise AssertionError("it was built")

    monkeypatch.setattr(module, "build_run", built)
    assert "max_features 1000000, the spec asks for 4294967295" in refused(Policy(), promising(), 2**32 - 1)
    assert "max_rounds 10000000, the spec asks for 9007199254740992" in refused(Policy(), promising(2**53))
    classes = promising(loss={"kind": "softmax", "classes": 10**8})
    assert "max_parameters 10000000, the spec asks for 300000000" in refused(Policy(), classes)


@pytest.mark.parametrize("name", ["dpsr", "dpps"])
def test_a_number_for_every_round_and_learner_needs_room(name: str) -> None:
    """What has none is refused in words before it is asked for."""
    changes = next(each for each in FIELD["runs"] if each["name"] == name)
    spec = parse_spec({**FIELD["common"], **changes, "rounds": 9_000_000, "learners": 16}, allow_imports=False)
    with pytest.raises(SpecError, match=r"9000000 rounds of 16 learners .* do not: lower rounds"):
        Policy().admit(spec, 6, 0)


def test_code_is_refused_before_it_is_imported() -> None:
    document = {"algorithm": {"name": "os:path"}, "loss": {"kind": "a.b:C"}, "topology": {"graph": {"kind": "ring"}}}
    with pytest.raises(
        SpecError,
        match=r"allows imports \[a.b:C\], the spec asks for \[os:path, a.b:C\]; `imports: \[a.b:C, os:path\]`",
    ):
        Policy(imports=("a.b:C",)).require_allowed_imports(document)
    Policy(imports=("a.b:C", "os:path")).require_allowed_imports(document)
    Policy().require_allowed_imports(document)
    Policy(imports=()).require_allowed_imports({"algorithm": "ldp-dol"})


def test_a_policy_for_a_spec_allows_it_and_no_other() -> None:
    spec = asking(10, 3)
    policy = Policy.from_spec(spec)
    policy.admit(spec, 10**7, 2)
    policy.require_allowed_imports(spec.model_dump(mode="json"))
    assert "max_rounds 10" in refused(policy, asking(11, 3))
    assert "algorithms" in refused(policy, small_spec(10, 3))
    plain = Policy.from_spec(small_spec(10, 3))
    assert "capture_modes never" in refused(plain, small_spec(10, 3, capture="mirror"))
    assert "telemetry []" in refused(plain, small_spec(10, 3, telemetry=TOLD))


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_policy_that_is_printed_is_read_as_the_same(tmp_path: Path) -> None:
    other = Policy(algorithms=("dsgd",), telemetry=("accuracy",), capture_modes=(), epsilon=3.0, max_rounds=None)
    for policy in (Policy(), other, ALLOWING):
        path = tmp_path / "policy.yaml"
        path.write_text(policy.dump(), encoding="utf-8")
        assert Policy.load(path).model_dump() == policy.model_dump()


def test_every_clause_is_explained_where_it_is_printed() -> None:
    text = Policy().dump()
    clauses = yaml.safe_load(text)
    assert clauses == Policy().model_dump(mode="json")
    for clause in (*Policy.model_fields.values(), *GuaranteeRequirements.model_fields.values()):
        assert clause.description
        assert " ".join(clause.description.split()) in re.sub(r"\n *# ", " ", text)


def test_the_page_shows_the_default() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "privacy", "policy.md").read_text(encoding="utf-8")
    assert re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) == [Policy().dump()]


def test_the_default_is_finite() -> None:
    for clause in ("epsilon_per_run", "epsilon_per_month", "max_features", "max_rounds", "max_learners"):
        assert getattr(Policy(), clause) is not None
    assert Policy.load(None) == Policy()


BAD = {
    "": "p.yaml: a policy must be a mapping of clauses, got an empty file; `sottovoce policy` prints one to start from",
    "# nothing\n": "p.yaml: a policy must be a mapping of fields, got nothing",
    "- telemetry\n": "p.yaml: a policy must be a mapping of fields, got a list",
    "{": "p.yaml is not YAML: ",
    "epsilon: 1\nepsilon: 1000": "p.yaml is not YAML: a name must be unique, got 'epsilon' twice",
    "telemtry: []": "p.yaml: unknown field telemtry; the fields are algorithms, imports, epsilon_per_run, ",
    "guarantees: {prof: true}": "unknown field guarantees.prof; the fields are adjacency, threat_model, proof",
    "epsilon_per_run: much": "p.yaml: epsilon_per_run: must be a number, got",
    "epsilon_per_run: .inf": "p.yaml: epsilon_per_run: must be a finite number, got inf",
    "epsilon: 0": "p.yaml: epsilon: must be greater than 0, got 0",
    "telemetry: accuracy": "p.yaml: telemetry: must be a list, got 'accuracy': write [accuracy]",
    "telemetry: [loss]": "p.yaml: telemetry.0: must be 'accuracy' or 'predict', got 'loss'",
    "capture_modes: always": "p.yaml: capture_modes: must be a list, got 'always': write [always]",
    "capture_modes: [relay, never]": (
        "p.yaml: capture_modes: must be some of 'relay', 'mirror' and 'wiretap', got ['relay', 'never']; `never` must be alone: "
        "`capture_modes: never`"
    ),
    "coordinators: [learner/main]": "coordinators: must name one or more as coordinator/NAME, got ['learner/main']",
    "coordinators: []": "p.yaml: coordinators: must name one or more as coordinator/NAME, got []",
    "eavesdroppers: [ear]": "p.yaml: eavesdroppers: must name one or more as eavesdropper/NAME, got ['ear']",
    "algorithms: [lpd-dol]": "did you mean ldp-dol?",
    "guarantees: {adjacency: person}": "guarantees.adjacency: must be 'record_use', 'learner' or 'round', got 'person'",
    "max_rounds: 1.5": "p.yaml: max_rounds: ",
    "\x00": "p.yaml is not YAML: ",
    f"# {'x' * MAX_POLICY_BYTES}": f"p.yaml: a policy must have at most {MAX_POLICY_BYTES} bytes",
    "[" * 4000: "p.yaml must be a mapping of fields and sections, got one nested too deeply",
}


@pytest.mark.parametrize("text", BAD, ids=[f"{text[:30]!r}" for text in BAD])
def test_a_bad_file_is_refused_in_a_line(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as refusal:
        Policy.load(Path("p.yaml"))
    assert BAD[text] in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"# caf\xe9")
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(SpecError, match=re.escape(f"cannot read the policy {path}: ")) as refusal:
            Policy.load(path)
        assert "\n" not in str(refusal.value)


def test_a_file_without_end_is_not_read_to_it() -> None:
    with pytest.raises(SpecError, match="a policy must have at most"):
        Policy.load(Path("/dev/zero"))


def test_what_a_policy_admits_is_what_is_run() -> None:
    spec = small_spec(10)
    assert ALLOWING.admit(spec, 3, 0).field_shapes == build_run(spec, 3).field_shapes
