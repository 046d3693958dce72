"""Where every process of ours begins: the command `sottovoce`, and so each service, also those that it starts.

What NumPy and grpc read when they are imported is set here and nowhere else: a library that is imported into somebody's own
process changes nothing there.
"""

from __future__ import annotations

import os


def settle() -> None:
    """Set what is read at import, unless the user did; inherited by processes that this one starts."""
    # Our matrices are small and learners share the cores: with two threads a round costs nearly twice.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines are no use to a person


def main() -> None:
    """The command `sottovoce`."""
    settle()
    from sottovoce_client.cli import main as command

    command()
