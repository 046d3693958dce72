"""Noticing: each rule when it is broken, silence where all is right, memory that does not grow."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
import pytest
import yaml

from sottovoce_core.algorithms.interface import LatticeAlgorithm
from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.online_checks import (
    CapturedMessage,
    Detection,
    ExpectedTraffic,
    OnlineChecks,
    _is_off_lattice,
)
from sottovoce_core.noise import SeededNoise, lattice_spacing
from sottovoce_core.noise.mechanisms import field_lattice_spacing
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import parse_spec
from tests.claims import SETUPS
from tests.examples import made_up, small_run

FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text("utf-8")
)
ROUNDS = 36
STEP = 0.25


def said(t: int, value: float = 1.0, *, to: int = 1, sender: int = 0, stream: int = 1, **more: Any) -> CapturedMessage:
    fields = {"y": np.array([value, 2.0])}
    usual: dict[str, Any] = {"claimed_sender": sender, "digest": f"{t} {value}".encode(), "size": 40, "fields": fields}
    return CapturedMessage(sender=sender, receiver=to, stream=stream, round=t, **{**usual, **more})


def rules(found: tuple[Detection, ...]) -> list[str]:
    assert all("\n" not in each.text and each.text.startswith("learner 0 to learner") for each in found)
    return [each.kind for each in found]


def expecting(**more: Any) -> OnlineChecks:
    return OnlineChecks(ExpectedTraffic(40, lambda sender, receiver, t: t, lambda learner, t: {"y": STEP}, **more))


# ---- one rule at a time ----------------------------------------------------------------------------------------------


def test_nothing_is_noticed_where_all_is_right() -> None:
    noticing = expecting()
    for t in range(5):
        for to in (1, 2):
            assert noticing.check_message(said(t, 0.25 * t, to=to)) == ()
    noticing.open_stream(0, 1, 2, 3)  # a broken stream: the last rounds again, in the same bytes
    assert [noticing.check_message(said(t, 0.25 * t, stream=2)) for t in (3, 4, 5)] == [(), (), ()]


def test_different_bytes_to_different_neighbours() -> None:
    noticing = expecting()
    noticing.check_message(said(0))
    found = noticing.check_message(said(0, 2.0, to=2))
    assert rules(found) == ["equivocation"]
    assert found[0].text == "learner 0 to learner 2, round 0: other bytes than learner 1 received"


def test_a_round_said_again_in_other_bytes() -> None:
    noticing = expecting()
    noticing.check_message(said(0))
    noticing.open_stream(0, 1, 2, 0)
    assert rules(noticing.check_message(said(0, 2.0, stream=2))) == ["changed-resend"]


def test_a_value_off_the_lattice_is_named() -> None:
    noticing = expecting()
    found = noticing.check_message(said(0, 0.3))
    assert rules(found) == ["lattice"]
    assert "y[0] = 0.3" in found[0].text
    assert noticing.check_message(said(0, 0.3, to=2)) == ()  # the same bytes once


def test_an_unusual_length() -> None:
    assert rules(expecting().check_message(said(0, size=41))) == ["length"]
    unknown = OnlineChecks(ExpectedTraffic())
    assert [rules(unknown.check_message(said(t, size=size))) for t, size in enumerate((33, 33, 34))] == [
        [],
        [],
        ["length"],
    ]


@pytest.mark.parametrize(
    ("rounds", "out_of_turn"),
    [((0, 1, 2), []), ((0, 2, 3), [2]), ((0, 1, 1), [1]), ((3, 2), [2]), ((5, 2**64 - 1), [2**64 - 1])],
)
def test_a_message_out_of_turn(rounds: tuple[int, ...], out_of_turn: list[int]) -> None:
    noticing = expecting()
    found = [each for t in rounds for each in noticing.check_message(said(t))]
    assert [(each.kind, each.round) for each in found] == [("round", t) for t in out_of_turn]


def test_a_stream_begins_with_what_was_lacking() -> None:
    noticing = expecting()
    noticing.open_stream(0, 1, 4, 7)
    assert rules(noticing.check_message(said(8, stream=4))) == ["round"]
    noticing.open_stream(0, 1, 5, 7)
    assert noticing.check_message(said(7, stream=5)) == ()


def test_a_network_that_changes_says_which_round_is_due() -> None:
    even = OnlineChecks(ExpectedTraffic(next_due_round=lambda sender, receiver, t: t + t % 2 if t < 6 else None))
    even.open_stream(0, 1, 1, 1)
    assert [rules(even.check_message(said(t))) for t in (2, 4, 5, 6)] == [[], [], ["round"], ["round"]]


def test_what_is_not_known_of_a_network_is_not_held_against_anybody() -> None:
    unknown = OnlineChecks(ExpectedTraffic())
    assert [rules(unknown.check_message(said(t))) for t in (0, 4, 3)] == [[], [], ["round"]]


def test_mirrored_messages_have_no_turn() -> None:
    noticing = expecting()
    assert [noticing.check_message(said(t, stream=0)) for t in (5, 2, 9)] == [(), (), ()]


def test_somebody_else_and_nobody_at_all() -> None:
    noticing = expecting()
    assert rules(noticing.check_message(said(0, claimed_sender=3))) == ["sender"]
    assert rules(noticing.report_undecodable(0, 1, 1, "no message")) == ["decoding"]
    assert noticing.check_message(said(2)) == ()  # the garbled one may have been any round


def test_memory_is_bounded_whatever_comes() -> None:
    noticing = OnlineChecks(ExpectedTraffic(), max_kept=50)
    for k in range(2_000):
        noticing.open_stream(k, k + 1, k, k)
        noticing.check_message(said(k * 2**40, sender=k, to=k + 1, stream=k))
    assert max(len(noticing._versions), len(noticing._next), len(noticing._lengths)) == 50


# ---- the lattice -----------------------------------------------------------------------------------------------------


def test_on_the_lattice_is_exact() -> None:
    values = np.array([0.0, -0.75, 1e300, 5.1, np.nextafter(0.25, 1), 2.0**52 + 0.5])
    assert _is_off_lattice(values, 0.25).tolist() == [False, False, False, True, True, False]
    assert not _is_off_lattice(np.array([1e100]), 1e-300).any()  # so large that it overflows


def test_a_scale_next_to_a_power_of_two_has_the_finer_lattice() -> None:
    for scale in (np.nextafter(1.0, 0), 1.0, np.nextafter(1.0, 2)):
        spacing = field_lattice_spacing("y", float(scale))["y"]
        assert spacing <= float(lattice_spacing(float(scale)))
        assert spacing == 2.0**-41
    assert field_lattice_spacing("y", 1.5) == {"y": float(lattice_spacing(1.5))}
    assert field_lattice_spacing("y", 0.0) == {}


def setups() -> dict[str, tuple[Run, int]]:
    """Every algorithm, and every variant that is attacked elsewhere, with the features of its records."""
    field = {}
    for each in FIELD["runs"]:
        rounds = min(ROUNDS, each.get("rounds", ROUNDS))
        field[str(each["name"])] = (
            build_run(parse_spec({**FIELD["common"], **each, "rounds": rounds}, allow_imports=True), 6),
            6,
        )
    return field | {f"claim {name}": (setup.build(), setup.n_features) for name, setup in SETUPS.items()}


def noticed(run: Run, n_features: int, spoil: float = 0.0) -> tuple[int, int]:
    """Findings in a simulated run with `spoil` added to what is said, and how many messages were held against a lattice."""
    algorithm, held = run.algorithm, 0

    def lattice(learner: int, t: int) -> dict[str, float]:
        nonlocal held
        known = dict(algorithm.lattice_spacings(learner, t)) if isinstance(algorithm, LatticeAlgorithm) else {}
        held += bool(known)
        return known

    noticing, count = OnlineChecks(ExpectedTraffic(lattice_spacings=lattice)), 0
    for t, step in enumerate(simulate_rounds(run, made_up(run.spec, n_features), SeededNoise(5))):
        for sender in range(run.spec.n_learners):
            fields: dict[str, FloatArray] = {
                name: each[sender, 0] + spoil for name, each in step.message.fields.items()
            }
            count += len(noticing.check_message(said(t, sender=sender, fields=fields)))
    return count, held


def test_no_algorithm_is_ever_accused() -> None:
    """Certain, not likely: no seed could make it fail."""
    judged = {name: noticed(*setup) for name, setup in setups().items()}
    assert {name: count for name, (count, _) in judged.items() if count} == {}
    on_lattice = {"ldp-dol", "dsgd", "dola", "pdop", "dpdola", "pd-ogd", "pd-ogd-t-fold", "dpsr", "pd-ftgl", "pd-ocg"}
    assert {name for name, (_, held) in judged.items() if held and not name.startswith("claim")} == on_lattice


def test_a_learner_that_leaves_the_lattice_is_caught() -> None:
    """What is said is off by an eighth of the spacing: far less than the noise."""
    run = small_run(rounds=4)
    assert noticed(run, 3) == (0, 12)
    assert noticed(run, 3, 2.0**-44) == (12, 12)
