"""Comparison of two algorithms on the same records with the same guarantee, with error bars: `python compare.py`."""

import sottovoce as sv

ROUNDS, REPLICAS = 100, 20
EPSILON = 10.0  # of a record, in all its uses, over the whole run
ALGORITHMS = {
    "LDP-DOL": {"name": "ldp-dol"},
    "DSGD": {"name": "dsgd", "noise": {"kind": "power"}},
}

print(f"after {ROUNDS} rounds, mean ± two standard errors over {REPLICAS} replicas")
for title, algorithm in ALGORITHMS.items():
    plain = sv.Experiment(
        rounds=ROUNDS,
        algorithm=algorithm,
        decision_set={"kind": "l2_ball", "radius": 10.0},
        data={"source": "breast_cancer", "scale": "standard", "reuse": True, "batch_size": 8},
    )
    # Accuracies are comparable only with the same guarantee.
    experiment = sv.calibrate(plain, EPSILON, privacy_unit="record")
    # With the same seed, equal noise requests of both get equal noise.
    results = sv.simulate(experiment, REPLICAS, seed=1, checkpoints=1).results
    final = results.summary()
    print(f"\n{title}, epsilon of a record {results.runs[0].facts.epsilon_record:.4g}")
    for metric, mean, error in zip(final["metric"], final["mean"], final["standard_error"], strict=True):
        print(f"  {metric:<24} {mean:10.4g} ± {2 * error:.2g}")
