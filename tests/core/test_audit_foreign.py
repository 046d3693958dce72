"""The audit of captured conversations: what gives a world away, what is said twice, and what may be said of it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from sottovoce_core.arrays import FloatArray, as_floats
from sottovoce_core.auditing.blackbox import GUESSED_FRACTION, compute_classifier_level
from sottovoce_core.auditing.bounds import (
    BLACK_BOX_ALLOCATION,
    NOISE_ALLOCATION,
    AlphaAllocation,
    compute_epsilon_lower_bound,
    compute_min_runs,
)
from sottovoce_core.auditing.foreign.answer_features import build_answer_views
from sottovoce_core.auditing.foreign.audit import ForeignAudit, audit_traffic
from sottovoce_core.auditing.foreign.noise import NoiseClaim, NoiseFindings, check_noise
from sottovoce_core.auditing.foreign.power import PowerAnalysis, _compute_gaussian_shift, compute_gaussian_epsilon
from sottovoce_core.auditing.foreign.repeats import find_anomalies
from sottovoce_core.auditing.http2_frames import (
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Http2Frame,
)
from sottovoce_core.auditing.traffic_features import (
    CapturedFrame,
    DecodedMessage,
    RunTraffic,
    build_timing_views,
    build_views,
    collect_decoded_fields,
    digest,
    flatten_numbers,
)
from sottovoce_core.auditing.verdict import Findings, decide
from sottovoce_core.errors import CaptureError, SpecError

ONE_FAMILY = AlphaAllocation(0.05, BLACK_BOX_ALLOCATION)

Speaker = Callable[[int, int, np.random.Generator], Sequence[FloatArray]]
"""What is said in a run: from the world, the run's number and noise."""


def said(values: FloatArray, t: int, *, sender: str = "clinic", read: bool = True) -> CapturedFrame:
    payload = struct.pack("<I", t) + values.tobytes()
    known = DecodedMessage({"total": flatten_numbers(values)}, t, sender) if read else None
    return CapturedFrame(
        "message", "/a/B", "back", 0, 0.1 * t, len(payload), payload[:64], digest(payload), decoded_message=known
    )


def conversations(
    speak: Speaker, runs: int = 250, *, seed: int = 1, read: bool = True, worlds: Sequence[int] | None = None
) -> list[RunTraffic]:
    generator = np.random.default_rng(seed)
    coins = generator.integers(2, size=runs).tolist() if worlds is None else list(worlds)
    return [
        RunTraffic(w, f"run {k}", float(k), tuple(said(v, t, read=read) for t, v in enumerate(speak(w, k, generator))))
        for k, w in enumerate(coins)
    ]


def noised(world: int, run: int, noise: np.random.Generator) -> list[FloatArray]:
    """Laplace noise of scale 2 on a total that differs by 1, twice: epsilon is 1."""
    return [np.array([world, 3.0]) + noise.laplace(scale=2.0, size=2) for _ in range(2)]


def once(world: int, run: int, noise: np.random.Generator) -> list[FloatArray]:
    """The first of the two."""
    return noised(world, run, noise)[:1]


def raw_later(world: int, run: int, noise: np.random.Generator) -> list[FloatArray]:
    return [noised(world, run, noise)[0], np.array([world, 3.0])]


def audited(runs: Sequence[RunTraffic], claim: float = 1.0, confidence: float = 0.999) -> ForeignAudit:
    return audit_traffic(runs, claim=claim, confidence=confidence)


def test_correct_noise_is_consistent_with_more_than_its_epsilon() -> None:
    """By construction refuted with probability at most 0.05: epsilon is 1/2. Half of the noise for 1.5 would have shown."""
    done = audited(conversations(once), 1.5, 0.95)

    assert done.verdict.kind == "consistent"
    assert done.findings.epsilon_lower_bound < 1.0
    assert done.anomalies == ()


@pytest.mark.parametrize("read", [True, False])
def test_what_is_said_without_noise_refutes_the_claim_and_is_named(read: bool) -> None:
    done = audited(conversations(raw_later, read=read))

    assert done.verdict.kind == "refuted"
    assert ("values of total" if read else "bytes") in done.verdict.text
    place = "number 0 of total, message 1 (round 1, from clinic)" if read else "of message 1, /a/B response"
    assert place in done.verdict.text and place in done.leaks[0].place
    assert done.findings.epsilon_lower_bound == pytest.approx(done.max_provable_epsilon, rel=0.1)


