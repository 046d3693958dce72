"""PyTorch modules as losses: per-record clipped gradients, the laws a loss keeps, and runs of networks."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import yaml
from sklearn.datasets import load_digits

from sottovoce_core.algorithms.interface import LocalMessages, Message, StateAxes
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.data import LearnerData, PlacedData, check_batch
from sottovoce_core.data.encoding import map_labels
from sottovoce_core.errors import AssumptionViolated, DataError, SpecError
from sottovoce_core.losses import mean_gradient
from sottovoce_core.losses.linear import LogisticLoss, SoftmaxLoss
from sottovoce_core.losses.torch import TorchLoss
from sottovoce_core.noise import RecordedNoise, Recorder, SeededNoise
from sottovoce_core.runs.replay import replay
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import build_spec_json_schema, dump_spec, parse_spec
from tests.examples import small_run, small_spec

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from sottovoce_core.losses.torch_module import MAX_CHUNK_RECORDS, _clipped_sum, _trainable  # noqa: E402

HERE = "tests.core.test_torch_loss"


class TinyCnn(torch.nn.Module):  # type: ignore[name-defined, misc]
    """310 parameters, for 8x8 images; with a frozen one, a buffer and a dropout layer, none of which may learn or vary."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(1, channels, 3)
        self.pool = torch.nn.MaxPool2d(3)
        self.dropout = torch.nn.Dropout(0.5)
        self.normal = torch.nn.BatchNorm2d(channels)
        self.last = torch.nn.Linear(channels * 4, 10)
        self.temperature = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, images: Any) -> Any:
        hidden = self.normal(torch.tanh(self.pool(self.convolution(images))))
        return self.last(self.dropout(hidden).flatten(1)) / self.temperature


