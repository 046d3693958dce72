"""What holds for the options of all commands: addresses are held to one form, and numbers have limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from sottovoce_client.cli import app
from sottovoce_client.entry_point import main
from sottovoce_core.errors import SpecError

pytestmark = pytest.mark.each


def options(command: Any, *names: str) -> Iterator[tuple[str, Any, Any]]:
    """Every option of every command: its name, the command and the option."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from options(inner, *names, name)
    for each in command.params:
        if each.param_type_name == "option":
            yield " ".join((*names, each.opts[0])), command, each


def limit(option: Any, which: str) -> float | None:
    """The least or the largest number that an option takes: its own, or with Click's classes that of its type."""
    return getattr(option, which, None) if hasattr(option, which) else getattr(option.type, which, None)


OPTIONS = list(options(typer.main.get_command(app)))
SIGNS = ("HOST:PORT", "host:port", "Address of", "Address for", "Where a service tells")
ADDRESSES = [
    each
    for each in OPTIONS
    if any(sign in f"{each[2].metavar} {each[2].help}" for sign in SIGNS) and "--backend" not in each[0]
]
URLS = [each for each in OPTIONS if each[0].endswith(("data fetch --from", "--backend"))]
"""Of services that are not ours."""
NUMBERS = [each for each in OPTIONS if limit(each[2], "min") is not None and not each[0].endswith("seed")]


def test_there_are_such() -> None:
    assert len(ADDRESSES) > 20 and len(NUMBERS) > 20 and len(URLS) == 1 + 4


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1", "a b:1", ""])
@pytest.mark.parametrize(("name", "command", "option"), ADDRESSES, ids=[each[0] for each in ADDRESSES])
def test_an_address_that_is_none_is_refused(name: str, command: Any, option: Any, address: str) -> None:
    given = [address] if option.multiple else address
    with pytest.raises(SpecError, match=r"must be HOST:PORT with a port from [01] to 65535, got"):
        option.process_value(typer.Context(command), given)


@pytest.mark.parametrize("url", ["{}://host:99999", "{}://host:0", "{}://", "gopher://host:1"])
@pytest.mark.parametrize(("name", "command", "option"), URLS, ids=[each[0] for each in URLS])
def test_so_is_a_url_that_is_none(name: str, command: Any, option: Any, url: str) -> None:
    begins = {"--backend": "dask", "--from": "http"}
    url = url.format(begins.get(option.opts[0], name.split()[1]))
    with pytest.raises(
        SpecError, match=r"(with a port from 1 to 65535|must be processes, ray, dask, ray://HOST:PORT).*, got "
    ):
        option.process_value(typer.Context(command), [url] if option.multiple else url)


@pytest.mark.parametrize(("name", "command", "option"), NUMBERS, ids=[each[0] for each in NUMBERS])
def test_a_number_has_a_limit(name: str, command: Any, option: Any) -> None:
    assert limit(option, "max") is not None


@pytest.mark.parametrize("given", ["nan", "inf", "-inf", "-1", "1e-300", "1e300", "0.5", "7", "x", "9" * 400])
@pytest.mark.parametrize(("name", "command", "option"), NUMBERS, ids=[each[0] for each in NUMBERS])
def test_a_number_is_within_its_limits_or_refused(name: str, command: Any, option: Any, given: str) -> None:
    least, most = limit(option, "min"), limit(option, "max")
    assert least is not None and most is not None
    try:
        taken = option.process_value(typer.Context(command), given)
    except (SpecError, typer.BadParameter):
        return
    assert least <= taken <= most and taken == float(given)


@pytest.mark.parametrize("number", ["SIGINT", "SIGHUP"])
def test_who_ignores_it_goes_on_to_while_the_command_starts(number: str, tmp_path: Path) -> None:
    """As jobs do that a shell has put into the background, and what nohup has started."""
    (tmp_path / "typer.py").write_text(
        f"import os, signal\nos.kill(os.getpid(), signal.{number})\nexit(7)\n", encoding="utf-8"
    )
    ignoring = f"import signal\nsignal.signal(signal.{number}, signal.SIG_IGN)\n"
    (tmp_path / "start.py").write_text(
        f"{ignoring}from sottovoce_client.entry_point import main\nmain()\n", encoding="utf-8"
    )
    done = subprocess.run([sys.executable, tmp_path / "start.py"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (7, "")


def test_ctrl_c_before_there_is_anything_to_end_ends_it_in_a_line(tmp_path: Path) -> None:
    """A module that is imported while the command starts asks for it: no traceback, whatever the moment."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n", encoding="utf-8")
    # What a shell has put into the background ignores it, and so do tests there and all that they start.
    heeding = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tmp_path / "start.py").write_text(
        f"{heeding}from sottovoce_client.entry_point import main\nmain()\n", encoding="utf-8"
    )
    done = subprocess.run([sys.executable, tmp_path / "start.py"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "sottovoce: interrupted\n")


def test_what_needs_more_memory_than_there_is_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def all_of_it(*, obj: bool) -> None:
        raise MemoryError

    monkeypatch.setattr("sottovoce_client.cli.app", all_of_it)
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "GRPC_VERBOSITY"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "more memory than is available" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
