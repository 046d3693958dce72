"""Audit of your own algorithm, and of a copy with too little noise: `python audit_own.py` (extra `audit`)."""

from dataclasses import dataclass, replace

from gossip import Gossip, GossipSpec

import sottovoce as sv


@dataclass(frozen=True)
class Stingy(Gossip):
    """Gossip with a twentieth of the noise that its accountant assumes: a mistake that an audit finds."""

    def emit(self, state, noise):
        return Gossip.emit(replace(self, scale=self.scale / 20), state, noise)


class StingySpec(GossipSpec):
    """The same parameters, for the broken algorithm."""

    def build(self, context):
        return Stingy(self.name, context.dim, context, self.step, self.scale), ()


def main():
    """Print both verdicts."""
    for name in ("gossip:GossipSpec", "audit_own:StingySpec"):
        experiment = sv.Experiment(
            rounds=5,
            learners=3,
            algorithm={"name": name, "scale": 1.0},
            decision_set={"kind": "l2_ball", "radius": 10.0},
            data={"source": "breast_cancer", "scale": "standard"},
        )
        verdict = sv.audit(experiment, runs=300, seed=1).verdict
        print(f"{name}: {verdict.kind}\n  {verdict.text}")


if __name__ == "__main__":
    main()
