"""An audit of one's own algorithm, and of one that says less than it should: `python audit_own.py` (extra `audit`)."""

from dataclasses import dataclass, replace

from gossip import Gossip, GossipSpec

import sottovoce as sv


@dataclass(frozen=True)
class Stingy(Gossip):
    """Draws a twentieth of the noise that its meter counts on: the kind of mistake that an audit is for."""

    def emit(self, state, noise):
        return Gossip.emit(replace(self, scale=self.scale / 20), state, noise)


class StingySpec(GossipSpec):
    """Its parameters: the same."""

    def build(self, context):
        return Stingy(self.name, context.dim, context, self.step, self.scale), ()


def main():
    """Both verdicts."""
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
