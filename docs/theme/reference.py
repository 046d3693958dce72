"""Generate the reference pages: the run spec from its models, and the command line from its commands.

`python docs/theme/reference.py` writes both, each below the marker of its page. The text above a marker is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from sottovoce_client.cli.app import app
from sottovoce_coordinator.metrics import CATALOGUE as COORDINATOR
from sottovoce_core.registry import Registry, Section
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.service import CATALOGUE as EAVESDROPPER
from sottovoce_learner.metrics import CATALOGUE as LEARNER
from sottovoce_rpc.access import ACCESS_RULES
from sottovoce_rpc.metrics import COMMON_METRICS
from sottovoce_rpc.principals import Role

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
MARKER = "<!-- Generated below this line: python docs/theme/reference.py -->\n"
FAMILIES = {
    "gradient_descent": "Gossip gradient descent ([theory](../theory/gossip.md))",
    "ldp_dol": "LDP-DOL ([theory](../theory/ldp-dol.md))",
    "admm": "ADMM ([theory](../theory/admm.md))",
    "follow_the_leader": "PD-FTGL and kin ([theory](../theory/pd-ftgl.md))",
    "dual_averaging": "Dual averaging ([theory](../theory/dpsda.md))",
}
"""Heading of each family of algorithms, by its package."""


def write_pages() -> None:
    """Write the generated part of each page."""
    for name, lines in PAGES.items():
        path = REFERENCE / name
        path.write_text(read_head(path) + "\n".join(lines()), encoding="utf-8")


def read_head(path: Path) -> str:
    """Read the handwritten part of a page, with its marker."""
    return path.read_text(encoding="utf-8").partition(MARKER)[0] + MARKER


# ---- the run spec ----------------------------------------------------------------------------------------------------


def describe_spec() -> Iterator[str]:
    """Yield the lines of all sections: fields of the spec, then a heading for each section that a field may be."""
    yield from _describe_section("Top level", RunSpec, "")


def _describe_section(title: str, section: type[Section], path: str) -> Iterator[str]:
    yield f"\n{'##' if path.count('.') == 0 else '###'} {title}\n\n{_first_paragraph(section)}\n"
    yield from _table_fields([section], path)
    for name, field in section.model_fields.items():
        below, registries = f"{path}.{name}".lstrip("."), _find_registries(field.annotation, tuple(field.metadata))
        for registry in registries:
            yield from _describe_registry(f"`{below}`", registry, below)
        if not registries:
            for inner in dict.fromkeys(_find_sections(field.annotation)):
                yield from _describe_section(f"`{below}`", inner, below)


def _describe_registry(title: str, registry: Registry[Any], path: str) -> Iterator[str]:
    classes = {name: registry.find(name) for name in registry.built_in_classes}
    heading = "##" if path.count(".") == 0 else "###"
    yield f"\n{heading} {title}\n"
    default = f", by default `{registry.default}`" if registry.default else ""
    own = ", or [`module:Class`](../guides/extending.md)" if registry.group else ""
    yield f"`{registry.key}` is one of the following{own}{default}.\n"
    groups: dict[str, dict[str, type[Section]]] = {}
    for name, each in classes.items():
        family = each.__module__.split(".")[2] if path == "algorithm" else ""
        groups.setdefault(family, {})[name] = each
    for family, group in groups.items():
        if family:
            yield f"\n{heading}# {FAMILIES[family]}\n"
        yield from [f"| `{registry.key}` | |", "|---|---|"]
        for each in dict.fromkeys(group.values()):
            names = ", ".join(_code(name) for name in group if group[name] is each)
            yield f"| {names} | {_first_paragraph(each)} |"
        yield ""
        yield from _table_fields(list(dict.fromkeys(group.values())), path, registry.key, group)
    nested: dict[str, list[type[Section]]] = {}
    for each in classes.values():
        for name, field in each.model_fields.items():
            if name != registry.key and not _find_registries(field.annotation, tuple(field.metadata)):
                nested.setdefault(name, []).extend(_find_sections(field.annotation))
    for name, found in nested.items():
        sections = list(dict.fromkeys(found))
        if sections:
            yield f"\n### `{path}.{name}`\n"
        if sections and "kind" not in sections[0].model_fields:
            yield f"{_first_paragraph(sections[0])}\n"
            yield from _table_fields(sections, path)
        elif sections:
            yield from ["| `kind` | |", "|---|---|"]
            kinds = {str(get_args(each.model_fields["kind"].annotation)[0]): each for each in sections}
            yield from (f"| {_code(kind)} | {_first_paragraph(each)} |" for kind, each in kinds.items())
            yield ""
            yield from _table_fields(sections, path, "kind", kinds)


def _table_fields(
    sections: Sequence[type[Section]], path: str, key: str = "", names: Mapping[str, type[Section]] | None = None
) -> Iterator[str]:
    """Yield the table of the fields of one section, or of all kinds of a section: equal fields of several kinds are one row."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for section in sections:
        schema, docs = section.model_json_schema(), section.get_field_docs()
        kinds = [name for name, each in (names or {}).items() if each is section]
        for name, field in section.model_fields.items():
            if name == key:
                continue
            shown = schema["properties"][field.alias or name]
            allowed = _describe_type(shown, schema.get("$defs", {}))
            default = "required" if field.is_required() else _format_default(shown.get("default"))
            row = rows.setdefault((name, allowed, _flatten(docs.get(name, ""))), {})
            row.update(dict.fromkeys(kinds or [""], default))
    if not rows:
        return
    everywhere = len(names or {"": None})
    has_kinds = any(len(defaults) < everywhere for defaults in rows.values())
    yield f"| field |{' of |' if has_kinds else ''} allowed | default | meaning |"
    yield f"|---|{'---|' if has_kinds else ''}---|---|---|"
    for (name, allowed, meaning), defaults in rows.items():
        of = f" {'all' if len(defaults) == everywhere else ', '.join(map(_code, defaults))} |" if has_kinds else ""
        values = dict.fromkeys(defaults.values())
        default = next(iter(values)) if len(values) == 1 else _list_defaults(defaults)
        yield f"| {_code(name)} |{of} {allowed} | {default} | {meaning} |"


