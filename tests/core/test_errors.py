"""Errors of this project: they arrive as they are raised, in another process, too."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Iterator

import pytest

from sottovoce_core.errors import (
    AssumptionViolated,
    EquivocationError,
    RemoteProtocolError,
    RunEnded,
    SottovoceError,
    ViolationKind,
)

RAISED_BY = (
    "sottovoce_client.auditing.network",
    "sottovoce_client.watching.canary_files",
    "sottovoce_client.runs.run_command",
    "sottovoce_client.runs.run_client",
)
"""Modules with errors of their own."""


def _all(error: type[SottovoceError]) -> Iterator[type[SottovoceError]]:
    yield error
    for narrower in error.__subclasses__():
        yield from _all(narrower)


def _made(error: type[SottovoceError]) -> SottovoceError:
    if issubclass(error, AssumptionViolated):
        return error("BLOCK_LENGTH", "blocks must be longer")
    return error("it went wrong")


def test_every_error_reaches_another_process() -> None:
    for module in RAISED_BY:
        importlib.import_module(module)

    assert len(set(_all(SottovoceError))) >= 17
    for error in _all(SottovoceError):
        raised = _made(error)
        found = pickle.loads(pickle.dumps(raised))  # noqa: S301 - as joblib does
        assert type(found) is error
        assert (str(found), found.args, vars(found)) == (str(raised), raised.args, vars(raised))


@pytest.mark.parametrize(
    "raised",
    [
        RunEnded("over", "aborted"),
        RemoteProtocolError("no", ViolationKind.ROUND),
        EquivocationError("two"),
        AssumptionViolated("A", "b"),
    ],
)
def test_what_an_error_knows_goes_with_it(raised: SottovoceError) -> None:
    found = copy.copy(raised)
    assert vars(found) == vars(raised)
    assert found.args == raised.args
