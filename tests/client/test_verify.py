"""What is counted of a capture, whatever comes when: messages before and behind their signatures, again, and forged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sottovoce_client.transcripts.verify import LearnerSignatures
from sottovoce_rpc.signatures import DIGEST_BYTES, ROUNDS_PER_BLOCK, Statement, compute_frame_digest

ROUNDS = 2 * ROUNDS_PER_BLOCK
SAID = st.tuples(st.integers(0, ROUNDS - 1), st.sampled_from(["it", "it", "it", "else"]))
SIGNED = st.tuples(
    st.integers(0, 1), st.sets(st.integers(0, ROUNDS_PER_BLOCK - 1)), st.sampled_from(["it", "it", "else"])
)


def of(t: int, what: str) -> bytes:
    return compute_frame_digest(f"{t} {what}".encode())


@given(st.lists(st.one_of(SAID, SIGNED), max_size=60))
def test_it_is_what_sets_would_say(events: list[tuple[int, str] | tuple[int, set[int], str]]) -> None:
    words = LearnerSignatures()
    passed, signed = {t: set[bytes]() for t in range(ROUNDS)}, {t: list[bytes]() for t in range(ROUNDS)}
    for event in events:
        if len(event) == 2:
            t, what = event
            words.record_message(t, of(t, what))
            passed[t].add(of(t, what))
        else:
            block, which, what = event
            rounds = [ROUNDS_PER_BLOCK * block + k for k in range(ROUNDS_PER_BLOCK)]
            digests = [of(t, what) if t % ROUNDS_PER_BLOCK in which else bytes(DIGEST_BYTES) for t in rounds]
            words.record_statement(Statement("run", 0, block, b"".join(digests)))
            for t in rounds:
                signed[t] += [of(t, what)] if t % ROUNDS_PER_BLOCK in which else []

    heard = [t for t in range(ROUNDS) if passed[t]]
    first = {t: set(own[:1]) for t, own in signed.items()}
    assert words.message_rounds_count == len(heard)
    assert words.signed_rounds_count == sum(passed[t] <= first[t] for t in heard)
    assert words.unsigned_rounds == [t for t in heard if not signed[t]]
    assert words.mismatched_rounds == [t for t in heard if signed[t] and passed[t] - first[t]]
    assert words.equivocated_rounds == [t for t in range(ROUNDS) if len(set(signed[t])) > 1]
    assert words.has_signatures == any(len(event) == 3 for event in events)
    unsigned = {t for t in heard if not signed[t]}
    assert set(words.find_missing_rounds(complete=True)) == unsigned
    last = max(heard, default=0) // ROUNDS_PER_BLOCK
    assert set(words.find_missing_rounds(complete=False)) == {t for t in unsigned if t // ROUNDS_PER_BLOCK < last}
