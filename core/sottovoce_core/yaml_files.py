"""Documents in YAML 1.2: run specs, schemas, policies, options.

Duplicate names and invalid values are refused with their line.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, Node
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import SafeRepresenter

from sottovoce_core.errors import SpecError

MAX_FILE_BYTES = 16 * 1024 * 1024
"""Maximum number of bytes of a file: thousands of learners, or categories, need some hundred each."""
_MAX_INTEGER_BITS = 2**13
"""Maximum size of an integer: longer ones are not even printed."""
_FORMS = {"NoneType": "nothing", "str": "text", "list": "a list", "int": "a number", "float": "a number"}
_KINDS = {"int": "whole number", "float": "number", "bool": "true or false", "timestamp": "date"}
_BLANK_LOOKALIKES = {"\t": "a tab", "\u00a0": "a no-break space"}
"""Characters that look like a blank and are none."""
_YAML_1_1_SCALAR = re.compile(r"(?i)y|n|yes|no|on|off|[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?")
"""Text that readers of YAML 1.1, such as Helm and PyYAML, read as a truth value or as minutes and seconds."""


class _Constructor(SafeConstructor):
    """Constructor that reports the line of an error, and never prints a value: aliases expand without limit."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = set[str]()
        merged = getattr(node, "merge", None) or ()  # precedes the own keys after a merge
        for key, _ in node.value[len(merged) :]:
            if not isinstance(key, ScalarNode):
                raise _build_yaml_error("the name of a field must be text", key)
            if key.value in names:
                raise _build_yaml_error(f"a name must be unique, got {key.value!r} twice", key)
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
                raise ValueError
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            form = str(node.tag).rpartition(":")[2]
            why = f": {error}" if form == "timestamp" and isinstance(error, ValueError) else ""
            raise _build_yaml_error(
                f"a value must be valid, got {str(node.value)[:40]!r}, which is no {_KINDS.get(form, form)}{why}", node
            ) from None
        return value


def _build_yaml_error(text: str, node: Node) -> YAMLError:
    return ConstructorError(None, None, text, node.start_mark)


class _Representer(SafeRepresenter):
    """Representer whose output every reader of YAML reads alike, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_float(self, data: float) -> ScalarNode:
        node = super().represent_float(data)
        if "." not in node.value:  # 1e-05, which is text in YAML 1.1
            node.value = node.value.replace("e", ".0e", 1)
        return node

    def represent_text(self, data: str) -> ScalarNode:
        quotes = "'" if _YAML_1_1_SCALAR.fullmatch(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=quotes)


_Representer.add_representer(str, _Representer.represent_text)
_Representer.add_representer(float, _Representer.represent_float)


def parse_yaml(text: str) -> Any:
    """Parse a text as YAML 1.2.

    Raises:
        YAMLError: not YAML, a duplicate key, or an invalid value.
        RecursionError: nested too deeply.
    """
    reader = _make_yaml()
    reader.Constructor = _Constructor
    return reader.load(text)


def write_yaml(value: object, *, flow: bool | None = False) -> str:
    """Write a value as YAML: mappings in their own order, without line breaks inside values.

    Args:
        value: value of mappings, lists, texts and numbers.
        flow: use braces and brackets; None: only for collections without nested ones.
    """
    writer, text = _make_yaml(), io.StringIO()
    writer.Representer = _Representer
    writer.default_flow_style, writer.width = flow, sys.maxsize
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.dump(value, text)
    return text.getvalue().removesuffix("...\n")


def _make_yaml() -> YAML:
    return YAML(typ="safe", pure=True, plug_ins=[])


def read_text_file(path: Path, what: str, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Read a text file.

    Args:
        path: path of the file.
        what: expected content, with its article.
        max_bytes: maximum number of bytes.

    Raises:
        SpecError: unreadable, too long, or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise SpecError(f"cannot read {_with_definite_article(what)} {path}: {error.strerror}") from None
    if len(raw) > max_bytes:
        raise SpecError(f"{path}: {what} must have at most {max_bytes} bytes, got more")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        if (found := detect_format(raw)) and "UTF" not in found:
            raise SpecError(
                f"cannot read {_with_definite_article(what)} {path}: it must be text in UTF-8, got {found}"
            ) from None
        line = raw.count(b"\n", 0, error.start) + 1
        found = found.replace("text in", "it is") or f"line {line} is not"
        raise SpecError(
            f"cannot read {_with_definite_article(what)} {path}: it must be UTF-8, and {found}: save it as UTF-8"
        ) from None


_FORMATS = (
    (rb"\x1f\x8b", "gzip data: unpack it"),
    (rb"PK\x03\x04.*(\[Content_Types\]|xl/)", "an Excel workbook: save the sheet as CSV UTF-8"),
    (rb"PK\x03\x04[^/]*\.npy", "a NumPy archive: its name must end in .npz"),
    (rb"PK\x03\x04", "a zip archive: unpack it"),
    (rb"\xd0\xcf\x11\xe0", "an old Excel workbook: save the sheet as CSV UTF-8"),
    (rb"BZh[1-9]1AY", "bzip2 data: unpack it"),
    (rb"\xfd7zXZ", "xz data: unpack it"),
    (rb"\x28\xb5\x2f\xfd", "zstd data: unpack it"),
    (rb"PAR1[\x00-\x08\x0e-\x1f\x80-\xff]", "a Parquet file: its name must end in .parquet"),
    (rb"ARROW1\x00", "an Arrow (Feather) file: write it as .parquet"),
    (rb"\x93NUMPY", "one NumPy array (.npy): write X and y with numpy.savez"),
    (rb"\x89HDF", "HDF5: write it as .parquet or .npz"),
    (rb"MATLAB \d\.\d MAT-file", "a MATLAB file: write it as .csv"),
    (rb"SQLite format 3\x00", "an SQLite database: write the table as .csv"),
    (rb"\x80[\x02-\x05]", "pickled Python objects: write them as .npz, .csv or .parquet"),
    (rb"version https://git-lfs", "a Git LFS pointer in place of the file: run git lfs pull"),
    (rb"\xff\xfe\x00\x00|\x00\x00\xfe\xff", "text in UTF-32"),
    (rb"\xff\xfe|\xfe\xff|(\x00[^\x00]){4}|([^\x00]\x00){4}", "text in UTF-16"),
    (rb"(?i)\s*<(!doctype )?html", "a web page: fetch the file itself"),
    (rb"\s*<(\?xml|!|\w[^,\n]*\n)", "XML"),
    (rb"(?i)(\s*%.*\n)*\s*@relation\b", "ARFF (Weka): write it as .csv"),
    (rb"\s*(\{\s*[\"}]|\[\s*[\[{\"\d-])", "JSON: write it as .csv or .parquet"),
    (
        rb"[ \t]*[+-]?\d[\d.eE+-]*([ \t]+\d+:[+-]?[\d.][\d.eE+-]*)+[ \t]*(#.*)?\r?(\n|$)",
        "LIBSVM (label index:value ...): write it as .npz or .csv (scikit-learn's load_svmlight_file reads it)",
    ),
)
"""Patterns of content in another format than a file's name states; with the format's name and what to do."""


def detect_format(content: bytes) -> str:
    """Name the format that a file's content looks like, with what to do about it; empty if unknown."""
    head = content[:4096].removeprefix(b"\xef\xbb\xbf")
    # A zip archive lists its members at the end, where an Excel workbook names its sheets.
    tail = content[-4096:] if head.startswith(b"PK") else b""
    return next((name for begin, name in _FORMATS if re.match(begin, head + tail, re.DOTALL if tail else 0)), "")


