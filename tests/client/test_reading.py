"""`sottovoce spec check` shows how records are read; paths begin where the spec lies; what is not whole is called partial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_client.runs.simulation import simulate_to_folder
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.experiment import Experiment
from sottovoce_core.spec import load_spec

RECORDS = "age,dose,outcome\n1,2,sick\n2,3,well\n4,5,well\n2,2,sick\n4,3,well\n1,1,sick\n3,3,well\n4,1,well\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `ward` with a spec and records, and a working directory elsewhere."""
    (ward := tmp_path / "ward").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (ward / "records.csv").write_text(RECORDS, encoding="utf-8")
    write(ward)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return ward


def write(ward: Path, more: str = "") -> None:
    text = f"rounds: 5\nlearners: 2\nalgorithm: ldp-dol\ndata: {{source: records.csv{more}}}\n"
    (ward / "spec.yaml").write_text(text, encoding="utf-8")


def check(ward: Path) -> str:
    done = CliRunner().invoke(app, ["spec", "check", str(ward / "spec.yaml")])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_a_check_shows_what_is_read_as_what(folder: Path) -> None:
    text = check(folder)
    assert "records.csv: 8 records, as they are read:" in text
    assert "features: 2 (age, dose), and a constant one, the intercept" in text
    assert (
        "label, column 'outcome': sick is 0 (3 records), well is 1 (5 records); to make another one the positive class"
        in text
    )
    assert [line for line in text.splitlines() if line.startswith("  ")] == [
        "  1, 2, sick", "  2, 3, well", "  4, 5, well", "  2, 2, sick", "  4, 3, well",
    ]  # fmt: skip
    assert "2 learners with 3 records each; 2 held out" in text
    assert "2 learners, 2 features and an intercept: valid" in text
    write(folder, ", positive: [sick], intercept: false")
    text = check(folder)
    assert "sick is 1 (3 records), well is 0 (5 records)\n" in text
    assert "2 learners, 2 features: valid" in text


def test_a_check_shows_who_hears_whom_by_a_file(folder: Path) -> None:
    (folder / "net.txt").write_text("learner-1 learner-0\n", encoding="utf-8")
    write(folder)
    with (folder / "spec.yaml").open("a", encoding="utf-8") as file:
        file.write("topology: {graph: {kind: file, path: net.txt}}\n")
    assert "graph: 1 edge: learner-0 and learner-1\n" in check(folder)


