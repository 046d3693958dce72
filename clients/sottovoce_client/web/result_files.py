"""Results in a folder that can be opened: pages, and what captures say of themselves. Nothing else of it is ever read.

Beside them lie logs of learners, which hold records, keys, and coins of canaries: so what may be opened is listed by name,
and folders of services are not even looked into.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic_core import from_json
from ruamel.yaml.error import YAMLError

from sottovoce_client.runs.monitoring import (
    MAX_OBSERVATIONS,
    CaptureListItem,
    EdgeView,
    LearnerView,
    RunListItem,
    RunPlan,
    RunView,
    parse_plan_document,
)
from sottovoce_core.errors import SottovoceError
from sottovoce_core.text import escape_control
from sottovoce_core.yaml_files import parse_yaml


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """A page in the results that can be opened."""

    path: str
    title: str
    bytes: int
    modified_at: float


def _ended_view(summary: Mapping[str, Any], plan: RunPlan) -> RunView:
    """A run that is over, as its `summary.json` says: the services that ran it need not be there any more.

    Args:
        summary: the content of the file.
        plan: of its spec.

    Raises:
        LookupError, TypeError, ValueError: it is no summary.
    """
    started = datetime.fromisoformat(summary["started_at"]).timestamp()
    seconds, told = float(summary["seconds"]), summary["learners"]
    looks = [(float(each["seconds"]), min(each["rounds"], default=0)) for each in summary["progress"]]
    pairs = [(a, b) for a, b in itertools.pairwise(looks[-MAX_OBSERVATIONS:]) if b[0] > a[0]]
    done = min((int(each["rounds"]) for each in told if not each["left"]), default=0)
    receivers = Counter(speaker for speaker, _ in plan.directed_edges)
    sent = {(s, r): int(told[s]["messages"]) // receivers[s] for s, r in plan.directed_edges}
    edges = sorted({(min(way), max(way)) for way in plan.directed_edges})
    return RunView(
        run_id=escape_control(str(summary["run_id"])),
        name=escape_control(plan.name),
        state=escape_control(str(summary["state"])),
        detail=escape_control(str(summary["detail"])),
        algorithm=escape_control(plan.algorithm),
        clock=plan.clock,
        period_s=plan.period_s,
        capture=plan.capture,
        is_live=plan.is_live,
        started_at=started,
        ended_at=started + seconds,
        rounds_done=done,
        rounds=plan.rounds,
        rounds_per_second=done / seconds if seconds > 0 else None,
        remaining_s=None,
        recent_rates=tuple(max(0.0, round((b[1] - a[1]) / (b[0] - a[0]), 3)) for a, b in pairs),
        traffic_source="learners",
        learners=tuple(_ended_learner(each, str(summary["state"])) for each in told),
        edges=tuple(
            EdgeView(*(way if way in sent else way[::-1]), 0.0, 0.0, 0.0, sent.get(way, 0) + sent.get(way[::-1], 0),
                     not (way in sent and way[::-1] in sent))
            for way in edges
        ),
        warnings=tuple(escape_control(str(each)) for each in (*summary["misconduct"], *summary["not_captured"])),
    )  # fmt: skip


def _ended_learner(said: Mapping[str, Any], state: str) -> LearnerView:
    return LearnerView(
        name=escape_control(str(said["name"])),
        address="",
        state="left" if said["left"] else escape_control(state),
        disconnected_since=None,
        rounds_done=int(said["rounds"]),
        epsilon=float(said["spent"]),
        epsilon_limit=None if said["budget"] is None else float(said["budget"]),
        epsilon_other_runs=0.0,
        epsilon_owner_budget=None,
        records=int(said["records"]),
        records_waiting=int(said["waiting"]),
        records_per_second=None,
        accuracy=said["prequential_accuracy"],
        warnings=(),
    )


PAGE_SUFFIX, CAPTURE_FACTS_FILE = ".html", "capture.json"
"""What may be opened: files that end so, and files of this name."""
_CLOSED = frozenset({"learner-state", "journals", "identities", "logs", "authority", "ledger"})
_MAX_DEPTH, _MAX_FOLDERS, _MAX_LISTED_FILES = 5, 2_000, 100
_MAX_FACTS_BYTES, _MAX_SUMMARY_BYTES = 4 * 1024 * 1024, 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ResultListing:
    """What there is to open, the newest first.

    Attributes:
        captures, reports: that can be opened.
        ended: how runs ended, by id, as their summaries say; the end is when that was written down.
        runs: these runs themselves, where this version can read their summaries.
    """

    captures: tuple[CaptureListItem, ...] = ()
    reports: tuple[ReportEntry, ...] = ()
    ended_runs: Mapping[str, RunListItem] = field(default_factory=dict)
    run_views: Mapping[str, RunView] = field(default_factory=dict)


class ResultFiles:
    """A folder of results, looked through now and then.

    Args:
        root: the folder; None: there is none.
    """

    def __init__(self, root: Path | None) -> None:
        self.root = None if root is None else root.resolve()
        self._read: dict[Path, tuple[float, Any]] = {}

    def list_results(self) -> ResultListing:
        """What there is now. Blocks on the disk."""
        if self.root is None:
            return ResultListing()
        captures: list[CaptureListItem] = []
        reports: list[ReportEntry] = []
        ended: dict[str, RunListItem] = {}
        runs: list[RunView] = []
        for folder, names in self._folders(self.root):
            summary = self._summary(folder) if "summary.json" in names else None
            if summary is not None:
                written = self._read[folder / "summary.json"][0]
                run_id = summary["run_id"]
                ended[run_id] = RunListItem(run_id, summary["state"], summary["detail"], 0.0, written)
                runs += [summary["view"]] if summary["view"] is not None else []
            if CAPTURE_FACTS_FILE in names and (line := self._capture(folder)) is not None:
                captures.append(line)
            found = (self._report(folder / name, summary) for name in names if name.endswith(PAGE_SUFFIX))
            reports += [each for each in found if each is not None]
        captures.sort(key=lambda line: line.modified, reverse=True)
        reports.sort(key=lambda line: line.modified_at, reverse=True)
        runs.sort(key=lambda run: run.started_at, reverse=True)
        kept = {run.run_id: run for run in runs[:_MAX_LISTED_FILES]}
        return ResultListing(tuple(captures[:_MAX_LISTED_FILES]), tuple(reports[:_MAX_LISTED_FILES]), ended, kept)

    def read_file(self, path: str) -> tuple[bytes, str] | None:
        """The content of a file that is listed, and its media type; None: there is no such, or it is not for looking at.

        Args:
            path: below the folder, with `/` between.
        """
        if self.root is None or "\0" in path:
            return None
        parts = Path(path).parts
        asked = self.root.joinpath(*parts)
        allowed = asked.name.endswith(PAGE_SUFFIX) or asked.name == CAPTURE_FACTS_FILE
        if not (allowed and all(_open(part) for part in parts)):
            return None
        try:
            real = asked.resolve(strict=True)  # a link may lead anywhere
            if real != asked or not real.is_relative_to(self.root) or not real.is_file():
                return None
            kind = "text/html" if asked.name.endswith(PAGE_SUFFIX) else "text/plain"
            return real.read_bytes(), f"{kind}; charset=utf-8"
        except OSError:
            return None

    # ---- looking ------------------------------------------------------------------------------------------

    def _folders(self, root: Path) -> Iterator[tuple[Path, list[str]]]:
        """Folders below, a bounded number of them, with the names of their files."""
        for where, folders, names in islice(os.walk(root), _MAX_FOLDERS):
            place = Path(where)
            deep = len(place.relative_to(root).parts)
            folders[:] = [] if deep >= _MAX_DEPTH else sorted(filter(_open, folders), reverse=True)
            yield place, names

    def _report(self, path: Path, summary: Mapping[str, Any] | None) -> ReportEntry | None:
        try:
            facts = path.lstat()
        except OSError:
            return None
        assert self.root is not None  # noqa: S101 - else nothing was found
        relative = path.relative_to(self.root).as_posix()
        ours = summary is not None and path.name == "report.html"
        title = f"{summary['name']}, {summary['state']}" if ours and summary is not None else path.stem
        return ReportEntry(escape_control(relative), escape_control(title), facts.st_size, facts.st_mtime)

    def _capture(self, folder: Path) -> CaptureListItem | None:
        facts = self._json(folder / CAPTURE_FACTS_FILE, _MAX_FACTS_BYTES, _of_capture)
        if facts is None or self.root is None:
            return None
        path = (folder / CAPTURE_FACTS_FILE).relative_to(self.root).as_posix()
        modified = self._read[folder / CAPTURE_FACTS_FILE][0]
        run_id, state, messages, size = facts
        return CaptureListItem(
            escape_control(folder.name),
            run_id,
            escape_control(str(folder)),
            state,
            messages,
            size,
            escape_control(path),
            modified,
        )

    def _summary(self, folder: Path) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._json(folder / "summary.json", _MAX_SUMMARY_BYTES, _of_summary)
        return found

    def _json(self, path: Path, most: int, take: Any) -> Any:
        """What a file says, read again when it has changed; None: nothing that is understood."""
        try:
            now = path.lstat()
            known = self._read.get(path)
            if known is None or known[0] != now.st_mtime:
                said = take(from_json(path.read_bytes())) if now.st_size <= most and not path.is_symlink() else None
                known = self._read[path] = (now.st_mtime, said)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return known[1]


def _open(name: str) -> bool:
    """Whether this part of a path may be looked into."""
    return name not in _CLOSED and not name.startswith(".") and "/" not in name


def _of_capture(facts: Mapping[str, Any]) -> tuple[str, str, int, int]:
    """Its run, how it is, messages and bytes."""
    noticed = int(facts.get("noticed_count") or 0)
    state = "complete" if facts.get("complete") else "not complete"
    told = f"{state}; noticed what must never happen: {noticed}" if noticed else state
    tapped = facts.get("ciphertext") or {}
    messages, size = int(facts.get("messages") or 0), int(facts.get("bytes") or 0)
    return (
        escape_control(str(facts["run_id"])),
        told,
        messages or int(tapped.get("records") or 0),
        size or int(tapped.get("bytes") or 0),
    )


def _of_summary(said: Mapping[str, Any]) -> dict[str, Any]:
    texts = {key: escape_control(str(said[key])) for key in ("name", "run_id", "state", "detail")}
    return {**texts, "view": _view(said)}


def _view(said: Mapping[str, Any]) -> RunView | None:
    """The run of a summary; None where it is one of another version."""
    try:
        return _ended_view(said, parse_plan_document(parse_yaml(str(said["spec_yaml"]))))
    except (SottovoceError, YAMLError, LookupError, TypeError, ValueError):
        return None