def _with_definite_article(what: str) -> str:
    return what.replace("a ", "the ", 1)


def parse_document(text: str, source: str, what: str = "a run spec") -> Mapping[Any, Any]:
    """Parse a text as YAML, without validation.

    Args:
        text: content of a file.
        source: name of the document in errors.
        what: expected content.

    Raises:
        SpecError: not YAML, or no mapping of fields.
    """
    try:
        document = parse_yaml(text)
    except YAMLError as error:
        raise SpecError(f"{source} is not YAML: {_describe_yaml_error(error, text)}") from None
    except RecursionError:
        raise SpecError(f"{source} must be a mapping of fields and sections, got one nested too deeply") from None
    return require_mapping(document, source, what)


def require_mapping(document: object, source: str, what: str = "a run spec") -> Mapping[Any, Any]:
    """Return the document if it is a mapping of fields.

    Raises:
        SpecError: it is not.
    """
    if isinstance(document, Mapping):
        return document
    form = type(document).__name__
    colon = isinstance(document, str) and re.search(r":\S", document)
    advice = ": put a blank after each colon" if colon else ""
    raise SpecError(f"{source}: {what} must be a mapping of fields, got {_FORMS.get(form, form)}{advice}")


def _describe_yaml_error(error: YAMLError, text: str) -> str:
    """Describe why a text is not YAML, and in which line: one sentence."""
    if isinstance(error, ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"its characters must be text, got U+{error.character:04X} in line {line}"
    mark = getattr(error, "problem_mark", None)
    description, advice = str(getattr(error, "problem", None) or "it cannot be read"), ""
    if mark is None:
        return description
    if description.startswith("but found another document"):
        return f"it must be one document, and a second one begins in line {mark.line + 1}, after ---: make it a file of its own"
    line, column = mark.line, mark.column
    near = [(k, at) for k, at in enumerate(text.split("\n")) if line - 1 <= k <= line]
    if odd := next(
        ((k, at.index(sign), name) for k, at in near for sign, name in _BLANK_LOOKALIKES.items() if sign in at), None
    ):
        line, column, name = odd
        description, advice = f"{name} is in the text", ": put a blank in its place"
    elif description.startswith("mapping values are not allowed"):
        advice = "; is a line indented too far, or does text with a colon need quotes?"
    return f"{' '.join(description.split())} (line {line + 1}, column {column + 1}){advice}"
