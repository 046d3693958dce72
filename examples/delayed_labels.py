"""Records whose labels arrive later than their features: `python delayed_labels.py HOST:PORT`.

Start the run of docs/guides/live.md in another terminal: `sottovoce up wards.yaml` prints where each learner takes records.
"""

import asyncio
import heapq
import sys

import numpy as np

import sottovoce as sv

DAY_S = 86_400


def events(n):
    """Yield admissions, and outcomes of most patients some days later: time, kind, patient and value."""
    rng, queue = np.random.default_rng(1), []
    for patient in range(n):
        time, age = patient * 600.0, int(rng.integers(0, 121))
        heapq.heappush(queue, (time, "admitted", patient, {"age": age, "ward": str(rng.choice(["icu", "surgery"]))}))
        if rng.random() < 0.9:
            later = time + rng.exponential(3 * DAY_S)
            heapq.heappush(queue, (later, "outcome", patient, "died" if age > 70 else "home"))
    while queue:
        yield heapq.heappop(queue)


async def main(address):
    join = sv.LabelJoin(window_s=7 * DAY_S, max_waiting=10_000)
    evaluation = sv.PrequentialEvaluation()
    async with sv.connect_learner(address, source="outcomes") as learner:
        for position, (now, kind, patient, value) in enumerate(events(40)):
            if kind == "admitted":
                join.add_event(patient, (value, await learner.predict([value])), now)
            elif (joined := join.label(patient, now)) is not None:
                record, prediction = joined
                if await learner.feed([record], [value], positions=[position]):  # 0: it was fed before
                    evaluation.update([value], prediction)
    print(join.counts)
    print(f"{evaluation.records} predictions evaluated, calibration error {evaluation.calibration.error:.2f}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
