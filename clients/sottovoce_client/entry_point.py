"""Where every process of ours begins: the command `sottovoce`, and so each service, also those that it starts.

What NumPy and grpc read when they are imported is set here and nowhere else: a library that is imported into somebody's own
process changes nothing there.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from sottovoce_client.command_words import strip_common_options

_UNTOUCHED = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
"""What asks a command to end, as Python begins with it. A shell's background job ignores Ctrl-C, what nohup starts SIGHUP."""


def set_environment_defaults() -> None:
    """Set what is read at import, unless the user did; inherited by processes that this one starts."""
    # Our matrices are small and learners share the cores: with two threads a round costs nearly twice.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines are no use to a person


_SERVICES = ("coordinator", "learner", "eavesdropper")
"""Commands that serve until they are told to stop, and whose exit code is 0 then."""


def _serves(words: list[str]) -> bool:
    """Whether the words of a command line start a service."""
    command = strip_common_options(words)
    # `eavesdropper audit` ends by itself.
    return bool(command) and command[0] in _SERVICES and "audit" not in command


def _leave(number: int, _: FrameType | None) -> None:
    """What Ctrl-C does while a command is imported: an exception there would come out of any module, in any form."""
    os.write(2, b"sottovoce: interrupted\n")
    os._exit(128 + number)


def _stop(number: int, _: FrameType | None) -> None:
    """End a service that serves nobody yet: as well as one that had nothing to drain."""
    line = f'{{"event": "stopped", "level": "info", "reason": "{signal.Signals(number).name}", "drained": true}}\n'
    os.write(2, line.encode())
    os._exit(0)


def _interrupt() -> None:
    """As if Ctrl-C had come. To a loop it comes between two steps: uvloop hears twice what is raised while it hears another."""
    import asyncio

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        signal.raise_signal(signal.SIGINT)
    else:
        loop.call_soon_threadsafe(signal.raise_signal, signal.SIGINT)


def main() -> None:
    """The command `sottovoce`. SIGTERM and SIGHUP end it as Ctrl-C does, unless it has a handler of its own."""
    heeded = [number for number, before in _UNTOUCHED.items() if signal.getsignal(number) == before]
    serves = _serves(sys.argv[1:])
    for number in heeded:  # while there is nothing yet that could end well, they just end it
        signal.signal(number, _stop if serves else _leave)
    set_environment_defaults()
    from sottovoce_client.cli import main as command

    told = list[int]()

    def as_ctrl_c(number: int, frame: FrameType | None) -> None:
        if told:  # a closed terminal says it twice, and so does `timeout`: that must not cut short how it ends
            return
        told.append(number)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.default_int_handler(number, frame)
        _interrupt()

    # A service imports more, and takes them over when its loop runs; SIGHUP comes to that as Ctrl-C.
    for number in (signal.SIGHUP,) if serves else _UNTOUCHED:
        if number in heeded:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else as_ctrl_c)
    try:
        command(service=serves)
    except SystemExit as ended:
        if told and ended.code == 128 + signal.SIGINT:
            raise SystemExit(128 + told[0]) from None
        raise