@pytest.mark.parametrize("factor", [1e300, 1e-320])
@pytest.mark.filterwarnings("error")
def test_numbers_of_any_size_are_audited(factor: float) -> None:
    done = audited(conversations(lambda *run: [factor * each for each in raw_later(*run)], 60))

    assert {bound.guesser for bound in done.findings.bounds} == {"logistic regression", "gradient boosting"}
    assert factor < 1.0 or done.findings.epsilon_lower_bound > 0.0


def test_without_a_claim_the_bound_alone_is_told() -> None:
    verdict = audited(conversations(raw_later), math.inf).verdict

    assert verdict.kind == "no-claim"
    assert "The lower bound on epsilon is" in verdict.text
    assert "values of total" in verdict.text


def changed(run: RunTraffic, **facts: object) -> RunTraffic:
    """The same run, its first message different in world 1."""
    first, *rest = run.frames
    return replace(run, frames=(replace(first, **facts), *rest)) if run.world else run  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("view", "facts"),
    [
        ("sizes", {"size": 21}),
        ("metadata", {"kind": "metadata", "entries": (("x-loss", "0.25"),)}),
        ("status", {"kind": "trailers", "status": ("ABORTED", "no")}),
        ("order", {"stream": 1}),
        ("bytes", {"head": b"\7"}),
    ],
)
def test_every_side_channel_has_a_view_that_shows_it(view: str, facts: dict[str, object]) -> None:
    runs = [changed(run, **facts) for run in conversations(noised, 12, worlds=[0, 1] * 6)]
    table, worlds = build_views(runs)[view], np.array([run.world for run in runs])

    assert any((column == column[0]).tolist() == (worlds == 0).tolist() for column in table.T)


def framed(frame: Http2Frame, other: Http2Frame) -> list[RunTraffic]:
    """Quiet runs, with one frame of HTTP/2 in world 0, and another one in world 1."""
    quiet = conversations(noised, 12, worlds=[0, 1] * 6)
    return [replace(run, http2_frames=(("request", other if run.world else frame),)) for run in quiet]


@pytest.mark.parametrize(
    ("frame", "change"),
    [
        (Http2Frame(SETTINGS, 0, 0, 6, b"\0\3\0\0\0\1"), {"content": b"\0\3\0\0\0\2"}),
        (Http2Frame(HEADERS, 4, 1, 3, b"abc"), {"flags": 5}),
        (Http2Frame(HEADERS, 12, 1, 3, b"\1a\0"), {"content": b"\2\0\0"}),
        (Http2Frame(GOAWAY, 0, 0, 9, bytes(9)), {"content": bytes(8) + b"!"}),
        (Http2Frame(0x53, 0, 0, 1, b"a"), {"content": b"b"}),
        (Http2Frame(0x53, 0, 0, 1, b"a"), {"kind": 0x54}),
        (Http2Frame(DATA, 8, 1, 2, b"\1\0"), {"content": b"\2\0\0"}),
    ],
)
def test_a_frame_that_differs_shows(frame: Http2Frame, change: dict[str, Any]) -> None:
    runs = framed(frame, replace(frame, **change))
    assert any(len(set(column.tolist())) == 2 for column in build_views(runs)["http2"].T)
    assert not build_timing_views(runs)["flow control"].size or frame.kind == DATA


@pytest.mark.parametrize(
    ("frame", "change"),
    [
        (Http2Frame(SETTINGS, 0, 0, 6, b"\0\4\0\0\0\1"), {"content": b"\0\4\0\0\0\2"}),
        (Http2Frame(DATA, 0, 1, 47, b""), {"size": 46}),
        (Http2Frame(PING, 0, 0, 8, bytes(8)), {"content": bytes(7) + b"!"}),
        (Http2Frame(PING, 0, 0, 8, bytes(8)), {"flags": 1}),
        (Http2Frame(RST_STREAM, 0, 1, 4, bytes(4)), {"content": b"\0\0\0\x08"}),
        (Http2Frame(WINDOW_UPDATE, 0, 1, 4, b"\0\0\0\x2f"), {"content": b"\0\0\0\x2e"}),
    ],
)
def test_what_flow_control_chooses_is_shown_with_times(frame: Http2Frame, change: dict[str, Any]) -> None:
    runs = framed(frame, replace(frame, **change))
    assert any(len(set(column.tolist())) == 2 for column in build_timing_views(runs)["flow control"].T)
    assert not build_views(runs)["http2"].size


