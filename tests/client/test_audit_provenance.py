"""What an audit of kept captures says of them: whether they are what was signed, whose noise and coins these were."""

from __future__ import annotations

import asyncio
import html
import io
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml
from rich.console import Console

from sottovoce_client.auditing.audit import report_audit
from sottovoce_client.auditing.audit_files import RunLedgerWriter, read_run_ledger, read_worlds, write_worlds
from sottovoce_client.transcripts.provenance import check_provenance, describe_noise_source
from sottovoce_client.transcripts.verify import EXIT_NOT_ALL_SIGNED, verify
from sottovoce_client.watching.watch import WatchRequest, open_source, watch
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.spec import RunSpec, dump_spec
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_rpc.certificates import AUTHORITIES_FILE
from sottovoce_rpc.signatures import EMPTY_DIGESTS, Statement, compute_frame_digest
from tests.client.test_audit_captures import ROUNDS, audited, keep, planned, rows_of, spec_of
from tests.docs.pages import CHECKOUT
from tests.services.identities import Identities

SEEDED = "came from a seed"


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return Identities(tmp_path_factory.mktemp("identities"))


def signed(folder: Path, identities: Identities, *, until: int = ROUNDS, changed: bool = False) -> Capture:
    """A run whose learners sign what they say before a round; `changed`: another message stands in its place."""
    plan = planned()
    said = [row for row in rows_of(plan.run, plan, 0, 1, ROUNDS) if row.kind == "message"]
    spec = json.dumps(plan.run.spec.model_dump(mode="json"))

    async def write() -> None:
        file = CaptureWriter(folder, folder.name, folder.name, spec, 3, fields={"y": (3,)})
        for row in said:
            other = row.payload[:-1] + bytes([row.payload[-1] ^ 0x80])  # the sign of the last number
            file.add_row(row._replace(payload=other) if changed and row.payload == said[-1].payload else row)
        for sender, name in enumerate(plan.run.spec.names):
            own = list(dict.fromkeys(row.payload for row in said if row.sender == sender))[:until]
            digests = b"".join(map(compute_frame_digest, own)).ljust(len(EMPTY_DIGESTS), b"\0")
            stands = (
                identities.of(f"learner/{name}").sign_statement(Statement(folder.name, sender, 0, digests)).encode()
            )
            at = next(row for row in said if row.sender == sender)
            file.add_row(at._replace(kind="signature", wall_ns=time.time_ns(), payload=stands, size=len(stands)))
        await file.close()

    asyncio.run(write())
    return open_capture(folder)


def watched(place: Path, code: int | None = None) -> str:
    """What is printed of a capture that is there; `code`: with which it ends."""

    def prepare(spec: RunSpec) -> PreparedRun:
        plan = planned()
        return PreparedRun(plan.run, plan.data)

    console = Console(file=io.StringIO(), width=1000)
    ended = watch(open_source(str(place), None, None, once=True), WatchRequest(once=True), prepare, console=console)
    assert isinstance(console.file, io.StringIO) and code in (None, ended)
    return console.file.getvalue()


def test_captures_that_nobody_signed_may_have_been_changed_and_the_audit_says_so(tmp_path: Path) -> None:
    plan = planned()
    keep(tmp_path / "captures", plan, None, 0)
    done = audited(tmp_path, plan)
    assert "There are no signatures in this capture: never made, or removed." in done.assumptions[0]
    assert done.unproven_reason == "no signatures: never made, or removed"
    done = replace(
        done, verdict=replace(done.verdict, kind="consistent")
    )  # as after more runs: even then it is no proof
    console = Console(file=io.StringIO(), width=1000)
    report_audit(done, 0, tmp_path, console)
    assert isinstance(console.file, io.StringIO)
    for text in (console.file.getvalue(), (tmp_path / "audit.html").read_text()):
        assert "no signatures: never made, or removed" in text and str(tmp_path / "captures") not in text
    assert console.file.getvalue().splitlines()[0].endswith("CONSISTENT (no signatures: never made, or removed)")
    assert 'class="verdict weak"' in (tmp_path / "audit.html").read_text()
    document = json.loads((tmp_path / "audit.json").read_text())
    assert document["provisos"] == list(done.assumptions) and document["coins"] == "none"
    assert document["unproven_reason"] == done.unproven_reason
    assert list(document["captures_sha256"]) == ["captures/run-0"] and str(tmp_path) not in json.dumps(document)


