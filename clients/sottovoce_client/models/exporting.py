"""`sottovoce models export`: a linear model as a file, with everything that predictions from raw records need.

Scores follow from a record's features x, the `metadata` and the arrays of the file::

    r = (x - shift) / width, with 1 appended if there is an intercept
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
from sottovoce_core.text import suggest_name
from sottovoce_rpc.specs import compute_plan_hash

_FORMAT = "sottovoce-model-1"
OUTPUT_SUFFIXES = (".npz", ".onnx")
_MODELS = ("models.parquet", "decisions.parquet")
"""Result files of a simulation with the final models."""
_OPSET, _IR = 17, 8
"""ONNX versions, chosen for compatibility with runtimes since 2022."""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A linear model, for export.

    Attributes:
        learner, run_id: Its learner and run; the run id is empty for a simulation.
        rounds_done: Number of rounds that it has learned from.
        inputs: Input format of records.
        theta: Parameters, `(features,)` or `(classes, features)`, the intercept last.
        publication: Privacy cost of publishing it.
    """

    learner: str
    run_id: str
    rounds_done: int
    inputs: InputFormat
    theta: FloatArray
    publication: Publication

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the file; an epsilon of null is infinite."""
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
                "protected_by": self.publication.coverage.value,
                "epsilon": self.publication.epsilon if finite else None,
                "text": self.publication.text,
            },
            "loss": spec.loss.kind,
            "columns": self.inputs.columns,
            "scale": spec.data.scale.kind,
            "clip": spec.data.scale.clip_bound,
            "intercept": spec.data.intercept,
            "feature_bound": spec.loss.feature_bound,
            "label": self._label(),
            "schema": None if spec.data.schema is None else spec.data.schema.model_dump(mode="json"),
        }

    def _label(self) -> dict[str, Any]:
        """Describe the meaning of scores: classes by index, or the conversion to a number in the unit of the records."""
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
        """Return the label bounds that a schema scales to [-1, 1]; [-1, 1] without a schema."""
        schema = self.inputs.spec.data.schema
        label = None if schema is None else schema.label
        return label.bounds if isinstance(label, NumberLabel) else (-1.0, 1.0)

    @property
    def arrays(self) -> dict[str, FloatArray]:
        """Arrays of the file: `weights`, `intercept`, `shift` and `width`."""
        transform, features = self.inputs.preparation, self.inputs.n_features - self.inputs.preparation.intercept
        zero = np.zeros(self.theta.shape[:-1])
        return {
            "weights": self.theta[..., :features],
            "intercept": self.theta[..., -1] if transform.intercept else zero,
            "shift": np.zeros(features) if transform.shift is None else transform.shift,
            "width": np.ones(features) if transform.width is None else transform.width,
        }

    @property
    def facts(self) -> Mapping[str, str]:
        """Summary of the model, for display."""
        own = self.publication
        epsilon = f"epsilon {own.epsilon:.4g}" if math.isfinite(own.epsilon) else "no epsilon"
        facts = {
            "model": f"{self.learner}, after {self.rounds_done:,} rounds{f' of {self.run_id}' if self.run_id else ''}",
            "algorithm": self.inputs.spec.algorithm.name,
        }
        if self.inputs.preparation.shift is not None:
            stated = self.inputs.spec.data.scale.is_stated
            facts["scaled by"] = (
                "constants that the spec states" if stated else "constants of held-out records, which are not protected"
            )
        return facts | {"protected": f"{'yes' if own.is_protected else 'NO'}, {epsilon}: {own.text}"}

    def require_protected(self) -> None:
        """Raise `SpecError` if no guarantee covers a publication of the model."""
        if not self.publication.is_protected:
            raise SpecError(
                f"an exported model is a publication, and this one is not protected: {self.publication.text}; to export it "
                "nevertheless, give --unprotected"
            )

    def write(self, out: Path) -> None:
        """Write the model to a new file, in the format of its suffix."""
        metadata, arrays = json.dumps(self.metadata), dict[str, Any](self.arrays)
        with create_file(out) as file:
            if out.suffix.lower() == ".npz":
                np.savez(file, metadata=np.array(metadata), **arrays)
            else:
                file.write(_to_onnx(self, metadata))


async def fetch_learner_model(endpoint: LearnerEndpoint, local_spec: RunSpec | None, *, imports: bool = False) -> Model:
    """Fetch the current model of a learner; only its owner is authorised.

    Args:
        endpoint: Address of the learner, and credentials of the caller.
        local_spec: Spec of the run with paths to local data; None: not available.
        imports: Allow the learner's spec to name code to import.

    Raises:
        SottovoceError: The learner does not answer or rejects the caller, its model is not linear, or constants are unknown.
    """
    async with connect_as_owner(endpoint, imports=imports) as owner:
        require_linear(owner.spec)
        inputs = InputFormat.from_spec(owner.spec, owner.n_features, local_spec, get_data_folders())
        theta, rounds = await owner.fetch_weights()
        return Model(owner.status.learner, owner.run_id, rounds, inputs, theta, await owner.compute_publication(rounds))


def load_simulated_model(folder: Path, learner: str | None, replica: int = 0) -> Model:
    """Load the final model of a simulated run.

    Args:
        folder: Output folder of `sottovoce simulate`.
        learner: Name of the learner; None: the first one.
        replica: Index of the repetition.

    Raises:
        SpecError: There is no such learner or repetition, or its model is not linear.
        DataError: The folder has no models, or its records cannot be read.
    """
    path = next((file for name in _MODELS if (file := folder / name).is_file()), None)
    if path is None:
        raise DataError(
            f"{folder} must have models.parquet or decisions.parquet: run `sottovoce simulate --write models` or --write "
            "decisions; for a running learner give its address"
        )
    spec = load_spec(folder / "spec.yaml")
    require_linear(spec)
    name = spec.names[0] if learner is None else learner
    if name not in spec.names:
        raise SpecError(
            f"--learner must be one of {', '.join(spec.names)}, got {name!r}{suggest_name(name, spec.names)}"
        )
    prepared, index = prepare(spec, folders=get_data_folders()), spec.names.index(name)
    wanted = [("round", "=", spec.rounds), ("sender", "=", index), ("replica", "=", replica)]
    rows = import_parquet().read_table(path, columns=["value"], filters=wanted).column("value").to_pylist()
    if not rows:
        raise SpecError(f"--replica must be a simulated repetition, got {replica}")
    features = prepared.data.n_features
    theta = np.asarray(rows[0], dtype=np.float64).reshape(*((-1, features) if len(rows[0]) > features else (features,)))
    cost = assess_publication(prepared.run, index, spec.rounds, has_private_noise=False)
    return Model(name, "", spec.rounds, InputFormat.from_spec(spec, features, spec, get_data_folders()), theta, cost)


def require_writable(out: Path) -> None:
    """Raise `SpecError` if the suffix of an output file names no supported format."""
    if out.suffix.lower() not in OUTPUT_SUFFIXES:
        raise SpecError(f"--out must be a {' or '.join(OUTPUT_SUFFIXES)} file, got {out}")
    if out.suffix.lower() == ".onnx":
        import_optional("onnx", "onnx", "a .onnx file", "onnx")


def _to_onnx(model: Model, metadata: str) -> bytes:
    """Build the ONNX graph: `features (records, features)` to `scores`, `classes` and `probabilities` or `values`; float64."""
    onnx = import_optional("onnx", "onnx", "a .onnx file", "onnx")
    node, value, double = onnx.helper.make_node, onnx.helper.make_tensor_value_info, onnx.TensorProto.DOUBLE
    numbers, spec = model.arrays, model.inputs.spec
    is_multiclass = numbers["weights"].ndim == 2
    constants: dict[str, Any] = {
        "shift": numbers["shift"],
        "width": numbers["width"],
        "weights": numbers["weights"].T if is_multiclass else numbers["weights"][:, None],
        "offset": np.atleast_1d(numbers["intercept"]),
        "bound": np.array([spec.loss.feature_bound]),
        "ones": np.array([float(spec.data.intercept)]),
        "axis": np.array([1], dtype=np.int64),
    }
    if (clip := model.inputs.preparation.clip) is not None:
        constants |= {"lowest": np.array(-clip), "highest": np.array(clip)}
    nodes = [
        node("Sub", ["features", "shift"], ["moved"]),
        node("Div", ["moved", "width"], ["scaled"]),
        node("Identity", ["scaled"], ["rows"])
        if clip is None
        else node("Clip", ["scaled", "lowest", "highest"], ["rows"]),
        node("Mul", ["rows", "rows"], ["squares"]),
        node("ReduceSum", ["squares", "axis"], ["sums"], keepdims=1),
        node("Add", ["sums", "ones"], ["squared_norms"]),
        node("Sqrt", ["squared_norms"], ["norms"]),
        node("Max", ["norms", "bound"], ["longest"]),
        node("Div", ["bound", "longest"], ["factors"]),
        node("MatMul", ["rows", "weights"], ["products"]),
        node("Add", ["products", "offset"], ["unbounded"]),
        node("Mul", ["unbounded", "factors"], ["columns"]),
        node("Identity", ["columns"], ["scores"])
        if is_multiclass
        else node("Squeeze", ["columns", "axis"], ["scores"]),
    ]
    shape = ["records", int(constants["weights"].shape[1])]
    outputs = [value("scores", double, shape if is_multiclass else ["records"])]
    if is_multiclass:
        nodes += [
            node("ArgMax", ["scores"], ["classes"], axis=1, keepdims=0),
            node("Softmax", ["scores"], ["probabilities"], axis=1),
        ]
        outputs.append(value("probabilities", double, shape))
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
    inputs = [value("features", double, ["records", len(numbers["shift"])])]
    graph = onnx.helper.make_graph(nodes, "sottovoce", inputs, outputs, initial)
    onnx_model = onnx.helper.make_model(
        graph,
        producer_name="sottovoce",
        producer_version=version("sottovoce"),
        opset_imports=[onnx.helper.make_opsetid("", _OPSET)],
        ir_version=_IR,
    )
    onnx.helper.set_model_props(onnx_model, {"metadata": metadata})
    onnx.checker.check_model(onnx_model)
    content: bytes = onnx_model.SerializeToString()
    return content
