"""`sottovoce models export`: a linear model as a file, with all that predictions from raw records need.

Of a record's features x, by `about` and the arrays beside it::

    r = (x - shift) / width,  then 1 where there is an intercept
    score = r . (weights, intercept) * feature_bound / max(||r||, feature_bound)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_client.atomic_files import create_file
from sottovoce_client.live.sender import LearnerEndpoint
from sottovoce_client.models.input_format import InputFormat
from sottovoce_client.models.predicting import connect_as_owner, require_linear
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data.catalogue import get_data_folders
from sottovoce_core.data.fields import NumberLabel
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.experiment import prepare
from sottovoce_core.optional import import_optional
from sottovoce_core.runs.run import Publication, assess_publication
from sottovoce_core.runs.transcript import import_parquet
from sottovoce_core.spec import RunSpec, load_spec
from sottovoce_rpc.specs import compute_plan_hash

_FORMAT = "sottovoce-model-1"
OUTPUT_SUFFIXES = (".npz", ".onnx")
_MODELS = ("models.parquet", "decisions.parquet")
"""What of a simulation has the final models."""
_OPSET, _IR = 17, 8
"""What runtimes of the last years read."""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A linear model that may leave its owner.

    Attributes:
        learner, run_id: whose it is; the latter empty where it is of a simulation.
        rounds_done: that it has learned from.
        inputs: what a record is.
        theta: `(features,)` or `(classes, features)`, the intercept last.
        publication: what handing it out costs.
    """

    learner: str
    run_id: str
    rounds_done: int
    inputs: InputFormat
    theta: FloatArray
    publication: Publication

    @property
    def metadata(self) -> dict[str, Any]:
        """What stands beside the numbers; an epsilon of null is infinite."""
        spec, finite = self.inputs.spec, math.isfinite(self.publication.epsilon)
        return {
            "format": _FORMAT,
            "sottovoce": version("sottovoce"),
            "run": self.run_id or None,
            "learner": self.learner,
            "rounds_done": self.rounds_done,
            "algorithm": spec.algorithm.name,
            "spec_sha256": compute_plan_hash(spec, self.inputs.n_features).hex(),
            "privacy": {
                "covered_by": self.publication.coverage.value,
                "epsilon": self.publication.epsilon if finite else None,
                "text": self.publication.text,
            },
            "loss": spec.loss.kind,
            "columns": self.inputs.columns,
            "scale": spec.data.scale,
            "intercept": spec.data.intercept,
            "feature_bound": spec.loss.feature_bound,
            "label": self._label(),
            "schema": None if spec.data.schema is None else spec.data.schema.model_dump(mode="json"),
        }

    def _label(self) -> dict[str, Any]:
        """The meaning of scores: classes by index, or how a number in the records' unit follows."""
        if self.inputs.classes is not None:
            rule = (
                "1 where the score is above 0"
                if self.inputs.spec.loss.has_binary_labels
                else "that of the largest score"
            )
            return {"classes": self.inputs.classes, "rule": rule}
        low, high = self._bounds()
        return {"classes": None, "rule": "low + (score + 1) (high - low) / 2", "low": low, "high": high}

    def _bounds(self) -> tuple[float, float]:
        """Of numbers that a schema scales onto [-1, 1]; these, where nothing does."""
        schema = self.inputs.spec.data.schema
        label = None if schema is None else schema.label
        return label.bounds if isinstance(label, NumberLabel) else (-1.0, 1.0)

    @property
    def arrays(self) -> dict[str, FloatArray]:
        """`weights`, `intercept`, `shift` and `width`."""
        ready, features = self.inputs.preparation, self.inputs.n_features - self.inputs.preparation.intercept
        zero = np.zeros(self.theta.shape[:-1])
        return {
            "weights": self.theta[..., :features],
            "intercept": self.theta[..., -1] if ready.intercept else zero,
            "shift": np.zeros(features) if ready.shift is None else ready.shift,
            "width": np.ones(features) if ready.width is None else ready.width,
        }

    @property
    def facts(self) -> Mapping[str, str]:
        """What it is, for people."""
        own = self.publication
        epsilon = f"epsilon {own.epsilon:.4g}" if math.isfinite(own.epsilon) else "no epsilon"
        facts = {
            "model": f"{self.learner}, after {self.rounds_done:,} rounds{f' of {self.run_id}' if self.run_id else ''}",
            "algorithm": self.inputs.spec.algorithm.name,
        }
        if self.inputs.preparation.shift is not None:
            facts["scaled by"] = "constants of held-out records, which nothing protects"
        return facts | {"covered": f"{'yes' if own.is_protected else 'NO'}, {epsilon}: {own.text}"}

    def require_protected(self) -> None:
        """Raises `SpecError` where no promise covers the model, which then may leave only if somebody says so."""
        if not self.publication.is_protected:
            raise SpecError(
                f"a model that leaves its owner is a publication, and this one is not protected: {self.publication.text}; "
                "--unprotected writes it all the same"
            )

    def write(self, out: Path) -> None:
        """To a new file, by its suffix."""
        about, arrays = json.dumps(self.metadata), dict[str, Any](self.arrays)
        with create_file(out) as file:
            if out.suffix.lower() == ".npz":
                np.savez(file, about=np.array(about), **arrays)
            else:
                file.write(_onnx(self, about))


