"""`sottovoce gallery`: what an eavesdropper can make of the wire, in pictures, with and without noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sottovoce.algorithms.dual_averaging.algorithm import DualAveraging
from sottovoce.errors import CaptureError, SpecError
from sottovoce.experiment import prepare
from sottovoce.lab.attacks.rebuild import rebuild
from sottovoce.spec import parse_spec
from sottovoce_client import terminal
from sottovoce_client.documents import private, write_json
from sottovoce_client.lab.gallery import cases as cases
from sottovoce_client.lab.gallery import exhibits
from sottovoce_client.lab.gallery.cases import Exhibit, Gallery, Membership, Strip
from sottovoce_client.wording import NOTHING, number, share
from sottovoce_eavesdropper.reading import find_captures
from sottovoce_eavesdropper.storage import open_folder


def gallery(folder: Path, epsilons: Sequence[float], runs: int, seed: int, console: Console | None = None) -> int:
    """Run every attack on simulated runs over scikit-learn's digits, print figures, write `gallery.json` and `gallery.html`.

    Returns the exit code.

    Args:
        folder: where to.
        epsilons: noise of the pictures, per record over the whole run.
        runs: for the guesses of membership.
        seed: of noise, coins and searches.
        console: where to print (default: standard output).

    Raises:
        SpecError: scikit-learn, scipy or Jinja2 are not installed.
    """
    console = console or terminal.console()
    with console.status("reading records off gradients"):
        linear = cases.exhibit("linear", cases.linear, epsilons, seed)
    with console.status("searching for records that fit a network's gradients"):
        network = Exhibit("network", ())
        if find_spec("torch") is not None:
            network = cases.exhibit("network", cases.network, epsilons, seed, rounds=1)
    with console.status("reading records off gossip"):
        gossip = cases.gossip(epsilons, seed)
    with console.status("guessing what was learned"):
        guesses = cases.memberships(runs, seed)
    return _publish(Gallery((linear, network, gossip), guesses), folder, console)


def gallery_of(
    capture: Path,
    folder: Path,
    seed: int,
    folders: Sequence[Path],
    console: Console | None = None,
    *,
    allow_imports: bool = False,
) -> int:
    """The attack that fits a capture, on what was overheard on the wire; returns the exit code.

    Args:
        capture: its folder.
        folder: where to.
        seed: of searches.
        folders: where data sets that have a name are looked for: the originals.
        console: where to print (default: standard output).
        allow_imports: import code that the capture's spec names.

    Raises:
        CaptureError: it cannot be read, or has no spec.
        SpecError: no attack fits its algorithm, or what the attack needs is not installed.
        DataError: the spec's data cannot be used.
    """
    console, below = console or terminal.console(), list(find_captures(open_folder(str(capture))))
    if not below:
        raise CaptureError(f"{capture} must be a capture, or a folder with one: there is no capture.json")
    found = below[-1]
    if not found.facts.get("spec"):
        raise CaptureError(f"the capture {capture} must have a run spec to be attacked, and has none")
    spec = parse_spec(found.facts["spec"], source=str(capture), imports=allow_imports)
    prepared = prepare(spec, folders=folders)
    run = prepared.run
    if isinstance(run.algorithm, DualAveraging):
        raise SpecError("membership is guessed over many runs, a capture is one; see sottovoce audit")
    heard = found.transcript(run.field_shapes, run.spec.n_learners, run.network)
    epsilon = max(run.guarantee(i).epsilon() for i in range(run.spec.n_learners))
    label = f"claimed ε = {number(epsilon)}" if math.isfinite(epsilon) else "nothing is promised"
    with console.status("attacking"):
        strip = Strip(label, rebuild(run, prepared.data, heard, seed=seed))
    where = found.place.name.rpartition("/")[2]
    source = f"{run.spec.algorithm.name}, {run.spec.data.source}, {heard.rounds:,} rounds overheard in {where}"
    return _publish(Gallery((Exhibit("capture", (strip,)),), source=source), folder, console)


# ---- showing ---------------------------------------------------------------------------------------------------------


def _publish(shown: Gallery, folder: Path, console: Console) -> int:
    opener = private if shown.source else None  # of a capture: they hold its learners' records
    write_json(folder / "gallery.json", _document(shown), opener=opener)
    _print(shown, console)
    page = folder / "gallery.html"
    code = terminal.attempt(str(page), lambda: exhibits.gallery_page(shown).write(page, opener=opener))
    console.out(f"{folder}: gallery.json{'' if code else ', gallery.html'}", highlight=False)
    return code


def _document(shown: Gallery) -> dict[str, Any]:
    """`gallery.json`."""
    return {
        "source": shown.source or "simulated on scikit-learn's digits",
        # By attack; empty: what it needs is not installed.
        "attacks": {each.name: [_attacked(strip) for strip in each.strips] for each in shown.exhibits},
        "membership": [
            {
                "algorithm": each.algorithm,  # and where its decisions come from
                "record": each.record,
                "seen": each.seen,  # by the guesser
                "claim": each.claim,  # epsilon of all learners together
                "covered": each.covered,  # whether all that is seen is part of the claim
                "runs": each.guessed.runs,
                "correct": each.guessed.correct,
                "interval": (each.guessed.low, each.guessed.high),  # 95 %, of the share of right guesses
                "epsilon_at_least": each.guessed.bound,
            }
            for each in shown.memberships
        ],
    }


def _attacked(strip: Strip) -> dict[str, Any]:
    """One transcript attacked."""
    made = strip.rebuilt
    return {
        "protection": strip.label,
        "records": len(made.pictures),  # rebuilt
        "mean_squared_error": made.error,
        "similarity": made.alike,  # 1 if equal, about 0 if unrelated
        "recognised": made.found,  # the share that is nearest its own record
        "recognised_among": made.pool,  # so many records
        "told_from_one_other": made.told,  # the share; null: messages do not tell where a gradient was taken
        "originals": np.round(made.originals[: exhibits.SHOWN], 4),  # the first true records, as pictures
        "pictures": np.round(made.pictures[: exhibits.SHOWN], 4),  # what was made of them
    }


def _print(shown: Gallery, console: Console) -> None:
    table = terminal.table("attack", "protection")
    for head in ("similarity", "recognised", "told from\nanother"):
        table.add_column(head, justify="right")
    for each in shown.exhibits:
        title = exhibits.TITLES[each.name]
        for k, strip in enumerate(each.strips):
            figures = number(strip.rebuilt.alike, 2), share(strip.rebuilt.found), share(strip.rebuilt.told)
            table.add_row("" if k else title, strip.label, *figures, end_section=k == len(each.strips) - 1)
        if not each.strips:
            table.add_row(title, Text("needs PyTorch", style="yellow"), *[NOTHING] * 3, end_section=True)
    console.print(table)
    if not all(each.strips for each in shown.exhibits):
        console.print(Text(f"The search needs PyTorch: {exhibits.GET_TORCH}"))
    if shown.memberships:
        console.print(_guesses(shown.memberships))


def _guesses(rows: Sequence[Membership]) -> Table:
    table = terminal.table("was it learned?", "records", "seen")
    for head in ("right guesses", "ε at\nleast", "ε\nclaimed"):
        table.add_column(head, justify="right")
    for each in rows:
        claim = number(each.claim) if each.covered else "none"
        table.add_row(
            each.algorithm, each.record, each.seen, share(each.guessed.rate), number(each.guessed.bound, 3), claim
        )
    return table
