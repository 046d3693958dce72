"""What `sottovoce watch --metrics` tells Prometheus, read as Prometheus would."""

from __future__ import annotations

import urllib.request
from collections import defaultdict

from sottovoce.errors import Unavailable
from sottovoce.optional import import_extra
from sottovoce.text import plain
from sottovoce_client.web.view import WatchLine, WatchView
from sottovoce_rpc.addresses import place_of

_PREFIX = "sottovoce_watch_"
_WAIT_S, _MOST = 2.0, 4 * 1024 * 1024


def read_watch(address: str) -> tuple[WatchView, ...]:
    """What a watch says of each run that it watches. Blocks, for two seconds at most.

    Raises:
        SpecError: this is no address, or prometheus_client is not installed.
        Unavailable: it does not answer.
    """
    place_of(address, "--watch")
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_WAIT_S) as answer:
            text = answer.read(_MOST).decode("utf-8", "replace")
        return watch_views(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"the watch at {address} does not tell its numbers (--metrics): {reason}") from None


def watch_views(text: str) -> tuple[WatchView, ...]:
    """The same, of its text.

    Raises:
        ValueError: it is none of Prometheus.
    """
    parser = import_extra("prometheus_client.parser", "prometheus_client", "--watch", "console")
    told: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX):
                run, learner = sample.labels.get("run", ""), sample.labels.get("learner", "")
                told[run][learner][sample.name.removeprefix(_PREFIX)] = sample.value
    return tuple(_view(run, learners) for run, learners in told.items())


def _view(run: str, learners: dict[str, dict[str, float]]) -> WatchView:
    lines = {name: _line(name, said) for name, said in learners.items() if "log_e_value" in said}
    together = lines.pop("", None)
    alarms = sum(int(said.get("alarms", 0)) for said in learners.values())
    return WatchView(plain(run), tuple(lines.values()), together, alarms)


def _line(name: str, said: dict[str, float]) -> WatchLine:
    return WatchLine(
        name=plain(name),
        e=said["log_e_value"],
        change=said.get("change_log_e_value"),
        line=said.get("log_threshold"),
        change_line=said.get("change_log_threshold"),
        rounds=int(said.get("round", 0)),
        alarms=int(said.get("alarms", 0)),
    )