def test_a_feature_that_is_always_the_same_and_a_learner_that_is_alone_are_noted(folder: Path) -> None:
    assert "note: " not in check(folder)
    rows = [f"{line},{'ward' if k == 0 else 7}" for k, line in enumerate(RECORDS.splitlines())]
    (folder / "records.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    write(folder, ", label: outcome")
    text = check(folder)
    assert "note: ward has the same value in all records: nothing can be learned from it" in text
    described = CliRunner().invoke(app, ["data", "describe", str(folder / "records.csv"), "--label", "outcome"]).output
    assert "note: ward has the same value in all records" in " ".join(described.split())
    path, out = str(folder / "records.csv"), str(folder / "own.yaml")
    begun = CliRunner().invoke(
        app, ["init", path, "--label", "outcome", "--learners", "1", "--rounds", "3", "--out", out]
    )
    assert (
        "note: ward has the same value" in begun.output and "note: a single learner has no neighbours" in begun.output
    )

    spec = (folder / "spec.yaml").read_text(encoding="utf-8").replace("learners: 2", "learners: 1")
    (folder / "spec.yaml").write_text(spec, encoding="utf-8")
    text = "note: a single learner has no neighbours: it sends no messages and learns only from its own records"
    assert text in check(folder)


@pytest.mark.parametrize(("times", "more"), [(2, ""), (100, ", scale: standard"), (100, "")])
def test_rows_that_a_loss_cuts_to_almost_nothing_are_told(folder: Path, times: int, more: str) -> None:
    rows = [line.split(",") for line in RECORDS.splitlines()[1:]]
    scaled = "".join(f"{times * int(age)},{dose},{outcome}\n" for age, dose, outcome in rows)
    (folder / "records.csv").write_text("age,dose,outcome\n" + scaled, encoding="utf-8")
    write(folder, more)
    warned = "warning: more than half of the records are over 10 times as long as loss.feature_bound, 1, and are clipped to it"
    assert (warned in check(folder)) == (times == 100 and not more)


def test_labels_that_are_all_the_same_are_told(folder: Path) -> None:
    (folder / "records.csv").write_text(RECORDS.replace("sick", "well"), encoding="utf-8")
    with pytest.raises(DataError, match=r"needs two labels, got only well: name in data\.positive"):
        check(folder)
    write(folder, ", positive: [sick]")
    assert "well is 0 (8 records): all are the same, so there is nothing to learn" in check(folder)


@pytest.mark.parametrize(
    "command",
    [["budget"], ["budget", "--target", "5"], ["policy", "--learner", "learner-0"]],
    ids="-".join,
)
def test_what_a_run_costs_is_told_whatever_its_labels_mean(folder: Path, command: list[str]) -> None:
    told = list[str]()
    for rows in (RECORDS, RECORDS.replace("sick", "well")):
        (folder / "records.csv").write_text(rows, encoding="utf-8")
        done = CliRunner().invoke(app, [*command, str(folder / "spec.yaml")])
        assert done.exit_code in (0, 1) and not isinstance(done.exception, DataError), done.exception
        told.append("\n".join(line for line in done.output.splitlines() if "sottovoce-runs" not in line))
    assert told[0] == told[1] != ""


@pytest.mark.parametrize("command", [["simulate"], ["audit", "--runs", "10"], ["up"], ["sweep", "--set", "rounds=5"]])
def test_what_learns_says_what_it_lacks(folder: Path, command: list[str]) -> None:
    (folder / "records.csv").write_text(RECORDS.replace("sick", "well"), encoding="utf-8")
    failure = CliRunner().invoke(app, [*command, str(folder / "spec.yaml")]).exception
    assert isinstance(failure, DataError)
    assert "needs two labels, got only well: name in data.positive what counts as 1" in str(failure)


@pytest.mark.parametrize("header", ["", "0.5,1,2\n", "1e3,-4,1\n"])
def test_a_first_line_that_is_a_record_is_refused_and_not_quoted(folder: Path, header: str) -> None:
    rows = RECORDS.partition("\n")[2].replace("sick", "0").replace("well", "1")
    (folder / "records.csv").write_text(header + rows, encoding="utf-8")
    with pytest.raises(DataError, match="must begin with a line of column names") as refused:
        check(folder)
    assert "1e3" not in str(refused.value)


@pytest.mark.parametrize("header", ["0,1,2", "2019,2020,2021", "a,1,label"])
def test_columns_may_be_numbered(folder: Path, header: str) -> None:
    (folder / "records.csv").write_text(f"{header}\n{RECORDS.partition(chr(10))[2]}", encoding="utf-8")
    assert "8 records" in check(folder)


ROWS = "1,2,well\n3,4,sick\n5,6,well\n7,8,sick\n"
WHYS = {
    "age,dose,outcome": "a word, 'age', heads a column of numbers",
    "年齢,投与,結果": "a word, '年齢', heads a column of numbers",
    "1,dose,outcome": "a word, 'dose', heads a column of numbers",
    "1,2,label": "one is called 'label'",
    "2019,2020,y": "one is called 'y'",
    "1,2,3": "they count up by one",
    "5,NA,outcome": "most of them are not numbers, and none is a value in its column",
}


@pytest.mark.parametrize("header", WHYS)
def test_a_check_says_why_the_first_line_holds_names(folder: Path, header: str) -> None:
    (folder / "records.csv").write_text(f"{header}\n{ROWS}", encoding="utf-8")
    text = check(folder)
    assert "4 records" in text and f"first line: names of the columns, because {WHYS[header]}\n" in text


def test_the_label_that_a_spec_names_is_a_name(folder: Path) -> None:
    (folder / "records.csv").write_text(f"1,2,well\n{ROWS}", encoding="utf-8")
    write(folder, ", label: well")
    assert "because one is called 'well', as data.label names it" in check(folder)


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,  # most of it are numbers
        "1,well\n3,sick\n5,well\n7,sick\n",  # half of it
        "a,1,well\nb,3,sick\nb,5,well\na,7,sick\n",  # a third
        "1,2,y\n3,4,n\n5,6,y\n7,8,n\n",
        "2020-01-01,1\n2020-01-02,0\n2020-01-03,1\n2020-01-04,0\n",
        "true,1\nfalse,0\ntrue,1\nfalse,1\n",
        "NA,1,well\n2,3,sick\n3,5,well\n4,7,sick\n",  # a gap, and no word
    ],
)
@pytest.mark.parametrize("command", ["check", "init", "infer"])
def test_no_record_is_taken_for_names(folder: Path, rows: str, command: str) -> None:
    (folder / "records.csv").write_text(rows, encoding="utf-8")
    done = {
        "init": ["init", str(folder / "records.csv"), "--out", str(folder / "new.yaml")],
        "infer": ["init", str(folder / "records.csv"), "--schema-only"],
        "check": ["spec", "check", str(folder / "spec.yaml")],
    }[command]
    failure = CliRunner().invoke(app, done).exception
    assert isinstance(failure, DataError) and "must begin with a line of column names" in str(failure)
    assert "well" not in str(failure) and "2020" not in str(failure)


def test_a_file_of_names_alone_is_refused(folder: Path) -> None:
    (folder / "records.csv").write_text("age,dose,outcome\n", encoding="utf-8")
    with pytest.raises(DataError, match="must hold at least one record, got only column names"):
        check(folder)


