"""Explanations of invalid documents, for the person who wrote the document."""

from __future__ import annotations

import datetime
import math
import numbers
import re
import reprlib
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import PurePath
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from sottovoce_core.registry import MisplacedBoolean, Registry, Section
from sottovoce_core.text import suggest_name
from sottovoce_core.yaml_files import write_yaml

FieldPath = tuple[int | str, ...]
RECORD_FIELD_PATHS: tuple[FieldPath, ...] = (("data",), ("data", "source"))
"""Fields in which a user may have put the records themselves by mistake."""
_DISPLAYABLE_TYPES = (str, bytes, numbers.Number, datetime.date, datetime.time, PurePath, type, type(None))

_REQUIREMENT_BY_ERROR_TYPE = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "path_type": "a path",
    "none_required": "null",
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
    "dict_type": "a mapping of fields",
    "mapping_type": "a mapping of fields",
    "finite_number": "a finite number",
}
"""Expected form of a value of the wrong type, by the kind of Pydantic's error."""
_QUOTED = "'([^']*)'"
"""Pattern of a name in a list of Pydantic's."""
_NUMBERS = ("int_type", "int_parsing", "int_parsing_size", "float_type", "float_parsing", "finite_number")
_LISTS = ("tuple_type", "list_type", "set_type", "frozen_set_type")
_TYPE_ERRORS = {*_REQUIREMENT_BY_ERROR_TYPE, *_LISTS, "literal_error", "is_instance_of"} - {"finite_number"}


def explain(error: ValidationError, source: str, document: Mapping[Any, Any], model: type[Section]) -> str:
    """Explain an invalid document: one line per problem, each with the field, the value and what is allowed."""
    return "\n".join(f"{source}: {line}" for line in format_validation_errors(error, document, model))


def format_validation_errors(error: ValidationError, document: Mapping[Any, Any], model: type[Section]) -> list[str]:
    """Return the explanation as a list of lines; the fields that a section has are named once."""
    found, lines, listed = _group_by_place(error.errors(), document), list[str](), set[FieldPath]()
    for place, alike in found:
        unknown = alike[0]["type"] == "extra_forbidden"
        again = unknown and place[:-1] in listed
        lines.append(
            f"unknown field {_format_place(place)}{suggest_name(place[-1], _fields_at(place[:-1], document, model))}"
            if again
            else _format_problem(place, alike, document, model)
        )
        listed |= {place[:-1]} if unknown else set()
    return lines


def describe_requirement(problem: Any) -> str:
    """Describe what one of Pydantic's problems required, as a sentence without a subject: `must be a number`."""
    kind, context, text = problem["type"], problem.get("ctx", {}), problem["msg"]
    if kind in _NUMBERS and _is_too_large(problem.get("input")):
        return "must be a number within [-1e+308, 1e+308]"
    if kind in _REQUIREMENT_BY_ERROR_TYPE or kind in _LISTS:
        return f"must be {_describe_form(problem)}"
    match kind:
        case "invalid_key":
            return "the name of a field must be text"
        case "union_tag_invalid":
            tags, key = context["expected_tags"], context["discriminator"].strip("'")
            near = suggest_name(context["tag"], re.findall(_QUOTED, tags))
            return f"{key} must be one of {tags}, got {context['tag']!r}{near}"
        case "literal_error" | "enum":
            return f"must be {context['expected']}"
        case "too_short" | "too_long":
            least, most = context.get("min_length"), context.get("max_length")
            return f"must have {f'at least {least}' if kind == 'too_short' else f'at most {most}'} items"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return f"must be {text.removeprefix('Input should be ')}"
        case _:
            text = text.removeprefix("Value error, ").removeprefix("Assertion failed, ")
            return f"{text[0].lower()}{text[1:]}"


def _is_too_large(value: object) -> bool:
    """Return whether a value is a number, written with digits, that float64 cannot hold."""
    if not isinstance(value, int | str) or isinstance(value, bool):
        return False
    try:
        return math.isinf(float(value)) and "inf" not in str(value).lower()
    except OverflowError:
        return True
    except ValueError:
        return False


