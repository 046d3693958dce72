"""A learner that dies anywhere goes on to the same trajectory, to the last bit, and says nothing twice with other noise."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from sottovoce_client.privacy.ledger import show_ledger
from sottovoce_core.arrays import as_floats
from sottovoce_core.errors import BudgetExhausted, CorruptStateError
from sottovoce_core.noise import KeyedNoise, NoiseSource, SystemNoise
from sottovoce_core.privacy.loss import PrivacyLoss
from sottovoce_core.runs.run import build_run, find_first_round_above
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_learner.assignment import RunAssignment
from sottovoce_learner.peers.outbox import NeighbourLink
from sottovoce_learner.session import Session
from sottovoce_learner.session_factory import open_session
from sottovoce_learner.state_machine import NoiseRecorder
from sottovoce_learner.storage.run_log import RunLog
from sottovoce_learner.storage.snapshot import pack
from sottovoce_learner.storage.store import Ledger, end_run
from sottovoce_rpc.codec import to_tensor
from sottovoce_wire.v1 import learner_pb2
from tests.examples import ALLOWING

ROUNDS, FEATURES = 6, 6
FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text("utf-8")
)


class Died(BaseException):
    """As kill -9: nothing of the process is left."""


def spec_of(**fields: Any) -> RunSpec:
    given = {"rounds": ROUNDS, "learners": 3, "algorithm": {"name": "ldp-dol"}, "durability": "process"}
    more = {"clock": {"window": 2}, "telemetry": {"accuracy": True}, "topology": {"graph": "complete"}}
    return parse_spec({**given, **more, **fields}, allow_imports=True)


def records(learner: int, t: int) -> learner_pb2.SampleBatch:
    """Of one round; some bring none, some two."""
    rows = np.random.default_rng([learner, t]).normal(size=(t % 3, FEATURES)) / 9
    labels = as_floats(np.arange(t % 3))
    return learner_pb2.SampleBatch(
        source="s", sequence=t, features=to_tensor(as_floats(rows)), labels=to_tensor(labels)
    )


class Crew:
    """All learners of a run, without a network: each may die, and is born again with its state folder.

    Args:
        owner: epsilon and delta of the owner's limit for all runs; 0: none.

    Attributes:
        left: by learner and round, what was ever handed to a link.
    """

    def __init__(
        self,
        folder: Path,
        spec: RunSpec,
        *,
        keyed: bool,
        run_id: str = "run-1",
        owner: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.folder, self.spec, self.keyed, self.run_id, self.owner = folder, spec, keyed, run_id, owner
        self.left: dict[tuple[int, int], set[bytes]] = {}
        self.learners = [self.born(i) for i in range(spec.n_learners)]

    def born(self, index: int) -> Session:
        noise: NoiseSource = KeyedNoise("secret", "run", index) if self.keyed else SystemNoise()
        role = RunAssignment(self.run_id, self.spec, FEATURES, index, self.spec.names[index])
        epsilon, delta = self.owner
        policy = ALLOWING.model_copy(update={"delta": delta})
        return open_session(role, noise, self.folder / str(index), policy=policy, own_budget=epsilon or None)

    async def live(self, rounds: range, mortal: int = 0) -> None:
        """These rounds; whoever dies in one is born again, and does what is left of it."""
        for t in rounds:
            there = [i for i, one in enumerate(self.learners) if t in one.state_machine.learner_participation]
            for index in there:
                await self.survived(index, mortal, "said", t)
            for index in there:
                await self.survived(index, mortal, "learned", t)

    async def survived(self, index: int, mortal: int, what: str, t: int) -> None:
        while True:
            try:
                await getattr(self, what)(self.learners[index], t)
                return
            except Died:
                assert index == mortal
                self.learners[index]._log.close()
                self.learners[index] = self.born(index)

    async def said(self, one: Session, t: int) -> None:
        """Round t, and before it whatever a learner that died has lost: neighbours say it again."""
        while one.record_queue.filled_rounds <= t:
            await one.ingestor.feed(records(one.assignment.index, one.record_queue.get_next_sequence("s")))
            await one.ingestor.receipts.wait_durable()
        for k in range(one.state_machine.rounds_done, t):
            await self._learned(one, k)
        if one.state_machine.rounds_committed <= t:
            await one._send(t)
        await one._snapshots.finish()
        for link in one.links.values():
            for k, frame in link._frames:
                self.left.setdefault((one.assignment.index, k), set()).add(frame)

    async def learned(self, one: Session, t: int) -> None:
        await self.said(one, t)
        for k in range(one.state_machine.rounds_done, t + 1):
            await self._learned(one, k)

    async def _learned(self, one: Session, t: int) -> None:
        for j in one.plan.get_in_neighbours(t):
            if one.inbox.get_due_round(j) == t:
                one.receive(j, dict(self.learners[j].links[one.assignment.index]._frames)[t])
        await one._update(t)

    def die(self) -> None:
        """All of them."""
        for one in self.learners:
            one._log.close()

    def kept(self, index: int) -> list[str]:
        """Kinds of files in the folder of a learner's log."""
        return sorted(path.suffix[1:] for path in (self.folder / str(index)).glob("*@*/*"))

    def models(self) -> list[bytes]:
        return [one.algorithm.decision(one.state_machine.state).tobytes() for one in self.learners]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Models in the end, where nobody dies."""
    import asyncio

    crew = Crew(tmp_path_factory.mktemp("undisturbed"), spec_of(), keyed=True)
    asyncio.run(crew.live(range(ROUNDS)))
    crew.die()
    return crew.models()


def dying(patch: pytest.MonkeyPatch, folder: Path, at: int) -> list[int]:
    """The learner of this folder dies before its change number `at`, or in the middle of a write; changes are counted.

    A change: a write, and a file that is renamed or deleted.
    """
    real, count = os.pwrite, [0]

    def write(file: int, raw: bytes, where: int) -> int:
        if not os.readlink(f"/proc/self/fd/{file}").startswith(f"{folder}/"):
            return real(file, raw, where)
        count[0] += 1
        if count[0] == at:
            raise Died
        if count[0] == -at:
            real(file, raw[: len(raw) // 2], where)
            raise Died
        return real(file, raw, where)

    def counted(real: Callable[..., None]) -> Callable[..., None]:
        def change(path: Any, *more: Any, **options: Any) -> None:
            if str(path).startswith(f"{folder}/"):
                count[0] += 1
                if count[0] == abs(at):
                    raise Died
            real(path, *more, **options)

        return change

    patch.setattr(os, "pwrite", write)
    patch.setattr(os, "replace", counted(os.replace))
    patch.setattr(os, "unlink", counted(os.unlink))
    return count


@pytest.fixture(params=[False, True], ids=["log", "snapshots"])
def snapshots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Is a snapshot made after every round?"""
    if request.param:
        monkeypatch.setattr(RunLog, "is_snapshot_due", True)
    return bool(request.param)


