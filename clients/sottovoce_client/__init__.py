"""What people hold: the command line, the Python client, feeders, the console and the report."""

import os

# Both are read once, when NumPy and grpc are imported: so they are set before any module of this package is.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # our matrices are small, and learners share the cores
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines are no use to a person