async def fetch_learner_model(endpoint: LearnerEndpoint, local_spec: RunSpec | None, *, imports: bool = False) -> Model:
    """The model in use at a learner; its owner may ask.

    Args:
        at: where it is, and who asks.
        own: the run's spec, whose data are here; None: it is not known.
        imports: whether the spec that the learner tells may name code to import.

    Raises:
        SottovoceError: it does not answer, or not to this caller; its model is not linear; or constants are not known.
    """
    async with connect_as_owner(endpoint, imports=imports) as owner:
        require_linear(owner.spec)
        inputs = InputFormat.from_spec(owner.spec, owner.n_features, local_spec, get_data_folders())
        theta, rounds = await owner.fetch_weights()
        return Model(owner.status.learner, owner.run_id, rounds, inputs, theta, await owner.compute_publication(rounds))


def load_simulated_model(folder: Path, learner: str | None, replica: int = 0) -> Model:
    """The final model of a simulated run.

    Args:
        folder: that `sottovoce simulate` wrote.
        learner: whose; None: of the first one.
        replica: of which repetition.

    Raises:
        SpecError: there is no such learner or repetition, or its model is not linear.
        DataError: the folder has no models, or its records cannot be read.
    """
    path = next((file for name in _MODELS if (file := folder / name).is_file()), None)
    if path is None:
        raise DataError(
            f"{folder} must have models.parquet or decisions.parquet, which `sottovoce simulate --write models` or decisions "
            "writes; a learner is asked by its address"
        )
    spec = load_spec(folder / "spec.yaml")
    require_linear(spec)
    name = spec.names[0] if learner is None else learner
    if name not in spec.names:
        raise SpecError(f"--learner must be one of {', '.join(spec.names)}, got {name!r}")
    prepared, index = prepare(spec, folders=get_data_folders()), spec.names.index(name)
    wanted = [("round", "=", spec.rounds), ("sender", "=", index), ("replica", "=", replica)]
    rows = import_parquet().read_table(path, columns=["value"], filters=wanted).column("value").to_pylist()
    if not rows:
        raise SpecError(f"--replica must be one that was simulated, got {replica}")
    features = prepared.data.n_features
    theta = np.asarray(rows[0], dtype=np.float64).reshape(*((-1, features) if len(rows[0]) > features else (features,)))
    cost = assess_publication(prepared.run, index, spec.rounds, has_private_noise=False)
    return Model(name, "", spec.rounds, InputFormat.from_spec(spec, features, spec, get_data_folders()), theta, cost)


