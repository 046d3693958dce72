"""A learner at the end of a scikit-learn pipeline: `python sklearn_pipeline.py HOST:PORT`.

Start the run of docs/guides/live.md in another terminal: `sottovoce up wards.yaml` prints where each learner takes records.
"""

import sys

import numpy as np
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer

import sottovoce as sv


def admissions(n, rng):
    born, ward = rng.integers(1906, 2027, n), rng.choice(["icu", "surgery"], n)
    died = (2026 - born) / 120 + 0.4 * (ward == "icu") + rng.normal(0, 0.1, n) > 0.8
    return {"born": born, "ward": ward}, np.where(died, "died", "home")


def as_declared(table):
    return {"age": 2026 - table["born"], "ward": table["ward"]}


def main(address):
    rng = np.random.default_rng(1)
    with sv.connect_learner(address, source="sklearn") as learner:
        pipeline = Pipeline([("fields", FunctionTransformer(as_declared)), ("model", learner.as_sklearn())])
        for _ in range(10):
            records, outcomes = admissions(100, rng)
            print(f"accuracy {np.mean(pipeline.predict(records) == outcomes):.2f}")
            pipeline[-1].partial_fit(pipeline[:-1].transform(records), outcomes)
        print(pipeline[-1].classes_, pipeline.predict_proba(records)[0].round(2))


if __name__ == "__main__":
    main(*sys.argv[1:])