def test_a_number_in_metadata_is_read_as_one() -> None:
    quiet = conversations(noised, 80)
    runs = [
        replace(
            run, frames=(replace(run.frames[0], entries=(("x-loss", str(run.world + 0.1 * k / 80)),)), *run.frames[1:])
        )
        for k, run in enumerate(quiet)
    ]
    done = audited(runs, 0.1, 0.9)

    assert done.verdict.kind == "refuted"
    assert "metadata" in done.verdict.text


def test_timing_is_shown_and_not_judged() -> None:
    runs = [
        replace(run, frames=tuple(replace(each, seconds=each.seconds * (1 + run.world)) for each in run.frames))
        for run in conversations(noised)
    ]
    done = audited(runs)

    assert max(bound.value for bound in done.timing_bounds) > 1.0
    assert done.findings.epsilon_lower_bound < 1.0 and done.verdict.kind == "inconclusive"


def test_views_are_finite_whatever_passes() -> None:
    odd = CapturedFrame(
        "message", "/a/B", "out", 3, 0.0, 10**12, b"", b"", (("k", "nan"), ("k", "1e999"), ("", "\ud800"))
    )
    wide = replace(
        odd,
        direction="back",
        decoded_message=DecodedMessage({"x": flatten_numbers([np.inf, np.nan, 1e300, 0.0]), "y": flatten_numbers([])}),
    )
    runs = [RunTraffic(k % 2, "", 0.0, (odd, wide)[: k % 3]) for k in range(12)]

    for view in (*build_views(runs).values(), *build_timing_views(runs).values()):
        assert view.shape[0] == 12
        assert np.isfinite(view).all()


def test_a_field_in_two_kinds_of_messages_is_two_fields() -> None:
    run = conversations(noised, 1)[0]
    twice = replace(run, frames=(*run.frames, replace(run.frames[0], direction="out")))

    assert set(collect_decoded_fields([run])) == {"total"}
    assert set(collect_decoded_fields([twice])) == {"total in /a/B response", "total in /a/B request"}


# ---- answers to requests ---------------------------------------------------------------------------------


def asked_for_gradients(runs: int, *, loss_noise: float, calls: int = 8) -> list[RunTraffic]:
    """A loss and a noised gradient at parameters that a client draws, on 50 records of which one has another label."""
    generator = np.random.default_rng(3)
    features = generator.normal(size=(50, 5))
    labels = np.sign(generator.normal(size=50))
    return [
        RunTraffic(world, f"run {k}", float(k), tuple(_calls(features, labels, world, loss_noise, calls, generator)))
        for k, world in enumerate(generator.integers(2, size=runs).tolist())
    ]


def _calls(
    features: FloatArray, labels: FloatArray, world: int, loss_noise: float, calls: int, generator: np.random.Generator
) -> Iterator[CapturedFrame]:
    own = labels * np.where(np.arange(50) == 0, 1.0 - 2.0 * world, 1.0)
    for call in range(calls):
        weights = generator.normal(size=5)
        margin = own * (features @ weights)
        gradient = -(features * (own / (1.0 + np.exp(margin)))[:, None]).mean(axis=0) + generator.laplace(size=5)
        loss = np.logaddexp(0.0, -margin).mean(keepdims=True) + generator.laplace(scale=loss_noise, size=1)
        said: tuple[tuple[Literal["out", "back"], dict[str, FloatArray]], ...] = (
            ("out", {"weights": weights}),
            ("back", {"gradient": gradient, "loss": loss}),
        )
        for direction, fields in said:
            payload = b"".join(values.tobytes() for values in fields.values())
            yield CapturedFrame(
                "message",
                "/a/Gradient",
                direction,
                call,
                0.1 * call,
                len(payload),
                payload[:64],
                digest(payload),
                decoded_message=DecodedMessage({name: flatten_numbers(values) for name, values in fields.items()}),
            )