def require_writable(out: Path) -> None:
    """Raises `SpecError` for a file of a format that is not written."""
    if out.suffix.lower() not in OUTPUT_SUFFIXES:
        raise SpecError(f"--out must be a {' or '.join(OUTPUT_SUFFIXES)} file, got {out}")
    if out.suffix.lower() == ".onnx":
        import_optional("onnx", "onnx", "a .onnx file", "onnx")


def _onnx(model: Model, about: str) -> bytes:
    """A graph from `features (records, features)` to `scores`, and to `classes` and `probabilities` or `values`; all float64."""
    onnx = import_optional("onnx", "onnx", "a .onnx file", "onnx")
    node, value, double = onnx.helper.make_node, onnx.helper.make_tensor_value_info, onnx.TensorProto.DOUBLE
    numbers, spec = model.arrays, model.inputs.spec
    several = numbers["weights"].ndim == 2
    constants: dict[str, Any] = {
        "shift": numbers["shift"],
        "width": numbers["width"],
        "weights": numbers["weights"].T if several else numbers["weights"][:, None],
        "offset": np.atleast_1d(numbers["intercept"]),
        "bound": np.array([spec.loss.feature_bound]),
        "ones": np.array([float(spec.data.intercept)]),
        "axis": np.array([1], dtype=np.int64),
    }
    nodes = [
        node("Sub", ["features", "shift"], ["moved"]),
        node("Div", ["moved", "width"], ["rows"]),
        node("Mul", ["rows", "rows"], ["squares"]),
        node("ReduceSum", ["squares", "axis"], ["sums"], keepdims=1),
        node("Add", ["sums", "ones"], ["squared_norms"]),
        node("Sqrt", ["squared_norms"], ["norms"]),
        node("Max", ["norms", "bound"], ["longest"]),
        node("Div", ["bound", "longest"], ["factors"]),
        node("MatMul", ["rows", "weights"], ["products"]),
        node("Add", ["products", "offset"], ["unbounded"]),
        node("Mul", ["unbounded", "factors"], ["columns"]),
        node("Identity", ["columns"], ["scores"]) if several else node("Squeeze", ["columns", "axis"], ["scores"]),
    ]
    many = ["records", int(constants["weights"].shape[1])]
    outputs = [value("scores", double, many if several else ["records"])]
    if several:
        nodes += [
            node("ArgMax", ["scores"], ["classes"], axis=1, keepdims=0),
            node("Softmax", ["scores"], ["probabilities"], axis=1),
        ]
        outputs.append(value("probabilities", double, many))
    elif model.inputs.classes is not None:
        constants["zero"] = np.zeros(1)
        nodes += [
            node("Greater", ["scores", "zero"], ["positive"]),
            node("Cast", ["positive"], ["classes"], to=onnx.TensorProto.INT64),
        ]
        if spec.loss.probabilities(np.zeros(1)) is not None:
            nodes += [node("Sigmoid", ["scores"], ["probabilities"])]
            outputs.append(value("probabilities", double, ["records"]))
    else:
        low, high = model._bounds()
        constants |= {"half": np.array([(high - low) / 2.0]), "middle": np.array([(high + low) / 2.0])}
        nodes += [node("Mul", ["scores", "half"], ["stretched"]), node("Add", ["stretched", "middle"], ["values"])]
        outputs.append(value("values", double, ["records"]))
    if model.inputs.classes is not None:
        outputs.append(value("classes", onnx.TensorProto.INT64, ["records"]))
    initial = [onnx.numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in constants.items()]
    given = [value("features", double, ["records", len(numbers["shift"])])]
    graph = onnx.helper.make_graph(nodes, "sottovoce", given, outputs, initial)
    made = onnx.helper.make_model(
        graph,
        producer_name="sottovoce",
        producer_version=version("sottovoce"),
        opset_imports=[onnx.helper.make_opsetid("", _OPSET)],
        ir_version=_IR,
    )
    onnx.helper.set_model_props(made, {"about": about})
    onnx.checker.check_model(made)
    text: bytes = made.SerializeToString()
    return text