class Mixed(torch.nn.Module):  # type: ignore[name-defined, misc]
    """Normalises over the batch, for which one record is too few."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = torch.nn.BatchNorm1d(3, track_running_stats=False)
        self.last = torch.nn.Linear(3, 2)

    def forward(self, rows: Any) -> Any:
        return self.last(self.normal(rows))


def section(**fields: Any) -> dict[str, Any]:
    return {"kind": "torch", "module": f"{HERE}:TinyCnn", "shape": [1, 8, 8], "clip_norm": 0.7, **fields}


def linear(n_features: int, classes: int, **fields: Any) -> dict[str, Any]:
    options = {"in_features": n_features, "out_features": classes, "bias": False}
    shape = {"module": "torch.nn:Linear", "options": options, "shape": [n_features], "classes": classes}
    return section(**shape | fields)


def loss_of(**fields: Any) -> TorchLoss:
    return TorchLoss.model_validate(section(**fields))


def linear_loss(n_features: int, classes: int, **fields: Any) -> TorchLoss:
    return TorchLoss.model_validate(linear(n_features, classes, **fields))


def records(count: int, *lead: int, n_features: int = 64, classes: int = 10, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, size=(*lead, count)).astype(np.float64)
    return Batch(rng.normal(size=(*lead, count, n_features)), labels)


def parameters(loss: TorchLoss, *lead: int, seed: int = 1) -> FloatArray:
    return loss.initial_parameters(0) + 0.3 * np.random.default_rng(seed).normal(
        size=(*lead, len(loss.initial_parameters(0)))
    )


def by_hand(loss: TorchLoss, theta: FloatArray, batch: Batch) -> FloatArray:
    """`(records, dim)` clipped gradients, one backward pass each."""
    weights = list(_trainable(loss.loaded_module.module).values())
    torch.nn.utils.vector_to_parameters(torch.tensor(theta, dtype=loss.loaded_module.dtype), weights)
    rows = []
    for record, label in zip(batch.features, batch.labels, strict=True):
        scores = loss.loaded_module.module(
            torch.tensor(record, dtype=loss.loaded_module.dtype).reshape(1, *loss.loaded_module.shape)
        )
        value = torch.nn.functional.cross_entropy(scores, torch.tensor([int(label)]))
        gradient = torch.cat([each.ravel() for each in torch.autograd.grad(value, weights)]).numpy().astype(float)
        rows.append(gradient * min(1.0, loss.clip_threshold / np.linalg.norm(gradient)))
    return np.array(rows)


# ---- gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [0.7, 1e6])
def test_gradients_are_those_of_one_backward_pass_per_record(clip_norm: float) -> None:
    loss, batch = loss_of(clip_norm=clip_norm), records(7)
    theta = parameters(loss)
    found = loss.gradient_sum(theta, batch)
    np.testing.assert_allclose(found, by_hand(loss, theta, batch).sum(axis=0), rtol=1e-10, atol=1e-12)


def test_parts_of_bounded_size_add_up() -> None:
    loss, batch = linear_loss(3, 4), records(2 * MAX_CHUNK_RECORDS + 3, n_features=3, classes=4)
    theta = parameters(loss)
    found = loss.gradient_sum(theta, batch)
    np.testing.assert_allclose(found, by_hand(loss, theta, batch).sum(axis=0), rtol=1e-10, atol=1e-12)
    assert loss.predict(theta, batch.features).shape == (2 * MAX_CHUNK_RECORDS + 3, 4)


def test_float32_is_float64_to_its_precision_and_still_clipped() -> None:
    fast, exact = loss_of(dtype="float32"), loss_of()
    batch, theta = records(5), parameters(exact)
    np.testing.assert_array_equal(fast.initial_parameters(0), exact.initial_parameters(0))
    np.testing.assert_allclose(fast.gradient_sum(theta, batch), exact.gradient_sum(theta, batch), atol=1e-5)
    for row, label in zip(batch.features, batch.labels, strict=True):
        one = Batch(row[None], np.array([label]))
        assert np.linalg.norm(fast.gradient_sum(theta, one)) <= 0.7 * (1 + 1e-15)


def test_padding_counts_for_nothing() -> None:
    loss, batch = loss_of(), records(4)
    theta = parameters(loss)
    padded = Batch(batch.features, batch.labels, np.array([1.0, 1.0, 0.0, 1.0]))
    kept = Batch(batch.features[[0, 1, 3]], batch.labels[[0, 1, 3]])
    np.testing.assert_allclose(mean_gradient(loss, theta, padded), mean_gradient(loss, theta, kept), rtol=1e-12)


def test_leading_axes_are_single_calls() -> None:
    """Learners have records of their own; replicas share them; held-out records are everybody's."""
    loss, batch = loss_of(), records(3, 2)
    theta = parameters(loss, 2, 4)
    total, values, scores = (
        loss.gradient_sum(theta, batch),
        loss.values(theta, batch),
        loss.predict(theta, batch.features[0]),
    )
    assert values.shape == (2, 4, 3)
    assert scores.shape == (2, 4, 3, 10)
    for i in range(2):
        own = Batch(batch.features[i], batch.labels[i])
        np.testing.assert_array_equal(loss.gradient_sum(theta[i], own), total[i])
        for k in range(4):
            np.testing.assert_array_equal(loss.gradient_sum(theta[i, k], own), total[i, k])
            np.testing.assert_array_equal(loss.values(theta[i, k], own), values[i, k])
            np.testing.assert_array_equal(loss.predict(theta[i, k], batch.features[0]), scores[i, k])


def test_leading_axes_broadcast() -> None:
    """One set of parameters for two learners' records, and one set of records for two learners' parameters."""
    loss, batch = loss_of(), records(3, 2)
    theta = parameters(loss, 2, 4)
    for some, at in ((theta[:1], ([0, 0], [0, 1])), (theta, ([0, 1], [0, 0]))):
        those = batch if len(some) == 1 else Batch(batch.features[:1], batch.labels[:1])
        of, by = at
        wide, full = Batch(batch.features[by], batch.labels[by]), theta[of]
        np.testing.assert_array_equal(loss.gradient_sum(some, those), loss.gradient_sum(full, wide))
        np.testing.assert_array_equal(loss.values(some, those), loss.values(full, wide))
        np.testing.assert_array_equal(loss.predict(some, those.features), loss.predict(full, wide.features))