async def writes(folder: Path) -> int:
    """Of one learner in the whole run."""
    with pytest.MonkeyPatch.context() as patch:
        crew = Crew(folder, spec_of(), keyed=True)
        count = dying(patch, folder / "0", 0)
        await crew.live(range(ROUNDS))
    return count[0]


@pytest.mark.slow
@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "system"])
@pytest.mark.parametrize("torn", [False, True], ids=["before", "torn"])
async def test_it_goes_on_wherever_it_died(
    tmp_path: Path, undisturbed: list[bytes], keyed: bool, torn: bool, snapshots: bool
) -> None:
    """Before and within every write: one content a round, as much charged as was said, and the same trajectory."""
    total = await writes(tmp_path / "counted")
    assert total > (10 if snapshots else 4) * ROUNDS
    every = 1 + snapshots  # of so many more changes, half with either noise
    for at in range(every - keyed * snapshots, total + 1, every):
        folder = tmp_path / str(at)
        crew = Crew(folder, spec_of(), keyed=keyed)
        with pytest.MonkeyPatch.context() as patch:
            count = dying(patch, folder / "0", -at if torn else at)
            await crew.live(range(ROUNDS))
        # It died, and did the rest; a snapshot that was not made then is not made up for.
        assert count[0] >= (at if snapshots else total)
        assert all(len(contents) == 1 for contents in crew.left.values())
        assert len(crew.left) == 3 * ROUNDS
        if keyed:
            assert crew.models() == undisturbed
        one = crew.learners[0]
        assert Ledger(folder / "0").sum_epsilon("learner-0") == one.status.epsilon_spent > 0
        assert one.status.rounds_done == ROUNDS and one.status.prequential_accuracy is not None
        crew.die()
        crew.born(0)._log.close()
        assert crew.kept(0).count("snapshot") <= snapshots and "draft" not in crew.kept(0)


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "system"])
async def test_a_budget_at_a_delta_ends_in_the_same_round_wherever_it_died(
    tmp_path: Path, keyed: bool, snapshots: bool
) -> None:
    """Before every write: one content a round, never above the budget, and no round fewer than without a death."""
    delta, counts = 0.01, np.arange(ROUNDS) % 3
    accountant = build_run(spec_of(), FEATURES).algorithm.accountant(0)
    whole = PrivacyLoss(accountant.losses(counts).sum(), accountant.total_renyi(counts)).epsilon(delta)
    spec = spec_of(privacy={"budget": 0.9 * whole, "delta": delta})
    limit = build_run(spec, FEATURES).budget(0)
    assert limit is not None and limit.delta == delta
    spending = accountant.spending(counts, limit)
    last = find_first_round_above(spending, limit.epsilon)
    assert last == ROUNDS - 1

    async def run_until_spent(folder: Path, at: int) -> tuple[Crew, int]:
        crew = Crew(folder, spec, keyed=keyed)
        with pytest.MonkeyPatch.context() as patch:
            count = dying(patch, folder / "0", at)
            with pytest.raises(BudgetExhausted, match=re.escape(f"(at delta {delta:g}), above the budget of")):
                await crew.live(range(ROUNDS))
        return crew, count[0]

    _, total = await run_until_spent(tmp_path / "counted", 0)
    assert total > last
    for at in range(1, total + 1, 1 + 2 * snapshots):
        crew, _ = await run_until_spent(folder := tmp_path / str(at), at)
        assert all(len(contents) == 1 for contents in crew.left.values())
        status = crew.learners[0].status
        assert status.rounds_committed == last and status.epsilon_charged == pytest.approx(spending[last - 1], rel=1e-9)
        assert status.epsilon_charged <= limit.epsilon < status.epsilon_spent
        crew.die()
        with pytest.raises(BudgetExhausted):
            await crew.born(0)._send(last)
        end_run(folder / "0", "learner-0", "run-1")
        (entry,) = Ledger(folder / "0").list_entries("learner-0")
        assert entry.epsilon_spent == status.epsilon_spent
        assert entry.loss.epsilon(delta) <= 1.001 * status.epsilon_charged


