"""What somebody who watches a run sees: a panel on a terminal, else lines; the same table in the end; numbers for Prometheus."""

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
"""Characters from an e-value of one to the line of alarm."""
NO_ALARM, INCOMPLETE_STATE = "no alarm", "not whole"
_COLOURS = {
    "watching": "cyan",
    "ALARM": "bold red",
    NO_ALARM: "bold green",
    INCOMPLETE_STATE: "bold yellow",
    "interrupted": "yellow",
}


@dataclass(slots=True)
class WatchStatus:
    """All there is to see.

    Attributes:
        title: of the run.
        rounds: planned; None: it goes on until it is stopped.
        names: of all learners.
        alpha: the chance of a false alarm.
        watch: of the noise.
        canaries: of the coins, if there are any.
        alarms: so far.
        state: in a word or two.
        unsaved: the exit code of a watch whose keys could not be written; else 0.
        provenance: what the capture's signatures say of it, in a sentence; empty: nobody looked.
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
    keys_exit_code: int = 0

    def name_blamed_learner(self, alarm: Alarm) -> str:
        """Whom an alarm blames."""
        return "the learners together" if alarm.learner is None else self.names[alarm.learner]

    def format_alarm(self, alarm: Alarm) -> str:
        """An alarm in words."""
        since = {"canaries": "coins are guessed too well", "equivocation": "two messages of one round"}
        what = since.get(alarm.test, "the noise is not what is claimed" + (", of late" if alarm.is_change else ""))
        e, line = _power(alarm.log_e_value), _power(alarm.log_threshold)
        return f"{self.name_blamed_learner(alarm)} in round {alarm.round}: {what} ({alarm.test}); e-value {e}, alarm from {line}"

    def render(self, max_learners: int = 40) -> RenderableType:
        """Everything: of `most` learners at most, those with the largest e-values first if there are more."""
        head = Text.assemble((self.title, "bold"), "  ", (self.state, _COLOURS.get(self.state, "")))
        head.append(
            f"  round {format_count(self.watch.round)}" + (f"/{format_count(self.rounds)}" if self.rounds else "")
        )
        parts: list[RenderableType] = [head, _table(self, max(3, max_learners))]
        if self.canary_test is not None:
            parts.append(Text(_canary_words(self.canary_test), style="magenta"))
        return Group(*parts)

    def print_end(self, console: Console) -> None:
        """The table as it stands, and what may be said."""
        console.print(self.render())
        for alarm in self.alarms:
            console.print(Text(f"ALARM: {self.format_alarm(alarm)}", style="bold red"))
        chance = f"{100 * self.alpha:.3g} %"
        if self.alarms:
            text = f"If all claims held, an alarm would have come with a chance of at most {chance}."
        else:
            text = f"No alarm in {pluralize(self.watch.round, 'round')}. A false one had a chance of at most {chance}."
        console.print(Text(text))
        if self.provenance:
            console.print(Text(self.provenance))

    def build_document(self) -> dict[str, Any]:
        """The same for programs."""
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
    """Shows a watch while a `with` block lasts, as often as one likes.

    On a terminal a panel, which disappears at the end; else a line about every two seconds, and at every tenth of the rounds.

    Args:
        console: where.
        clock: seconds.
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

    def update(self, sight: WatchStatus) -> None:
        """Show it, unless it comes too soon after the last."""
        now, tenth = self._clock(), 10 * sight.watch.round // sight.rounds if sight.rounds else 0
        pause, news = (PLAIN_INTERVAL_S, tenth) if self._live is None else (LIVE_INTERVAL_S, sight.state)
        if now - self._shown[0] < pause and news == self._shown[1]:
            return
        self._shown = now, news
        if self._live is None:
            self._console.out("  ".join(_words(sight)), highlight=False)
        else:
            self._live.update(sight.render(self._console.height - 10), refresh=True)

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Within it, others write to the terminal."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


def _words(sight: WatchStatus) -> Iterator[str]:
    watch = sight.watch
    worst = max(watch.learners, key=lambda each: each.log_e_value)
    yield f"round {watch.round}" + (f"/{sight.rounds}" if sight.rounds else "")
    yield f"e-value {_power(watch.log_e_value)} of {_power(watch.log_threshold)}, most at {sight.names[worst.learner]} ({worst.test})"
    yield f"of late {_power(watch.change_log_e_value)} of {_power(watch.change_log_threshold)}"
    if sight.canary_test is not None:
        yield _canary_words(sight.canary_test)


# ---- the picture -----------------------------------------------------------------------------------------------------