def test_a_loss_without_noise_is_found_by_who_knows_what_was_asked() -> None:
    """300 runs in all. The loss varies by 0.5 with the parameters, and by 0.02 with the record."""
    done = audited(asked_for_gradients(300, loss_noise=0.0), confidence=0.95)

    assert done.verdict.kind == "refuted" and done.findings.epsilon_lower_bound > 2.0
    assert "answers of /a/Gradient beside their requests" in done.verdict.text
    assert "the largest effect is in number 0 of loss, after regression on its request" in done.verdict.text


def test_noised_answers_to_requests_are_consistent() -> None:
    """A record moves the loss by 0.1 at the most, and the noise has scale 1.

    By construction refuted with probability at most 0.001.
    """
    done = audited(asked_for_gradients(300, loss_noise=1.0), claim=2.0)

    assert done.verdict.kind != "refuted" and done.findings.epsilon_lower_bound < 1.0


def test_answers_are_not_learnt_from_runs_that_are_guessed() -> None:
    """Whatever the other runs say, those that may be learnt from look the same."""
    runs, learnt = asked_for_gradients(60, loss_noise=0.0), np.arange(40)
    changed_later = [*runs[:40], *asked_for_gradients(80, loss_noise=5.0)[60:]]
    (name,) = build_answer_views(runs, learnt)

    assert name == "answers of /a/Gradient beside their requests"
    one, other = (build_answer_views(each, learnt)[name][0] for each in (runs, changed_later))
    assert np.isfinite(one).all() and np.array_equal(one[:40], other[:40]) and (one[40:] != other[40:]).any()


def test_requests_that_are_always_the_same_explain_nothing() -> None:
    assert build_answer_views(conversations(noised, 40), np.arange(30)) == {}


# ---- said twice ------------------------------------------------------------------------------------------


def test_noise_from_a_few_seeds_is_noticed() -> None:
    def reused(world: int, run: int, noise: np.random.Generator) -> list[FloatArray]:
        return [np.random.default_rng(run % 200 + 1000 * world).laplace(scale=2.0, size=2)]

    found = find_anomalies(conversations(reused))

    assert [each.test for each in found] == ["repetition"]
    assert "total" in found[0].text
    assert "run " in found[0].location


def test_a_claim_is_not_consistent_with_noise_said_again() -> None:
    def reused(world: int, run: int, noise: np.random.Generator) -> list[FloatArray]:
        one = noised(world, run, noise)[0]
        return [one, one] if run % 20 == 0 else [one, noised(world, run, noise)[0]]

    found = tuple(map(str, find_anomalies(conversations(reused))))
    verdict = decide(Findings(200, ONE_FAMILY, 1.0, anomalies=found))

    assert verdict.kind == "inconclusive"
    assert "repeated" in verdict.text


ROUNDED: dict[str, Callable[[FloatArray], FloatArray]] = {
    "float64": lambda value: value,
    "float32": lambda value: as_floats(value.astype(np.float32)),
    "multiples of 1/1024": lambda value: as_floats(np.round(value * 1024) / 1024),
    "six decimals": lambda value: as_floats(np.round(value, 6)),
    "six decimals by a product": lambda value: as_floats(np.floor(value * 1e6 + 0.5) * 1e-6),
    "six decimals, large": lambda value: as_floats(np.round(100.0 + value, 6)),
    "four decimals in float32": lambda value: as_floats(np.round(value, 4).astype(np.float32)),
    "four digits": lambda value: as_floats([float(f"{each:.3e}") for each in value]),
    "tens": lambda value: as_floats(np.round(1e4 * value, -1)),
    "levels of a quantiser": lambda value: 0.00137 * as_floats(np.round(value / 0.00137)),
    "its levels in float32": lambda value: as_floats((0.0137 * np.round(value / 0.0137)).astype(np.float32)),
    "float16": lambda value: as_floats(value.astype(np.float16)),
    "cut off": lambda value: np.clip(value, -1.0, 12.0),
    "a sentinel": lambda value: np.where(value > 3.0, -1.0, value),
    "counts": lambda value: as_floats(np.round(np.abs(value)) + 1.0),
    "constant": lambda value: np.arange(8.0),
}