async def test_the_log_of_a_run_with_a_pause_is_verified(tmp_path: Path, snapshots: bool) -> None:
    """Rounds in which a learner is offline are charged, too."""
    away = [{"learner": "learner-0", "first_round": 2, "until_round": 4}]
    crew = Crew(tmp_path, spec_of(offline_intervals=away), keyed=False)
    await crew.live(range(ROUNDS - 1))
    (entry,) = Ledger(tmp_path / "0").verify("learner-0", imports=False)
    assert entry.epsilon_spent == crew.learners[0].status.epsilon_spent > 0
    assert entry.loss.epsilon(0.01) < entry.epsilon_spent
    crew.die()


async def test_an_owners_limit_at_a_delta_counts_the_runs_before(tmp_path: Path) -> None:
    """By their divergences: a second run may send more than the sum of epsilons would allow, and never too much."""
    delta, folder = 0.01, tmp_path / "0"
    first = Crew(tmp_path, spec_of(), keyed=False, owner=(50.0, delta))
    await first.live(range(ROUNDS))
    first.die()
    for index in range(3):
        end_run(tmp_path / str(index), f"learner-{index}", "run-1")
    (before,) = Ledger(folder).list_entries("learner-0")
    one, status = before.loss.epsilon(delta), first.learners[0].status
    assert one <= 1.001 * status.epsilon_charged < status.epsilon_spent == before.epsilon_spent
    limit = 1.6 * one
    second = Crew(tmp_path, spec_of(), keyed=False, run_id="run-2", owner=(limit, delta))
    status = second.learners[0].status
    assert status.epsilon_other_runs >= one and status.owner_delta == delta and status.epsilon_owner_budget == limit
    with pytest.raises(BudgetExhausted, match="epsilon spent in all runs from"):
        await second.live(range(ROUNDS))
    second.die()
    total = Ledger(folder).verify("learner-0", imports=False)
    assert [each.run_id for each in total] == ["run-1", "run-2"] and 1 < total[1].rounds_committed < ROUNDS
    together = before.loss + total[1].loss
    assert one < together.epsilon(delta) <= limit < together.pure
    out = io.StringIO()
    show_ledger(folder, None, Console(file=out, width=160), delta=delta)
    assert f"{together.epsilon(delta):.4g}" in out.getvalue()


