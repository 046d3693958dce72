"""Records: where they come from, who learns them, and in which round.

`load_dataset` reads a source into a `Dataset`; `check_batch` is what live records must pass.
"""

from sottovoce_core.data.dataset import Dataset, check_batch, load_dataset
from sottovoce_core.data.schedule import LearnerData, PlacedData, stack_batches

__all__ = ["Dataset", "LearnerData", "PlacedData", "check_batch", "load_dataset", "stack_batches"]