@pytest.mark.statistics
@pytest.mark.parametrize("kind", ROUNDED)
def test_coincidences_that_chance_explains_are_not_reported(kind: str) -> None:
    """False alarms have a chance of about 1e-6 each: what is tested is a Poisson number at that level."""

    def honest(world: int, run: int, noise: np.random.Generator) -> list[FloatArray]:
        return [ROUNDED[kind](noise.laplace(scale=2.0, size=8))]

    assert find_anomalies(conversations(honest, 1000)) == ()


@pytest.mark.parametrize("kind", ["float64", "float32", "six decimals", "six decimals, large", "levels of a quantiser"])
def test_noise_said_again_is_noticed_beyond_its_resolution(kind: str) -> None:
    """One run in ten repeats the run before: 100 runs of eight numbers. By chance, about four numbers of six decimals are equal.

    Quantised to 4,000 levels, two of 8,000 numbers are equal all the time: nothing is found, and nothing should be.
    """
    before = np.zeros(8)

    def reused(world: int, run: int, noise: np.random.Generator) -> list[FloatArray]:
        nonlocal before
        before = before if run % 10 == 9 else noise.laplace(scale=2.0, size=8)
        return [ROUNDED[kind](before)]

    found = find_anomalies(conversations(reused, 1000))
    assert [each.test for each in found] == ([] if kind == "levels of a quantiser" else ["repetition"])


CACHED = np.random.default_rng(5).laplace(scale=2.0, size=(2, 2, 2))
"""Noise of two servers, for two messages each."""


def cached(world: int, run: int, noise: np.random.Generator) -> list[FloatArray]:
    """The noise of a server is drawn once, for all of its runs."""
    return [np.array([world, 3.0]) + each for each in CACHED[world]]


def cached_beside(world: int, run: int, noise: np.random.Generator) -> list[FloatArray]:
    """So that no message is that of another run."""
    return [each + run for each in cached(world, run, noise)]


@pytest.mark.parametrize("read", [True, False])
def test_noise_that_a_server_draws_once_for_all_runs_is_noticed(read: bool) -> None:
    found = find_anomalies(conversations(cached, 80, read=read))

    assert {each.test for each in found} == {"repetition"}
    if read:
        assert found[0].text.startswith("number 0 of total, message 0 (round 0, from clinic) is the same in all runs")
    else:
        assert "byte for byte" in found[0].text


def test_numbers_from_a_short_list_are_no_noise() -> None:
    """As parameters that clients choose are: both worlds have the same ones."""
    some = np.random.default_rng(3).normal(size=10)

    assert find_anomalies(conversations(lambda world, run, noise: [noise.choice(some, 2)], 200)) == ()


def test_noise_from_a_short_list_of_one_server_is_noticed() -> None:
    lists = np.random.default_rng(3).normal(size=(2, 10))

    found = find_anomalies(conversations(lambda world, run, noise: [noise.choice(lists[world], 2)], 200))
    assert [each.test for each in found] == ["repetition"]


# ---- claimed noise ---------------------------------------------------------------------------------------


def centre(world: int, message: DecodedMessage, before: Sequence[DecodedMessage]) -> FloatArray:
    return np.array([world, 3.0])


CENTRED, FREE = NoiseClaim("laplace", (2.0,), centre), NoiseClaim("laplace", (2.0,))


def said_with(scale: float | Sequence[float] = 2.0, law: str = "laplace") -> Speaker:
    """Two messages of noise; a scale of each world."""
    scales = np.broadcast_to(scale, 2)

    def speak(world: int, run: int, noise: np.random.Generator) -> list[FloatArray]:
        return [np.array([world, 3.0]) + getattr(noise, law)(scale=scales[world], size=2) for _ in range(2)]

    return speak


def noise_in(runs: Sequence[RunTraffic], claim: NoiseClaim, epsilon: float = 1.0, delta: float = 0.0) -> NoiseFindings:
    levels = AlphaAllocation(0.001, NOISE_ALLOCATION)
    return check_noise(runs, {"total": claim}, levels, np.random.default_rng(0), epsilon, delta)


def rejected(found: NoiseFindings) -> set[str]:
    return {test.name for test in found.tests if test.is_significant}