async def test_the_log_of_a_run_that_is_over_goes_wherever_its_learner_dies(tmp_path: Path) -> None:
    """Before every change of a file; what the run has cost stays, and the next start deletes what is left of it."""
    whole, deaths, at = tmp_path / "whole", 0, 0
    crew = Crew(whole, spec_of(), keyed=False)
    await crew.live(range(4))
    crew.die()
    spent = Ledger(whole / "0").sum_epsilon("learner-0")
    while True:
        at += 1
        folder = tmp_path / str(at)
        shutil.copytree(whole / "0", folder)
        Ledger(folder).accept_moved_folder("learner-0")
        with pytest.MonkeyPatch.context() as patch:
            dying(patch, folder, at)
            try:
                end_run(folder, "learner-0", "run-1")
                break
            except Died:
                deaths += 1
        end_run(folder, "learner-0")
        was_open = any(folder.glob("*@*"))
        end_run(folder, "learner-0", "run-1")  # as its coordinator tells it when it comes back in the run
        assert not any(folder.glob("*@*"))
        assert was_open == (at == 1)
        assert Ledger(folder).sum_epsilon("learner-0") == spent > 0
    assert deaths >= 3


async def test_a_state_that_does_not_come_back_keeps_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot from which the same learner cannot be made is none, and ends no run."""
    monkeypatch.setattr(RunLog, "is_snapshot_due", True)
    for k, wrong in enumerate((CorruptStateError("another class"), MemoryError(), None)):

        def other(raw: bytes, names: Any, wrong: Any = wrong) -> Any:
            if wrong is not None:
                raise wrong
            return "something else"

        with monkeypatch.context() as patch:
            patch.setattr("sottovoce_learner.storage.run_log.unpack", other)
            crew = Crew(tmp_path / str(k), spec_of(), keyed=False)
            await crew.live(range(ROUNDS))
        assert set(crew.kept(0)) == {"log"}
        assert crew.born(0).status.rounds_done == ROUNDS


async def test_a_learner_that_had_finished_has_its_model_and_what_neighbours_lack(tmp_path: Path) -> None:
    crew = Crew(tmp_path, spec_of(), keyed=False)
    await crew.live(range(ROUNDS))
    before, last = crew.learners[0], ROUNDS - 1
    frames = {j: list(link._frames) for j, link in before.links.items()}
    again = crew.born(0)
    assert (
        again.algorithm.decision(again.state_machine.state).tobytes()
        == before.algorithm.decision(before.state_machine.state).tobytes()
    )
    assert (again.status.rounds_done, again.status.rounds_committed) == (ROUNDS, ROUNDS)
    assert {j: list(link._frames) for j, link in again.links.items()} == frames
    assert frames[1][-1][0] == last
    assert again.status.epsilon_spent == before.status.epsilon_spent


@pytest.mark.parametrize(
    ("topology", "absent"),
    [
        ({"graph": "complete"}, False),
        ({"graph": "complete"}, True),
        ({"sequence": {"kind": "random", "probability": 0.5, "seed": 1}}, False),
    ],
)
async def test_what_it_has_said_is_counted_as_if_it_had_not_died(
    tmp_path: Path, topology: dict[str, Any], absent: bool, snapshots: bool
) -> None:
    """One message for everybody who was told in its round, those who were away left out."""
    away = [{"learner": "learner-1", "first_round": 2, "until_round": 4}]
    more = {} if "graph" in topology else {"algorithm": {"name": "dsgd", "noise": {"kind": "power", "sigma": 0.6}}}
    spec = spec_of(topology=topology, **more, **({"offline_intervals": away} if absent else {}))
    whole, crew = Crew(tmp_path / "whole", spec, keyed=True), Crew(tmp_path / "crew", spec, keyed=True)
    for t in range(ROUNDS):
        await whole.live(range(t, t + 1))
        await crew.live(range(t, t + 1))
        crew.learners[0]._log.close()
        crew.learners[0] = crew.born(0)
        one, other = crew.learners[0].status, whole.learners[0].status
        assert (one.messages_sent, one.bytes_sent) == (other.messages_sent, other.bytes_sent)
    if "graph" in topology:
        assert crew.learners[0].status.messages_sent == 2 * ROUNDS - 2 * absent


@pytest.mark.parametrize("changes", FIELD["runs"], ids=lambda run: str(run["name"]))
async def test_every_algorithm_goes_on_from_its_log(tmp_path: Path, changes: dict[str, Any], snapshots: bool) -> None:
    """After every round: what it says then, and its model, are those of one that did not die, to the last bit."""
    spec = parse_spec(
        {
            **FIELD["common"],
            **changes,
            "rounds": min(36, changes.get("rounds", 36)),
            "durability": "process",
            "capture": "none",
            "clock": {"window": 7},
        },
        allow_imports=True,
    )
    whole, crew = Crew(tmp_path / "whole", spec, keyed=True), Crew(tmp_path / "crew", spec, keyed=True)
    for t in range(spec.rounds):
        await whole.live(range(t, t + 1))
        await crew.live(range(t, t + 1))
        assert (crew.kept(0) == ["log", "snapshot"]) is snapshots
        crew.learners[0]._log.close()
        crew.learners[0] = crew.born(0)
        await crew.learned(crew.learners[0], t)
        assert crew.left == whole.left
        assert crew.models() == whole.models()


def hidden() -> RunSpec:
    """Of an algorithm whose state keeps noise that no message shows."""
    changes = next(run for run in FIELD["runs"] if run["name"] == "pd-ftgl-published")
    algorithm = {**changes["algorithm"], "block_length": 4}
    more = {"algorithm": algorithm, "rounds": 20, "durability": "process", "capture": "none"}
    return parse_spec({**FIELD["common"], **changes, **more}, allow_imports=True)


async def test_noise_that_no_message_shows_is_not_drawn_again(tmp_path: Path, snapshots: bool) -> None:
    """With the operating system's noise, of which no two draws are equal: after every round, its state is the one that it had."""
    spec = hidden()
    crew = Crew(tmp_path, spec, keyed=False)
    for t in range(spec.rounds):
        await crew.live(range(t, t + 1))
        before = crew.learners[0]
        before._log.close()
        crew.learners[0] = crew.born(0)
        await crew.learned(crew.learners[0], t)
        assert pack(crew.learners[0].state_machine.state, before._snapshots._names) == pack(
            before.state_machine.state, before._snapshots._names
        )
    assert any(noise.any() for noise in crew.learners[0].state_machine.state.nodes.noise)
    assert all(len(frames) == 1 for frames in crew.left.values())


