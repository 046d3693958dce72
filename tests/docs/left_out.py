"""What of the pages' commands does not run as it stands, and why: here, and nowhere else."""

from __future__ import annotations

from enum import StrEnum


class Why(StrEnum):
    """Reasons. What is left out is still held against the command line: its words must exist."""

    INSTALLED = "it is installed already: the tests' own packages are what is tried"
    NEWCOMER = "it installs from the clone and starts: `.ci/run` does it as a newcomer would"
    DOWNLOADS = "it downloads, or needs what was downloaded"
    LONG = "it takes minutes: tests of the command give it less to do"
    EXPERIMENTS = "it runs an item of experiments/ in full: tests/test_experiments.py runs its short form"
    TWICE = "its page or another one has it again, with other options; tests of its own have the rest"
    GOES_ON = "it needs a run that goes on meanwhile: the engineer's tutorial follows one"
    ELSEWHERE = "it speaks to machines, stores or clusters that are not here"
    BROKER = "it needs a broker with messages: tests/client/test_feeding_brokers.py and its neighbours have some"
    OTHERS = "it is a program of others"
    TORCH = "it needs PyTorch, an extra: `nox -s torch` tries it"
    DOCKER = "it needs a Docker Engine: `nox -s deploy` tries it"
    KUBERNETES = "it needs a cluster: tests/deploy_chart renders what it would install"
    ROOT = "it needs root, and a machine that runs systemd"
    AUTHORITY = "it needs an authority: docs/identities.md makes one"
    YOURS = "it names a file or a folder of the reader's own"


NOT_RUN: dict[str, dict[str, Why]] = {
    "README.md": {
        "python3 -m venv": Why.NEWCOMER,
        "sottovoce audit examples/wards.yaml": Why.LONG,
        "sottovoce compare": Why.LONG,
    },
    "docs/audit.md": {
        "sottovoce audit ring.yaml": Why.LONG,
        "sottovoce audit --captures audit": Why.LONG,
        "sottovoce demo": Why.TWICE,
        "sottovoce audit --captures demo": Why.TWICE,
    },
    "docs/away.md": {"sottovoce runs": Why.GOES_ON},
    "docs/budget.md": {
        "sottovoce budget wards.yaml": Why.TWICE,
    },
    "docs/comparison.md": {"sottovoce compare": Why.LONG},
    "docs/console.md": {"pip install": Why.INSTALLED},
    "docs/data.md": {"sottovoce data fetch": Why.DOWNLOADS, "sottovoce demo --data mushrooms": Why.DOWNLOADS},
    "docs/deploy.md": {"docker": Why.DOCKER},
    "docs/eavesdropper.md": {
        "pip install": Why.INSTALLED,
        "sottovoce eavesdropper --folder s3": Why.ELSEWHERE,
        "sottovoce eavesdropper --remote-workers": Why.ELSEWHERE,
        "sottovoce eavesdropper --join": Why.ELSEWHERE,
        "sottovoce transcript show s3": Why.ELSEWHERE,
    },
    "docs/feeding.md": {
        "sottovoce feed ward-3.csv": Why.GOES_ON,
        "jq": Why.GOES_ON,
        "sottovoce feed http": Why.GOES_ON,
        "curl": Why.GOES_ON,
        "sottovoce feed 'nats://broker": Why.BROKER,
        "redis-cli": Why.BROKER,
        "sottovoce feed 'redis://broker": Why.BROKER,
        "sottovoce feed 'mqtts://broker": Why.BROKER,
        "mosquitto_pub": Why.BROKER,
        "sottovoce feed 'kafka://broker": Why.BROKER,
    },
    "docs/hosting.md": {"sottovoce learner --host": Why.ELSEWHERE},
    "docs/identities.md": {
        "sottovoce coordinator": Why.ELSEWHERE,
        "sottovoce learner": Why.ELSEWHERE,
        "sottovoce run": Why.ELSEWHERE,
        "step ": Why.OTHERS,
        "spire-server": Why.OTHERS,
        "sottovoce transcript verify": Why.YOURS,
    },
    "docs/index.md": {"python3 -m venv": Why.NEWCOMER},
    "docs/kubernetes.md": {
        "helm": Why.KUBERNETES,
        "kubectl": Why.KUBERNETES,
        "sottovoce pki": Why.AUTHORITY,
        "cat north-ca.crt": Why.YOURS,
    },
    "docs/live.md": {"sottovoce up": Why.GOES_ON, "grpcurl": Why.OTHERS},
    "docs/metrics.md": {"sottovoce plot": Why.TWICE},
    "docs/models.md": {"sottovoce": Why.GOES_ON},
    "docs/observability.md": {"sottovoce coordinator 2>&1": Why.GOES_ON},
    "docs/papers-admm.md": {"python -m experiments": Why.EXPERIMENTS},
    "docs/papers-dpsda.md": {"python -m experiments": Why.EXPERIMENTS},
    "docs/papers-ldp-dol.md": {"python -m experiments": Why.EXPERIMENTS},
    "docs/papers-pd-ftgl.md": {"python -m experiments": Why.EXPERIMENTS},
    "docs/pipelines.md": {"pip install": Why.INSTALLED},
    "docs/policy.md": {"sottovoce learner": Why.ELSEWHERE},
    "docs/python.md": {"sottovoce simulate": Why.TWICE, "sottovoce plot wards": Why.TWICE},
    "docs/scale.md": {"pip install": Why.INSTALLED, "dask": Why.ELSEWHERE, "sottovoce sweep": Why.ELSEWHERE},
    "docs/schema.md": {"sottovoce init public.csv": Why.YOURS},
    "docs/selftest.md": {"sottovoce lab power": Why.LONG},
    "docs/systemd.md": {
        "python3": Why.ROOT,
        "/opt": Why.ROOT,
        "cp ": Why.ROOT,
        "install": Why.ROOT,
        "systemctl": Why.ROOT,
        "sottovoce pki": Why.AUTHORITY,
    },
    "docs/torch.md": {"pip install": Why.INSTALLED, "PYTHONPATH": Why.TORCH},
    "docs/watch.md": {"sottovoce up wards.yaml --canaries": Why.TWICE, "sottovoce watch canaries": Why.TWICE},
    "docs/tutorial-researcher.md": {"python3 -m venv": Why.INSTALLED, "pip install": Why.INSTALLED},
    "docs/tutorial-auditor.md": {"python3 -m venv": Why.INSTALLED, "pip install": Why.INSTALLED},
    "docs/tutorial-engineer.md": {
        "python3 -m venv": Why.INSTALLED,
        "pip install": Why.INSTALLED,
        "docker ": Why.DOCKER,
        "cp deploy": Why.ROOT,
        "systemctl": Why.ROOT,
    },
}
"""Of a page, how commands begin, and the reason."""