def _group_by_place(problems: list[Any], document: object) -> list[tuple[FieldPath, list[Any]]]:
    """Group the problems by their place in the document.

    For a field of several possible types, Pydantic reports one problem for each type. Only the relevant ones are kept: a problem
    within a list excludes that the value is no list; a number that is too large is not reported as no list; and a list with a
    wrong item is not reported as too short, because Pydantic counts only valid items.
    """
    found = [(_locate(each, document), each) for each in problems]
    deeper = {place[:k] for place, _ in found for k in range(len(place))}
    kept = [
        (place, each)
        for place, each in found
        if not (place in deeper and (each["type"] == "too_short" or _has_several_types(each, place)))
    ]
    groups = []
    for place, pairs in groupby(kept, key=lambda pair: pair[0]):
        alike = [each for _, each in pairs]
        fitting = [each for each in alike if each["type"] not in _TYPE_ERRORS]
        groups.append((place, fitting if fitting and _has_several_types(alike[0], place) else alike))
    return groups


def _locate(problem: Any, document: object) -> FieldPath:
    """Return the place of a problem in the document, without the names of types that Pydantic inserts."""
    place: list[int | str] = []
    for part in problem["loc"]:
        if (isinstance(document, Mapping) and part in document) or (
            isinstance(part, int) and isinstance(document, list | tuple) and part < len(document)
        ):
            document = document[part]
        elif problem["type"] != "missing" or part != problem["loc"][-1]:
            continue
        place.append(part)
    return tuple(place)


def _has_several_types(problem: Any, place: FieldPath) -> bool:
    """Return whether the problem concerns a field of several possible types."""
    return len(problem["loc"]) > len(place)


def _format_place(place: FieldPath) -> str:
    return ".".join(map(str, place))


def _format_problem(place: FieldPath, alike: list[Any], document: object, model: type[Section]) -> str:
    problem, where = alike[0], _format_place(place)
    match problem["type"]:
        case "extra_forbidden":
            known = _fields_at(place[:-1], document, model)
            there = (
                f"the fields are {', '.join(known)}{suggest_name(place[-1], known)}"
                if known
                else "`sottovoce spec check --json-schema` lists the fields"
            )
            return f"unknown field {where}; {there}"
        case "missing":
            return f"field {where} is required{_show_long_form(place, document, model)}"
        case "kind":  # worded by the registry
            text = problem["msg"]
            dot = "." if text.startswith(("kind", "name", "type")) else ": "
            field = "field " if " is required" in text else ""
            return f"{field}{where}{dot}{text}"
    requirements = list(dict.fromkeys(map(describe_requirement, alike)))
    if len(requirements) > 1 and all(each.startswith("must be ") for each in requirements):
        requirements = ["must be " + " or ".join(each.removeprefix("must be ") for each in requirements)]
    value = problem.get("input")
    value = value.value if isinstance(value, MisplacedBoolean) else value
    if problem["type"] == "invalid_key":
        where = _format_place(place[:-1])
    subject = f"{where}: " if where else ""
    # A whole document or section is not shown: the problem with it names the fields.
    whole = not place or (isinstance(value, Mapping) and {each["type"] for each in alike} == {"value_error"})
    came = (
        "" if whole else f", got {_describe_class(value) if _holds_records(place, value) else abbreviate_value(value)}"
    )
    remedy = "" if whole else _show_example(place, document, model) or _suggest_remedy(place, alike, value)
    return f"{subject}{', or '.join(requirements)}{came}{remedy}"


def _show_example(place: FieldPath, document: object, model: type[Section]) -> str:
    """Return a valid example of a field, also for an item of its list; empty if there is none."""
    for end in range(len(place), 0, -1):
        field = _fields_at(place[: end - 1], document, model).get(str(place[end - 1]))
        if field is not None:
            return f": write {place[end - 1]}: {_as_yaml(field.examples[0])}" if field.examples else ""
    return ""


