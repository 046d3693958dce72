"""Display of a watch: a panel on a terminal, otherwise lines; a final table; metrics for Prometheus."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.formatting import format_count, format_number, pluralize
from sottovoce_client.runs.terminal_display import LIVE_INTERVAL_S, PLAIN_INTERVAL_S
from sottovoce_core.auditing.online.canaries import CanaryTest
from sottovoce_core.auditing.online.watch import Alarm, Watch
from sottovoce_core.errors import Unavailable
from sottovoce_core.optional import import_optional
from sottovoce_rpc.addresses import parse_address

_BAR = 12
"""Characters of a bar, from an e-value of one to the alarm threshold."""
NO_ALARM, INCOMPLETE_STATE = "no alarm", "incomplete"
_COLOURS = {
    "watching": "cyan",
    "ALARM": "bold red",
    NO_ALARM: "bold green",
    INCOMPLETE_STATE: "bold yellow",
    "interrupted": "yellow",
}


@dataclass(slots=True)
class WatchStatus:
    """Status of a watch.

    Attributes:
        title: name of the run.
        rounds: planned rounds; None: the run goes on until it is stopped.
        names: names of all learners.
        alpha: false alarm rate.
        watch: e-processes of the noise.
        canary_test: test of the canaries, if there are any.
        alarms: alarms so far.
        state: one or two words.
        provenance: description of the capture's signatures; empty: not checked.
        history_exit_code: exit code if the noise history could not be written; else 0.
    """

    title: str
    rounds: int | None
    names: tuple[str, ...]
    alpha: float
    watch: Watch
    canary_test: CanaryTest | None = None
    alarms: list[Alarm] = field(default_factory=list)
    state: str = "watching"
    provenance: str = ""
    history_exit_code: int = 0

    def name_blamed_learner(self, alarm: Alarm) -> str:
        """Return the learner that an alarm is about."""
        return "the learners together" if alarm.learner is None else self.names[alarm.learner]

    def format_alarm(self, alarm: Alarm) -> str:
        """Format an alarm as text."""
        reasons = {"canaries": "coins are guessed too well", "equivocation": "two messages of one round"}
        reason = reasons.get(alarm.test, "the noise is not as claimed" + (", recently" if alarm.is_change else ""))
        e, threshold = _format_e_value(alarm.log_e_value), _format_e_value(alarm.log_threshold)
        where = f"{self.name_blamed_learner(alarm)} in round {alarm.round}"
        return f"{where}: {reason} ({alarm.test}); e-value {e}, alarm from {threshold}"

    def render(self, max_learners: int = 40) -> RenderableType:
        """Render the status; if there are more than `max_learners`, those with the largest e-values."""
        head = Text.assemble((self.title, "bold"), "  ", (self.state, _COLOURS.get(self.state, "")))
        head.append(
            f"  round {format_count(self.watch.round)}" + (f"/{format_count(self.rounds)}" if self.rounds else "")
        )
        parts: list[RenderableType] = [head, _build_table(self, max(3, max_learners))]
        if self.canary_test is not None:
            parts.append(Text(_describe_canaries(self.canary_test), style="magenta"))
        return Group(*parts)

    def print_end(self, console: Console) -> None:
        """Print the final table and the conclusion."""
        console.print(self.render())
        for alarm in self.alarms:
            console.print(Text(f"ALARM: {self.format_alarm(alarm)}", style="bold red"))
        chance = f"{100 * self.alpha:.3g} %"
        if self.alarms:
            text = f"If all claims hold, the probability of an alarm is at most {chance}."
        else:
            text = f"No alarm in {pluralize(self.watch.round, 'round')}. The probability of a false alarm was at most {chance}."
        console.print(Text(text))
        if self.provenance:
            console.print(Text(self.provenance))

    def build_document(self) -> dict[str, Any]:
        """Build the status as JSON."""
        return {
            "run": self.title,
            "state": self.state,
            "rounds_watched": self.watch.round,
            "rounds": self.rounds,
            "alpha": self.alpha,
            "provenance": self.provenance,
            "alarms": [
                {"learner": None if each.learner is None else self.names[each.learner], "text": self.format_alarm(each)}
                | {"round": each.round, "test": each.test, "e_value": each.log_e_value, "threshold": each.log_threshold}
                for each in self.alarms
            ],
        }


class WatchDisplay:
    """Live display of a watch, as a context manager.

    On a terminal a panel, removed at the end; otherwise a line about every two seconds, and at every tenth of the rounds.

    Args:
        console: where to print.
        clock: clock in seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._shown: tuple[float, object] = -math.inf, None

    def __enter__(self) -> WatchDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: WatchStatus) -> None:
        """Show the status, unless the last update was too recent."""
        now, tenth = self._clock(), 10 * status.watch.round // status.rounds if status.rounds else 0
        interval, event = (PLAIN_INTERVAL_S, tenth) if self._live is None else (LIVE_INTERVAL_S, status.state)
        if now - self._shown[0] < interval and event == self._shown[1]:
            return
        self._shown = now, event
        if self._live is None:
            self._console.out("  ".join(_format_line(status)), highlight=False)
        else:
            self._live.update(status.render(self._console.height - 10), refresh=True)

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Suspend the panel, so that others can write to the terminal."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