@pytest.mark.parametrize("claim", [CENTRED, FREE])
@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "six decimals"])
def test_claimed_noise_is_not_refuted(claim: NoiseClaim, kind: str) -> None:
    """By construction with probability at most 0.001 each."""
    found = noise_in(conversations(lambda *run: [ROUNDED[kind](each) for each in noised(*run)], 100), claim)

    assert rejected(found) == set() and found.exclusions == ()
    assert found.noise_count == (400 if claim is CENTRED else 200)
    assert math.isnan(found.epsilon) if claim is FREE else found.epsilon == pytest.approx(1.0)


@pytest.mark.parametrize("claim", [CENTRED, FREE])
def test_half_of_the_claimed_noise_is_found_in_tens_of_runs(claim: NoiseClaim) -> None:
    assert "scale" in rejected(noise_in(conversations(said_with(1.0), 60), claim))


def test_noise_of_another_size_in_one_world_is_found_beside_its_claim() -> None:
    """By 40 %, with 800 numbers of each world."""
    assert {"scale", "signs on the world", "sizes"} & rejected(
        noise_in(conversations(said_with((2.0, 2.8)), 400), CENTRED)
    )


def test_another_law_is_found() -> None:
    """Gaussian noise whose sizes are as large on average."""
    scale = 2.0 * math.sqrt(math.pi / 2.0)
    assert {"tails", "shape", "distribution"} & rejected(
        noise_in(conversations(said_with(scale, "normal"), 500), CENTRED)
    )
    gaussian = replace(CENTRED, distribution="gaussian", scale=(scale,))
    assert not rejected(noise_in(conversations(said_with(scale, "normal"), 500), gaussian, 9.0, 1e-5))


@pytest.mark.parametrize("speak", [cached, cached_beside])
def test_noise_that_is_used_again_is_found_behind_messages_that_differ(speak: Speaker) -> None:
    beside = speak is cached_beside

    def at(world: int, message: DecodedMessage, before: Sequence[DecodedMessage]) -> FloatArray:
        return np.array([world, 3.0]) + (round(message.fields["total"][1] - 3.0 - CACHED[0, 0, 1]) if beside else 0)

    runs = [run for run in conversations(speak, 80) if run.world == 0]
    ones = conversations(noised, 40, worlds=[1] * 40, seed=9)
    known = replace(CENTRED, centre=lambda world, message, before: at(world, message, before) if world == 0 else 0.0)
    assert "ties" in rejected(noise_in([*runs, *ones], known))


def test_a_claimed_noise_that_does_not_keep_the_claimed_epsilon_is_refuted_by_arithmetic() -> None:
    """As it is claimed it has epsilon 2 * 1 / 2 = 1; that a run says more than half of it need not be seen."""
    found = noise_in(conversations(noised, 24), CENTRED, 0.5)

    assert rejected(found) == {"epsilon of the noise"}
    verdict = decide(Findings(12, AlphaAllocation(0.05, NOISE_ALLOCATION), 0.5, tests=found.tests))
    assert verdict.kind == "refuted" and "the claimed noise has an epsilon of 1" in verdict.text


def test_gaussian_noise_has_an_epsilon_at_a_delta_alone() -> None:
    shift = _compute_gaussian_shift(1.0, 1e-5)
    claim = NoiseClaim("gaussian", (math.sqrt(2.0) / shift,), centre)
    runs = conversations(said_with(math.sqrt(2.0) / shift, "normal"), 24)

    assert noise_in(runs, claim, 1.0, 1e-5).epsilon == pytest.approx(1.0)
    assert not rejected(noise_in(runs, claim, 1.0, 1e-5))
    assert rejected(noise_in(runs, claim, 1.0)) == {"epsilon of the noise"}
    assert compute_gaussian_epsilon(shift, 1e-5) == pytest.approx(1.0) and compute_gaussian_epsilon(0.0, 0.0) == 0.0


def test_numbers_that_are_rounded_to_more_than_the_noise_are_not_tested() -> None:
    found = noise_in(conversations(lambda *run: [np.round(each) for each in noised(*run)], 60), CENTRED)

    assert (found.noise_count, found.tests[:0]) == (0, ())
    assert found.exclusions == ("total is rounded to 0.5 scales: its noise was not tested",)


