"""The command `sottovoce`."""

from __future__ import annotations

import sys
from importlib import import_module

from sottovoce_client.cli.app import INTERRUPTED_MESSAGE, app
from sottovoce_core.errors import SottovoceError, SpecError
from sottovoce_core.optional import format_install_hint
from sottovoce_core.text import escape_control_lines

# Importing these modules registers their commands, in the order of the help, which begins with the first steps.
# isort: off
from sottovoce_client.cli import specs as specs
from sottovoce_client.cli import runs as runs
from sottovoce_client.cli import experiments as experiments
from sottovoce_client.cli import feeding as feeding
from sottovoce_client.cli import results as results
from sottovoce_client.cli import services as services
from sottovoce_client.cli import operations as operations
from sottovoce_client.cli import pki as pki
from sottovoce_client.cli import auditing as auditing
from sottovoce_client.cli import privacy as privacy
# isort: on

__all__ = ["app", "main"]


def _add_laboratory() -> None:
    """Add the commands of the optional package `sottovoce_lab`; without it, a command that explains how to install it."""
    try:
        app.add_typer(import_module("sottovoce_lab.commands").lab_app, name="lab", rich_help_panel="Privacy")
    except ModuleNotFoundError as error:
        if error.name not in ("sottovoce_lab", "sottovoce_lab.commands"):
            raise
        accept_any = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command("lab", rich_help_panel="Privacy", context_settings=accept_any)(_require_laboratory)


def _require_laboratory() -> None:
    """Refuse a command of the laboratory, which is not installed."""
    raise SpecError(
        f"`sottovoce lab` needs the package sottovoce_lab, which is not installed: {format_install_hint('audit')}"
    )


_add_laboratory()


def main(*, service: bool = False) -> None:
    """Run the command; print an error in a line and exit with code 2.

    Args:
        service: whether the command is a service, which writes a log.
    """
    try:
        app(obj=service)
    except SottovoceError as error:
        print(f"sottovoce: {escape_control_lines(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    except MemoryError as error:
        detail = f" ({error})" if str(error) else ""
        print(
            f"sottovoce: the command needs more memory than is available{detail}: reduce the size or the number of jobs",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except OSError as error:  # a full disk, a folder without write permission: the message tells the user what to do
        print(f"sottovoce: {escape_control_lines(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception as error:
        from sottovoce_rpc.logs import describe_user_code_error

        if not (text := describe_user_code_error(error)):
            raise  # a bug of this program: the traceback is needed
        print(f"sottovoce: {escape_control_lines(text)}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(INTERRUPTED_MESSAGE, end="", file=sys.stderr)
        raise SystemExit(130) from None