def _show_long_form(place: FieldPath, document: object, model: type[Section]) -> str:
    """Show a section given as a word in its long form, with a field that it lacks, or the example of that field."""
    *parent, name = place
    section: Any = document
    for part in parent:
        section = section.get(part) if isinstance(section, Mapping) else None
    if not isinstance(section, str):
        return _show_example(place, document, model)
    fields = _fields_at(tuple(parent), document, model)
    key = next((each for each in ("kind", "name", "type") if each in fields), "kind")
    needed = {each: field for each, field in fields.items() if field.is_required() and each != key}
    if name not in needed:
        return ""
    shown = ", ".join(
        f"{each}: {_as_yaml(field.examples[0]) if field.examples else '...'}" for each, field in needed.items()
    )
    return f": write {parent[-1]}: {{{key}: {section}, {shown}}}"


def _as_yaml(value: object) -> str:
    return write_yaml(value, flow=True).strip()


def _describe_form(problem: Any) -> str:
    if problem["type"] not in _LISTS:
        return _REQUIREMENT_BY_ERROR_TYPE[problem["type"]]
    of = next((each for each in problem["loc"][::-1] if isinstance(each, str)), "")
    return "a list of numbers" if of.startswith(("tuple[float", "tuple[constrained-float")) else "a list"


def _suggest_remedy(place: FieldPath, alike: list[Any], value: object) -> str:
    kinds = {each["type"] for each in alike}
    if kinds == {"literal_error"}:
        return suggest_name(value, re.findall(_QUOTED, alike[0]["ctx"]["expected"]))
    if _holds_records(place, value):
        return (
            ": records must be a pair of arrays (X, y), a data frame, or in a file: write them to one (.csv, .parquet)"
        )
    if kinds <= {"string_type", "invalid_key"} and isinstance(value, int | float | datetime.date):
        return ": put quotes around it, because it is text"
    if kinds <= set(_LISTS) and isinstance(value, str | int | float):
        written = write_yaml([value], flow=True).strip()
        return f": write {written}" if len(written) < 40 else ": put it in brackets"
    return ""


def _holds_records(place: FieldPath, value: object) -> bool:
    """Return whether the value holds the records themselves."""
    words = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    return place in RECORD_FIELD_PATHS and not isinstance(value, _DISPLAYABLE_TYPES) and not words


class _AbbreviatedRepr(reprlib.Repr):
    """Abbreviated representation; of an object that may hold records, such as a data frame or an array, only its class."""

    def repr_instance(self, x: Any, level: int) -> str:
        return super().repr_instance(x, level) if isinstance(x, _DISPLAYABLE_TYPES) else _describe_class(x)

    repr_array = repr_deque = repr_instance


def _describe_class(value: object) -> str:
    """Return the class of a value, without any of its content."""
    of, name = type(value).__module__.partition(".")[0], type(value).__qualname__
    return name if of == "builtins" else f"{name} of {of}"


def abbreviate_value(value: object) -> str:
    """Abbreviate a value to one line: YAML aliases expand a few lines without limit. Records in a frame are not shown."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    shortened = _AbbreviatedRepr()  # its limits are arguments from Python 3.12 on
    shortened.maxlevel, shortened.maxlist, shortened.maxtuple, shortened.maxdict = 1, 10, 10, 10
    shortened.maxstring, shortened.maxlong, shortened.maxother = 200, 60, 200
    return shortened.repr(value)


def _registries(field: FieldInfo) -> Iterator[Registry[Any]]:
    """Find the registries of a field whose value, or an item of it, is a section that names its kind."""
    found = [*field.metadata]
    annotations = [field.annotation]
    while annotations:
        each = annotations.pop()
        found += getattr(each, "__metadata__", ())
        annotations += get_args(each)
    return (each for each in found if isinstance(each, Registry))


def _fields_at(place: FieldPath, document: Any, model: type[Section]) -> Mapping[str, FieldInfo]:
    """Return the fields of the section at a place of a document; none if the section is unknown."""
    section: Any = model
    field: FieldInfo | None = None
    for part in place:
        if isinstance(part, int):  # an item of the same field
            document = document[part] if isinstance(document, list | tuple) and part < len(document) else None
        else:
            is_section = isinstance(section, type) and issubclass(section, Section)
            field = section.model_fields.get(part) if is_section else None
            document = document.get(part) if isinstance(document, Mapping) else None
        if field is None:
            return {}
        registry = next(_registries(field), None)
        section = field.annotation if registry is None else registry.find_section_class(document)
    return section.model_fields if isinstance(section, type) and issubclass(section, Section) else {}
