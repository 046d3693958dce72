"""The language of the product: the first words of docstrings, words that say nothing, and names.

A docstring of a function opens with a verb, any other with a noun phrase (CONTRIBUTING.md). ruff checks the verb (D401);
what it cannot see is checked here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = [
    path for folder in ("core", "services", "coordinator", "clients") for path in sorted((ROOT / folder).rglob("*.py"))
]

# Question words, relative pronouns and prepositions: what follows them names no subject.
OPENERS = (
    "What Who Whom Whose Which Whether How Where When Why Of As Is Are That By With Without In On At From Until If So"
)
OPENING = re.compile(rf"({'|'.join(OPENERS.split())})\b")
EMPTY = re.compile(r"\b(who|what)ever\b|\b(some|any|every|no)body\b", re.IGNORECASE)
# A participle alone says neither what is done nor what is there.
PARTICIPLE = re.compile(r"_*([a-z]+ed|told|said|heard|kept|made|known|seen|taken|drawn|found|sent|built)$")
VERBS = {"feed", "need", "seed", "speed", "spread"}
LIMIT = re.compile(r"_?(MOST|LEAST|LONGEST|LARGEST|SMALLEST|FEWEST)(_|$)")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those of attributes and constants included."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(node):
            yield getattr(node, "lineno", 1), text
        for statement, after in zip(node.body, node.body[1:], strict=False):
            match statement, after:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                    yield after.lineno, text.strip()


def findings(source: str) -> list[str]:
    """Violations of a module, one line each."""
    tree = ast.parse(source)
    found = [f"{line}: {text[:60]!r} names no subject" for line, text in docstrings(tree) if OPENING.match(text)]
    found += [f"{k}: {match[0]!r}" for k, line in enumerate(source.splitlines(), 1) if (match := EMPTY.search(line))]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
            if PARTICIPLE.match(name) and name.lstrip("_") not in VERBS:
                found.append(f"{node.lineno}: {name} is a participle")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and LIMIT.match(node.id):
            found.append(f"{node.lineno}: {node.id}: limits are MIN_ or MAX_")
    return found


def own_names(source: str) -> list[str]:
    """Functions whose name stands in their own docstring as if it were a word: a rename has reached into the sentence."""
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    prose = {node: re.sub(r"`[^`]*`", "", ast.get_docstring(node) or "").split(">>>")[0] for node in functions}
    return [node.name for node in functions if "_" in node.name and re.search(rf"\b{node.name}\b", prose[node])]


def test_no_docstring_has_the_name_of_its_function_as_a_word() -> None:
    source = 'def list_all():\n    """List the {} of a run, >>> list_all()."""\n'
    assert own_names(source.format("list_all")) == ["list_all"] and own_names(source.format("`list_all`")) == []
    scripts = [ROOT / "noxfile.py", *(ROOT / "proto").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    found = {str(path): own_names(path.read_text(encoding="utf-8")) for path in [*PRODUCT, *scripts]}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_speaks_the_language_of_the_field(path: Path) -> None:
    assert findings(path.read_text(encoding="utf-8")) == []


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""What is sent."""', 1),
        ('"""Messages."""\nMAX_BYTES = 1\n"""Of a message, at most."""', 1),
        ('"""Messages."""\n# nobody reads it', 1),
        ('"""Messages."""\ndef told():\n    """Send a message."""', 1),
        ('"""Messages."""\nMOST_BYTES = 1', 1),
        ('"""Messages."""\nMAX_BYTES = 1\n"""Maximum size of a message."""\ndef feed():\n    """Send a message."""', 0),
    ],
)
def test_what_is_found(source: str, count: int) -> None:
    assert len(findings(source)) == count
