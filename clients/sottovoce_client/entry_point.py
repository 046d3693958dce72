"""Entry point of the command `sottovoce`, and so of every service process.

Environment variables that NumPy and grpc read at import are set here and nowhere else, so that importing the library does
not change the environment of a user's process.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType

from sottovoce_client.command_words import strip_common_options

_DEFAULT_HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""Termination signals and Python's initial handlers. A shell's background job ignores SIGINT, a process of nohup SIGHUP."""


def set_environment_defaults() -> None:
    """Set variables that libraries read at import, unless the user has set them; child processes inherit them."""
    # Matrices are small and learners share the cores: with two threads a round takes nearly twice as long.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own log lines do not help users


_SERVICES = ("coordinator", "learner", "eavesdropper")
"""Commands that serve until they are stopped; their exit code is then 0."""


def _is_service(words: list[str]) -> bool:
    """Return whether a command line starts a service."""
    command = strip_common_options(words)
    # `eavesdropper audit` ends by itself.
    return bool(command) and command[0] in _SERVICES and "audit" not in command


def _exit_at_once(number: int, _: FrameType | None) -> None:
    """Handle Ctrl-C while a command is imported: an exception would surface inside an arbitrary module."""
    os.write(2, b"sottovoce: interrupted\n")
    os._exit(128 + number)


def _stop_service(number: int, _: FrameType | None) -> None:
    """End a service before it serves: its log reports a drained stop, as there was nothing to drain."""
    line = f'{{"event": "stopped", "level": "info", "reason": "{signal.Signals(number).name}", "drained": true}}\n'
    os.write(2, line.encode())
    os._exit(0)


def _interrupt() -> None:
    """Raise SIGINT; in an event loop between two steps, because uvloop handles a signal twice that is raised in a handler."""
    import asyncio

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        signal.raise_signal(signal.SIGINT)
    else:
        loop.call_soon_threadsafe(signal.raise_signal, signal.SIGINT)


def main() -> None:
    """Run the command `sottovoce`. SIGTERM and SIGHUP end it as Ctrl-C does, unless it has its own handlers."""
    handled = [number for number, before in _DEFAULT_HANDLERS.items() if signal.getsignal(number) == before]
    is_service = _is_service(sys.argv[1:])
    for number in handled:  # before the command is imported there is nothing to shut down
        signal.signal(number, _stop_service if is_service else _exit_at_once)
    set_environment_defaults()
    gc.disable()  # objects made by imports live until the process ends: collections would scan them and free nothing
    from sottovoce_client.cli import main as command

    gc.freeze()
    gc.enable()
    if not is_service:  # other commands import most of their modules, such as SciPy, when they run, and end soon
        gc.set_threshold(50_000)

    received = list[int]()

    def interrupt_once(number: int, frame: FrameType | None) -> None:
        if (
            received
        ):  # a closed terminal and `timeout` send the signal twice: the second must not cut the shutdown short
            return
        received.append(number)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.default_int_handler(number, frame)
        _interrupt()

    # A service handles SIGINT and SIGTERM itself once its loop runs; SIGHUP reaches it as SIGINT.
    for number in (signal.SIGHUP,) if is_service else _DEFAULT_HANDLERS:
        if number in handled:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else interrupt_once)
    try:
        command(service=is_service)
    except SystemExit as ended:
        if received and ended.code == 128 + signal.SIGINT:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        gc.freeze()  # the process ends: the interpreter's last collections would scan the objects of all modules
