"""Records: sources, placement on learners, and rounds.

`load_dataset` reads a source into a `Dataset`; `check_batch` validates live records.
"""

from sottovoce_core.data.dataset import Dataset, check_batch, load_dataset
from sottovoce_core.data.schedule import LearnerData, PlacedData, stack_batches

__all__ = ["Dataset", "LearnerData", "PlacedData", "check_batch", "load_dataset", "stack_batches"]
