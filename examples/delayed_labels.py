"""Features now, labels later: `python delayed_labels.py HOST:PORT`.

Start the run of docs/live.md in another terminal: `sottovoce up wards.yaml` says where each learner takes records.
"""

import asyncio
import heapq
import sys

import numpy as np

import sottovoce as sv

DAY_S = 86_400


def events(n):
    """Admissions, and outcomes some days later; of some patients nobody ever hears: time, kind, patient, and what is told."""
    rng, told = np.random.default_rng(1), []
    for patient in range(n):
        at, age = patient * 600.0, int(rng.integers(0, 121))
        heapq.heappush(told, (at, "admitted", patient, {"age": age, "ward": str(rng.choice(["icu", "surgery"]))}))
        if rng.random() < 0.9:
            later = at + rng.exponential(3 * DAY_S)
            heapq.heappush(told, (later, "outcome", patient, "died" if age > 70 else "home"))
    while told:
        yield heapq.heappop(told)


async def main(address):
    join = sv.LabelJoin(window_s=7 * DAY_S, max_waiting=10_000)
    judged = sv.PrequentialEvaluation()
    async with sv.connect_learner(address, source="outcomes") as learner:
        for position, (now, kind, patient, told) in enumerate(events(40)):
            if kind == "admitted":
                join.add_event(patient, (told, await learner.predict([told])), now)
            elif (known := join.label(patient, now)) is not None:
                record, prediction = known
                if await learner.feed([record], [told], positions=[position]):  # 0: it was fed before
                    judged.update([told], prediction)
    print(join.counts)
    print(f"{judged.records} predictions judged, calibration error {judged.calibration.error:.2f}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
