"""Logs: what a log line depends on is nobody's record."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import structlog.testing

from sottovoce_core.errors import AssumptionViolated, DataError, SpecError, require
from sottovoce_core.noise.mechanisms import magnitude_bound
from sottovoce_core.spec import parse_spec
from sottovoce_rpc.logs import configure_logs, describe_failure, has_project_text, hide_error_texts

OVERFLOW = """
import numpy as np
from sottovoce_rpc.logs import configure_logs
{configure}
np.exp(np.array([1e9]))
"""


@pytest.mark.parametrize(("configure", "told"), [("", True), ("configure_logs()", False)])
def test_no_numeric_warning_reaches_a_services_log(configure: str, told: bool) -> None:
    """Whether a number overflows depends on records."""
    code = OVERFLOW.format(configure=configure)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("overflow" in done.stderr) is told


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(SpecError, match="got loud"):
        configure_logs("loud")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(SpecError, match="the log format must be one of auto, json, people, got xml"):
        configure_logs("info", "xml")


@pytest.mark.parametrize(("form", "is_json"), [("auto", True), ("json", True), ("people", False)])
def test_how_logs_are_written_where_there_is_no_terminal(form: str, is_json: bool) -> None:
    """Those for people have no colours there."""
    code = f"import structlog\nfrom sottovoce_rpc.logs import configure_logs\nconfigure_logs('info', {form!r})\n"
    code += "structlog.get_logger().info('joined', learner='ann')"
    line = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert ('"event": "joined"' in line) is is_json and "joined" in line and "\x1b" not in line


def test_a_line_is_json_whatever_a_number_is() -> None:
    code = "import math, structlog\nfrom sottovoce_rpc.logs import configure_logs\nconfigure_logs('info', 'json')\n"
    code += "structlog.get_logger().info('waits', seconds=math.inf, share=math.nan, rounds=3)"
    line = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    said = json.loads(line, parse_constant=refuse)
    assert (said["seconds"], said["share"], said["rounds"]) == (None, None, 3)


# ---- errors of others ------------------------------------------------------------------------------------------------


def caught(work: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
        work()
    return raised.value


def foreign() -> None:
    raise ValueError("diagnosis: positive")


def test_the_place_of_an_error_is_in_code_that_its_author_can_change() -> None:
    """Not in NumPy, that it called."""
    line = foreign.__code__.co_firstlineno + 1
    assert describe_failure(caught(foreign)) == {"kind": "ValueError", "where": f"{__file__}:{line}"}
    inside = describe_failure(caught(lambda: np.linalg.inv(np.zeros((2, 2)))))
    assert inside["kind"] == "LinAlgError"
    assert inside["where"].startswith(f"{__file__}:")
    ours = describe_failure(caught(lambda: parse_spec({"rounds": -1}, allow_imports=True)))
    assert "sottovoce_core/spec" in ours["where"]


def test_code_that_a_spec_names_may_be_installed_like_a_library() -> None:
    error = caught(lambda: np.linalg.inv(np.zeros((2, 2))))
    assert "numpy" in describe_failure(error, user_packages={"numpy"})["where"]


def test_the_place_is_in_the_code_that_a_spec_names_whatever_of_ours_it_called() -> None:
    """It gave a learner's parts what they do not take: the line that did is its author's to change."""

    def given_wrongly() -> None:
        magnitude_bound(None, 1.0)  # type: ignore[arg-type]

    error = caught(given_wrongly)
    line = given_wrongly.__code__.co_firstlineno + 1
    assert describe_failure(error, user_packages={"tests", "sottovoce_core"})["where"] == f"{__file__}:{line}"
    assert "sottovoce_core/noise" in describe_failure(error)["where"]
    assert (
        "sottovoce_core/noise" in describe_failure(error, user_packages={"sottovoce_core"})["where"]
    )  # an algorithm of ours is not somebody's own


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert describe_failure(ValueError("x")) == {"kind": "ValueError", "where": "nowhere"}


def test_the_words_of_an_error_are_ours_where_we_raised_it() -> None:
    def borrowed() -> None:
        raise DataError("diagnosis: positive")

    def required() -> None:
        require(False, "CODE", "diagnosis: positive")

    assert has_project_text(caught(lambda: parse_spec([], allow_imports=True)))
    assert not has_project_text(caught(borrowed))
    assert isinstance(caught(required), AssumptionViolated) and not has_project_text(caught(required))
    assert not has_project_text(caught(foreign))
    assert not has_project_text(DataError("never raised"))


async def test_what_nobody_caught_is_told_without_its_text() -> None:
    loop = asyncio.get_running_loop()
    hide_error_texts(loop)
    with structlog.testing.capture_logs() as logs:
        loop.call_soon(foreign)
        await asyncio.sleep(0.01)
    assert [(event["event"], event["kind"]) for event in logs] == [("not caught", "ValueError")]
    assert "diagnosis" not in str(logs)
