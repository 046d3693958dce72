"""What a user may get wrong, command by command: told in words that name it, with exit code 2, and never a traceback."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from sottovoce_client.cli import app, main

pytestmark = pytest.mark.each

NOBODY = "127.0.0.1:1"
ADDRESS = "must be HOST:PORT with a port from"
SPEC = "rounds: 5\nlearners: [north, south]\nalgorithm: ldp-dol\ndata: {source: wards.csv}\ndurability: process\n"
ROWS = "".join(f"{k % 7},{k % 5 + 7},{'sick' if k % 3 else 'well'}\n" for k in range(60))
FILES = {
    "spec.yaml": SPEC,
    "live.yaml": "rounds: 5\nalgorithm: ldp-dol\ndata: {source: live, features: 2}\n",
    "odd.yaml": "rounds: true\nlearners: [false, b]\nalgorithm: {name: ldp-dol, sigma: big}\n",
    "list.yaml": "- rounds: 5\n",
    "twice.yaml": SPEC + "rounds: 6\n",
    "empty.yaml": "",
    "wards.csv": "age,dose,outcome\n" + ROWS,
    "no-header.csv": ROWS,
    "names.csv": "age,dose,outcome\n",
    "nothing.csv": "",
    "text.txt": "hello\n",
    "odd.parquet": "hello\n",
    "odd.npz": "hello\n",
    "host.yaml": "learners: {a: {listen: '127.0.0.1:99999'}}\ncoordinator: 127.0.0.1:1\n",
    "config.yaml": "colour: red\n",
    "listen.yaml": "listen: 127.0.0.1:99999\n",
    "schema.yaml": "features: {age: {type: number, bounds: [5, 1]}}\nlabel: {name: outcome, type: boolean}\n",
    "half.yaml": "features: {age: {type: number, bounds: [0, 9]}}\nlabel: {name: outcome, type: category, "
    "categories: [sick, well]}\n",
}

WRONG = [
    ("init nowhere.csv", "nowhere.csv"),
    ("init text.txt", "FILE must be a .npz, .csv, .parquet file of records, got text.txt"),
    ("init nothing.csv", "nothing.csv must be a readable .csv file: it has no record"),
    ("init no-header.csv", "no-header.csv must begin with a line of column names"),
    ("init wards.csv --label colour", "--label must be one of the columns, got 'colour' ('age', 'dose', 'outcome')"),
    ("init wards.csv --label outcome --positive ill", "--positive must name labels that occur, sick, well, got 'ill'"),
    ("init wards.csv --label outcome --epsilon -1", "--epsilon must be a finite number above 0, got '-1.0'"),
    ("init wards.csv --label outcome --epsilon inf", "--epsilon must be a finite number above 0, got 'inf'"),
    (
        "init wards.csv --label outcome --learners 0",
        "--learners must be a number, at most one for each of 60 records, or names with commas between them, got '0'",
    ),
    ("init wards.csv --label outcome --out spec.yaml", "there is a file spec.yaml already"),
    ("simulate wards.csv", "this is a file of records: `sottovoce init wards.csv` writes a run spec for them"),
    ("sweep odd.parquet --set rounds=1", "`sottovoce init odd.parquet` writes a run spec for them"),
    ("data describe wards.csv --schema wards.csv", "`sottovoce init wards.csv --schema-only` writes a schema for them"),
    ("track spec.yaml mlflow", "results must be read from results.parquet or its folder, not from an exported table"),
    ("plot wards.csv", "results.parquet or its folder, not from an exported table, got wards.csv"),
    ("plot spec.yaml", "results must be read from results.parquet or its folder, not from an exported table, got spec.yaml"),
    ("transcript show wards.csv", "give the folder, or the .parquet file itself"),
    ("demo --data nothing", "data.source must be one of"),
    ("demo --rounds many", "--rounds"),
    ("demo --out text.txt", "cannot write to the folder text.txt"),
    ("up nowhere.yaml", "cannot read the run spec nowhere.yaml: No such file or directory"),
    ("up folder", "cannot read the run spec folder: Is a directory"),
    ("up binary", "cannot read the run spec binary: it must be UTF-8, and line 2 is not"),
    ("up twice.yaml", "twice.yaml is not YAML: a name must be unique, got 'rounds' twice (line 6"),
    ("up list.yaml", "list.yaml: a run spec must be a mapping of fields, got a list"),
    ("up spec.yaml --recorded-noise nowhere.npz", "nowhere.npz: it must be a .npz or .parquet file that exists"),
    ("up spec.yaml --canaries 1000", "canaries must be 1 to"),
    ("run spec.yaml --coordinator 127.0.0.1:99999", ADDRESS),
    ("run spec.yaml --coordinator ''", f"--coordinator {ADDRESS}"),
    ("run spec.yaml --resume a --recover b", "exclude each other: give one of them"),
    (f"run spec.yaml --identity nowhere --coordinator {NOBODY}", "the identity in nowhere cannot be used"),
    ("simulate odd.yaml", "odd.yaml: rounds: must be a whole number, got True"),
    ("simulate odd.yaml", "odd.yaml: learners.0: must be text, got False"),
    ("simulate odd.yaml", "odd.yaml: algorithm.sigma: must be a number or a list of numbers, got 'big'"),
    ("simulate empty.yaml", "empty.yaml: a run spec must be a mapping of fields, got nothing"),
    ("simulate live.yaml", "data.source: live has no records before services run it"),
    ("simulate spec.yaml --replicas 0", "--replicas"),
    ("simulate spec.yaml --recorded-noise text.txt", "text.txt: it must be a .npz or .parquet file that exists"),
    ("simulate spec.yaml --recorded-noise odd.npz", "cannot read the noise file odd.npz"),
    ("simulate spec.yaml --recorded-noise folder", "folder: it must be a .npz or .parquet file that exists"),
    ("simulate spec.yaml --export gif", "--export must be of svg, pdf, png, csv, tex, latex, got gif"),
    ("compare", "compare requires specs, or --all-algorithms"),
    ("compare spec.yaml --replicas -1", "--replicas"),
    ("sweep spec.yaml --set rounds", "--set must be FIELD=V,V,... with values as in a spec file, got 'rounds'"),
    ("sweep spec.yaml --set 'rounds=[1'", "--set rounds=[1 is not YAML"),
    ("sweep spec.yaml --set rounds=5 --set rounds=6", "--set must name each field once, with all its values, got rounds twice"),
    ("sweep spec.yaml --set colour=5", "unknown field colour"),
    ("sweep spec.yaml --set rounds=5 --backend dask://host:99999", ADDRESS),
    ("sweep spec.yaml --set rounds=5 --backend spark", "must be processes, ray, dask, ray://HOST:PORT"),
    ("plot nowhere", "cannot read the results nowhere: it must be a results.parquet that exists, or a folder with one"),
    ("plot odd.parquet", "cannot read the results odd.parquet"),
    ("predict host wards.csv", f"{ADDRESS} 1 to 65535, got 'host'"),
    (f"predict {NOBODY} nowhere.csv", "records must be in a file that exists, got nowhere.csv"),
    (f"predict {NOBODY} text.txt", "FILE must be a .npz, .csv, .parquet file of records, got text.txt"),
    (f"predict {NOBODY} wards.csv --spec nowhere.yaml", "cannot read the run spec nowhere.yaml"),
    ("models export nowhere --out m.npz", "must be a learner's HOST:PORT, or an existing folder, got 'nowhere'"),
    ("models export folder --out m.npz", "folder must have models.parquet or decisions.parquet"),
    ("models export folder --out m.pickle", "--out must be a .npz or .onnx file, got m.pickle"),
    ("coordinator --listen :7400", f"--listen {ADDRESS} 0 to 65535, got ':7400'"),
    ("coordinator --config config.yaml", "config.yaml must map options of this command to values; unknown: ['colour']"),
    ("coordinator --config listen.yaml", f"--listen {ADDRESS} 0 to 65535, got '127.0.0.1:99999'"),
    ("coordinator --config list.yaml", "list.yaml: a configuration must be a mapping of fields, got a list"),
    ("coordinator --log-level loud", "must be one of debug, info, warning, error, got loud"),
    ("learner", "a learner requires --name, or several learners a --host file"),
    ("learner --name a/b --coordinator 127.0.0.1:1", "got 'a/b'"),
    ("learner --name a --coordinator 127.0.0.1:1 --budget nan", "budget must be a positive, finite number, got nan"),
    ("learner --name a --coordinator 127.0.0.1:1 --budget inf", "budget must be a positive, finite number, got inf"),
    ("learner --name a --coordinator 127.0.0.1:1 --policy spec.yaml", "spec.yaml: unknown field rounds"),
    ("learner --name a --coordinator 127.0.0.1:1 --owner bob", "must be ROLE/NAME"),
    ("learner --host host.yaml", "host.yaml: learner a: --listen must be HOST:PORT"),
    ("eavesdropper --advertise-host host:7500", "--advertise-host must be the name or address of a machine"),
    ("eavesdropper --listen 127.0.0.1:0 --folder text.txt", "captures must be stored in a folder, and text.txt is a file"),
    ("eavesdropper relay --to host", f"--to {ADDRESS} 1 to 65535, got 'host'"),
    (f"eavesdropper relay --to {NOBODY} --tls-cert a.pem", "--tls-cert and --tls-key must be given together"),
    ("eavesdropper audit nowhere", "nowhere must have captures, and has none: record some with sottovoce eavesdropper relay"),
    ("eavesdropper audit folder --run-boundary dance", "--run-boundary must be connection, stream or metadata:KEY, got dance"),
    ("eavesdropper audit folder --decoder codec", "--decoder must be module:function, got 'codec'"),
    ("rebind north --coordinator host", f"--coordinator {ADDRESS}"),
    ("doctor --learner-address a:1 --learner-address b:0", f"--learner-address {ADDRESS} 1 to 65535, got 'b:0'"),
    ("console nowhere", "FOLDER must be a folder of results, got nowhere"),
    ("console folder --watch host", f"--watch {ADDRESS}"),
    ("audit", "audit needs a SPEC, or --captures FOLDER"),
    ("audit spec.yaml --learner west", "--learner must be one of north, south, got west"),
    ("audit spec.yaml --replacement mirror", "--replacement needs --record"),
    ("audit spec.yaml --record 0 --replacement nowhere.json", "--replacement nowhere.json must hold a JSON object"),
    ("audit --captures nowhere", "nowhere"),
    ("lab self-test spec.yaml --learner west", "--learner must be one of north, south, got west"),
    ("lab self-test --mutant none:NONE", "--mutant: cannot import 'none:NONE'"),
    ("lab power --mutant none:NONE", "--mutant: cannot import 'none:NONE'"),
    ("lab gallery --epsilons a,b", "--epsilons must be numbers with commas between them, got 'a,b'"),
    ("lab gallery --captures nowhere", "nowhere"),
    ("watch", "watch needs either a capture's folder, or --eavesdropper HOST:PORT and --run RUN_ID"),
    ("watch nowhere --once", "nowhere"),
    ("watch folder --alpha 2", "alpha"),
    ("watch --eavesdropper host:0 --run x", f"--eavesdropper {ADDRESS}"),
    ("budget spec.yaml --delta 2", "delta"),
    ("budget spec.yaml --learner west", "west"),
    ("budget live.yaml --records nan", "nan"),
    ("budget spec.yaml --target north=1", "--target"),
    ("budget spec.yaml --target nan", "nan"),
    ("budget spec.yaml --target west=1", "west"),
    ("budget spec.yaml --target north=1 --target north=2", "--target must name each learner once, got north twice"),
    ("budget spec.yaml --target 1 --horizon soon", "soon"),
    ("budget spec.yaml --tradeoff 1,2", "--tradeoff must be at least 3 different levels, got 2"),
    ("budget spec.yaml --tradeoff 1,2,3 --metric joy", "joy"),
    ("data list all", "all"),
    ("data fetch nothing", "nothing"),
    ("data fetch letter --from ftp://host", "--from must be a folder that exists, or a URL"),
    ("data fetch letter --from http://host:99999", "with a port from 1 to 65535"),
    ("data describe nothing", "nothing"),
    ("data describe wards.csv --label colour", "colour"),
    ("feed nowhere.csv -l host:99999", f"--learner {ADDRESS}"),
    (f"feed nowhere.csv -l {NOBODY}", "nowhere.csv"),
    (f"feed wards.csv -l {NOBODY} --delimiter ab", "ab"),
    (f"feed wards.csv -l {NOBODY} --dead-letters ./wards.csv", "--dead-letters must be another file than those"),
    (f"feed nowhere.jsonl -l {NOBODY}", "nowhere.jsonl"),
    (
        f"feed wards.csv --format jsonl -l {NOBODY} --map age",
        "--map must be FIELD=PATH, as age=patient.age, got 'age'",
    ),
    (f"feed a.parquet b.parquet -l {NOBODY}", "there is no file b.parquet"),
    (f"feed a.csv b.parquet -l {NOBODY}", "SOURCE must be files of one format, got csv and parquet"),
    (f"feed records.txt -l {NOBODY}", "got 'records.txt': give its format by --format"),
    (f"feed wards.csv --position at -l {NOBODY}", "--position must be left out: a source of csv does not have it"),
    (f"feed - --follow -l {NOBODY}", "--follow must be left out: a source of standard input does not have it"),
    (f"feed - --format parquet -l {NOBODY}", "--format of standard input must be csv or jsonl, got parquet"),
    (f"feed - a.csv -l {NOBODY}", "SOURCE must be files, or one URL, or - alone, got 2"),
    (f"feed ftp://host/a -l {NOBODY}", "must be one of http, https, kafka,"),
    (f"feed http://host:x -l {NOBODY}", "SOURCE must be HOST:PORT with a port from 0 to 65535, got 'host:x'"),
    (f"feed http://127.0.0.1:0 -l {NOBODY} --token-file nowhere", "nowhere"),
    (f"feed http://127.0.0.1:0?max-bytes=0 -l {NOBODY}", "?max-bytes= of http://127.0.0.1:0 must be a whole number from 1 to"),
    (f"feed https://127.0.0.1:0 -l {NOBODY}", "https:// needs --tls-cert and --tls-key"),
    (f"feed http://127.0.0.1:0 --dead-letters d -l {NOBODY}", "--dead-letters must be left out: a source of HTTP"),
    (f"feed nats://host:99999/wards -l {NOBODY}", "SOURCE must be like nats://HOST:4222, with a port"),
    (f"feed nats://host:0/wards -l {NOBODY}", "got 'nats://host:0'"),
    (f"feed nats://host -l {NOBODY}", "SOURCE must be like nats://HOST:4222,HOST:4222.../STREAM, got 'nats://host'"),
    (f"feed redis://host/wards?from=now -l {NOBODY}", "must be one of committed, start, new, got 'now'"),
    (f"feed redis://host/wards?group=a&group=b -l {NOBODY}", "?group= of redis://host/wards must be given once, got it twice"),
    (f"feed mqtt://host/w/# -l {NOBODY}", "mqtt://host/w/# must have ?client=, got none"),
    (f"feed mqtt:///w?client=c -l {NOBODY}", "SOURCE must be like mqtt://HOST:1883"),
    (f"feed kafka://a:1,b:x/wards -l {NOBODY}", "got 'kafka://b:x'"),
    (
        f"feed kafka://a/wards?topic=b -l {NOBODY}",
        "?topic= of kafka://a/wards must be one of from, group, sasl: see `sottovoce feed --help-for kafka`",
    ),
    ("feed --help-for telnet", "--help-for must be one of http, https, kafka,"),
    ("runs show --coordinator host:70000", f"--coordinator {ADDRESS}"),
    ("status --coordinator host:70000", f"--coordinator {ADDRESS}"),
    ("status --learner-address a:1 --learner-address b:0", f"--learner-address {ADDRESS} 1 to 65535, got 'b:0'"),
    ("status nowhere", "no run is up in nowhere: `sottovoce up` writes services.json"),
    ("status 127.0.0.1:7400", "to connect to a coordinator at that address, give --coordinator 127.0.0.1:7400"),
    ("simulate spec.yaml --write models,loss", "--write"),
    ("simulate spec.yaml --write ''", "--write"),
    ("runs show x --coordinator host", f"--coordinator {ADDRESS}"),
    (f"runs stop x --coordinator {NOBODY} --identity nowhere", "the identity in nowhere cannot be used"),
    ("runs resume x --coordinator :1", f"--coordinator {ADDRESS}"),
    ("runs leave x north --coordinator http://a:1", f"--coordinator {ADDRESS}"),
    ("runs join x north --coordinator a:0", f"--coordinator {ADDRESS}"),
    ("transcript show nowhere", "nowhere"),
    ("transcript show odd.parquet", "odd.parquet"),
    ("transcript query nowhere 'SELECT 1'", "nowhere"),
    ("transcript verify nowhere --ca nowhere.crt", "nowhere"),
    ("pki init --domain 'a b'", "a b"),
    ("pki issue bob --authority nowhere", "nowhere"),
    ("pki request king/a", "king/a"),
    ("pki issue nowhere --authority folder", "folder"),
    ("pki revoke learner/a --authority nowhere", "nowhere"),
    ("pki show nowhere", "nowhere"),
    ("ledger --state nowhere", "nowhere"),
    ("ledger --verify --state nowhere", "nowhere"),
    ("ledger --repair --state nowhere --learner a", "nowhere"),
    ("ledger --adopt-copy --state nowhere --learner a", "nowhere"),
    ("policy --policy spec.yaml", "spec.yaml: unknown field rounds"),
    ("policy spec.yaml --learner west", "west"),
    ("policy spec.yaml --learner north --policy nowhere.yaml", "cannot read the policy nowhere.yaml"),
    ("spec check nowhere.yaml", "nowhere.yaml"),
    ("spec check odd.yaml --print", "odd.yaml: rounds"),
    ("spec check spec.yaml --json-schema", "--json-schema describes all specs"),
    ("spec values spec.yaml --own west", "west"),
    ("init nowhere.csv --schema-only", "nowhere.csv"),
    ("init names.csv --schema-only", "names.csv"),
    ("data describe schema.yaml", "features.age.bounds: the first bound must be below the second one"),
    ("data describe nowhere.csv --schema half.yaml", "nowhere.csv"),
]  # fmt: skip


def commands(command: Any, *names: str) -> Iterator[str]:
    """All that can be asked for; of a group that is a command itself, too."""
    inner = getattr(command, "commands", {})
    for name, each in inner.items():
        yield from commands(each, *names, name)
    if names and (not inner or command.invoke_without_command):
        yield " ".join(names)


COMMANDS = set(commands(typer.main.get_command(app)))


def command_of(line: str) -> str:
    """The longest name that a line begins with."""
    words = shlex.split(line)
    return next(name for k in (2, 1) if (name := " ".join(words[:k])) in COMMANDS)


@pytest.fixture(scope="module")
def wards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files, good and bad."""
    folder = tmp_path_factory.mktemp("wards")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "folder").mkdir()
    np.savez(folder / "noise.npz", y=np.full((5, 2, 3), np.nan))
    return folder


def test_every_command_has_been_asked_for_something_wrong() -> None:
    assert {command_of(line) for line, _ in WRONG} == COMMANDS
    assert len(WRONG) >= 60


@pytest.mark.parametrize(("line", "words"), WRONG, ids=[f"{line} [{words[:20]}]" for line, words in WRONG])
def test_it_is_told_in_words(
    wards: Path, line: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("SOTTOVOCE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(wards)
    monkeypatch.setattr(sys, "argv", ["sottovoce", *shlex.split(line)])
    before = {path.name for path in wards.iterdir()}
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err
    assert left.value.code == 2, said
    assert words in " ".join(said.split()), said
    assert "Traceback" not in said and "Errno" not in said and "Error(" not in said
    assert {path.name for path in wards.iterdir()} - before <= {"sottovoce-runs"}
