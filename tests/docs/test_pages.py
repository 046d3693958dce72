"""Whoever follows a page sees what it shows: every command is typed, from the first to the last, or stands in `left_out.py`."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.commands import mistake, named
from tests.docs.following import follow, reason
from tests.docs.left_out import NOT_RUN
from tests.docs.outputs import STEADY, shows
from tests.docs.pages import CHECKOUT, PAGES, Block, blocks, text_of
from tests.docs.shell import isolated

READABLE = sorted(
    path.relative_to(CHECKOUT).as_posix()
    for places in ("*.md", "docs/**/*.md", "deploy/**/*.md", "benchmarks/**/*.md")
    for path in CHECKOUT.glob(places)
)
FILE = re.compile(
    r"(?<![\w:/.-])(?:\./)?([\w.-]+(?:/[\w.*-]+)*\.(?:yaml|yml|csv|py|whl|txt|service|env\.example|json))(?![\w/])"
)
WRITTEN = re.compile(r"(?:--out|--dead-letters|>)\s+([\w./-]+)")
SCRIPT = re.compile(r"(?:python|pytest)[^`\n]*? ((?:benchmarks|tests|proto|examples|\.ci)/[\w/.-]+\w)")
MODULE = re.compile(r"python -m ([\w.]+\w)")
NOT_THERE = {
    "docs/guides/live.md": {"ward-3.csv"},
    "docs/guides/models.md": {"new.csv"},
    "docs/guides/data.md": {"public.csv"},
}
"""Files of the reader's own that commands of a page name, and nobody can have made."""


def commands_of(page: str) -> list[str]:
    return [command for block in blocks(text_of(page)) for command in block.commands]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if not all(reason(page, each) for each in commands_of(page))])
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    if not isolated():
        pytest.skip("no network of its own can be had here (unshare), and its services listen at the ports of the page")
    followed = 0
    for said in follow(page, tmp_path / "page"):
        assert said.code == 0, said.text
        assert said.shown or not said.block.output or not said.whole, f"{said.block.text}now prints\n{said.text}"
        followed += 1
    assert followed


@pytest.mark.parametrize("page", NOT_RUN)
def test_what_is_left_out_is_there(page: str) -> None:
    commands = commands_of(page)
    for start in NOT_RUN[page]:
        assert any(command.startswith(start) for command in commands), start


@pytest.mark.parametrize("page", READABLE)
def test_the_command_line_has_what_a_page_names(page: str) -> None:
    assert [f"{command}: {wrong}" for command in named(text_of(page)) if (wrong := mistake(command))] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_commands_name_are_there(page: str) -> None:
    """A page brings them, its commands write them, or a clone has them."""
    found = blocks(text_of(page))
    there = {block.file for block in found} | {"wards.yaml", "wards.csv"} | set(WRITTEN.findall(text_of(page)))
    missing = {
        name
        for command in commands_of(page)
        if reason(page, command)
        for name in FILE.findall(command)
        if name not in there and not any(name.startswith(f"{each}/") for each in there) and not _in_clone(name)
    }
    assert missing == NOT_THERE.get(page, set())


@pytest.mark.parametrize("page", READABLE)
def test_scripts_and_sessions_that_a_page_names_are_there(page: str) -> None:
    text = text_of(page)
    sessions = set(re.findall(r"^def (\w+)\(session", text_of("noxfile.py"), re.MULTILINE))
    missing = [name for name in re.findall(r"\bnox -s ([a-z]+)", text) if name not in sessions]
    missing += [path for path in SCRIPT.findall(text) if not any(CHECKOUT.glob(path))]
    missing += [name for name in MODULE.findall(text) if not _module(name)]
    assert missing == []


def _module(name: str) -> bool:
    """Whether `python -m` finds it here, or an installed package has it."""
    path = CHECKOUT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file() or find_spec(name) is not None


def _in_clone(name: str) -> bool:
    return "/" in name and any(CHECKOUT.glob(name))


def test_commands_are_found_and_held_against_the_command_line() -> None:
    page = """`sottovoce up --tls`, `sottovoce runs stop RUN`, `sottovoce up --tsl`, `sottovoce go`

    sottovoce audit SPEC [--runs 10] [--threat wire|output]
                    [--alarm 5]

```sh
A=1 sottovoce audit wards.yaml --runs 3 \\
  --seed 1 > out.txt && sottovoce audit a b c   # sottovoce nothing
sottovoce budget wards.yaml --target
sottovoce runs stop
```
"""
    assert {str(each): mistake(each) for each in named(page)} == {
        "sottovoce up --tls": "",
        "sottovoce runs stop RUN": "",
        "sottovoce up --tsl": "no option --tsl",
        "sottovoce go": "no command 'go'",
        "sottovoce audit SPEC --runs 10 --threat wire --alarm 5": "no option --alarm",
        "sottovoce audit wards.yaml --runs 3 --seed 1": "",
        "sottovoce audit a b c": "takes 1 arguments, got a b c",
        "sottovoce budget wards.yaml --target": "--target needs a value",
        "sottovoce runs stop": "needs 1 arguments",
    }


def test_a_block_of_commands_is_known() -> None:
    """However a page fences it; what is not a shell's is none."""
    assert Block("sh", "a\nb \\\n  c\n# d\n").commands == ["a", "b \\\n  c"]
    assert Block("text", "a\n").commands == []


def test_an_output_is_held_to_its_words_and_numbers() -> None:
    assert shows("epsilon 1.999, in 3 s\n", "epsilon 1.998, in 12 min\n", exact=True)
    assert not shows("epsilon 1.999\n", "epsilon 1.5\n", exact=True)
    assert shows("epsilon 1.999\n", "epsilon 1.5\n", exact=False)
    assert not shows("epsilon 1.999\n", "delta 1.999\n", exact=False)
    assert shows("[1.5, -2.5]\n", "[1.5, -140, 2]\n", exact=False) is False
    assert shows("[1.5, -2.5, 3]\n", "[1.5, -140, 3]\n", exact=False)
    head = "| spec | loss | rounds/s |\n| --- | ---: | ---: |\n"
    table = f"{head}| a | 0.72 ± 3e−16 | 366,000 |\n"
    assert shows(table, f"{head}| a | 0.72 ± 4e−17 | 9,000 |\n", exact=True)
    assert not shows(table, f"{head}| a | 0.70 ± 3e−16 | 366,000 |\n", exact=True)
    assert all(STEADY.match(f"sottovoce {command} wards.yaml") for command in ("compare", "simulate", "sweep"))
    assert shows("\u2026 REFUTED\n\u2026\n", "north REFUTED\nthe claim\n", exact=True)
    assert not shows("\u2026 REFUTED\n\u2026\n", "north CONSISTENT\n", exact=False)
