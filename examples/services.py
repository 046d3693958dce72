"""Experiment on running services: `python services.py [HOST:PORT]`.

Start them in other terminals: `sottovoce coordinator`, `sottovoce learner --name north`, and likewise east and south.
"""

import asyncio
import sys

import sottovoce as sv

experiment = sv.Experiment(
    rounds=50,
    learners=["north", "east", "south"],
    algorithm={"name": "ldp-dol", "sigma": 2.0},
    topology={"graph": "complete"},
    data={"source": "breast_cancer", "scale": "standard", "reuse": True},
)


async def main(address: str) -> None:
    """Start the experiment, follow it, and print epsilon."""
    async with sv.connect(address) as deployment:
        started = await deployment.start(experiment)  # this process streams its records
        async for progress in started.watch():
            print(f"round {min(progress.rounds)}, epsilon {max(progress.epsilon):.4g}")
        outcome = await started.wait_for_outcome()
    print(outcome.state)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:7400"]))