def test_noise_of_a_field_that_there_is_not() -> None:
    with pytest.raises(
        SpecError, match="--noise-distribution must name decoded fields, got 'totals': choose from total"
    ):
        check_noise(
            conversations(noised, 8),
            {"totals": FREE},
            AlphaAllocation(0.05, NOISE_ALLOCATION),
            np.random.default_rng(0),
        )
    two = replace(CENTRED, centre=lambda *_: [1.0, 2.0, 3.0])
    with pytest.raises(SpecError, match=r"the centre of total must be 2 finite numbers, got \[1.0, 2.0, 3.0\]"):
        noise_in(conversations(noised, 8), two)


def test_noise_with_its_centre_is_consistent_with_few_runs() -> None:
    """Refuted with probability at most 0.001. Without the centre, so few runs decide nothing."""
    runs = conversations(noised, 60)
    known, free = (
        audit_traffic(runs, claim=1.0, confidence=0.999, noise={"total": claim}) for claim in (CENTRED, FREE)
    )

    assert (
        known.verdict.kind == "consistent"
        and "noise whose size is wrong by" in known.findings.detectable_effects[0].text
    )
    assert free.verdict.kind == "inconclusive"


@pytest.mark.parametrize("claims", [{"total": CENTRED}, {"total": CENTRED, "other": FREE}])
def test_claimed_noise_decides_nothing_of_a_field_without_noise_and_centre(claims: dict[str, NoiseClaim]) -> None:
    """The other field alone loses 1: epsilon is 2. Its noise is right, so the tests fail with probability at most 0.001."""
    runs = conversations(noised, 60)
    other = np.random.default_rng(2).laplace(scale=2.0, size=(60, 2, 1))
    for run, noise in zip(runs, other, strict=True):
        for each, own in zip(run.messages, noise, strict=True):
            assert each.decoded_message is not None
            each.decoded_message.fields["other"] = flatten_numbers(run.world + own)  # type: ignore[index]
    done = audit_traffic(runs, claim=1.0, confidence=0.999, noise=claims)

    assert done.verdict.kind == "inconclusive"
    assert "could not refute" in done.verdict.text or "numbers of other twice as far" in done.verdict.text
    assert done.noise is not None and done.noise.undecided_fields == ("other",)


def test_what_a_client_sends_and_what_stays_the_same_need_no_noise_claim() -> None:
    runs = conversations(noised, 60)
    for k, run in enumerate(runs):
        first = run.messages[0]
        assert first.decoded_message is not None
        first.decoded_message.fields["version"] = flatten_numbers(7.0)  # type: ignore[index]
        asked = replace(
            first, method="/a/B", direction="out", decoded_message=DecodedMessage({"seed": flatten_numbers(float(k))})
        )
        runs[k] = replace(run, frames=(asked, *run.frames))
    done = audit_traffic(runs, claim=1.0, confidence=0.999, noise={"total": CENTRED})

    assert done.verdict.kind == "consistent"


# ---- whole messages ----------------------------------------------------------------------------------------


def test_messages_that_nobody_decodes_are_compared_whole() -> None:
    def resent(world: int, run: int, noise: np.random.Generator) -> list[FloatArray]:
        return [np.random.default_rng(run % 30).normal(size=2)] if run % 3 == 0 else [noise.normal(size=2)]

    (found,) = find_anomalies(conversations(resent, 99, read=False))

    assert found.test == "repetition"
    assert "byte for byte" in found.text


def test_one_round_in_two_versions_is_equivocation() -> None:
    runs = conversations(noised, 20)
    first = runs[4].frames[0]
    same = replace(runs[3], frames=(*runs[3].frames, runs[3].frames[0]))
    other = replace(runs[4], frames=(*runs[4].frames, replace(first, digest=b"other")))
    alike = replace(runs[5], frames=(*runs[5].frames, said(np.ones(2), 0, sender="another")))

    assert [f for f in find_anomalies([*runs[:3], same, alike]) if f.test == "equivocation"] == []
    (found,) = [f for f in find_anomalies([*runs[:3], other]) if f.test == "equivocation"]
    assert found.location == "run 4, /a/B response, round 0"


# ---- coins, and how many -----------------------------------------------------------------------------------