def test_gradients_that_are_not_finite_count_as_zero() -> None:
    gradients = np.array([[3.0, 4.0], [np.nan, 1.0], [np.inf, 0.0], [1e200, 1e200], [0.0, 0.0]])
    np.testing.assert_allclose(_clipped_sum(gradients, np.ones(5), 1.0), [0.6, 0.8])
    loss, batch = linear_loss(3, 2), records(3, n_features=3, classes=2)
    theta = 1e200 * parameters(loss)
    far = Batch(batch.features * np.array([[1.0], [1e200], [1.0]]), batch.labels)  # scores of the second are infinite
    others = Batch(batch.features[[0, 2]], batch.labels[[0, 2]])
    np.testing.assert_array_equal(loss.gradient_sum(theta, far), loss.gradient_sum(theta, others))


def test_two_classes_are_the_logistic_loss() -> None:
    """With `theta = w_1 - w_0` a gradient is `(-g, g)`, g that of the logistic loss: its norm is sqrt(2) times as large."""
    batch = records(9, n_features=5, classes=2)
    clip = 0.4
    loss, logistic = (
        linear_loss(5, 2, clip_norm=clip),
        LogisticLoss(feature_bound=1e9, ridge=0.0, clip_norm=clip / math.sqrt(2)),
    )
    theta = parameters(loss)
    margin = theta[5:] - theta[:5]
    expected = logistic.gradient_sum(margin, batch)
    np.testing.assert_allclose(loss.gradient_sum(theta, batch), np.r_[-expected, expected], rtol=1e-10)
    np.testing.assert_allclose(loss.values(theta, batch), logistic.values(margin, batch), rtol=1e-10)
    found = loss.classify(loss.predict(theta, batch.features))
    np.testing.assert_array_equal(found, logistic.classify(logistic.predict(margin, batch.features)))


