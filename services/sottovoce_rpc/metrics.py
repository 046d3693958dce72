"""Metrics: what a service remembers anyway, as numbers for Prometheus, made when somebody asks for them.

A service lists its metrics once, in a `Catalogue`, and gives readings of them from plain numbers that it holds: nothing is done
for them in between. Names, labels and numbers are of ours: a label is a name that a rule allows, or one of a few words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

from sottovoce.errors import NotReady
from sottovoce.optional import import_extra
from sottovoce_rpc.access import Refusals
from sottovoce_rpc.credentials import Credentials

EXTRA = "metrics"


class Reading(NamedTuple):
    """What a metric is now, of what its labels name."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Metric:
    """Something that is counted or measured.

    Attributes:
        name: as Prometheus has it: with its unit, and `_total` where it only grows.
        text: what it means, in a sentence.
        labels: what tells its series apart.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()

    def of(self, value: float, *labels: str) -> Reading:
        """A reading, with a value for each label."""
        return Reading(self, labels, value)


@dataclass(slots=True)
class Catalogue:
    """The metrics of a service, in their order.

    Args:
        prefix: of their names.
    """

    prefix: str
    metrics: list[Metric] = field(default_factory=list)

    def add(self, name: str, text: str, *labels: str) -> Metric:
        """One more."""
        self.metrics.append(Metric(f"{self.prefix}_{name}", text, labels))
        return self.metrics[-1]


COMMON = Catalogue("sottovoce")
_BUILD = COMMON.add("build_info", "Always 1; the version that runs.", "version")
_EXPIRY = COMMON.add(
    "certificate_expiry_timestamp_seconds", "When the certificate of an identity ends, in Unix time.", "identity"
)
_REFUSED = COMMON.add(
    "calls_refused_total",
    "Calls that were refused, for whoever called is not believed (stranger), has another role than it takes (role), or is "
    "not the one that the service takes (condition).",
    "reason",
)


def common(credentials: Iterable[Credentials], refused: Iterable[Refusals]) -> Iterator[Reading]:
    """Of any service.

    Args:
        credentials: of this process.
        refused: whom its servers refused.
    """
    yield _BUILD.of(1, _version())
    for each in credentials:
        try:
            principal, expires = each.principal, each.expires
        except NotReady:  # it has not begun
            continue
        if principal is not None and expires is not None:
            yield _EXPIRY.of(expires.timestamp(), str(principal))
    totals = [each.by_reason for each in refused]
    for reason in Refusals().by_reason:
        yield _REFUSED.of(sum(each[reason] for each in totals), reason)


@cache
def _version() -> str:
    return version("sottovoce")


class Exposition:
    """Readings in Prometheus' words.

    Args:
        metrics: all that there are: one without a reading is told, too, so that whoever asks knows its name.
        process: whether to tell what the process has used of its machine.

    Raises:
        SpecError: prometheus_client is not installed.
    """

    def __init__(self, metrics: Sequence[Metric], *, process: bool) -> None:
        client, self._exposition, self._core = (
            import_extra(name, "prometheus_client", "--metrics", EXTRA)
            for name in ("prometheus_client", "prometheus_client.exposition", "prometheus_client.core")
        )
        self._metrics = metrics
        self._process = client.ProcessCollector(registry=None) if process else None

    def text(self, readings: Sequence[Reading], accepted: str = "") -> tuple[str, bytes]:
        """The type of a text and the text: all metrics, and the readings that there are of each.

        Args:
            readings: of them.
            accepted: types that whoever asks knows.
        """
        encode, kind = self._exposition.choose_encoder(accepted)
        return kind, encode(_Registry([*self._families(readings), *(self._process.collect() if self._process else ())]))

    def _families(self, readings: Sequence[Reading]) -> Iterator[Any]:
        core, found = self._core, dict[str, Any]()
        for each in self._metrics:
            counts = each.name.endswith("_total")
            family = core.CounterMetricFamily if counts else core.GaugeMetricFamily
            found[each.name] = family(each.name.removesuffix("_total"), each.text, labels=each.labels)
        for metric, labels, value in readings:
            found[metric.name].add_metric(labels, value)
        yield from found.values()


@dataclass(frozen=True, slots=True)
class _Registry:
    """What the client's encoders ask for."""

    families: list[Any]

    def collect(self) -> list[Any]:
        return self.families
