"""A learner at the end of a pipeline of River, judged while it learns: `python river_pipeline.py HOST:PORT`.

Start the run of docs/live.md in another terminal: `sottovoce up wards.yaml` says where each learner takes records.
"""

import sys

import numpy as np
from river import compose, drift, evaluate, metrics

import sottovoce as sv


def admissions(n, seed):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        age, ward = int(rng.integers(0, 121)), str(rng.choice(["icu", "surgery"]))
        died = age / 120 + 0.4 * (ward == "icu") + rng.normal(0, 0.1) > 0.8
        yield {"age": age, "ward": ward, "bed": int(rng.integers(1, 41))}, "died" if died else "home"


def main(address):
    with sv.connect_learner(address, source="river") as learner:
        model = compose.Select("age", "ward") | learner.as_river()  # a step that learns nothing
        print(evaluate.progressive_val_score(admissions(50, seed=1), model, metrics.Accuracy()))

        # The same in larger steps: one call predicts a hundred records, and one feeds them.
        judged = sv.PrequentialEvaluation(metrics.Accuracy(), metrics.ROCAUC(), drift=drift.ADWIN())
        coming = [({"age": x["age"], "ward": x["ward"]}, y) for x, y in admissions(1000, seed=2)]
        for at in range(0, len(coming), 100):
            records, outcomes = zip(*coming[at : at + 100], strict=True)
            prediction = learner.predict(records)
            learner.feed(records, outcomes)
            judged.update(outcomes, prediction)
        print(*judged.metrics, f"calibration error {judged.calibration.error:.2f}", f"drifts {list(judged.drifts)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