def _table(sight: WatchStatus, most: int) -> Table:
    watch = sight.watch
    table = terminal.create_table()
    table.add_column("learner", no_wrap=True, overflow="ellipsis", max_width=16)
    for title in ("since round 0", "of late"):
        table.add_column(title, no_wrap=True)
        table.add_column("e-value", justify="right", no_wrap=True)
    table.add_column("strongest", no_wrap=True)
    shown = list(watch.learners)
    if len(shown) > most:
        shown = sorted(shown, key=lambda each: -max(each.log_e_value, each.change_log_e_value))[:most]
    for each in shown:
        lines = (watch.log_threshold + watch.learner_margin, watch.change_log_threshold + watch.learner_margin)
        cells = _cells((each.log_e_value, each.change_log_e_value), lines)
        test = each.test if each.is_replayable else "not heard"
        table.add_row(Text(sight.names[each.learner]), *cells, Text(test, style="" if each.is_replayable else "yellow"))
    if len(shown) < len(watch.learners):
        table.add_row(f"… {len(watch.learners) - len(shown)} more", style="dim")
    table.add_section()
    lines = (watch.log_threshold, watch.change_log_threshold)
    table.add_row("together", *_cells((watch.log_e_value, watch.change_log_e_value), lines), style="bold")
    table.add_row("alarm from", "", _power(lines[0]), "", _power(lines[1]), style="dim")
    return table


def _cells(e_values: tuple[float, float], lines: tuple[float, float]) -> Iterator[Text]:
    for e, line in zip(e_values, lines, strict=True):
        yield _bar(e / line)
        yield Text(_power(e), style="bold red" if e >= line else "")


def _bar(full: float) -> Text:
    """A logarithmic bar: empty up to an e-value of one, full at the line of alarm."""
    filled = round(_BAR * min(max(full, 0.0), 1.0))
    colour = "bold red" if full >= 1.0 else "yellow" if full >= 0.5 else "green"
    return Text.assemble(("━" * filled, colour), ("─" * (_BAR - filled), "bright_black"), ("▏", "red"))


def _canary_words(canaries: CanaryTest) -> str:
    total = len(canaries.canaries.positions)
    return (
        f"canaries: {canaries.scored_count} of {total} scored, {canaries.correct_count} of {canaries.guessed_count} guesses right; "
        f"ε at least {format_number(canaries.bound, 3)}, claimed {format_number(canaries.canaries.claim, 3)}"
    )


def _power(e: float) -> str:
    """An e-value, of its logarithm: two or three digits, or one and a power of ten where it is very large or small."""
    if math.isinf(e):
        return "∞" if e > 0 else "0"
    if -7.0 < e < 11.0:
        return format_number(math.exp(e), 2 if e < 4.0 else 3)
    exponent, fraction = divmod(e / math.log(10.0), 1.0)
    mantissa = round(10.0**fraction)
    return f"{mantissa}e{exponent:.0f}".replace("10e", "1e").replace("-", "−") if mantissa < 10 else _power(e + 0.1)


# ---- numbers ---------------------------------------------------------------------------------------------------------


_OF_LEARNERS = {
    "log_e_value": "Natural logarithm of the e-value since round 0; learner is empty: of all.",
    "change_log_e_value": "The same for a change on the way.",
    "log_threshold": "From where on log_e_value is an alarm.",
    "change_log_threshold": "From where on change_log_e_value is an alarm.",
    "alarms": "Alarms so far; learner is empty where none stands out.",
    "round": "Rounds watched.",
}
"""Gauges with a learner each, and what they mean."""


class Gauges:
    """Gauges for Prometheus, served on an address. Use it in a `with` block.

    Args:
        address: `host:port`; port 0 picks one.

    Raises:
        SpecError: prometheus_client is not installed, or this is no address.
        Unavailable: the address cannot be listened on.
    """

    def __init__(self, address: str) -> None:
        prometheus_client = import_optional("prometheus_client", "prometheus_client", "--metrics", "metrics")
        host, port = parse_address(address, "--metrics", allow_port_zero=True)
        registry = prometheus_client.CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Any:
            return prometheus_client.Gauge(f"sottovoce_watch_{name}", text, ("run", *labels), registry=registry)

        self._of_learners = [gauge(name, text, "learner") for name, text in _OF_LEARNERS.items()]
        self._bound = gauge("compute_epsilon_lower_bound", "Lower bound on epsilon from canaries.")
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

    def update(self, sight: WatchStatus) -> None:
        """Give these numbers from now on."""
        watch, lines = sight.watch, (sight.watch.log_threshold, sight.watch.change_log_threshold)
        blamed = Counter("" if alarm.learner is None else sight.names[alarm.learner] for alarm in sight.alarms)
        self._tell(sight.title, "", watch.log_e_value, watch.change_log_e_value, *lines, blamed[""])
        for each in watch.learners:
            name, own = sight.names[each.learner], (line + watch.learner_margin for line in lines)
            self._tell(sight.title, name, each.log_e_value, each.change_log_e_value, *own, blamed[name], each.rounds)
        if sight.canary_test is not None:
            self._bound.labels(sight.title).set(sight.canary_test.bound)

    def _tell(self, run: str, learner: str, *values: float) -> None:
        """The first gauges of `_OF_LEARNERS`, in their order."""
        for gauge, value in zip(self._of_learners, values, strict=False):
            gauge.labels(run, learner).set(value)
