"""`python -m tests.versions --old PYTHON`: an old version and this one in the same runs, and what came of it.

PYTHON is that of an environment in which the old version is installed; noxfile.py's session `versions` makes it.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sottovoce_eavesdropper.capture_reader import open_capture
from tests.versions.stage import ALL, CLIENT, COORDINATOR, EAVESDROPPER, LEARNERS, Stage

ROUNDS, CHANGING_ROUNDS = 100, 400


@dataclass(frozen=True, slots=True)
class Trial:
    """A run with two versions.

    Attributes:
        title: what it is.
        new: who is of this version; all others are of the old one.
        changed: who is changed for the other version under way, one after the other.
    """

    title: str
    new: tuple[str, ...]
    changed: tuple[str, ...] = ()

    @property
    def rounds(self) -> int:
        return CHANGING_ROUNDS if self.changed else ROUNDS


TRIALS = (
    Trial("old learners, new coordinator, eavesdropper and client", (CLIENT, COORDINATOR, EAVESDROPPER)),
    Trial("new learners, old coordinator, eavesdropper and client", LEARNERS),
    Trial("one old learner among new ones", (CLIENT, COORDINATOR, EAVESDROPPER, *LEARNERS[1:])),
    Trial("an upgrade under way: coordinator, then learners", (CLIENT, EAVESDROPPER), (COORDINATOR, *LEARNERS)),
)


async def tried(trial: Trial, folder: Path, pythons: Mapping[str, str]) -> list[str]:
    """Run it; returns what does not hold."""
    cast = {name: "new" if name in trial.new else "old" for name in ALL}
    stage = Stage(folder, pythons, cast)
    try:
        await stage.begin(trial.rounds)
        done = 0
        for k, name in enumerate(trial.changed, 1):
            done = await stage.until(max(done + 10, k * trial.rounds // (2 * len(trial.changed))))
            if done >= trial.rounds:
                return [f"the run was over before {name} was changed"]
            await stage.change(name, "old" if cast[name] == "new" else "new")
        code = await stage.over()
    except RuntimeError as error:
        return [str(error)]
    finally:
        await stage.end()
    if code:
        return [f"the run failed, exit code {code}:\n{stage.words()}"]
    return wrong_in(stage, trial.rounds)


def wrong_in(stage: Stage, rounds: int) -> list[str]:
    """What this version has to say against the run's capture."""
    (place,) = Path(stage.captures).iterdir()
    capture = open_capture(place)
    wrong = [] if capture.is_complete else ["the capture is not complete"]
    transcript = capture.read_transcript(capture.shapes, len(LEARNERS))
    wrong += [] if transcript.rounds == rounds else [f"the transcript has {transcript.rounds} of {rounds} rounds"]
    audit = [sys.executable, "-m", "sottovoce_client", "audit", "--captures", str(place)]
    done = subprocess.run([*audit, "--out", str(stage.folder / "audit")], capture_output=True, text=True, check=False)
    wrong += [] if done.returncode == 0 else [f"the audit ends with {done.returncode}:\n{done.stdout}{done.stderr}"]
    return wrong


def main() -> int:
    """Exit code 1: something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--old", required=True, help="the interpreter of the old version's environment")
    parser.add_argument("--only", default="", help="trials whose title has these words")
    options = parser.parse_args()
    pythons = {"old": options.old, "new": sys.executable}
    bad = 0
    with tempfile.TemporaryDirectory(prefix="sottovoce-versions-") as folder:
        for k, trial in enumerate(trial for trial in TRIALS if options.only in trial.title):
            began = time.monotonic()
            wrong = asyncio.run(tried(trial, Path(folder, str(k)), pythons))
            bad += bool(wrong)
            print(f"{'FAILED' if wrong else 'holds'}: {trial.title} ({time.monotonic() - began:.0f} s)", flush=True)
            for line in wrong:
                print(f"  {line}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