@pytest.mark.parametrize("clip_norm", [0.4, 50.0])
def test_a_linear_module_is_softmax(clip_norm: float) -> None:
    batch = records(9, 2, n_features=5, classes=3)
    loss, softmax = (
        linear_loss(5, 3, clip_norm=clip_norm),
        SoftmaxLoss(feature_bound=1e9, ridge=0.0, clip_norm=clip_norm, classes=3),
    )
    theta = parameters(loss, 2, 2)
    np.testing.assert_allclose(
        loss.gradient_sum(theta, batch), softmax.gradient_sum(theta, batch), rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(loss.values(theta, batch), softmax.values(theta, batch), rtol=1e-10)
    np.testing.assert_allclose(loss.predict(theta, batch.features), softmax.predict(theta, batch.features), rtol=1e-10)


# ---- parameters and constants ----------------------------------------------------------------------------


def test_theta_is_the_trainable_parameters_one_after_the_other() -> None:
    loss = linear_loss(3, 2)
    weights = np.arange(6.0)
    np.testing.assert_allclose(loss.predict(weights, np.array([[1.0, 10.0, 100.0]])), [[210.0, 543.0]])
    network = loss_of()
    assert network.dim(64) == len(network.initial_parameters(0)) == 4 * 9 + 4 + 8 + 160 + 10
    assert "temperature" not in _trainable(network.loaded_module.module)


def test_the_start_depends_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    first, other = loss_of(seed=1).initial_parameters(0), loss_of(seed=2).initial_parameters(0)
    drawn = torch.rand(1)
    torch.manual_seed(6)
    np.testing.assert_array_equal(first, loss_of(seed=1).initial_parameters(0))
    assert not np.array_equal(first, other)
    torch.manual_seed(5)
    assert torch.rand(1) == drawn, "building a loss must leave the global generator as it was"


def test_calls_leave_the_module_as_it_is() -> None:
    loss = loss_of()
    start = loss.initial_parameters(0)
    before = {name: value.clone() for name, value in loss.loaded_module.module.state_dict().items()}
    loss.gradient_sum(parameters(loss), records(3))
    loss.predict(parameters(loss), records(3).features)
    assert all(torch.equal(before[name], value) for name, value in loss.loaded_module.module.state_dict().items())
    np.testing.assert_array_equal(loss.initial_parameters(0), start)


def test_only_clipping_bounds_a_network() -> None:
    loss = loss_of(clip_norm=0.7)
    assert (loss.gradient_bound(1e9), loss.gradient_change(1e9)) == (0.7, 1.4)
    assert (loss.smoothness, loss.is_convex) == (math.inf, False)


def test_labels_are_made_to_be_classes() -> None:
    loss = loss_of()
    _, labels = loss.enforce_bounds(np.zeros((4, 64)), np.array([-3.0, 2.4, 9.0, 77.0]))
    np.testing.assert_array_equal(labels, [0.0, 2.0, 9.0, 9.0])


def test_records_are_labelled_with_classes() -> None:
    spec = TorchLoss.model_validate(section())
    mapped, _ = map_labels(np.array(["b", "a", "c"]), spec, None)
    np.testing.assert_array_equal(mapped, [1.0, 0.0, 2.0])
    check_batch(np.zeros((2, 64)), np.array([0.0, 9.0]), 64, spec)
    with pytest.raises(DataError, match="0 to 9"):
        check_batch(np.zeros((1, 64)), np.array([10.0]), 64, spec)


@pytest.mark.parametrize(("name", "shape", "dim"), [("mnist-cnn", (1, 28, 28), 5994), ("cifar-cnn", (3, 32, 32), 7834)])
def test_built_in_networks(name: str, shape: tuple[int, ...], dim: int) -> None:
    loss = loss_of(module=name, shape=None)
    n_features = math.prod(shape)
    assert loss.dim(n_features) == dim
    batch = records(2, n_features=n_features)
    theta = loss.initial_parameters(dim)
    np.testing.assert_allclose(loss.gradient_sum(theta, batch), by_hand(loss, theta, batch).sum(axis=0), atol=1e-10)


# ---- what is refused -------------------------------------------------------------------------------------


def test_a_network_without_clipping_is_refused_with_the_reason() -> None:
    with pytest.raises(AssumptionViolated, match="clip_norm") as caught:
        loss_of(clip_norm=None).loaded_module.dim  # noqa: B018
    assert caught.value.code == "GRAD_CHANGE"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"module": "nowhere:Net"}, "nowhere"),
        ({"module": "torch.nn:Missing"}, "Missing"),
        ({"module": "vgg"}, "mnist-cnn, cifar-cnn"),
        ({"module": "os:system", "options": {"command": "true"}}, "subclass of torch.nn.Module"),
        ({"options": {"layers": 3}}, "layers"),
        ({"shape": None}, "loss.shape is required"),
        ({"shape": [3, 8, 8]}, r"\(1, 3, 8, 8\)"),
        ({"classes": 4}, r"\(1, 10\)"),
        ({"module": "torch.nn:Flatten", "shape": [10]}, "requires_grad"),
        ({"module": f"{HERE}:Mixed", "shape": [3], "classes": 2}, "torch.func"),
    ],
)
def test_modules_that_cannot_be_used(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        loss_of(**fields).loaded_module.dim  # noqa: B018


def test_without_pytorch_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "sottovoce_core.losses.torch_module", raising=False)
    with pytest.raises(SpecError, match=r"in a clone of the repository, pip install '\.\[torch\]'"):
        TorchLoss.model_validate(section()).loaded_module.dim  # noqa: B018


def test_records_must_fill_the_shape() -> None:
    with pytest.raises(SpecError, match="65 features"):
        loss_of().dim(65)


@pytest.mark.parametrize("mode", ["smooth", "convex"])
def test_modes_that_need_what_no_network_has_are_refused(mode: str) -> None:
    with pytest.raises(AssumptionViolated, match="smoothness"):
        small_run(n_features=64, loss=section(), algorithm={"accounting": mode})


def test_a_spec_survives_writing_and_its_schema_knows_it() -> None:
    spec = small_spec(loss=section(options={"channels": 2}))
    assert parse_spec(yaml.safe_load(dump_spec(spec)), allow_imports=True) == spec
    assert "TorchLoss" in build_spec_json_schema()


# ---- runs ------------------------------------------------------------------------------------------------


