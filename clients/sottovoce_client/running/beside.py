"""Several experiments on the same data, in the simulator, as a table: `sottovoce compare` from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sottovoce.errors import SpecError
from sottovoce.experiment import Experiment, experiment_of, require_count
from sottovoce.table import Table
from sottovoce_client.running.compare import require_same_records, result_of, table_of


def compare(
    experiments: Mapping[str, Experiment | Path | str] | Sequence[Experiment | Path | str],
    replicas: int = 10,
    seed: int = 0,
) -> Table:
    """Simulate several experiments that hold the same records out, and put what they came to side by side.

    Args:
        experiments: by what they are called; or a list, each called by its own name. Paths are those of spec files.
        replicas: repetitions of each, which differ in their noise alone.
        seed: of the noise, the same for each.

    Returns:
        One row per experiment: `spec`, `algorithm`, `threat_model`, `epsilon_paper`, `epsilon_event`, `epsilon_record` (as
        `sottovoce compare` has them), `floats` that a learner says in a round, `rounds`, and each metric after the last round
        with its standard error.

    Raises:
        SpecError: names are not different, records are not the same, or one cannot be run as it is.
        DataError: the data cannot be used.

    >>> from sottovoce.experiment import Experiment
    >>> loud = Experiment(rounds=5, learners=3, algorithm={"name": "ldp-dol", "sigma": 4.0})
    >>> table = compare({"loud": loud, "quiet": loud.replace(**{"algorithm.sigma": 1.0})}, replicas=2)
    >>> table["spec"].tolist(), bool(table["epsilon_event"][0] < table["epsilon_event"][1])
    (['loud', 'quiet'], True)
    """
    require_count("replicas", replicas)
    if isinstance(experiments, Mapping):
        named = [(name, experiment_of(each)) for name, each in experiments.items()]
    else:
        named = [(each.name, each) for each in map(experiment_of, experiments)]
    names = [name for name, _ in named]
    if not names or len(set(names)) < len(names):
        raise SpecError(
            f"experiments to compare must have different names, got {', '.join(names) or 'none'}: give them as a mapping by name"
        )
    for _, each in named:
        require_same_records(each.data, named[0][1].data)
    return table_of([result_of(name, each.prepared, replicas, seed) for name, each in named], names)
