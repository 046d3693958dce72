"""Noise that is drawn ahead: every row is given out once, for the round that it is for, and in one process.

Its law is held by `test_noise.py` (the sampler `ahead`). Where no seed is fixed, rows of the operating system's noise are equal
by chance with probability below 1e-9.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from scipy import stats

from sottovoce_core.algorithms.interface import StateAxes
from sottovoce_core.arrays import FloatArray
from sottovoce_core.noise import KeyedNoise, NoiseRequest, NoiseSource, SeededNoise, SystemNoise, lattice_spacing
from sottovoce_core.noise.request import MAX_PREFETCH_ROWS, PrefetchCache, PrefetchKey
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import parse_spec
from tests.core.test_noise import Entropy

DIM = 100
OF_ONE = 44
"""Random bytes for a number, unless it is drawn again."""


def rising(t: int) -> float:
    """A scale that passes a power of two in round 31."""
    return 1.4 * math.pow(t + 1.0, 0.1)


def draw(t: int, scale: Callable[[int], float] = rising, dim: int = DIM) -> NoiseRequest:
    return NoiseRequest("laplace", "y", t, scale(t), lattice_spacing(scale(t)), (dim,), scale)


def rounds(source: NoiseSource, first: int, last: int, scale: Callable[[int], float] = rising) -> FloatArray:
    return np.array([source(draw(t, scale)) for t in range(first, last)])


def share(rows: FloatArray, others: FloatArray) -> bool:
    """Whether two sets of rows have a row in common."""
    return bool(set(rows[:, 0]) & set(others[:, 0]))


# ---- drawn together --------------------------------------------------------------------------------------------------


def test_rows_are_drawn_together_and_given_out_in_order() -> None:
    entropy = Entropy(1)
    source, constant = SystemNoise(entropy), lambda t: 1.5
    given = [source(draw(t, constant)) for t in range(MAX_PREFETCH_ROWS)]
    assert entropy.asked.count(OF_ONE * DIM * MAX_PREFETCH_ROWS) == 1 and entropy.asked.count(OF_ONE * DIM) == 0
    source(draw(MAX_PREFETCH_ROWS, constant))
    assert entropy.asked.count(OF_ONE * DIM * MAX_PREFETCH_ROWS) == 2

    together = SystemNoise(Entropy(1))._integers(
        np.full(MAX_PREFETCH_ROWS, lattice_spacing(1.5) / 1.5), DIM
    ) * lattice_spacing(1.5)
    np.testing.assert_array_equal(np.concatenate(given), together)


def test_rows_have_each_its_own_scale_and_lattice() -> None:
    """Kolmogorov-Smirnov in units of the scale. Failure probability 1e-9, fixed seed. The last bit of each is fair: 1e-9."""
    rows = rounds(SystemNoise(Entropy(2)), 0, 2000)
    scales = np.array([[rising(t)] for t in range(2000)])
    points = rows / lattice_spacing(scales)
    assert len(set(np.ravel(lattice_spacing(scales)))) > 1
    assert (points == np.rint(points)).all()
    assert stats.kstest(np.ravel(rows / scales), "laplace").pvalue > 1e-9
    for part in (points[:20], points[40:100], points[1000:]):
        assert stats.binomtest(int((part.astype(np.int64) & 1).sum()), part.size).pvalue > 1e-9
    early, late = rows[:64] / scales[:64], rows[64:128] / scales[64:128]
    assert stats.spearmanr(np.abs(early), np.abs(late), axis=None).pvalue > 1e-9


def test_no_row_comes_twice() -> None:
    rows = rounds(SystemNoise(), 0, 500)
    assert len(np.unique(rows[:, 0])) == 500


def test_every_row_is_an_array_of_its_own() -> None:
    source, plain = SystemNoise(Entropy(3)), rounds(SystemNoise(Entropy(3)), 0, 20)
    for t in range(20):
        row = source(draw(t))
        assert row.base is None
        np.testing.assert_array_equal(row, plain[t])
        row[:] = math.nan


@pytest.mark.parametrize("edge", [0.0, math.inf, math.nan, 1e200, 2.0**-1000])
def test_rows_end_where_later_noise_would_have_no_lattice(edge: float) -> None:
    entropy = Entropy(4)
    SystemNoise(entropy)(
        NoiseRequest("laplace", "y", 0, 1.5, lattice_spacing(1.5), (DIM,), lambda t: 1.5 if t < 3 else edge)
    )
    assert entropy.asked[0] == OF_ONE * DIM * 3


@pytest.mark.parametrize("dim", [10_000, 1_000_000])
def test_long_vectors_are_not_drawn_ahead(dim: int) -> None:
    entropy = Entropy(5)
    SystemNoise(entropy)(draw(0, dim=dim))
    assert sum(entropy.asked) < 1.01 * OF_ONE * dim


def test_what_is_drawn_ahead_is_bounded() -> None:
    for dim in (1, 117, 4096, 8192):
        entropy = Entropy(6)
        SystemNoise(entropy)(draw(0, lambda t: 1.5, dim))
        assert entropy.asked[0] == OF_ONE * dim * min(MAX_PREFETCH_ROWS, 2**14 // dim)


@pytest.mark.parametrize("source", [lambda: KeyedNoise("hush", "run", 0), lambda: SeededNoise(1)])
def test_noise_that_can_be_drawn_again_is_not_drawn_ahead(source: Callable[[], NoiseSource]) -> None:
    ahead, plain = source(), source()
    for t in range(5):
        np.testing.assert_array_equal(ahead(draw(t)), plain(replace(draw(t), future_scale=None)))


AHEAD = {
    "ldp-dol": {"name": "ldp-dol", "sigma": 1.0, "varsigma": 0.1},
    "dsgd": {"name": "dsgd", "noise": {"kind": "power", "sigma": 1.0, "varsigma": 0.1}},
    "dpps": {"name": "dpps", "sigma": 1.0},
}


@pytest.mark.parametrize("name", AHEAD)
def test_a_learner_says_noise_that_was_drawn_ahead(name: str) -> None:
    """Failure probability 1e-9, fixed seed."""
    spec = parse_spec({"rounds": 50, "learners": 2, "algorithm": AHEAD[name]}, allow_imports=True)
    algorithm = build_run(spec, DIM).algorithm
    entropy = Entropy(7)
    source, state, said = SystemNoise(entropy), algorithm.init(StateAxes(0)), []
    for t in range(1, 51):
        state, message = algorithm.emit(replace(state, t=t), source)
        said.append(next(iter(message.fields.values())) / algorithm.noise_scale(0, t))
    whole = [asked for asked in entropy.asked if asked >= OF_ONE * DIM]
    assert sum(whole) >= 50 * OF_ONE * DIM and len(whole) <= 3
    assert stats.kstest(np.ravel(said), "laplace").pvalue > 1e-9


# ---- thrown away -----------------------------------------------------------------------------------------------------

OTHERS = {
    "scale": replace(draw(1), scale=rising(1) * (1 + 2**-50)),
    "grid": replace(draw(1), spacing=lattice_spacing(rising(1)) / 2),
    "shape": replace(draw(1), shape=(DIM, 1)),
    "shorter": replace(draw(1), shape=(DIM - 1,)),
    "round": draw(2),
    "earlier": draw(0),
}


@pytest.mark.parametrize("other", OTHERS)
def test_rows_of_another_law_or_shape_are_thrown_away(other: str) -> None:
    source = SystemNoise(Entropy(8))
    waiting = rounds(SystemNoise(Entropy(8)), 0, MAX_PREFETCH_ROWS // 2)
    source(draw(0))
    drawn = source(OTHERS[other])
    assert drawn.shape == OTHERS[other].shape
    assert not share(drawn.reshape(1, -1), waiting)
    assert not share(rounds(source, 1, 10), waiting)


def test_a_draw_whose_next_is_not_known_leaves_what_waits() -> None:
    source, plain = SystemNoise(Entropy(9)), rounds(SystemNoise(Entropy(9)), 0, 2)
    source(draw(0))
    source(replace(draw(1), future_scale=None))
    np.testing.assert_array_equal(source(draw(1)), plain[1])


def test_fields_wait_each_for_itself() -> None:
    entropy = Entropy(10)
    source = SystemNoise(entropy)
    rows = [source(replace(draw(t, lambda t: 1.5), field=field)) for t in range(20) for field in ("y", "z")]
    assert len({row[0] for row in rows}) == 40
    assert entropy.asked.count(OF_ONE * DIM * MAX_PREFETCH_ROWS) == 2


# ---- copies, processes, threads --------------------------------------------------------------------------------------


def unpickled(source: SystemNoise) -> SystemNoise:
    made: SystemNoise = pickle.loads(pickle.dumps(source))  # noqa: S301 - our own
    return made


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, unpickled])
def test_a_copy_has_none_of_the_rows(again: Callable[[SystemNoise], SystemNoise]) -> None:
    source = SystemNoise()
    source(draw(0))
    other = again(source)
    first = rounds(other, 1, 20)
    assert not share(first, rounds(source, 1, 20))


def test_a_pickle_holds_no_noise() -> None:
    source = SystemNoise()
    fresh = len(pickle.dumps(source))
    source(draw(0))
    assert len(pickle.dumps(source)) == fresh


FORKING = """
import json, os, sys
from sottovoce_core.noise import SystemNoise
from tests.core.test_noise_ahead import rounds
source = SystemNoise()
said = {"before": rounds(source, 0, 5)[:, 0].tolist()}
reading, writing = os.pipe()
for child in ("one", "two"):
    if not os.fork():
        os.write(writing, json.dumps({child: rounds(source, 5, 15)[:, 0].tolist()}).encode() + b"\\n")
        os._exit(0)
    os.wait()
