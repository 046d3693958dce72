"""The sentences of the audit's report: plain text, unless said otherwise. Fields in braces are filled in by `audit_report`."""

from __future__ import annotations

HEADLINES = {
    "consistent": ("consistent", "Consistent: no violation was found"),
    "refuted": ("refuted", "Refuted: the claim does not hold"),
    "inconclusive": ("open", "Inconclusive: there is a hint, and too few runs to judge it"),
    "unpromised": ("open", "Nothing finite was promised"),
}
"""By verdict: how the banner looks, and its first line."""

LISTENERS = {
    "wire": "somebody who hears every message on every channel",
    "neighbour": "one neighbour, who reads what reaches it",
    "output": "somebody who sees published decisions only",
}

UNHEARD = {
    "output": "who sees published decisions only hears no message, so there is nothing to replay, and no exact loss is known",
    "neighbour": "this neighbour does not hear everybody whose messages the learner depends on, so no exact loss is known",
}
"""Why the likelihood family had nothing to do."""

FAMILIES = (
    "They look at different things, and none replaces another. Each may raise a false alarm with a third of the probability that "
    "was accepted."
)
LOSSES = (
    "Every run, weighed: how much likelier is what was said if the first world is the true one, as a logarithm? To the right, "
    "the run points to the first world; to the left, to the second. The claim says that nothing lies beyond its two lines. "
    "The thin steps are the bars that the claimed noise would make of these very losses: bars that stray far from them do "
    "not fit it."
)
NO_LOSSES = (
    "How much likelier is what was said if the first world is the true one, as a logarithm? There is nothing to draw."
)
ROC = (
    "Somebody says “first world” whenever the loss is above some level. Up: how often that is right; across: how often it is a "
    "false alarm, for every level. A learner that keeps the claim stays in the grey area, but for chance; "
    "the corner at the top left is a sure guess."
)
ROUNDS = (
    "What all rounds so far show together: no run’s loss may ever be above the dashed claim. And every message on its own: in "
    "each round of each run a coin chose in which world the message was drawn anew after the same past, and the coin was "
    "guessed from it."
)
PROGRESS = (
    "How much the guesses of whole runs prove, as the runs come in, in a random order. The stepped line holds at all times at "
    "once, so one may look whenever one likes; the diamond is the bound that counts above, looked at once. Even right guesses "
    "only would prove no more than the dotted line."
)
NOISE = (
    "A listener who knows the records can take the noise off the messages. Divided by its claimed scale, it must be standard "
    "Laplace noise: the dots on the left follow the line, those on the right lie on the diagonal, but for the few at the ends. A "
    "flatter row of dots is less noise than claimed."
)
ONE_WORLD = "all runs are of one world, so there is nothing to guess"
NO_NOISE = "No noise was found to look at: {why}."
TWINS = (
    "One number of the learner’s messages ({field}, number {coordinate}), in two runs that differ in one record and in nothing "
    "else, not even in noise. The record is learned in round {swapped}. This is a picture, not evidence: who listens does not "
    "know the noise, and sees one of the solid lines only."
)
LEARNERS = (
    "The same replay for every learner, in the few runs that conformance looked at, each for the most telling swap of its first "
    "record. In grey what is claimed for one record of that learner; the learner that was audited is in bold."
)
TESTS = (
    "Nothing that was tried is left out. The verdict may be wrong about a correct learner with probability {alpha} at most: a "
    "third of that, {third}, is for each family. Conformance divides its third evenly among its tests; the likelihood’s is "
    "divided into three, for whole runs, for too many right guesses, and for all single rounds; the black box’s, between its "
    "classifiers."
)
LIMITS = (
    "It does not show that the learner is private. It looked for a violation with so many runs; smaller ones may be left.",
    "It compared two worlds. Another record might give away more; the claim is that for this very swap.",
    "Simulated runs have noise, lengths and numbers of messages, but nothing of timing, of retries, or of what a service adds.",
    "It does not look at what the learner does outside its messages: logs, files, predictions answered to clients.",
)
OVERHEARD_LIMITS = (LIMITS[0], LIMITS[1], LIMITS[3])
"""Of runs that were not simulated."""
NOT_MADE_FOR = (
    "The claim was made for {made_for}. This audit holds it against {heard}: what it finds says nothing about "
    "published decisions."
)
REPEAT = "With the spec below, saved as {file}: the same seed gives the same runs, and the same page."
CHOSEN = "Add the options --record and --replacement that chose the swap."
ELSEWHERE = "The runs came from {source}. They are not made again by a seed; their tests are."