def test_all_columns_of_text_are_told_at_once(folder: Path) -> None:
    (folder / "records.csv").write_text("a,b,c,label\nx,1,y,0\nx,1,y,1\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"column 'a' must be numeric.* and column 'c' must be numeric"):
        check(folder)


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_paths_begin_where_the_spec_lies(folder: Path) -> None:
    assert load_spec(folder / "spec.yaml").data.source == "../ward/records.csv"
    out = folder.parent / "results"
    out.mkdir()
    experiment = Experiment.model_validate(load_spec(folder / "spec.yaml").model_dump(mode="json"))
    simulate_to_folder(out, experiment, replicas=1, seed=0, recorded_noise=None, outputs=())
    assert "source: ../ward/records.csv" in (out / "spec.yaml").read_text(encoding="utf-8")
    (deeper := out / "a" / "b").mkdir(parents=True)
    experiment.to_yaml(deeper / "spec.yaml")
    assert "source: ../../../ward/records.csv" in (deeper / "spec.yaml").read_text(encoding="utf-8")
    assert Experiment.model_validate(load_spec(deeper / "spec.yaml").model_dump(mode="json")).records.n_features == 3


def test_so_does_that_of_a_graph(folder: Path) -> None:
    (folder / "graph.txt").write_text("0 1\n", encoding="utf-8")
    text = (folder / "spec.yaml").read_text(encoding="utf-8")
    (folder / "spec.yaml").write_text(text + "topology: {graph: {kind: file, path: graph.txt}}\n", encoding="utf-8")
    assert "2 learners" in check(folder)


def test_names_and_whole_paths_stay(folder: Path) -> None:
    for source in ("breast_cancer", str(folder / "records.csv")):
        spec = f"{{rounds: 5, algorithm: ldp-dol, data: {{source: '{source}'}}}}"
        (folder / "spec.yaml").write_text(spec, encoding="utf-8")
        assert load_spec(folder / "spec.yaml").data.source == source


# ---- what is not whole -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError])
def test_a_simulation_that_is_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: type[BaseException]
) -> None:
    from sottovoce_core.runs import transcript

    experiment = Experiment(rounds=5, learners=2, algorithm="ldp-dol")
    write = transcript.TranscriptWriter.write

    def until_round_3(self: Any, t: int, *rest: Any) -> None:
        if t == 3:
            raise how
        write(self, t, *rest)

    monkeypatch.setattr(transcript.TranscriptWriter, "write", until_round_3)
    with pytest.raises(how):
        simulate_to_folder(
            tmp_path, experiment, replicas=1, seed=0, recorded_noise=None, outputs=("models", "decisions", "transcript")
        )
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    simulate_to_folder(
        tmp_path, experiment, replicas=1, seed=0, recorded_noise=None, outputs=("models", "decisions", "transcript")
    )
    assert not list(tmp_path.glob("*.partial"))


def test_a_simulation_beyond_memory_is_refused(tmp_path: Path) -> None:
    experiment = Experiment(rounds=5, learners=2, algorithm="ldp-dol")
    with pytest.raises(SpecError, match=r"a simulation must hold at most 134217728 numbers, .* take fewer replicas"):
        simulate_to_folder(
            tmp_path,
            experiment,
            replicas=10**9,
            seed=0,
            recorded_noise=None,
            outputs=("models", "decisions", "transcript"),
        )


def test_a_model_beyond_what_services_take_is_refused() -> None:
    spec = {"rounds": 5, "algorithm": "ldp-dol", "loss": {"kind": "softmax", "classes": 10**8}}
    with pytest.raises(SpecError, match="a model must have at most 16777216 numbers"):
        _ = Experiment(**spec).run


def test_what_its_records_say_less_is_said_by_each_command_once(folder: Path) -> None:
    """On standard error, in the words of `spec check`, whose last line does not call it fine alone."""
    (folder / "records.csv").write_text(RECORDS.replace("2,2,sick", "2,2,dead"), encoding="utf-8")
    spec, code = str(folder / "spec.yaml"), ["[RECORDS_END]", "[CLASSES_JOINED]"]
    warned = [line for line in check(folder).splitlines() if line.startswith("warning: ")]
    warned = [line for line in warned if line.rsplit(" ", 1)[1] in code]  # others are of the algorithm
    assert len(warned) == 2
    assert check(folder).endswith("2 features and an intercept: valid, with 4 warnings above\n")
    for command in (
        ["simulate", spec],
        ["compare", spec, spec],
        ["sweep", spec, "--set", "algorithm.sigma=1,2", "--replicas", "1"],
    ):
        done = CliRunner().invoke(app, command)
        assert (done.exit_code, [line for line in done.stderr.splitlines() if "warning" in line]) == (0, warned)
    (folder / "records.csv").write_text(RECORDS, encoding="utf-8")
    (folder / "spec.yaml").write_text((folder / "spec.yaml").read_text().replace("rounds: 5", "rounds: 3"))
    assert CliRunner().invoke(app, ["simulate", spec]).stderr == ""
    assert check(folder).endswith("valid, with 2 warnings above\n")
