"""The report's sentences, as HTML. Fields in braces are filled in by `report`, which escapes what it fills in."""

from __future__ import annotations

GRAPH = "{learners}, {edges}. Colour: accuracy on {records}; grey where it is not known."
DISAGREE = " Two learners disagree on at most {share} of the held-out records."

LEARNED = "Each learner predicts every record of its own before it learns it; share of right predictions so far."
UNKNOWN = "No accuracy was reported during this run."

COST = """
The ε claimed so far, largest of all learners; the bands reach down to the smallest. The paper’s formula and the tight
per-event value bound the same thing: what one use of one record reveals. The per-record value adds all uses of the most
telling record.
"""
FOREVER = "However long the run goes on, per event ε stays below <b>{bound}</b>."
NOT_FOREVER = "No finite bound is known for infinitely many rounds."
UNPROMISED = "<b>ε = ∞</b> for at least one learner, so nothing is promised: {kinds}."

PROOF = """
Algorithm <code>{algorithm}</code>, accounting <code>{accounting}</code>: {adjacency}. Proof: {proof}.
"""
RESTS_ON = " The numbers rest on these constants, which are enforced, not assumed:"

LOSSES = """
One record of a learner is swapped in thought, and every message of the capture weighed: how much likelier is it with the
true record than with the other one? The logarithm of that ratio, summed over rounds, is the exact privacy loss of this
very capture, for the most telling swap among those tried. The grey area is what the claim allows, as far as it is finite.
"""
NO_LOSSES = "There is no capture to measure."

HEARD = """
All that {name} said, as the eavesdropper heard it: {messages} of {numbers}, a column each. {noise}
"""
NOISE = """
Mostly this is noise, of scale {first} at first and {last} in the end; what is learned shows only as a faint lasting
tint of a row.
"""
NO_NOISE = "There is no noise in it."
CLIPPED = "The colours end where 2 % of the values lie beyond."
PICKED = "Too large to show whole: evenly spaced rounds and coordinates were picked."
WHERE = "The capture lies in <code>{location}</code>."

TABLE = """
Own accuracy: on the learner’s own records, each predicted before it was learned. Forever: bound on the per-event ε over
infinitely many rounds. Loss: of this capture; the largest that any capture could have shown for the same swap; and what is
claimed for the record that was swapped (not the dearest one), which neither may exceed.
"""

OUTPUT = (
    "In published decisions",
    """Somebody who sees nothing but the decisions that all learners publish (threat model <i>output</i>) is promised
    ε = {epsilon}. <b>That is no promise about the messages.</b>""",
)
THREATS = {
    "wire": (
        "On the wire",
        """Somebody hears every message on every channel (threat model <i>wire</i>), and knows the algorithm, the graph
        and the noise scales. Swapping one record changes the probability of whatever is heard by a factor of at most
        e<sup>ε</sup>, even if other learners send it anything they like.""",
    ),
    "neighbour": (
        "At a neighbour",
        """One learner reads what reaches it (threat model <i>neighbour</i>), and knows the algorithm, the graph and the noise
        scales. Swapping one record of another learner changes the probability of what it reads by a factor of at most
        e<sup>ε</sup>. Somebody who hears other channels, too, is not covered.""",
    ),
    "output": OUTPUT,
}
"""Who may listen, and what that means."""
UNPROTECTED = (
    "Nothing",
    "<b>ε is infinite</b>: this algorithm promises nothing about what can be heard.",
)
PROMISE = (
    (
        "Event and record",
        """<i>Per event</i>: one use of one record is swapped. <i>Per record</i>: the record is swapped wherever it is
        learned; in this run a record was learned in up to {uses}. Whoever owns several records adds up their losses.""",
    ),
    (
        "Not covered",
        """Accuracies, predictions answered to clients, the number, size and timing of messages, and the un-noised models
        inside the learners.""",
    ),
)
"""Terms and what they mean."""

WARNINGS = (
    "Conditions that do not hold. Most belong to a convergence theorem, and touch how well is learned; those that touch what "
    "is protected say so."
)

SPEC = "The whole run spec, to run it again."

OUTSIDE = """
This page itself is not covered by the promise: accuracies and exact losses are computed from the records, without noise.
Think before you publish it.
"""
