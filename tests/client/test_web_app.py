"""Whom the console answers, with what, and what it never opens."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_client.runs.monitoring import RunListItem
from sottovoce_client.web.app import _is_own_host, _load_token, _open_socket, create_console_app
from sottovoce_client.web.result_files import ResultFiles
from sottovoce_core.errors import SpecError, Unavailable
from tests.client.consoles import COOKIE, TOKEN, Told, a_page

GUARD_S = 100.0
HERE = "http://127.0.0.1:7480"
FACTS = {"run_id": "run-1", "complete": True, "messages": 12, "bytes": 1200, "detection_count": 0}


class Browser:
    """Asks the console, and keeps its cookies; it has the token already, unless told otherwise."""

    def __init__(self, told: Told, token: str | None, ours: bool) -> None:
        self._app = create_console_app(told, TOKEN, COOKIE, lambda _: ours)  # type: ignore[arg-type]
        self._cookies = httpx.Cookies({} if token is None else {COOKIE: token})

    def request(self, method: str, path: str, **more: Any) -> Any:
        async def ask() -> Any:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url=HERE, cookies=self._cookies) as client:
                answer = await client.request(method, path, **more)
                self._cookies = client.cookies
                return answer

        return asyncio.run(ask())

    def get(self, path: str, **more: Any) -> Any:
        return self.request("GET", path, **more)


def console(
    folder: Path | None = None, *, ours: bool = True, token: str | None = TOKEN, told: Told | None = None
) -> Browser:
    return Browser(told or Told(a_page(), folder), token, ours)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Of a run, with all that lies beside what may be opened."""
    root = tmp_path / "results"
    capture = root / "captures" / "run-1-ab"
    for folder in (capture, root / "journals", root / "identities" / "operator", root / "logs", root / ".hidden"):
        folder.mkdir(parents=True)
    (root / "report.html").write_text("<h1>report</h1>")
    (root / "canaries.json").write_text('"secret"')
    (root / "summary.json").write_text(
        json.dumps({"name": "wards", "run_id": "run-1", "state": "finished", "detail": "", "accuracy": 1})
    )
    for closed in ("journals", "identities/operator", "logs", ".hidden"):
        (root / closed / "secret.html").write_text("secret")
        (root / closed / "capture.json").write_text(json.dumps(FACTS))
    (capture / "capture.json").write_text(json.dumps(FACTS))
    (capture / "part-000001.parquet").write_text("secret")
    (tmp_path / "outside.html").write_text("secret")
    (root / "link.html").symlink_to(tmp_path / "outside.html")
    (root / "way").symlink_to(tmp_path)
    return root


# ---- who may look ----------------------------------------------------------------------------------------------------


def test_the_token_opens_the_page_and_is_kept_in_a_cookie() -> None:
    browser = console(token=None)
    assert browser.get("/").status_code == 403
    answer = browser.get("/", params={"token": TOKEN})
    assert answer.status_code == 200 and "<title>Sottovoce console</title>" in answer.text
    assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=Strict" in answer.headers["set-cookie"]
    assert browser.get("/console.js").status_code == 200


@pytest.mark.parametrize("path", ["/", "/events", "/console.js", "/files/report.html", "/elsewhere"])
def test_nothing_is_told_without_the_right_token(path: str) -> None:
    for token in (None, "b" * 30, ""):
        answer = console(token=token).get(path, params={"token": "wrong"})
        assert answer.status_code == 403 and "learner" not in answer.text
    if path != "/":  # a token in an address is only for the page: others would land in histories
        assert console(token=None).get(path, params={"token": TOKEN}).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:7480", "10.0.0.1:7480", "", "unix:x", "::1"])
