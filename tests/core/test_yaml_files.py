"""YAML means what a person means by it, or is refused in a sentence with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError, create_model

from sottovoce_core.errors import SpecError
from sottovoce_core.registry import Section
from sottovoce_core.spec import RunSpec, load_spec
from sottovoce_core.yaml_files import MAX_FILE_BYTES, parse_yaml, read_text_file, write_yaml

pytestmark = pytest.mark.each

HEAD = "algorithm: ldp-dol\n"
FIVE = HEAD + "rounds: 5\n"

MEANT = {
    "rounds: 1e5": ("rounds", 100_000),
    "rounds: +1.5E3": ("rounds", 1_500),
    "rounds: 1.5e1": ("rounds", 15),
    "rounds: 1_000": ("rounds", 1_000),
    "rounds: '100'": ("rounds", 100),
    "rounds: 0x10": ("rounds", 16),
    "rounds: 0o10": ("rounds", 8),
    "rounds: 08": ("rounds", 8),
    "rounds: 012": ("rounds", 12),
    "rounds: &n 5\nclock: {window: *n}": ("rounds", 5),
    "\ufeffrounds: 5": ("rounds", 5),
    "rounds: 5\r\nname: x\r\n": ("name", "x"),
    "rounds: 5\rname: x\r": ("name", "x"),
    "---\nrounds: 5\n...\n": ("rounds", 5),
    "rounds: 5\nlearners: [yes, no, off, n]": ("learners", ("yes", "no", "off", "n")),
    "rounds: 5\nlearners: ['yes', 'no', '012', '1e5', '2020-01-31']": (
        "learners",
        ("yes", "no", "012", "1e5", "2020-01-31"),
    ),
    '{"rounds": 5, "name": "x"}': ("name", "x"),
}
"""What a person means by it: a field, and its value."""

TOLD = {
    "rounds: yes": "rounds: must be a whole number, got 'yes'",
    "rounds: true": "rounds: must be a whole number, got True",
    "learners: true\nrounds: 5": "learners: must be a whole number or a list, got True",
    "rounds: 5\nlearners: [true, b]": "learners.0: must be text, got True: put quotes around it, because it is text",
    "rounds: 5\nlearners: [2020-01-31, b]": "learners.0: must be text, got 2020-01-31: put quotes around it, because it is text",
    "rounds: 5\nlearners: [a, 007]": "learners.1: must be text, got 7: put quotes around it, because it is text",
    "rounds: 5\nname: 2020": "name: must be text, got 2020: put quotes around it, because it is text",
    "rounds: 5\nprivacy: {budget: on}": "privacy.budget: must be a number or a list, got 'on'",
    "rounds: 5\nprivacy: {budget: true}": "privacy.budget: must be a number or a list, got True",
    "rounds: 5\nprivacy: {budget: [1, true]}": "privacy.budget.1: must be a number, got True",
    "rounds: 5\ncapture: off": "capture: must be 'relay', 'mirror', 'wiretap' or 'none', got 'off'",
    "rounds: 1,000": "rounds: must be a whole number, got '1,000'",
    "rounds: 1.5e0": "rounds: must be a whole number, got 1.5",
    "rounds: 1:30": "rounds: must be a whole number, got '1:30'",
    "rounds: 5\nrounds: 6": "s.yaml is not YAML: a name must be unique, got 'rounds' twice (line 3, column 1)",
    "rounds: 5\nclock:\n\twindow: 3": "a tab is in the text (line 4, column 1): put a blank",
    "rounds:\u00a05": "a no-break space is in the text (line 2, column 8): put a blank",
    "rounds: 5\n---\nrounds: 6": "it must be one document, and a second one begins in line 3, after ---",
    "rounds: [5": "s.yaml is not YAML: expected ',' or ']', but got '<stream end>' (line 3, column 1)",
    "rounds: 5\nname: a: b": "mapping values are not allowed here (line 3, column 8); is a line indented too far",
    "rounds: 2020-02-30": "got '2020-02-30', which is no date: day is out of range for month (line 2, column 9)",
    "rounds: !!bool maybe": "a value must be valid, got 'maybe', which is no true or false (line 2, column 9)",
    "rounds: !!int ''": "a value must be valid, got '', which is no whole number (line 2, column 9)",
    "rounds: !!timestamp x": 'failed to construct timestamp from "x" (line 2, column 9)',
    "rounds: !!python/name:os.system": "could not determine a constructor for the tag",
    f"rounds: 0x{'f' * 5000}": "which is no whole number (line 2, column 9)",
    "rounds: 5\ntrue: 2": "the name of a field must be text, got True: put quotes around it, because it is text",
    "rounds: 5\nprivacy: {budget: 1,5}": "privacy: the name of a field must be text, got 5: put quotes around it",
    "rounds: 5\n? [1, 2]\n: 3": "the name of a field must be text (line 3, column 3)",
    "rounds: 5\n? [[1], 2]\n: 3": "the name of a field must be text (line 3, column 3)",
    "rounds: 5\nprivacy: {<<: {budget: 1}, budget: 2, budget: 3}": "must be unique, got 'budget' twice (line 3, column 39)",
    "rounds: 5\nname: a\x00b": "s.yaml is not YAML: its characters must be text, got U+0000 in line 3",
}


def written(folder: Path, text: str) -> Path:
    path = folder / "s.yaml"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("text", MEANT, ids=repr)
def test_it_works_as_a_person_means_it(tmp_path: Path, text: str) -> None:
    field, value = MEANT[text]
    ends = "\n" if "\r" not in text else text[-1] if text.endswith("\r") else "\r\n"
    head = '"algorithm": "ldp-dol", ' if text.startswith("{") else f"{HEAD.strip()}{ends}"
    at = next((k for k, each in enumerate(text) if each not in "\ufeff{-\n"), 0)
    assert getattr(load_spec(written(tmp_path, text[:at] + head + text[at:])), field) == value


@pytest.mark.parametrize("text", TOLD, ids=lambda text: repr(text)[:60])
def test_or_it_is_told_in_a_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_spec(written(tmp_path, HEAD + text + "\n"))
    assert TOLD[text] in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert "<unicode string>" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_says_nothing(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError, match=r"s\.yaml: a run spec must be a mapping of fields, got nothing$"):
        load_spec(written(tmp_path, text))


def test_a_file_without_blanks_is_text(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="fields, got text: put a blank after each colon"):
        load_spec(written(tmp_path, "rounds:5\nname:x\n"))


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (FIVE.encode("utf-16"), "it is UTF-16"),
        ((FIVE + "learners: [Süd, b]").encode("latin-1"), "line 3 is not"),
        (b"\xfe\x00", "line 1 is not"),
    ],
)
def test_what_is_no_utf_8_is_told_with_its_line(tmp_path: Path, raw: bytes, found: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(raw)
    with pytest.raises(
        SpecError, match=rf"cannot read the run spec .*: it must be UTF-8, and {found}: save it as UTF-8"
    ):
        load_spec(path)


def test_a_file_that_is_none_is_told_once(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(SpecError) as refused:
            load_spec(path)
        assert str(refused.value) == f"cannot read the run spec {path}: {why}"


def test_a_file_without_end_is_not_read_to_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"/dev/zero: a run spec must have at most {MAX_FILE_BYTES} bytes, got more"):
        load_spec(Path("/dev/zero"))
    path = written(tmp_path, "x" * 11)
    assert read_text_file(path, "a note", 11) == "x" * 11
    with pytest.raises(SpecError, match="a note must have at most 10 bytes, got more"):
        read_text_file(path, "a note", 10)


def test_what_the_library_writes_is_read_as_it_was() -> None:
    said = {"texts": ["012", "1:30", "1e5", "yes", "2020-01-31", "1_0", "0x1f"], "numbers": [12, 90, 1e5, 0, -7, 0.5]}
    assert parse_yaml(write_yaml(said)) == said == yaml.safe_load(write_yaml(said))


def test_aliases_that_grow_without_end_are_refused_at_once(tmp_path: Path) -> None:
    grown = "".join(f"  - &a{k + 1} [{', '.join([f'*a{k}'] * 9)}]\n" for k in range(30))
    bomb = f"{FIVE}name: &a0 [x]\ndata:\n{grown}"
    for text in (bomb, f"{bomb}data: 1\n", f"{bomb}? *a30\n: 1\n"):
        with pytest.raises(SpecError) as refused:
            load_spec(written(tmp_path, text))
        assert len(str(refused.value)) < 1000


# ---- all fields ------------------------------------------------------------------------------------------------------


def sections(of: type[Section] = Section) -> list[type[Section]]:
    return [of, *(each for inner in of.__subclasses__() for each in sections(inner))]


def numeric(section: type[Section]) -> list[str]:
    """Fields that take a number and neither text nor true."""

    def kinds(annotation: Any) -> set[Any]:
        return {annotation} | {
            kind for inner in get_args(annotation) if isinstance(inner, type) for kind in kinds(inner)
        }

    fields = section.model_fields.items()
    return [
        name
        for name, each in fields
        if kinds(each.annotation) & {int, float} and not kinds(each.annotation) & {str, bool}
    ]


def test_no_field_takes_true_for_a_number() -> None:
    RunSpec.model_json_schema()  # imports all built-in kinds
    tried = [(section, name) for section in sections() for name in numeric(section)]
    assert len(tried) > 30
    for section, name in tried:
        field = section.model_fields[name]
        alone = create_model("Alone", __base__=Section, **{name: (field.annotation, field)})  # type: ignore[call-overload]
        with pytest.raises(ValidationError) as refused:
            alone.model_validate({name: True})
        assert refused.value.errors()[0]["loc"][0] == name, (section, name)
