"""What a run says by its spec as it is in the end, where the noise follows from a seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import FloatArray
from sottovoce_core.noise import KeyedNoise, NoiseRequest, NoiseSource
from sottovoce_core.runs.participation import NO_ROUND, USED_ROUNDS_FIELD
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import RunSpec
from sottovoce_rpc.codec import RoundCodec
from tests.examples import made_up
from tests.faults.stage import NOISE_SEED
from tests.faults.trial import FEATURES, Said

Decoded = Mapping[tuple[int, int], Message]
"""Messages by sender and round."""


def decoded(spec: RunSpec, said: Iterable[Said]) -> Decoded:
    """What messages say."""
    codec = RoundCodec(build_run(spec, FEATURES).field_shapes)
    return {(sender, t): codec.decode(payload)[2] for sender, t, payload in said}


def unlike(spec: RunSpec, said: Decoded) -> tuple[int, int] | None:
    """Sender and round of the first message that is not what the simulator says; None: all are."""
    run = build_run(spec, FEATURES)
    used = _used(spec, said) if run.has_bounded_staleness else None
    for step in simulate_rounds(run, made_up(spec), keyed(spec), used_rounds=used):
        for i in range(spec.n_learners):
            own = said.get((i, step.t))
            if own is not None and not all(
                np.allclose(own[name], wanted[i, 0], rtol=1e-9, atol=1e-12)
                for name, wanted in step.message.fields.items()
            ):
                return i, step.t
    return None


def anybody_late(said: Decoded) -> bool:
    """Did an update go on with an earlier message than its round's?"""
    return any(
        ((message[USED_ROUNDS_FIELD] != NO_ROUND) & (message[USED_ROUNDS_FIELD] < t - 1)).any()
        for (_, t), message in said.items()
    )


def _used(spec: RunSpec, said: Decoded) -> FloatArray:
    """`(rounds, learners, width)`: which rounds' messages updates used; what the last one used, no message shows."""
    rows = [[said[i, t][USED_ROUNDS_FIELD] for i in range(spec.n_learners)] for t in range(1, spec.rounds)]
    return np.array([*rows, rows[-1]])


def keyed(spec: RunSpec) -> NoiseSource:
    """Of all learners, as each draws it."""
    own = [KeyedNoise(NOISE_SEED, spec.name, i) for i in range(spec.n_learners)]

    def noise(draw: NoiseRequest) -> FloatArray:
        each = replace(draw, shape=draw.shape[2:])
        return np.stack([source(each) for source in own])[:, None]

    return noise
