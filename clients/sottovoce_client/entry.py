"""Where every process of ours begins: the command `sottovoce`, and so each service, also those that it starts.

What NumPy and grpc read when they are imported is set here and nowhere else: a library that is imported into somebody's own
process changes nothing there.
"""

from __future__ import annotations

import os
import signal


def settle() -> None:
    """Set what is read at import, unless the user did; inherited by processes that this one starts."""
    # Our matrices are small and learners share the cores: with two threads a round costs nearly twice.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines are no use to a person


def _leave(*_: object) -> None:
    """What Ctrl-C does while a command is imported: an exception there would come out of any module, in any form."""
    os.write(2, b"sottovoce: interrupted\n")
    os._exit(130)


def main() -> None:
    """The command `sottovoce`."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    if heeded:  # while there is nothing yet that could end well, Ctrl-C just ends it
        signal.signal(signal.SIGINT, _leave)
    settle()
    from sottovoce_client.cli import main as command

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()