async def test_noise_that_was_not_written_down_is_missed(tmp_path: Path) -> None:
    """Versions that wrote none refused to go on, too."""
    crew = Crew(tmp_path, hidden(), keyed=False)
    crew.learners[0].state_machine.has_hidden_noise = False
    await crew.live(range(5))
    crew.learners[0]._log.close()
    with pytest.raises(
        CorruptStateError,
        match=r"needs \d+ more numbers of noise, got an entry with 0: it was written by another version",
    ):
        crew.born(0)


async def test_noise_that_is_left_over_was_drawn_for_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message would show it."""
    crew, drawn = Crew(tmp_path, hidden(), keyed=False), vars(NoiseRecorder)["recorded_bytes"].fget
    monkeypatch.setattr(NoiseRecorder, "recorded_bytes", property(lambda kept: drawn(kept) + bytes(8)))
    await crew.live(range(1))
    crew.learners[0]._log.close()
    with pytest.raises(
        CorruptStateError, match="and by the entries before it must have another one: it was written by another"
    ):
        crew.born(0)


async def test_a_log_that_another_version_wrote_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(tmp_path, spec_of(), keyed=False)
    await crew.live(range(2))
    with monkeypatch.context() as patch:
        patch.setattr("sottovoce_learner.state_machine.PrivacyFilter.admit_round", lambda books, t: 1e-9)
        with pytest.raises(
            CorruptStateError, match=r"entry \d+ of the log has round 0 at epsilon .* by another version"
        ):
            crew.born(0)
    assert crew.born(0).status.rounds_committed == 2


def test_a_link_says_again_what_the_log_has() -> None:
    link = NeighbourLink(2)
    for t in range(3):
        link.queue(t, bytes([t]))
    assert list(link._frames) == [(1, b"\1"), (2, b"\2")]
