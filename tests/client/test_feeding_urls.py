"""URLs of sources: their settings, their help, and a broker that another package adds."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sottovoce_client import doctor
from sottovoce_client.cli import app
from sottovoce_client.feeding.broker import HTTP, START_SETTING, BrokerCredentials, Feed, UrlSetting, load_feeds
from sottovoce_core.errors import SpecError
from tests.client.test_feeding import ann, command, ended
from tests.client.test_live_learner import RECORD, learned

OWN = load_feeds()

TOY = f"""
import asyncio
from sottovoce_client.feeding.broker import BrokerPart, Feed, Link, Setting
from sottovoce_client.feeding.records import Message

class ToyLink(Link):
    async def start(self):
        return [ToyPart(self, name, f"toy {{name}}") for name in self.at.names]

    async def close(self):
        pass

class ToyPart(BrokerPart):
    async def _begin(self, after):
        return after

    async def _read_on(self, after):
        self._patience.subscribed(self.name)
        for position in range(after + 1, self._link.at.settings["records"]):
            yield [Message({RECORD!r}, position)]
        await asyncio.Event().wait()

    async def _commit(self, position):
        print("kept", self.name, position, self._link.at.group, flush=True)

TOY = Feed(
    name="Toy",
    schemes={{"toy": 99, "toys": 98}},
    tls=frozenset({{"toys"}}),
    help="Records that are all the same.",
    examples=("toy://host/box?records=3",),
    settings=(Setting("records", "How many there are.", 1), Setting("group", "Name of the position.")),
    modules=("a_module_that_is_not_installed",),
    extra="toy",
    path="BOX",
    many=True,
    connect=ToyLink,
)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that is installed in a folder, and offers a broker."""
    folder = tmp_path / "packages"
    (folder / "toy-1.0.dist-info").mkdir(parents=True)
    (folder / "toy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (folder / "toy-1.0.dist-info" / "entry_points.txt").write_text("[sottovoce.feeds]\ntoy = a_toy_feed:TOY\n")
    (folder / "a_toy_feed.py").write_text(TOY)
    monkeypatch.syspath_prepend(folder)
    return folder


async def test_a_broker_of_another_package_is_fed_from(toy: Path, tmp_path: Path) -> None:
    assert "toy" in {scheme for each in load_feeds() for scheme in each.schemes}
    async with ann(tmp_path) as (up, learner):
        environment = {**os.environ, "PYTHONPATH": str(toy)}
        url = "toy://host/red,blue?records=3&group=north"
        process = command(up, url, "--log-level", "error", env=environment)
        await learned(learner, 6)
        process.terminate()
        code, out, error = await ended(process)
        assert (code, error) == (0, "") and "Fed 6 records of 2 sources" in out
        assert "kept red 2 north" in out and "kept blue 2 north" in out


def test_it_has_its_help_and_its_line_of_the_doctor(toy: Path) -> None:
    result = CliRunner().invoke(app, ["feed", "--help-for", "toys"])
    assert result.exit_code == 0
    for words in (
        "toy://HOST:99/BOX,BOX...",
        "With TLS: toys://",
        "How many there are. [default: 1]",
        "toy://host/box?r",
    ):
        assert words in result.output
    (extras,) = [each.text for each in doctor._check_installation() if each.subject == "extras"]
    assert "toy" in extras.partition("not installed: ")[2].split(", ")


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("nowhere:FEED", r"the entry point toy of sottovoce\.feeds: cannot import 'nowhere:FEED'"),
        ("json:loads", r"the entry point toy of sottovoce\.feeds must be a Feed, got json:loads"),
    ],
)
def test_an_entry_point_that_is_no_broker_is_named(entry: str, text: str, toy: Path) -> None:
    (toy / "toy-1.0.dist-info" / "entry_points.txt").write_text(f"[sottovoce.feeds]\ntoy = {entry}\n")
    with pytest.raises(SpecError, match=text):
        load_feeds()


def test_the_feeds_are_those_of_the_package() -> None:
    assert {each.name for each in load_feeds()} == {"HTTP", "Kafka", "MQTT", "NATS", "Redis"}


@pytest.mark.parametrize("feed", OWN, ids=lambda each: each.name)
def test_every_setting_stands_in_the_help_and_every_example_is_a_source(feed: Feed) -> None:
    text = CliRunner().invoke(app, ["feed", "--help-for", next(iter(feed.schemes))]).output
    for each in feed.settings:
        assert f"\n  {each.name}\n" in text and each.help in text
    for example in feed.examples:
        assert example in text
        feed.parse_url(example)


@pytest.mark.parametrize("place", ["host:99999", "host:-1", "", "a b"])
@pytest.mark.parametrize("feed", OWN, ids=lambda each: each.name)
def test_a_host_that_is_none_is_refused(feed: Feed, place: str) -> None:
    with pytest.raises(SpecError, match=r"with a port from [01] to 65535.*, got "):
        feed.parse_url(f"{next(iter(feed.schemes))}://{place}{'/a' * bool(feed.path)}?client=a")


@pytest.mark.parametrize(
    "where", ["://ann:secret@host/a", "://host/a?password=secret", "://ann:sec/ret@host/a", "://host/a?Token=secret"]
)
@pytest.mark.parametrize("feed", OWN, ids=lambda each: each.name)
def test_no_url_holds_a_password_and_none_is_shown(feed: Feed, where: str) -> None:
    with pytest.raises(SpecError, match="must hold no user or password") as refused:
        feed.parse_url(next(iter(feed.schemes)) + (where if feed.path else where.replace("/a?", "?")))
    assert "secret" not in str(refused.value) and "ret@" not in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        (UrlSetting("n", "", 5, minimum=1, maximum=9), "9", 9),
        (UrlSetting("n", "", 5, minimum=1, maximum=9), "10", "a whole number from 1 to 9, got '10'"),
        (UrlSetting("n", "", 5), "five", f"a whole number from 0 to {2**31 - 1}, got 'five'"),
        (UrlSetting("n", "", 5), "٣", "a whole number"),
        (START_SETTING, "start", "start"),
        (START_SETTING, "", "one of committed, start, new, got ''"),
        (UrlSetting("f", "", None), "a/b", Path("a/b")),
        (UrlSetting("f", "", None), "", "a value, got ''"),
    ],
)
def test_a_setting_has_a_value_or_is_refused(setting: UrlSetting, text: str, value: Any) -> None:
    if isinstance(value, str) and value != text:
        with pytest.raises(SpecError, match=re.escape(f"of URL must be {value}")):
            setting.parse_value(text, "URL")
    else:
        assert setting.parse_value(text, "URL") == value


def test_names_and_values_are_as_a_url_writes_them() -> None:
    mqtt = next(each for each in load_feeds() if each.name == "MQTT")
    source = mqtt.parse_url(
        "MQTTS://[::1]/wards/+/north/#,a%2Cb%3Fc?client=feeder%20north%26&session=9", access=BrokerCredentials("ann")
    )
    assert (source.scheme, source.servers, source.addresses) == ("mqtts", [("::1", 8883)], ["[::1]:8883"])
    assert source.names == ("wards/+/north/#", "a,b?c")
    assert source.settings == {"client": "feeder north&", "session": 9, "state": None}
    assert source.build_tls_context() is not None and mqtt.parse_url("mqtt://h/a?client=b").build_tls_context() is None


def test_where_all_requests_come_to_is_a_url_too() -> None:
    assert HTTP.parse_url("http://[::1]:0").addresses == ["[::1]:0"]
    assert HTTP.parse_url("https://0.0.0.0?when-full=reject").settings == {
        "when-full": "reject",
        "max-bytes": 1024 * 1024,
    }
    with pytest.raises(SpecError, match=r"SOURCE must be like http://HOST:7490, got 'http://a:1/records'"):
        HTTP.parse_url("http://a:1/records")
