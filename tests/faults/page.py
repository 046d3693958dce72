"""The page docs/developers/faults.md: every fault, its promise, and whether it held."""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.catalogue import CATALOGUE
from tests.faults.trial import Fault

_HEAD = """\
# Fault injection

Which faults a run survives, tried on real processes. For operators who must know what to expect, and developers who
change recovery. [Storage and recovery](storage.md) explains why the guarantees hold.
Written by `{command}`; do not edit.

A try is a run of three learners, a coordinator with `--state` and a relay, each in its own process; undisturbed it
takes about {seconds:g} s. One fault hits a random victim at a random moment. Half of the tries have a free clock, half
a paced one. In half of them all processes have identities, channels are encrypted, and learners
[sign](../operate/identities.md#signatures) their messages. Half use the operating system's noise. The other half use
seeded noise, and each message must equal that of an undisturbed run bit for bit; if the fault changes participation or
uses late messages, it must equal that of the simulator with the final spec, up to rounding.

After each try these must hold, and the result is *held* if none was broken in any try:

- The run finished, or ended for the reason that this fault must end it for.
- No learner has two contents of one round, on the wire or in a log.
- No ledger is below the cost of the captured messages nor, in a run that finished, above that of all rounds in which
  its learner participates.
- Coordinator and learners agree. The learners that are offline at the end are those that left or were lost, and a lost
  learner sends nothing once it knows.
- The capture is a transcript of the run. No signature is of anything but sent messages, and all but the last block of
  rounds are signed.
- No process is left after all were stopped, and none ended or logged as only a bug does.

With `capture: mirror` a killed learner loses the copies of its last rounds: the run finishes, and the capture is
incomplete. Use `relay` if [the audit must survive that](../audit/captures.md).
"""


@dataclass(frozen=True, slots=True)
class Row:
    """How a fault's tries went."""

    fault: Fault
    tries: int
    broken: int

    @property
    def result(self) -> str:
        """In words."""
        return f"broken in {self.broken}" if self.broken else "held"


def page(rows: list[Row], command: str, seconds: float) -> str:
    """The page.

    Args:
        rows: of the faults that were tried.
        command: that wrote it.
        seconds: that a run lasts by itself.
    """
    parts = [_HEAD.format(command=command, seconds=seconds)]
    by_name = {row.fault.name: row for row in rows}
    for heading, faults in CATALOGUE.items():
        own = [by_name[fault.name] for fault in faults if fault.name in by_name]
        if own:
            lines = [f"| {row.fault.name} | {row.fault.promise} | {row.tries} | {row.result} |" for row in own]
            parts.append(
                "\n".join((f"## {heading}\n", "| fault | promise | tries | result |", "|---|---|---:|---|", *lines))
            )
    return "\n".join(f"{part}\n" if k else part for k, part in enumerate(parts))
