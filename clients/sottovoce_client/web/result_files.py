"""Files of a results folder that the console may open: HTML pages and `capture.json`. No other file is served.

The same folder holds logs of learners with their records, private keys, and the coins of canaries. So the files that may be
opened are listed by name, and folders of services are not scanned.
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
    """A page of the results that the console may open; `run_id`: the run that it reports on, if it is a run's report."""

    path: str
    title: str
    bytes: int
    modified_at: float
    run_id: str = ""


def _ended_view(summary: Mapping[str, Any], plan: RunPlan) -> RunView:
    """Build the view of a run that has ended from its `summary.json`: the services that ran it may be gone.

    Args:
        summary: Content of the file.
        plan: Plan from the run's spec.

    Raises:
        LookupError, TypeError, ValueError: The file is no summary of this version.
    """
    started = datetime.fromisoformat(summary["started_at"]).timestamp()
    seconds, learners = float(summary["seconds"]), summary["learners"]
    samples = [(float(each["seconds"]), min(each["rounds"], default=0)) for each in summary["progress"]]
    pairs = [(a, b) for a, b in itertools.pairwise(samples[-MAX_OBSERVATIONS:]) if b[0] > a[0]]
    done = min((int(each["rounds_done"]) for each in learners if not each["has_left"]), default=0)
    receivers = Counter(sender for sender, _ in plan.directed_edges)
    sent = {(s, r): int(learners[s]["messages"]) // receivers[s] for s, r in plan.directed_edges}
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
        learners=tuple(_ended_learner(each, str(summary["state"])) for each in learners),
        edges=tuple(
            EdgeView(*(way if way in sent else way[::-1]), 0.0, 0.0, 0.0, sent.get(way, 0) + sent.get(way[::-1], 0),
                     not (way in sent and way[::-1] in sent))
            for way in edges
        ),
        warnings=tuple(escape_control(str(each)) for each in (*summary["violations"], *summary["missing_traffic"])),
    )  # fmt: skip


def _ended_learner(learner: Mapping[str, Any], state: str) -> LearnerView:
    return LearnerView(
        escape_control(str(learner["name"])),
        "",
        "left" if learner["has_left"] else escape_control(state),
        None,
        rounds_done=int(learner["rounds_done"]),
        epsilon=float(learner["epsilon_spent"]),
        epsilon_limit=None if learner["epsilon_limit"] is None else float(learner["epsilon_limit"]),
        delta=float(learner.get("delta", 0.0)),
        epsilon_other_runs=0.0,
        epsilon_owner_budget=None,
        owner_delta=0.0,
        records=int(learner["records"]),
        records_waiting=int(learner["records_waiting"]),
        records_per_second=None,
        accuracy=learner["prequential_accuracy"],
        warnings=(),
    )


PAGE_SUFFIX, CAPTURE_FACTS_FILE = ".html", "capture.json"
"""Suffix and name of the files that may be opened."""
_CLOSED = frozenset({"journals", "learner-state", "identities", "logs", "authority", "ledger"})
_MAX_DEPTH, _MAX_FOLDERS, _MAX_LISTED_FILES = 5, 2_000, 100
_MAX_FACTS_BYTES, _MAX_SUMMARY_BYTES = 4 * 1024 * 1024, 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ResultListing:
    """Content of a results folder, the newest first.

    Attributes:
        captures, reports: Captures and pages that can be opened.
        ended_runs: Final state of runs by run id, from their summaries; the end time is when the summary was written.
        run_views: Views of these runs by run id, where this version can read their summaries.
    """

    captures: tuple[CaptureListItem, ...] = ()
    reports: tuple[ReportEntry, ...] = ()
    ended_runs: Mapping[str, RunListItem] = field(default_factory=dict)
    run_views: Mapping[str, RunView] = field(default_factory=dict)


