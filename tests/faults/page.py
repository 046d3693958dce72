"""docs/developers/faults.md: every fault, what is promised, and whether it held."""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.catalogue import CATALOGUE
from tests.faults.trial import Fault

_HEAD = """\
# What a run survives

By `{command}`; this page is written by that command. What is promised rests on
[what a learner writes down](internals.md#the-learners-files) and on
[what a coordinator keeps](internals.md#when-the-coordinator-is-offline).

Each try is a run of three learners, a coordinator with `--state` and an eavesdropper that relays, in a process each, which lasts
about {seconds:g} s by itself. One thing goes wrong in it, at a moment and to a victim by chance. Half of the tries have a free
clock, half a paced one. In half of them all processes have identities, channels are encrypted, and learners
[sign](identities.md#signatures) what they say. In half of them the noise is the operating system's; in the other half it
follows from a seed, and then every message must be that of an undisturbed run, to the last bit; or, where who takes part or who
is waited for changes, that of the simulator by the spec as it is in the end, to rounding.

After every try: the run has finished, or has ended for the reason that this fault must end it for; nobody has said two things in
one round, on the wire or in a log; no ledger is below the price of what was overheard, nor, in a run that finished, above that of
all rounds in which its learner takes part; coordinator and learners say the same; those who are away in the end are those who
left or were lost, and who was lost says nothing once it knows; the capture is a transcript of the run; no signature in it is of
anything else than was said, and all of it is signed but for the last block of rounds; no process is left when all were told to
end, and none has ended or spoken as only a bug does. A promise is *held* where none of this was broken in any try. Code:
`tests/faults/`.

With `capture: mirror` a learner that is killed loses the copies of its last rounds for good: the run finishes, and the verdict is
that too little was overheard. Take `relay` where [the audit must survive that](eavesdropper.md).
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