def test_a_name_of_somebody_else_that_leads_here_is_refused(host: str) -> None:
    assert console().get("/", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:7480", "localhost:9", "[::1]:7480", "[::1]"])
def test_names_of_this_machine(host: str) -> None:
    assert _is_own_host(host)


def test_other_users_of_this_machine_are_refused() -> None:
    assert console(ours=False).get("/").status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_it_changes_nothing(method: str) -> None:
    assert console().request(method, "/").status_code == 405


def test_pages_of_others_get_nothing() -> None:
    browser = console()
    for site in ("cross-site", "same-site"):
        assert browser.get("/console.js", headers={"sec-fetch-site": site}).status_code == 403
    assert browser.get("/console.js", headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_every_answer_is_locked_up() -> None:
    for browser, path in ((console(), "/"), (console(), "/nothing"), (console(token=None), "/")):
        headers = browser.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert (headers["cache-control"], headers["x-frame-options"]) == ("no-store", "DENY")


def test_no_more_pages_than_it_can_feed() -> None:
    told = Told(a_page())
    told.is_full = True
    assert console(told=told).get("/events").status_code == 503


async def test_events_are_pages_as_json() -> None:
    told = Told(a_page())
    pages = told.stream_states("run-1")
    page = json.loads(await anext(pages))
    assert page["run"]["learners"][0]["name"] == "learner-0"
    assert told.asked == ["run-1"]


# ---- what is opened --------------------------------------------------------------------------------------------------


def test_reports_run_in_a_sandbox(results: Path) -> None:
    answer = console(results).get("/files/report.html")
    assert (answer.status_code, answer.text) == (200, "<h1>report</h1>")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts allow-downloads; default-src 'none';")
    assert "allow-same-origin" not in policy and "connect-src" not in policy


def test_facts_of_a_capture_are_text(results: Path) -> None:
    answer = console(results).get("/files/captures/run-1-ab/capture.json")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")


CLOSED = [
    "canaries.json",
    "summary.json",
    "captures/run-1-ab/part-000001.parquet",
    "journals/secret.html",
    "journals/capture.json",
    "identities/operator/secret.html",
    "logs/secret.html",
    ".hidden/secret.html",
    "link.html",
    "way/outside.html",
    "../outside.html",
    "%2e%2e/outside.html",
    "captures/../../outside.html",
    "captures/%2e%2e/%2e%2e/outside.html",
    "captures/..%2f..%2foutside.html",
    "/etc/passwd",
    "%00.html",
    "",
    ".",
    "captures",
    "nothing.html",
]


@pytest.mark.parametrize("path", CLOSED)
def test_nothing_else_is_opened(results: Path, path: str) -> None:
    answer = console(results).get(f"/files/{path}")
    assert answer.status_code == 404 and "secret" not in answer.text


@pytest.mark.parametrize("path", [*CLOSED, str(Path("/etc/hosts.html")), "..", "a\0.html"])
def test_nothing_else_is_opened_however_it_is_asked(results: Path, path: str) -> None:
    """A browser mends a path before it asks; others need not."""
    outside = results.parent / "outside.html"
    assert ResultFiles(results).read_file(path) is None
    assert ResultFiles(results).read_file(str(outside)) is None and outside.exists()


def test_without_a_folder_nothing_is_opened() -> None:
    assert console().get("/files/report.html").status_code == 404
    assert ResultFiles(None).list_results().reports == ()


def test_what_can_be_opened_is_listed(results: Path) -> None:
    found = ResultFiles(results).list_results()
    listed = [*(each.path for each in found.reports), *(each.path for each in found.captures)]
    assert sorted(set(listed)) == ["captures/run-1-ab/capture.json", "link.html", "report.html"]
    (report,) = (each for each in found.reports if each.path == "report.html")
    assert report.title == "wards, finished"
    (capture,) = found.captures
    assert (capture.state, capture.messages, capture.bytes) == ("complete", 12, 1200)
    assert found.ended_runs == {
        "run-1": RunListItem("run-1", "finished", "", 0.0, (results / "summary.json").stat().st_mtime)
    }


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run_id": 1, "messages": "many"}', "null"])
def test_files_of_others_that_say_nonsense_are_left_out(results: Path, text: str) -> None:
    (results / "captures" / "run-1-ab" / "capture.json").write_text(text)
    (results / "summary.json").write_text(text)
    found = ResultFiles(results).list_results()
    assert found.captures == () and found.ended_runs == {} and found.reports


def test_what_the_eavesdropper_noticed_is_told(results: Path) -> None:
    place, files = results / "captures" / "run-1-ab" / "capture.json", ResultFiles(results)
    files.list_results()
    place.write_text(json.dumps({**FACTS, "complete": False, "detection_count": 2}))
    (capture,) = files.list_results().captures
    assert capture.state == "not complete; protocol violations detected: 2"


# ---- where it listens, and its token ---------------------------------------------------------------------------------


def test_it_listens_on_this_machine_alone() -> None:
    for listen in ("0.0.0.0:7480", "10.1.2.3:7480", "example.org:80"):
        with pytest.raises(SpecError, match="must listen on a loopback address"):
            _open_socket(listen)
    for listen in ("7480", "127.0.0.1:port", "127.0.0.1:70000"):
        with pytest.raises(SpecError, match="must be HOST:PORT"):
            _open_socket(listen)
    with _open_socket("127.0.0.1:0") as taken, pytest.raises(Unavailable, match="cannot listen on"):
        _open_socket(f"127.0.0.1:{taken.getsockname()[1]}")


def test_a_token_is_kept_where_it_was_asked_for(tmp_path: Path) -> None:
    assert _load_token(None) != _load_token(None)
    place = tmp_path / "token"
    token = _load_token(place)
    assert _load_token(place) == token and len(token) >= 40
    assert place.stat().st_mode & 0o077 == 0
    place.chmod(0o644)
    with pytest.raises(SpecError, match="other users may read the token"):
        _load_token(place)


@pytest.mark.parametrize("text", ["short", "x" * 300, "with spaces in between it", "semicolon;" * 4])
def test_a_token_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    place = tmp_path / "token"
    place.write_text(text)
    place.chmod(0o600)
    with pytest.raises(SpecError, match="a token must have 20 to 200 letters"):
        _load_token(place)
    with pytest.raises(SpecError, match="cannot be used"):
        _load_token(tmp_path / "no" / "folder")


# ---- as a process ----------------------------------------------------------------------------------------------------


async def test_the_command_prints_the_address_and_ends_when_told_though_somebody_looks(tmp_path: Path) -> None:
    where = ("--coordinator", "127.0.0.1:9", "--listen", "127.0.0.1:0", "--token-file", str(tmp_path / "token"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sottovoce_client", "console", str(tmp_path), *where, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode()
        address, token = said.removeprefix("console: ").strip(), (tmp_path / "token").read_text().strip()
        assert address.startswith("http://127.0.0.1:") and address.endswith(f"/?token={token}")
        async with httpx.AsyncClient(timeout=GUARD_S) as client:
            assert (await client.get(address)).status_code == 200
            async with client.stream("GET", httpx.URL(address).join("/events")) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                lines = answer.aiter_lines()
                while not (line := await anext(lines)).startswith("data: "):
                    pass
                (problem,) = json.loads(line.removeprefix("data: "))["problems"]
                assert "the coordinator at 127.0.0.1:9" in problem["text"]
                process.terminate()
                async with asyncio.timeout(GUARD_S):
                    assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["console", str(tmp_path / "none")])
    assert isinstance(done.exception, SpecError) and "FOLDER must be a folder of results" in str(done.exception)