def digits(run: Run, batch: int) -> PlacedData:
    """Digits 8x8 for every learner and round, the rest held out."""
    features, labels = load_digits(return_X_y=True)
    features, labels = features / 8.0 - 1.0, labels.astype(np.float64)
    shuffled = np.random.default_rng(0).permutation(len(labels))
    own, offsets = run.spec.rounds * batch, np.arange(run.spec.rounds + 1) * batch
    cut = np.split(shuffled, np.arange(1, run.spec.n_learners + 1) * own)
    learners = tuple(LearnerData(features[rows], labels[rows], np.arange(own), offsets) for rows in cut[:-1])
    return PlacedData(learners, features[cut[-1]], labels[cut[-1]])


def accuracy(run: Run, theta: FloatArray, data: PlacedData) -> float:
    return float(np.mean(run.loss.classify(run.loss.predict(theta, data.test_features)) == data.test_labels))


def test_ldp_dol_trains_a_network() -> None:
    """Chance is 0.1. Started at zero, where all channels are alike, it would not get beyond that."""
    algorithm = {"lam0": 4.0, "v": 0.6, "gam0": 0.5, "u": 0.55, "sigma": 0.01, "varsigma": 0.02}
    run = small_run(rounds=30, learners=2, n_features=64, loss=section(clip_norm=2.0), algorithm=algorithm)
    data = digits(run, batch=8)
    *_, last = simulate_rounds(run, data, SeededNoise(1))
    first = run.algorithm.decision(run.algorithm.init(StateAxes(0)))
    np.testing.assert_array_equal(first, run.loss.initial_parameters(run.algorithm.dim))
    assert accuracy(run, first, data) < 0.3
    assert accuracy(run, last.decisions_after, data) > 0.5


def test_a_learner_alone_is_its_row_of_the_simulator() -> None:
    run = small_run(rounds=4, learners=3, n_features=64, loss=section(ridge=0.1))
    data = digits(run, batch=2)
    recorder = Recorder(SeededNoise(3))
    steps = list(simulate_rounds(run, data, recorder))
    weights, own = run.network.mixing(0).in_neighbour_weights(1), float(run.network.mixing(0).own_weights[1])
    state, noise = (
        run.algorithm.init(StateAxes(1)),
        RecordedNoise({"y": np.stack(recorder.noise_by_field["y"])[:, 1, 0]}),
    )
    for step in steps:
        state, message = run.algorithm.emit(state, noise)
        np.testing.assert_allclose(message["y"], step.message["y"][1, 0], atol=1e-12)
        heard = LocalMessages(weights, {j: Message({"y": step.message["y"][j, 0]}) for j in weights}, own)
        state = run.algorithm.update(state, heard, data.learners[1].batch(step.t))
        np.testing.assert_allclose(run.algorithm.decision(state), step.decisions_after[1, 0], atol=1e-12)


def test_no_transcript_costs_more_than_clipping_promises() -> None:
    """Mode `best` falls back to `clip`; replaying worlds with another first record, or another third one, stays below."""
    run = small_run(rounds=12, learners=3, n_features=64, loss=section(clip_norm=0.5))
    clip = small_run(
        rounds=12, learners=3, n_features=64, loss=section(clip_norm=0.5), algorithm={"accounting": "clip"}
    )
    claimed = run.guarantee(0).round_losses
    np.testing.assert_array_equal(claimed, clip.guarantee(0).round_losses)
    assert claimed[0] == 0
    assert np.isfinite(claimed).all()
    accountant = run.algorithm.accountant(0)
    data = digits(run, batch=1)
    steps = list(simulate_rounds(run, data, SeededNoise(4)))
    transcript = Transcript.from_rounds(step.message for step in steps)
    own = data.learners[0]
    worlds = [own, *(own.with_use(0, row, float(k)) for k, row in enumerate(data.test_features[:4]))]
    losses = replay(run, transcript, 0, worlds)
    assert (np.abs(losses.max_losses) <= claimed[:, None, None]).all()
    assert (np.abs(losses.realised_losses[1]) > 0).all(), "worlds that do not differ would show nothing"
    later = replay(run, transcript, 0, [own, own.with_use(2, -own.features[2], 3.0)])
    assert (later.max_losses[:3] == 0).all()
    assert later.supremum[0, 0] <= claimed.sum()
    total = 0.0
    for _ in range(12):
        total += accountant.next_loss()
        accountant.advance(1)
    assert total == pytest.approx(claimed.sum())
