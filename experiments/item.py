"""Description of an item, read from `experiments/PAPER/ITEM.yaml`: its runs, the paper's values, and the checks of a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sottovoce_core.experiment import Experiment
from sottovoce_core.yaml_files import parse_document, read_text_file

FOLDER = Path(__file__).parent
PAPERS = {
    "ldp-dol": "Chen and Wang: Locally differentially private distributed online learning with guaranteed optimality",
    "admm": "Zhang and Zhu: Dynamic differential privacy for ADMM-based distributed classification learning",
    "pd-ftgl": "Wang et al.: Revisiting differentially private algorithms for decentralized online learning",
    "dpsda": "Cheng, Liao and Li: Distributed online private learning of convex nondecomposable objectives",
}
"""Papers by the name of their folder."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Form(_Section):
    """Size of the runs of an item: `quick`, `full`, or `check`, which uses shipped data alone."""

    replicas: int = 1
    changes: Mapping[str, Any] = {}
    """Fields of the spec that differ in this form."""
    tolerance: float = 0.01
    """Relative difference up to which a number of another machine counts as equal: one of a hundred records flips."""


class Check(_Section):
    """Requirement for a verdict, on the means of a measure after the last checkpoint.

    `within`: every value is within `tolerance` of the paper's, or within `factor` of it. `above`: every value is at least
    `factor` times the paper's. `increasing`, `decreasing`: the values of the named variants, settings, or rounds are
    in this order, for all others each.
    """

    rule: Literal["within", "above", "increasing", "decreasing"]
    measure: str
    tolerance: float = 0.0
    factor: float = 1.0
    along: Literal["variants", "settings", "rounds"] = "settings"
    variants: tuple[str, ...] = ()
    """Variants that are compared, in this order; none: all."""
    settings: tuple[str, ...] = ()
    """Likewise settings."""


class Item(_Section):
    """A table or figure of a paper, or a finding about it.

    A run is made for each variant and setting. Its spec is `base` with the changes of the form, the variant and the setting.
    The change `target` calibrates the noise to this epsilon of one use of a record.
    """

    title: str
    shows: str
    """Claim of the paper, in a sentence; of a finding: ours."""
    is_finding: bool = False
    """True if the checks state our finding and not the paper's claim."""
    base: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = {"": {}}
    settings: Mapping[str, Mapping[str, Any]] = {"": {}}
    forms: Mapping[Literal["quick", "full", "check"], Form]
    measures: tuple[str, ...]
    """Metrics (docs/reference/metrics.md), and budgets: `epsilon` of one use of a record, tight, pure; `epsilon_at_delta` 1e-5;
    `epsilon_record` of all uses of a record; `epsilon_by_paper`, by the paper's formula as the project computes it."""
    thresholds: Mapping[str, tuple[str, float]] = {}
    """Further measures: the first checkpoint at which a metric reaches a threshold; infinite: it does not in the run."""
    script: str | None = None
    """Python file beside this one whose `measure(experiment, replicas)` returns further measures."""
    checkpoints: int | tuple[int, ...] = 1
    paper: Mapping[str, Mapping[str, tuple[float | None, ...]]] = {}
    """Printed values by variant and measure, one for each setting."""
    not_stated: tuple[str, ...] = ()
    """Facts that the paper leaves open, with our choice and its reason."""
    checks: tuple[Check, ...] = ()
    conclusion: str = ""
    """Result of the full form in words, with its reason."""
    needs: Literal["torch"] | None = None
    """Optional dependency of the runs."""
    plot: tuple[str, ...] = ()
    """Measures that are drawn: over the rounds if there are several checkpoints, else over the settings."""
    names: Mapping[str, str] = Field(default={})
    """Names of measures for readers."""

    def build(self, form: str, variant: str, setting: str) -> tuple[Experiment, float | None]:
        """Build the experiment of a run; also return the epsilon to which its noise is to be calibrated, if any."""
        changes = {**self.forms[form].changes, **self.variants[variant], **self.settings[setting]}  # type: ignore[index]
        target = changes.pop("target", None)
        fields = _apply(self.base, changes)
        return Experiment.model_validate({"name": "experiment", **fields}), target

    def get_paper_value(self, variant: str, setting: str, measure: str) -> float | None:
        """Return the printed value of a measure; None: the paper does not print it."""
        values = self.paper.get(variant, {}).get(measure)
        return None if values is None else values[list(self.settings).index(setting)]


def list_items(paper: str) -> list[str]:
    """List the names of a paper's items, in the order of the paper."""
    return sorted(path.stem for path in (FOLDER / paper).glob("*.yaml") if not path.stem.endswith(".spec"))


def load_item(paper: str, name: str) -> Item:
    """Read an item.

    Raises:
        SpecError: the file is no YAML.
        ValidationError: a field is wrong.
    """
    path = FOLDER / paper / f"{name}.yaml"
    return Item.model_validate(parse_document(read_text_file(path, "an item"), str(path), "an item"))


def _apply(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec with changes, whose names are paths with dots; a whole section may be replaced."""
    changed: dict[str, Any] = dict(fields)
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        section = changed.get(head)
        changed[head] = _apply(section if isinstance(section, Mapping) else {}, {rest: value}) if rest else value
    return changed
