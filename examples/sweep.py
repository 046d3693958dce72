"""Sweep over noise sizes as a table for LaTeX and a figure for a paper: `python sweep.py` (extra `audit`)."""

import matplotlib.pyplot as plt

import sottovoce as sv

METRIC = "average_loss"
experiment = sv.Experiment(
    rounds=50,
    algorithm="ldp-dol",
    data={"source": "breast_cancer", "scale": "standard", "reuse": True},
)


def main() -> None:
    """Run the sweep. Its worker processes import this file, so nothing may start at import."""
    changes = {"algorithm.sigma": [0.5, 1.0, 2.0, 4.0], "topology.graph": ["ring", "complete"]}
    table = sv.sweep(experiment, changes, replicas=20, metrics=[METRIC]).summary()
    print(table)
    table.to_csv("sweep.csv")
    table.to_latex("sweep.tex")

    figure, axes = plt.subplots(figsize=(3.5, 2.5), layout="constrained")
    for graph in changes["topology.graph"]:
        rows = table.where(**{"topology.graph": graph})
        ends = [rows["mean"] - rows["low"], rows["high"] - rows["mean"]]
        axes.errorbar(rows["algorithm.sigma"], rows["mean"], yerr=ends, capsize=3, label=graph)
    axes.set(xscale="log", xlabel="noise size σ", ylabel="average loss")
    axes.legend()
    figure.savefig("sweep.svg")
    figure.savefig("sweep.pdf")


if __name__ == "__main__":
    main()
