"""The file that names the learners of a process, and what they need of it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from sottovoce_core.errors import CorruptStateError, SpecError, Unavailable
from sottovoce_learner import host
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.host import Host
from sottovoce_learner.host_file import build_configs, load_host_file

pytestmark = pytest.mark.each

OPTIONS: dict[str, Any] = {
    "coordinator": "127.0.0.1:7400",
    "listen": "127.0.0.1:0",
    "advertise": None,
    "state": Path("states"),
    "join_timeout": 30.0,
    "recorded_noise": None,
    "allow_imports": False,
    "budget": None,
    "noise": "bitwise",
    "noise_seed": None,
    "identity": None,
    "insecure": False,
    "owner": (),
    "feeder": (),
    "policy": None,
    "keep_log": False,
}
"""What `sottovoce learner` has for them where nothing is given."""


def of(folder: Path, text: str, **options: Any) -> dict[str, LearnerConfig]:
    file = folder / "wards.yaml"
    file.write_text(text, encoding="utf-8")
    return {each.name: each for each in load_host_file(file, {**OPTIONS, **options})}


def test_what_is_said_of_one_holds_before_what_is_said_of_all_and_that_before_the_options(tmp_path: Path) -> None:
    (tmp_path / "strict.yaml").write_text("epsilon_per_run: 2\n", encoding="utf-8")
    text = f"""
        budget: 5
        identity: {tmp_path}/identities
        feeder: [feeder/ward]
        learners:
          north:
          south: {{budget: null, listen: '127.0.0.1:7402', policy: {tmp_path}/strict.yaml, feeder: []}}
          west: {{identity: {tmp_path}/elsewhere, state: /srv/west, owner: [operator/alice]}}
    """
    north, south, west = of(tmp_path, text, budget=7.0, keep_log=True).values()
    assert (north.name, north.coordinator, north.state_folder) == ("north", OPTIONS["coordinator"], OPTIONS["state"])
    assert (north.budget, south.budget, west.budget) == (5.0, None, 5.0)
    assert (north.policy, south.policy.epsilon_per_run) == (west.policy, 2.0)
    folders = [each.credentials.folder for each in (north, south, west)]
    assert folders == [
        tmp_path / "identities/learner-north",
        tmp_path / "identities/learner-south",
        tmp_path / "elsewhere",
    ]
    assert (west.state_folder, west.owners, south.listen) == (Path("/srv/west"), ("operator/alice",), "127.0.0.1:7402")
    assert (north.feeders, south.feeders) == (("feeder/ward",), ())
    assert all(each.keep_log for each in (north, south, west))


def test_names_alone_are_learners_of_which_all_is_the_same(tmp_path: Path) -> None:
    listed = of(tmp_path, "learners: [north, south]")
    assert listed == {each.name: each for each in build_configs(["north", "south"], OPTIONS)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learners: [a, b, a]", "learners: each must have its own name, got 'a' twice"),
        ("learners: {a: , b: , a: }", "twice"),
        ("learners: []", "must be names, or map each name to its own settings, got {}"),
        ("learners: 3", "must be names, or map each name to its own settings, got 3"),
        ("state: there", "field learners is required"),
        ("learners: {a: {polcy: x}}", "unknown field learners.a.polcy; the fields of a learner, or of all, are coordinator,"),
        ("name: a\nlearners: [a]", "unknown field name"),
        ("learners: {a: 3}", "learners.a: must be a mapping of fields, got 3"),
        ("learners: [a/b]", "learner a/b: a learner's name is part of file names"),
        ("learners: [3]", "must be text, got 3"),
        ("learners: [a]\nbudget: much", "budget: must be a number"),
        ("learners: [a]\nbudget: -1", "learner a: a learner's budget must be a positive, finite number, got -1"),
        ("learners: {a: , b: {policy: /none/there.yaml}}", "learner b: cannot read the policy /none/there.yaml"),
        ("learners: {a: , b: {owner: [bob]}}", "learner b: "),
        ("learners: [a, b]\nlisten: 127.0.0.1:7401", "an address each, got listen 127.0.0.1:7401 for both a and b"),
        ("learners: [a, b]\nadvertise: WARD:7401", "an address each, got advertise WARD:7401 for both a and b"),
        ("learners: {a: {noise_seed: x, listen: '0.0.0.0:0', advertise: 'A:1'}}", "learner a: seeded noise gives no privacy"),
        ("[a, b]", "a file of learners must be a mapping"),
        ("learners: [a", "is not YAML"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        of(tmp_path, text)
    assert words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert "wards.yaml" in str(refused.value) or "an address each" in words


def test_a_coordinator_stands_in_the_file_or_is_an_option(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"learner b: a learner needs the address of its coordinator"):
        of(tmp_path, "learners: {a: {coordinator: 'HOST:1'}, b: }", coordinator=None)
    with pytest.raises(SpecError, match="got 'a' twice"):
        build_configs(["a", "a"], OPTIONS)
    with pytest.raises(SpecError, match="cannot read the file of learners"):
        load_host_file(tmp_path / "none.yaml", OPTIONS)


# ---- open files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Of open files; put back at the end."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_many_learners_get_the_open_files_that_they_need(limits: tuple[int, int]) -> None:
    """As far as the system allows; where that is little, the log says so."""
    _, hard = limits
    low = min(hard, 1024)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low // 2, hard))
    with capture_logs() as said:
        host._raise_file_limit(1)
        assert (resource.getrlimit(resource.RLIMIT_NOFILE)[0], said) == (low // 2, [])
        host._raise_file_limit(hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    assert [(each["event"], each["allowed"]) for each in said] == [("few open files are allowed", hard)]


async def test_several_learners_are_announced_before_they_start(tmp_path: Path) -> None:
    """Hundreds take a while."""

    class Starting:
        def __init__(self, name: str, logs: list[Any]) -> None:
            self.config, self._logs = LearnerConfig(name, "127.0.0.1:1", state_folder=tmp_path), logs

        async def start(self) -> str:
            assert [(each["event"], each["learners"]) for each in self._logs] == [("starting", 2)]
            return "127.0.0.1:7"

        async def follow(self, address: str) -> None:
            """Never asked for."""

        async def stop(self) -> None:
            """Nothing to end."""

    with capture_logs() as said:
        await Host(cast(Any, [Starting(name, said) for name in ("north", "south")])).start()


class WithFolder:
    """A learner whose state folder may be damaged."""

    def __init__(self, name: str, folder: Path, *, damaged: bool) -> None:
        self.config, self._damaged, self.followed = (
            LearnerConfig(name, "127.0.0.1:1", state_folder=folder),
            damaged,
            False,
        )

    async def start(self) -> str:
        if self._damaged:
            raise CorruptStateError("this state folder is a copy")
        return "127.0.0.1:7"

    async def follow(self, address: str) -> None:
        self.followed = True
        raise Unavailable("the coordinator is gone")

    async def stop(self) -> None:
        """Nothing to end."""


async def test_a_damaged_state_folder_costs_its_own_learner_alone(tmp_path: Path) -> None:
    learners = [WithFolder(name, tmp_path, damaged=name == "south") for name in ("north", "south", "east")]
    host = Host(cast(Any, learners))
    with capture_logs() as said:
        addresses = await host.start()
        with pytest.raises(Unavailable, match="the coordinator is gone"):
            await host.follow(addresses)
    assert list(addresses) == ["north", "east"]
    assert [each.followed for each in learners] == [True, False, True]
    (ended,) = [each for each in said if each["event"] == "learner ended" and each["learner"] == "south"]
    assert (ended["others"], ended["reason"]) == (2, "learner south: this state folder is a copy")


async def test_learners_that_all_have_damaged_state_folders_do_not_start(tmp_path: Path) -> None:
    with pytest.raises(CorruptStateError, match="this state folder is a copy"):
        await Host(cast(Any, [WithFolder(name, tmp_path, damaged=True) for name in ("north", "south")])).start()