def test_what_even_the_best_guesser_would_not_find_is_inconclusive() -> None:
    """Half of the noise: epsilon 2, where 1 is claimed, in two messages."""
    done = audited(conversations(said_with(1.0), 100), 1.0, 0.95)

    assert done.verdict.kind == "inconclusive" and done.message_count == 2
    assert (
        "could not have detected even a service with half of its noise (the optimal guesser needs about"
        in done.verdict.text
    )


def test_power_grows_with_runs_and_falls_with_messages() -> None:
    """600 runs show 0.87 or so of an epsilon of 2 in four messages: not 1."""
    powers = {messages: PowerAnalysis(1.0, 0.0, messages, ONE_FAMILY) for messages in (1, 4)}

    assert powers[1].can_detect(2.0, 600) and not powers[4].can_detect(2.0, 600) and powers[4].can_detect(2.0, 2000)
    assert 0.4 < powers[4].compute_bound(2.0, 600) < 0.9
    assert powers[4].find_needed_runs(2.0) == pytest.approx(800, rel=0.15)
    assert powers[1].find_min_factor(600) < 2.0 < powers[4].find_min_factor(600)
    assert PowerAnalysis(1.0, 1e-5, 4, ONE_FAMILY).find_min_factor(10_000) < 3.0


def test_numbers_of_another_size_in_one_world_are_found_and_named() -> None:
    """By 30 %, in 80 numbers of a run, where no number has another mean."""
    runs = conversations(lambda world, run, noise: [noise.laplace(scale=1 + 0.3 * world, size=40) for _ in range(2)])
    done = audited(runs)

    assert done.verdict.kind == "refuted"
    assert "spread of total" in done.verdict.text and "sizes of all numbers of total" in done.verdict.text


def test_a_claim_at_a_delta_is_held_against_bounds_at_it() -> None:
    done = audit_traffic(conversations(raw_later), claim=1.0, delta=0.01)

    assert done.verdict.kind == "refuted" and "at delta 0.01, not 1" in done.verdict.text
    assert (
        1.0 < done.findings.epsilon_lower_bound < max(replace(bound, delta=0.0).value for bound in done.findings.bounds)
    )


def test_too_few_runs_say_how_many_are_needed() -> None:
    done = audited(conversations(noised, 40), 6.0, 0.95)

    assert (
        done.findings.needed_runs == compute_min_runs(6.0, compute_classifier_level(ONE_FAMILY), GUESSED_FRACTION) > 20
    )
    assert done.verdict.kind == "inconclusive"
    assert f"{done.findings.needed_runs:,} of each world" in done.verdict.text


@pytest.mark.parametrize("claim", [50.0, 955.0, 1e9])
def test_a_claim_that_nobody_could_refute_is_said_to_be_one(claim: float) -> None:
    done = audited(conversations(noised, 40), claim, 0.95)

    assert (done.verdict.kind, done.findings.needed_runs) == ("inconclusive", math.inf)
    assert "more than 1,000,000,000 runs of each world are needed" in done.verdict.text


@pytest.mark.parametrize("claim", [0.1, 1.0, 4.0])
def test_the_runs_needed_are_those_that_suffice(claim: float) -> None:
    tested = int(0.4 * 2 * compute_min_runs(claim, compute_classifier_level(ONE_FAMILY), GUESSED_FRACTION))

    assert compute_epsilon_lower_bound(tested, tested, 0.025) > claim
    assert compute_epsilon_lower_bound(tested - 3, tested - 3, 0.025) <= claim


def test_one_world_too_frequent_is_no_leak() -> None:
    """Always guessing the frequent world would be right in four of five. Refuted with probability at most 0.001."""
    done = audited(conversations(noised, 300, worlds=[int(k % 5 == 0) for k in range(300)]), 1.0)

    assert done.excluded_runs > 120
    assert abs(done.runs[0] - done.runs[1]) < 60
    assert done.findings.epsilon_lower_bound < 1.0 and done.verdict.kind == "inconclusive"


def test_worlds_one_after_the_other_are_said_so() -> None:
    done = audited(conversations(raw_later, 80, worlds=[0] * 40 + [1] * 40))

    assert not done.is_interleaved
    assert "if only the world changed" in done.verdict.text


def test_both_worlds_are_needed() -> None:
    with pytest.raises(CaptureError, match="got 5 of world 0 and 0 of world 1"):
        audited(conversations(noised, 5, worlds=[0] * 5))