os.close(writing)
said["after"] = rounds(source, 5, 15)[:, 0].tolist()
for line in os.fdopen(reading):
    said |= json.loads(line)
print(json.dumps(said))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_processes_never_share_a_row() -> None:
    """A process draws ahead and forks twice: none of the three says what another one says."""
    found = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=True)
    said = json.loads(found.stdout)
    assert set(said) == {"before", "after", "one", "two"}
    numbers = [number for each in said.values() for number in each]
    assert len(set(numbers)) == len(numbers) == 35


def in_four_threads(work: Callable[[], list[float]]) -> list[float]:
    """What four threads find that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            return [number for found in [threads.submit(work) for _ in range(4)] for number in found.result()]
    finally:
        sys.setswitchinterval(interval)


def test_threads_never_share_a_row() -> None:
    source, due = SystemNoise(), count()
    numbers = in_four_threads(lambda: [source(draw(next(due)))[0] for _ in range(300)])
    assert len(set(numbers)) == len(numbers) == 1200


def test_threads_that_want_the_same_row_take_one_each() -> None:
    ahead, row, rows = PrefetchCache(), PrefetchKey(0, 1.5, 2.0**-40, (1,)), 5_000
    ahead.draw("y", [row] * (rows + 1), lambda all_of_them: np.arange(-1.0, rows)[:, None])
    numbers = in_four_threads(lambda: [taken[0] for taken in iter(lambda: ahead.take("y", row), None)])
    assert sorted(numbers) == list(range(rows))