def _format_line(status: WatchStatus) -> Iterator[str]:
    watch = status.watch
    worst = max(watch.learners, key=lambda each: each.log_e_value)
    yield f"round {watch.round}" + (f"/{status.rounds}" if status.rounds else "")
    yield (
        f"e-value {_format_e_value(watch.log_e_value)} of {_format_e_value(watch.log_threshold)}, "
        f"most at {status.names[worst.learner]} ({worst.test})"
    )
    yield f"recently {_format_e_value(watch.change_log_e_value)} of {_format_e_value(watch.change_log_threshold)}"
    if status.canary_test is not None:
        yield _describe_canaries(status.canary_test)


# ---- table -----------------------------------------------------------------------------------------------------------


def _build_table(status: WatchStatus, max_learners: int) -> Table:
    watch = status.watch
    table = terminal.create_table()
    table.add_column("learner", no_wrap=True, overflow="ellipsis", max_width=16)
    for title in ("since round 0", "recently"):
        table.add_column(title, no_wrap=True)
        table.add_column("e-value", justify="right", no_wrap=True)
    table.add_column("strongest", no_wrap=True)
    shown = list(watch.learners)
    if len(shown) > max_learners:
        shown = sorted(shown, key=lambda each: -max(each.log_e_value, each.change_log_e_value))[:max_learners]
    for each in shown:
        thresholds = (watch.log_threshold + watch.learner_margin, watch.change_log_threshold + watch.learner_margin)
        cells = _build_cells((each.log_e_value, each.change_log_e_value), thresholds)
        test = each.test if each.is_replayable else "no replay"
        style = "" if each.is_replayable else "yellow"
        table.add_row(Text(status.names[each.learner]), *cells, Text(test, style=style))
    if len(shown) < len(watch.learners):
        table.add_row(f"… {len(watch.learners) - len(shown)} more", style="dim")
    table.add_section()
    thresholds = (watch.log_threshold, watch.change_log_threshold)
    table.add_row("together", *_build_cells((watch.log_e_value, watch.change_log_e_value), thresholds), style="bold")
    table.add_row("alarm from", "", _format_e_value(thresholds[0]), "", _format_e_value(thresholds[1]), style="dim")
    return table


def _build_cells(e_values: tuple[float, float], thresholds: tuple[float, float]) -> Iterator[Text]:
    for e, threshold in zip(e_values, thresholds, strict=True):
        yield _build_bar(e / threshold)
        yield Text(_format_e_value(e), style="bold red" if e >= threshold else "")


def _build_bar(fraction: float) -> Text:
    """Build a logarithmic bar: empty up to an e-value of one, full at the alarm threshold."""
    filled = round(_BAR * min(max(fraction, 0.0), 1.0))
    colour = "bold red" if fraction >= 1.0 else "yellow" if fraction >= 0.5 else "green"
    return Text.assemble(("━" * filled, colour), ("─" * (_BAR - filled), "bright_black"), ("▏", "red"))