def test_a_capture_of_several_parts_has_the_digest_that_the_report_tells_how_to_compute(tmp_path: Path) -> None:
    plan = planned()
    place = keep(tmp_path / "captures", plan, None, 0)
    report_audit(audited(tmp_path, plan), 0, tmp_path, Console(file=io.StringIO()))
    shutil.copy(place / "part-000001.parquet", place / "part-000002.parquet")
    page = html.unescape((tmp_path / "audit.html").read_text())
    lines = page[page.index("raw() {") :].partition("</code>")[0]
    shown = (CHECKOUT / "docs" / "audit" / "captures.md").read_text(encoding="utf-8")
    assert all(line in shown for line in lines.splitlines())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    typed, environment = ["bash", "-c", lines], {**os.environ, "PATH": path}
    done = subprocess.run(typed, cwd=place, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == open_capture(place).compute_digests()[0]


def test_signatures_are_held_against_the_authority_beside_the_captures(tmp_path: Path, identities: Identities) -> None:
    capture, place = signed(tmp_path / "captures" / "run", identities), open_folder(tmp_path)
    unchecked = check_provenance([capture], place)
    assert "were not checked" in unchecked.text and unchecked.unproven_reason == "its signatures were not checked"
    shutil.copy(identities.authority.folder / AUTHORITIES_FILE, tmp_path / AUTHORITIES_FILE)
    whole = check_provenance([capture], place)
    assert whole.text.startswith("All messages are signed by their learners, by ca.crt:") and not whole.unproven_reason
    assert "by ../../ca.crt:" in check_provenance([capture], capture.folder).text
    half = check_provenance([signed(tmp_path / "half", identities, until=ROUNDS - 1)], place)
    first, second, third = planned().run.spec.names
    each = f"({first} 1, {second} 1, {third} 1)"
    assert half.text.startswith(
        f"Of {3 * ROUNDS} messages 3 are not signed, by ca.crt {each}: their signatures were never"
    )
    assert half.unproven_reason == "not all messages are signed"


@pytest.mark.parametrize(("removed", "of"), [("all", (0, 1, 2)), ("of one", (1,)), ("of two", (0, 2))])
def test_signatures_that_were_removed_are_missed(
    tmp_path: Path, identities: Identities, removed: str, of: tuple[int, ...]
) -> None:
    """From the files of a capture: the audit's headline warns, and `transcript verify` has an exit code of its own."""
    kept, authorities = tmp_path / "captures" / "run", identities.authority.folder / AUTHORITIES_FILE
    signed(kept, identities)
    shutil.copy(authorities, tmp_path / AUTHORITIES_FILE)
    assert verified(kept, authorities)[0] == 0 and audited(tmp_path, planned()).unproven_reason == ""
    part = kept / "part-000001.parquet"
    table = parquet.read_table(part)
    rows = zip(table["kind"].to_pylist(), table["sender"].to_pylist(), strict=True)
    parquet.write_table(table.filter(pa.array([kind != "signature" or by not in of for kind, by in rows])), part)

    code, said = verified(kept, authorities)
    done, names = audited(tmp_path, planned()), planned().run.spec.names
    assert code == EXIT_NOT_ALL_SIGNED
    if removed == "all":
        assert "no signatures here: never made, or removed" in said
        assert "though the learners had identities (ca.crt): never made, or removed" in done.assumptions[0]
        assert done.unproven_reason == "no signatures: never made, or removed"
        return
    missed = [f"{name}: no signature at all: never made, or removed" in said for name in names]
    assert missed == [f"{name} {ROUNDS}" in done.assumptions[0] for name in names] == [i in of for i in range(3)]
    assert done.unproven_reason == "not all messages are signed"


def verified(place: Path, authorities: Path) -> tuple[int, str]:
    """Exit code, and what was printed."""
    console = Console(file=io.StringIO(), width=1000)
    code = verify(str(place), authorities, console)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def test_a_capture_that_is_not_what_was_signed_is_no_evidence(tmp_path: Path, identities: Identities) -> None:
    shutil.copy(identities.authority.folder / AUTHORITIES_FILE, tmp_path / AUTHORITIES_FILE)
    capture = signed(tmp_path / "run", identities, changed=True)
    with pytest.raises(
        CaptureError, match=r"run must be what its learners signed, by ca\.crt, and is not: .* another message"
    ):
        check_provenance([capture], open_folder(tmp_path))
    plan = planned()
    with pytest.raises(CaptureError, match=r"must be what its learners signed, by .*, and is not"):
        audited(tmp_path, plan)
    others = Identities(tmp_path / "others")
    shutil.copy(others.authority.folder / AUTHORITIES_FILE, tmp_path / AUTHORITIES_FILE)
    other = r"lead to .*: none of the authorities given has issued them, .* or ca\.crt is of another authority"
    with pytest.raises(CaptureError, match=f"refused: a signature whose certificates do not {other}"):
        check_provenance([signed(tmp_path / "again", identities)], open_folder(tmp_path))


def test_a_watch_of_what_was_kept_says_it_too(
    tmp_path: Path, identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "captures", planned(), None, 0)
    assert "There are no signatures in this capture" in watched(tmp_path)
    shutil.copy(identities.authority.folder / AUTHORITIES_FILE, tmp_path / AUTHORITIES_FILE)
    signed(tmp_path / "changed", identities, changed=True)
    monkeypatch.chdir(tmp_path)
    assert "must be what its learners signed, by ca.crt" in watched(tmp_path / "changed")
    monkeypatch.chdir("changed")
    assert "must be what its learners signed, by ../ca.crt" in watched(tmp_path / "changed")
    monkeypatch.chdir("/")
    assert f"by {str(tmp_path)[1:]}/ca.crt" in watched(tmp_path / "changed")


def test_a_promise_that_was_changed_beside_its_spec_is_refused_with_the_fields(tmp_path: Path) -> None:
    plan = planned()
    capture = keep(tmp_path / "captures", plan, None, 0)
    spec = plan.run.spec.model_copy(update={"capture": "mirror"})  # the audit asks for none of that
    (tmp_path / "spec.yaml").write_text(dump_spec(spec, tmp_path))
    assert audited(tmp_path, plan).plan.runs == 1
    facts = json.loads((capture / "capture.json").read_text())
    facts["spec"]["algorithm"]["sigma"] = 60.0  # half of the noise that learners now seem to have promised
    facts["spec"]["decision_set"]["radius"] = 7.0
    (capture / "capture.json").write_text(json.dumps(facts))
    both = r"algorithm\.sigma: 60\.0 and 30\.0; decision_set\.radius: 7\.0 and .*: one of them was changed"
    for named in (tmp_path, tmp_path / "captures", capture):
        with pytest.raises(CaptureError, match=both):
            audited(named, plan)
    with pytest.raises(CaptureError, match=both):
        watched(capture)
    with pytest.raises(SpecError, match=r"differs in algorithm\.sigma: 30\.0 and 60\.0"):
        audited(tmp_path, plan, plan.run.spec)
    (tmp_path / "spec.yaml").write_text("[")
    with pytest.raises(CaptureError, match="must be readable to be compared with them"):
        audited(tmp_path, plan)


def test_a_spec_beside_captures_may_name_the_same_file_from_elsewhere_and_imports_nothing(tmp_path: Path) -> None:
    spec = spec_of(data={"source": "records.npz", "scale": "none"})
    plan = planned(spec)
    keep(tmp_path / "captures", plan, None, 0)
    text = dump_spec(spec, tmp_path / "deep")
    assert text != dump_spec(spec)
    (tmp_path / "spec.yaml").write_text(text)
    assert audited(tmp_path, plan).plan.runs == 1
    elsewhere = yaml.safe_load(text) | {"topology": {"graph": {"kind": "file", "path": "graph.txt"}}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(elsewhere))  # which is not here: the rest is compared
    assert audited(tmp_path, plan).plan.runs == 1
    (tmp_path / "spec.yaml").write_text(text.replace("name: ldp-dol", "name: antigravity:Algorithm"))
    with pytest.raises(CaptureError, match="must be readable to be compared with them"):
        audited(tmp_path, plan)
    assert "antigravity" not in sys.modules


def test_whose_word_the_promise_is_stands_in_every_audit_without_a_spec(tmp_path: Path) -> None:
    plan = planned()
    keep(tmp_path / "captures", plan, None, 0)
    told = "The claim is taken from capture.json, which is not signed"
    assert any(each.startswith(told) for each in audited(tmp_path, plan).assumptions)
    assert not any(told in each for each in audited(tmp_path, plan, plan.run.spec).assumptions)
    assert told in watched(tmp_path)


def test_a_look_at_a_capture_that_is_not_whole_does_not_end_as_one_without_alarm(
    tmp_path: Path, identities: Identities
) -> None:
    plan = planned()
    part = keep(tmp_path / "captures", plan, None, 0) / "part-000001.parquet"
    table = parquet.read_table(part)
    cases = {
        "whole": (table, 0, "no alarm"),
        "cut": (table.slice(0, table.num_rows // 2), 2, "parts are missing"),
        "twice": (pa.concat_tables([table, table.slice(table.num_rows - 1)]), 2, "it is damaged, or was changed"),
    }
    for name, (rows, code, said) in cases.items():
        parquet.write_table(rows, part)
        assert said in watched(tmp_path, code), name
    early = keep(tmp_path / "early", plan, None, 1, rounds=ROUNDS - 1)  # closed, and nothing of it is missing
    assert f"ends before round {ROUNDS - 1}" in watched(early, 2)
    shutil.copy(identities.authority.folder / AUTHORITIES_FILE, tmp_path / AUTHORITIES_FILE)
    signed(tmp_path / "changed", identities, changed=True)
    assert "  incomplete  " in watched(tmp_path / "changed", 2)


def test_noise_of_a_seed_is_said_where_it_is_known_and_else_what_is_assumed(tmp_path: Path) -> None:
    plan = planned()
    keep(tmp_path / "captures", plan, None, 0)
    assert any("is assumed" in each for each in audited(tmp_path, plan).assumptions)
    for told, said in (
        ({}, "the operating system's is assumed"),
        ({"run_id": "run-0"}, SEEDED),
        ({"run_id": "other"}, "the operating system's is assumed"),
    ):
        (tmp_path / "summary.json").write_text(json.dumps({"private_noise": False, **told}))
        assert said in audited(tmp_path / "captures", plan).assumptions[-1]
    (tmp_path / "summary.json").write_text('{"run_id": "run-0", "private_noise": true, "loss": Infinity}')
    assert not describe_noise_source([open_capture(tmp_path / "captures" / "run-0")], open_folder(tmp_path))
    (tmp_path / "summary.json").write_text("[")
    assert "the operating system's is assumed" in audited(tmp_path, plan).assumptions[-1]


def test_what_learners_said_of_their_noise_stands_in_the_ledger(tmp_path: Path) -> None:
    plan = planned()
    two = plan.runs * 2
    coins = plan.seeds.audited_runs.generate_state(two) % 2
    ledger = RunLedgerWriter(tmp_path, coins.astype(int))
    write_worlds(tmp_path, plan, ledger.commitment, seeded_coins=True)
    ledger.bind()
    for k in range(two):
        ledger.record_start(k)
        keep(tmp_path, plan, int(coins[k]), k)
        ledger.record_end(k, f"run-{k}", "finished", seeded_noise=k < 3)
    entries = read_run_ledger(open_folder(tmp_path), read_worlds(open_folder(tmp_path))) or {}
    assert [entry.seeded for entry in entries.values()] == [k < 3 for k in range(two)]
    done = audited(tmp_path, plan)
    assert done.coin_source == "seed" and f"of 3 of {two} runs {SEEDED}" in done.assumptions[-1]


def test_coins_are_called_what_they_are(tmp_path: Path) -> None:
    plan = planned()
    for seeded, said in ((True, "seed 7"), (False, "the operating system’s")):
        folder = tmp_path / str(seeded)
        folder.mkdir()
        write_worlds(folder, plan, seeded_coins=seeded)
        for k in range(2 * plan.runs):
            keep(folder, plan, k % 2, k)
        done = replace(audited(folder, plan), assumptions=())
        console = Console(file=io.StringIO(), width=1000)
        report_audit(done, 7, folder, console)
        assert isinstance(console.file, io.StringIO)
        assert f"Coins: {said}." in console.file.getvalue()
        page = (folder / "audit.html").read_text()
        assert (f"coins: {said}" in page) is not seeded and ("seed 7" in page) is seeded
