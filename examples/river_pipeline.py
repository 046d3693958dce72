"""A learner at the end of a River pipeline, evaluated while it learns: `python river_pipeline.py HOST:PORT`.

Start the run of docs/guides/live.md in another terminal: `sottovoce up wards.yaml` prints where each learner takes records.
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
        model = compose.Select("age", "ward") | learner.as_river()  # the first step does not learn
        print(evaluate.progressive_val_score(admissions(50, seed=1), model, metrics.Accuracy()))

        # The same in batches: one call predicts a hundred records, and one feeds them.
        evaluation = sv.PrequentialEvaluation(metrics.Accuracy(), metrics.ROCAUC(), drift=drift.ADWIN())
        records_to_feed = [({"age": x["age"], "ward": x["ward"]}, y) for x, y in admissions(1000, seed=2)]
        for start in range(0, len(records_to_feed), 100):
            records, outcomes = zip(*records_to_feed[start : start + 100], strict=True)
            prediction = learner.predict(records)
            learner.feed(records, outcomes)
            evaluation.update(outcomes, prediction)
        print(
            *evaluation.metrics,
            f"calibration error {evaluation.calibration.error:.2f}",
            f"drifts {list(evaluation.drifts)}",
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
