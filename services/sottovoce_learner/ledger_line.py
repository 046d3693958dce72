"""A line of the ledger, as people see it: one run of one learner, and what it has cost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sottovoce.network.roster import Roster
from sottovoce.privacy.guarantee import Guarantee
from sottovoce.running.run import Run, build_run
from sottovoce.spec import RunSpec, parse_spec


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One run of one learner.

    Attributes:
        learner: its name.
        run_id: the run.
        index: the learner's, in the run.
        n_features: features of a record.
        spec: the whole run spec, JSON: with the two before it says by which guarantee the learner was charged.
        said: messages journaled.
        spent: epsilon charged for them; infinite where nothing was promised.
    """

    learner: str
    run_id: str
    index: int
    n_features: int
    spec: str
    said: int = 0
    spent: float = 0.0

    @property
    def algorithm(self) -> str:
        """Its name."""
        return str(json.loads(self.spec)["algorithm"]["name"])

    def guarantee(self, *, imports: bool) -> Guarantee:
        """What was promised.

        Args:
            imports: whether the spec may name code to import: it came from the run's coordinator.

        Raises:
            SpecError: the algorithm is not installed here, or may not be imported.
        """
        return self.run(imports=imports).guarantee(self.index)

    def run(self, *, imports: bool) -> Run:
        """What was run; arguments and errors as of `guarantee`."""
        return build_run(self.parsed(imports=imports), self.n_features)

    def parsed(self, *, imports: bool) -> RunSpec:
        """The run spec; arguments and errors as of `guarantee`."""
        return parse_spec(json.loads(self.spec), imports=imports)

    @property
    def budget(self) -> float | None:
        """What it must not exceed in this run; None: there is none."""
        document = json.loads(self.spec)
        budget = document.get("privacy", {}).get("budget")
        mine: float | None = budget[self.index] if isinstance(budget, list) else budget
        return mine

    @property
    def but_absences(self) -> dict[str, Any]:
        """The spec without what may change in a run, and without what nobody set: another version may know more fields."""
        document: dict[str, Any] = _set(json.loads(self.spec))
        return {key: value for key, value in document.items() if key != "absences"}

    @property
    def roster(self) -> Roster:
        """Who takes part in which round."""
        return Roster.of_spec(json.loads(self.spec))

    @classmethod
    def unknown(cls, learner: str, run_id: str) -> LedgerLine:
        """A run of which only its price is known."""
        return cls(learner, run_id or "repaired", 0, 1, json.dumps({"learners": 1, "algorithm": {"name": "unknown"}}))


def _set(section: Any) -> Any:
    """A document without fields that are None, as `plan_hash` takes it."""
    if not isinstance(section, dict):
        return section
    return {key: _set(value) for key, value in section.items() if value is not None}
