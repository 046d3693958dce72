"""Where a learner's noise comes from: its owner decides, and what protects nobody stays on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from sottovoce_core.errors import SpecError
from sottovoce_core.noise import KeyedNoise, NoiseRequest, OpenDpNoise, SystemNoise, lattice_spacing
from sottovoce_learner.assignment import RunAssignment
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.service import Learner
from tests.examples import small_spec


def config(**options: Any) -> LearnerConfig:
    return LearnerConfig("ann", "127.0.0.1:1", **options)


def noise_of(index: int = 0, run_id: str = "r", **options: Any) -> Any:
    """What a learner draws from in a run."""
    spec = small_spec(name="demo")
    return Learner(config(**options))._build_noise(RunAssignment(run_id, spec, 3, index, spec.names[index]))


def test_by_default_the_bitwise_sampler_draws() -> None:
    assert type(noise_of()) is SystemNoise
    assert config().is_noise_private


@pytest.mark.skipif(importlib.util.find_spec("opendp") is None, reason="OpenDP is not installed (extra: opendp)")
def test_an_owner_may_choose_opendp() -> None:
    assert type(noise_of(noise="opendp")) is OpenDpNoise
    assert config(noise="opendp").is_noise_private


def test_a_seed_gives_the_same_noise_in_every_run_of_a_name_and_each_learner_its_own() -> None:
    first, again, other = noise_of(noise_seed="7"), noise_of(noise_seed="7", run_id="s"), noise_of(1, noise_seed="7")
    drawn = [
        source(NoiseRequest("laplace", "y", 0, 1.0, lattice_spacing(1.0), (9,))).tolist()
        for source in (first, again, other)
    ]

    assert isinstance(first, KeyedNoise)
    assert drawn[0] == drawn[1] != drawn[2]
    assert not config(noise_seed="7").is_noise_private


@pytest.mark.parametrize("where", [{"listen": "192.0.2.1:0"}, {"advertise": "ann.example:7000"}])
def test_a_seed_is_for_loopback_alone(where: dict[str, str]) -> None:
    with pytest.raises(SpecError, match="seeded noise gives no privacy and is allowed on loopback addresses only"):
        config(noise_seed="7", **where).check()


@pytest.mark.parametrize("more", [{"noise": "opendp"}, {"recorded_noise": Path("noise.npz")}])
def test_a_seed_goes_with_no_other_noise(more: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="a noise seed goes with neither recorded noise nor OpenDP's"):
        config(noise_seed="7", **more).check()