class ResultFiles:
    """Index of a results folder.

    Args:
        root: The folder; None: no folder was given.
    """

    def __init__(self, root: Path | None) -> None:
        self.root = None if root is None else root.resolve()
        self._read: dict[Path, tuple[float, Any]] = {}

    def list_results(self) -> ResultListing:
        """Scan the folder. Blocks on the disk."""
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
        """Return the content of a file and its media type; None if it does not exist or may not be opened.

        Args:
            path: Path relative to the folder, with `/` between its parts.
        """
        if self.root is None or "\0" in path:
            return None
        parts = Path(path).parts
        requested = self.root.joinpath(*parts)
        allowed = requested.name.endswith(PAGE_SUFFIX) or requested.name == CAPTURE_FACTS_FILE
        if not (allowed and all(_is_open(part) for part in parts)):
            return None
        try:
            real = requested.resolve(strict=True)  # a link may lead out of the folder
            if real != requested or not real.is_relative_to(self.root) or not real.is_file():
                return None
            kind = "text/html" if requested.name.endswith(PAGE_SUFFIX) else "text/plain"
            return real.read_bytes(), f"{kind}; charset=utf-8"
        except OSError:
            return None

    # ---- scanning -----------------------------------------------------------------------------------------

    def _folders(self, root: Path) -> Iterator[tuple[Path, list[str]]]:
        """Yield at most `_MAX_FOLDERS` folders below the root, each with the names of its files."""
        for path, folders, names in islice(os.walk(root), _MAX_FOLDERS):
            folder = Path(path)
            depth = len(folder.relative_to(root).parts)
            folders[:] = [] if depth >= _MAX_DEPTH else sorted(filter(_is_open, folders), reverse=True)
            yield folder, names

    def _report(self, path: Path, summary: Mapping[str, Any] | None) -> ReportEntry | None:
        try:
            facts = path.lstat()
        except OSError:
            return None
        assert self.root is not None  # noqa: S101 - files are found only below a root
        relative = path.relative_to(self.root).as_posix()
        reported = summary if path.name == "report.html" else None
        title = path.stem if reported is None else f"{reported['name']}, {reported['state']}"
        run_id = "" if reported is None else reported["run_id"]
        return ReportEntry(escape_control(relative), escape_control(title), facts.st_size, facts.st_mtime, run_id)

    def _capture(self, folder: Path) -> CaptureListItem | None:
        facts = self._json(folder / CAPTURE_FACTS_FILE, _MAX_FACTS_BYTES, _parse_capture)
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
        found: dict[str, Any] | None = self._json(folder / "summary.json", _MAX_SUMMARY_BYTES, _parse_summary)
        return found

    def _json(self, path: Path, max_bytes: int, parse: Any) -> Any:
        """Return the parsed content of a JSON file, cached until the file changes; None if it cannot be parsed."""
        try:
            now = path.lstat()
            cached = self._read.get(path)
            if cached is None or cached[0] != now.st_mtime:
                readable = now.st_size <= max_bytes and not path.is_symlink()
                cached = self._read[path] = (now.st_mtime, parse(from_json(path.read_bytes())) if readable else None)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return cached[1]


def _is_open(name: str) -> bool:
    """Return whether a path with this part may be opened."""
    return name not in _CLOSED and not name.startswith(".") and "/" not in name


def _parse_capture(facts: Mapping[str, Any]) -> tuple[str, str, int, int]:
    """Return the run id, the state, and the numbers of messages and bytes of a capture."""
    detections = int(facts.get("detection_count") or 0)
    state = "complete" if facts.get("complete") else "not complete"
    ciphertext = facts.get("ciphertext") or {}
    messages, size = int(facts.get("messages") or 0), int(facts.get("bytes") or 0)
    return (
        escape_control(str(facts["run_id"])),
        f"{state}; protocol violations detected: {detections}" if detections else state,
        messages or int(ciphertext.get("records") or 0),
        size or int(ciphertext.get("bytes") or 0),
    )


def _parse_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    texts = {key: escape_control(str(summary[key])) for key in ("name", "run_id", "state", "detail")}
    return {**texts, "view": _view(summary)}


def _view(summary: Mapping[str, Any]) -> RunView | None:
    """Return the view of a summarised run; None if another version wrote the summary."""
    try:
        return _ended_view(summary, parse_plan_document(parse_yaml(str(summary["spec_yaml"]))))
    except (SottovoceError, YAMLError, LookupError, TypeError, ValueError):
        return None