def _list_defaults(defaults: Mapping[str, str]) -> str:
    by_value: dict[str, list[str]] = {}
    for kind, value in defaults.items():
        by_value.setdefault(value, []).append(kind)
    return "; ".join(f"{value} ({', '.join(map(_code, kinds))})" for value, kinds in by_value.items())


def _find_registries(annotation: Any, metadata: tuple[Any, ...] = ()) -> list[Registry[Any]]:
    found = [each for each in metadata if isinstance(each, Registry)]
    for each in get_args(annotation):
        found += _find_registries(each, tuple(getattr(each, "__metadata__", ())))
    return list(dict.fromkeys(found))


def _find_sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for each in get_args(annotation):
        yield from _find_sections(each)


def _describe_type(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _describe_type(defs[schema["$ref"].rpartition("/")[2]], defs)
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        texts = (_describe_type(each, defs) for each in alternatives if each.get("type") != "null")
        unique = list(dict.fromkeys(texts))
        if "section" in unique:  # its kinds have a table of their own
            unique = [each for each in unique if not each.startswith("`")]
        return " or ".join(unique)
    if "const" in schema or "enum" in schema:
        return ", ".join(_code(each) for each in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array":
            items = schema.get("items") or schema.get("prefixItems", [{}])[0]
            inner = _describe_type(items, defs)
            return f"pair ({inner})" if "prefixItems" in schema else f"list ({inner})" if inner else "list"
        case "object" if "properties" in schema:
            return "section"
        case "object":
            return "mapping"
        case "number" | "integer" as kind:
            return f"{kind}{_describe_bounds(schema)}"
        case "boolean":
            return "`true`, `false`"
        case "string":
            return "path" if schema.get("format") == "path" else "date" if schema.get("format") == "date" else "text"
    return "any"


def _describe_bounds(schema: Mapping[str, Any]) -> str:
    whole = schema["type"] == "integer"
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if whole and above is not None:
        low, above = above + 1, None
    if high is not None and high >= 2**53:
        high = None
    texts = [f"from {low:g}" if low is not None else "", f"above {above:g}" if above is not None else ""]
    texts += [f"to {high:g}" if high is not None else "", f"below {below:g}" if below is not None else ""]
    return "".join(f" {text}" for text in texts if text)


def _format_default(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        kind = value.get("kind") or value.get("name")
        rest = ", ".join(f"{key}: {each}" for key, each in value.items() if each is not None and key != "kind")
        return _code(f"{{kind: {kind}{', ' + rest if rest else ''}}}") if kind else "its defaults" if value else "none"
    if isinstance(value, bool):
        return _code(str(value).lower())
    if isinstance(value, float) and value.is_integer():
        return _code(f"{value:g}")
    if isinstance(value, list | tuple):
        return _code(f"[{', '.join(map(str, value))}]") if value else "none"
    return _code(str(value))


def _first_paragraph(section: type[Section]) -> str:
    return _flatten((section.__doc__ or "").partition("\n\n")[0])


# ---- the command line ------------------------------------------------------------------------------------------------


def describe_commands() -> Iterator[str]:
    """Yield the lines of all commands: a heading, the help text, arguments and options."""
    root = typer.main.get_command(app)
    yield "\n## Options of many commands\n"
    yield "They may stand before or after the command. The help of a command lists those that it takes.\n"
    yield from _table_parameters([each for each in root.params if not getattr(each, "hidden", False)])
    for words, command in _iterate_commands(root, ()):
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        usage = " ".join(_format_argument(each) for each in arguments)
        yield f"\n## sottovoce {' '.join(words)}\n"
        yield f"    sottovoce {' '.join(words)}{' ' if usage else ''}{usage}\n"
        yield f"{_escape((command.help or '').strip())}\n"
        yield from _table_parameters([each for each in command.params if not getattr(each, "hidden", False)])
        common = sorted(getattr(command, "common_options", ()) or ())
        flags = [_code(each.opts[0]) for each in root.params if each.name in common]
        if flags:
            yield f"\nAlso: {', '.join(flags)}."


def _iterate_commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    commands = getattr(command, "commands", {})
    if words and (not commands or command.invoke_without_command):
        yield words, command
    for name, each in commands.items():
        if not each.hidden:
            yield from _iterate_commands(each, (*words, name))


def _table_parameters(parameters: Sequence[Any]) -> Iterator[str]:
    rows = [each for each in parameters if each.name != "help" and (each.param_type_name == "argument" or each.opts)]
    if not rows:
        return
    yield from ["| | default | meaning |", "|---|---|---|"]
    for each in rows:
        names = [_format_argument(each)] if each.param_type_name == "argument" else [*each.opts, *each.secondary_opts]
        variable = f" (`${each.envvar}`)" if isinstance(each.envvar, str) else ""
        allowed = ", ".join(map(_code, _find_choices(each.type_descriptor.annotation)))
        meaning = " ".join(filter(None, [_flatten(_escape(each.help or "")), allowed and f"One of {allowed}."]))
        yield f"| {', '.join(map(_code, names))}{variable} | {_format_option_default(each)} | {meaning} |"


def _find_choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next(filter(None, map(_find_choices, get_args(annotation))), ())


def _format_argument(argument: Any) -> str:
    name = (argument.metavar or argument.name).upper()
    name += "..." if argument.nargs != 1 and not name.endswith("...") else ""
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _format_option_default(option: Any) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return _escape(option.show_default)
    if option.default in (None, False, (), []) or callable(option.default) or not option.show_default:
        return ""
    return _code(str(getattr(option.default, "value", option.default)))


# ---- metrics of services ---------------------------------------------------------------------------------------------


def describe_service_metrics() -> Iterator[str]:
    """Yield the lines of all metrics, by service."""
    for title, kind in (("All services", COMMON_METRICS), ("Learner", LEARNER), ("Coordinator", COORDINATOR)):
        yield from _describe_metrics(title, kind)
    yield from _describe_metrics("Eavesdropper", EAVESDROPPER)


def _describe_metrics(title: str, kind: Any) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield from ["| metric | labels | meaning |", "|---|---|---|"]
    yield from (
        f"| {_code(each.name)} | {', '.join(each.labels)} | {_flatten(each.description)} |" for each in kind.metrics
    )


# ---- permissions -----------------------------------------------------------------------------------------------------


def describe_access() -> Iterator[str]:
    """Yield the lines of the table of methods and the roles that may call them."""
    yield from ["\n| method | roles | condition | other domain |", "|---|---|---|---|"]
    for method, rule in ACCESS_RULES.items():
        everyone = rule.roles == set(Role) - {Role.MONITOR}
        roles = "any" if everyone else ", ".join(role for role in Role if role in rule.roles)
        yield f"| {_code(method.split('.')[-1])} | {roles} | {rule.condition} | {rule.foreign or 'not allowed'} |"


# ---- text ------------------------------------------------------------------------------------------------------------


def _code(text: object) -> str:
    return f"`{text}`"


def _flatten(text: str) -> str:
    """Return text as one line of a table."""
    return re.sub(r"\bNone\b", "none", " ".join(text.split())).replace("|", r"\|")


def _escape(text: str) -> str:
    """Keep angle brackets and stars as text, outside of code, and leave out markup of the terminal."""
    text = re.sub(r"\[(?:bold|/bold|/)\]", "", text)
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [part.replace("<", "&lt;").replace("*", r"\*") for part in parts[::2]]
    return "".join(parts)


PAGES = {
    "access.md": describe_access,
    "spec.md": describe_spec,
    "commands.md": describe_commands,
    "service-metrics.md": describe_service_metrics,
}
"""Generated pages."""

if __name__ == "__main__":
    write_pages()