def _describe_canaries(canaries: CanaryTest) -> str:
    total = len(canaries.canaries.positions)
    return (
        f"canaries: {canaries.scored_count} of {total} scored, {canaries.correct_count} of {canaries.guessed_count} guesses right"
        f"; ε at least {format_number(canaries.bound, 3)}, claimed {format_number(canaries.canaries.claim, 3)}"
    )


def _format_e_value(e: float) -> str:
    """Format an e-value from its logarithm: two or three digits, or one and a power of ten if very large or small."""
    if math.isinf(e):
        return "∞" if e > 0 else "0"
    if -7.0 < e < 11.0:
        return format_number(math.exp(e), 2 if e < 4.0 else 3)
    exponent, fraction = divmod(e / math.log(10.0), 1.0)
    mantissa = round(10.0**fraction)
    text = f"{mantissa}e{exponent:.0f}".replace("10e", "1e").replace("-", "−")
    return text if mantissa < 10 else _format_e_value(e + 0.1)


# ---- metrics ---------------------------------------------------------------------------------------------------------


_LEARNER_GAUGES = {
    "log_e_value": "Natural logarithm of the e-value since round 0; an empty learner: all together.",
    "change_log_e_value": "The same, for a change during the run.",
    "log_threshold": "Alarm threshold of log_e_value.",
    "change_log_threshold": "Alarm threshold of change_log_e_value.",
    "alarms": "Alarms so far; an empty learner: about no single learner.",
    "round": "Rounds watched.",
}
"""Help texts of the gauges with the label learner."""


class Gauges:
    """Gauges for Prometheus, served on an address, as a context manager.

    Args:
        address: `host:port`; port 0 picks one.

    Raises:
        SpecError: prometheus_client is not installed, or the address is invalid.
        Unavailable: The address cannot be used.
    """

    def __init__(self, address: str) -> None:
        prometheus_client = import_optional("prometheus_client", "prometheus_client", "--metrics", "metrics")
        host, port = parse_address(address, "--metrics", allow_port_zero=True)
        registry = prometheus_client.CollectorRegistry()

        def create_gauge(name: str, text: str, *labels: str) -> Any:
            return prometheus_client.Gauge(f"sottovoce_watch_{name}", text, ("run", *labels), registry=registry)

        self._learner_gauges = [create_gauge(name, text, "learner") for name, text in _LEARNER_GAUGES.items()]
        self._bound = create_gauge("epsilon_lower_bound", "Lower bound on epsilon from canaries.")
        try:
            self._server, _ = prometheus_client.start_http_server(port, host, registry)
        except OSError as error:
            raise Unavailable(f"--metrics cannot listen on {address}: {error.strerror or error}") from None
        self.address = f"{address.rpartition(':')[0]}:{self._server.server_port}"

    def __enter__(self) -> Gauges:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def update(self, status: WatchStatus) -> None:
        """Set all gauges."""
        watch, thresholds = status.watch, (status.watch.log_threshold, status.watch.change_log_threshold)
        alarms = Counter("" if alarm.learner is None else status.names[alarm.learner] for alarm in status.alarms)
        self._set(status.title, "", watch.log_e_value, watch.change_log_e_value, *thresholds, alarms[""])
        for each in watch.learners:
            name, own = status.names[each.learner], (threshold + watch.learner_margin for threshold in thresholds)
            self._set(status.title, name, each.log_e_value, each.change_log_e_value, *own, alarms[name], each.rounds)
        if status.canary_test is not None:
            self._bound.labels(status.title).set(status.canary_test.bound)

    def _set(self, run: str, learner: str, *values: float) -> None:
        """Set the first gauges of `_LEARNER_GAUGES`, in their order."""
        for gauge, value in zip(self._learner_gauges, values, strict=False):
            gauge.labels(run, learner).set(value)
