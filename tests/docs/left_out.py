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
    AUTHORITY = "it needs an authority: docs/operate/identities.md makes one"
    YOURS = "it names a file or a folder of the reader's own"


NOT_RUN: dict[str, dict[str, Why]] = {
    "README.md": {
        "python3 -m venv": Why.NEWCOMER,
        "sottovoce audit examples/wards.yaml": Why.LONG,
        "sottovoce compare": Why.LONG,
    },
    "docs/audit/captures.md": {
        "pip install": Why.INSTALLED,
        "sottovoce eavesdropper --folder s3": Why.ELSEWHERE,
        "sottovoce eavesdropper --remote-workers": Why.ELSEWHERE,
        "sottovoce eavesdropper --join": Why.ELSEWHERE,
        "sottovoce transcript show s3": Why.ELSEWHERE,
    },
    "docs/audit/methods.md": {
        "sottovoce lab self-test": Why.LONG,
    },
    "docs/audit/monitoring.md": {
        "sottovoce up wards.yaml --canaries": Why.TWICE,
        "sottovoce watch canaries": Why.TWICE,
    },
    "docs/audit/run.md": {
        "sottovoce audit ring.yaml": Why.LONG,
        "sottovoce audit --captures audit": Why.LONG,
        "sottovoce demo": Why.TWICE,
        "sottovoce audit --captures demo": Why.TWICE,
    },
    "docs/guides/data.md": {
        "sottovoce data fetch": Why.DOWNLOADS,
        "sottovoce data describe mushrooms": Why.DOWNLOADS,
        "sottovoce demo --data mushrooms": Why.DOWNLOADS,
        "sottovoce init public.csv": Why.YOURS,
    },
    "docs/guides/failures.md": {
        "sottovoce runs": Why.GOES_ON,
    },
    "docs/guides/live.md": {
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
        "sottovoce up": Why.GOES_ON,
        "grpcurl": Why.OTHERS,
    },
    "docs/guides/models.md": {
        "sottovoce predict": Why.GOES_ON,
        "sottovoce models export 127": Why.GOES_ON,
    },
    "docs/guides/python.md": {
        "MLFLOW_TRACKING_URI": Why.ELSEWHERE,
        "WANDB_MODE": Why.TWICE,
    },
    "docs/guides/torch.md": {
        "pip install": Why.INSTALLED,
        "sottovoce": Why.TORCH,
    },
    "docs/index.md": {
        "python3 -m venv": Why.NEWCOMER,
        ".venv/bin/sottovoce demo": Why.NEWCOMER,
    },
    "docs/operate/backup.md": {
        "cp -a": Why.YOURS,
        "docker": Why.DOCKER,
        "sottovoce ledger": Why.YOURS,
        "sottovoce rebind": Why.ELSEWHERE,
        "sottovoce run": Why.ELSEWHERE,
        "sottovoce transcript": Why.YOURS,
    },
    "docs/operate/deploy.md": {
        "docker": Why.DOCKER,
        "chown": Why.ROOT,
        "sottovoce doctor": Why.ELSEWHERE,
        "sottovoce learner --host": Why.ELSEWHERE,
        "helm": Why.KUBERNETES,
        "kubectl": Why.KUBERNETES,
        "sottovoce pki": Why.AUTHORITY,
        "cat north-ca.crt": Why.YOURS,
        "python3": Why.ROOT,
        "/opt": Why.ROOT,
        "cp ": Why.ROOT,
        "install": Why.ROOT,
        "systemctl": Why.ROOT,
        "journalctl": Why.ROOT,
    },
    "docs/operate/identities.md": {
        "sottovoce coordinator": Why.ELSEWHERE,
        "sottovoce learner": Why.ELSEWHERE,
        "sottovoce run": Why.ELSEWHERE,
        "step ": Why.OTHERS,
        "spire-server": Why.OTHERS,
        "sottovoce transcript verify": Why.YOURS,
    },
    "docs/operate/observability.md": {
        "pip install": Why.INSTALLED,
        "sottovoce coordinator 2>&1": Why.GOES_ON,
    },
    "docs/operate/upgrade.md": {
        "pip install": Why.INSTALLED,
        "dask": Why.ELSEWHERE,
        "sottovoce sweep": Why.ELSEWHERE,
    },
    "docs/papers/admm.md": {
        "python -m experiments": Why.EXPERIMENTS,
    },
    "docs/papers/dpsda.md": {
        "python -m experiments": Why.EXPERIMENTS,
    },
    "docs/papers/index.md": {
        "pip install": Why.INSTALLED,
        "sottovoce data fetch": Why.DOWNLOADS,
        "python -m experiments": Why.EXPERIMENTS,
    },
    "docs/papers/ldp-dol.md": {
        "python -m experiments": Why.EXPERIMENTS,
    },
    "docs/papers/pd-ftgl.md": {
        "python -m experiments": Why.EXPERIMENTS,
    },
    "docs/privacy/policy.md": {
        "sottovoce learner": Why.ELSEWHERE,
    },
    "docs/reference/algorithms.md": {
        "sottovoce compare": Why.LONG,
    },
    "docs/reference/metrics.md": {
        "sottovoce plot": Why.TWICE,
    },
    "docs/start/auditor.md": {
        "python3 -m venv": Why.INSTALLED,
        "pip install": Why.INSTALLED,
    },
    "docs/start/engineer.md": {
        "python3 -m venv": Why.INSTALLED,
        "pip install": Why.INSTALLED,
    },
    "docs/start/install.md": {
        "python3 -m venv": Why.INSTALLED,
        "pip install": Why.INSTALLED,
        ". .venv": Why.INSTALLED,
    },
    "docs/start/researcher.md": {
        "python3 -m venv": Why.INSTALLED,
        "pip install": Why.INSTALLED,
        "python -m experiments": Why.EXPERIMENTS,
    },
}
"""Of a page, how commands begin, and the reason."""
