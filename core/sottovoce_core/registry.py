"""Sections of a run spec, and registries that find the class of a section by its kind.

A loss, a decision set, a graph, a weight rule, a partition, an algorithm's parameters: each is one frozen class that validates
itself and does its work. A registry maps the names used in specs to the classes of one such family. A name is that of a
built-in class, one that an installed package offers (an entry point), or `module:Class`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module, invalidate_caches
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Generic, Literal, TypeVar, cast, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from sottovoce_core.errors import SpecError

MIN_MAGNITUDE, MAX_MAGNITUDE = 1e-100, 1e100
"""Bounds of a number in a spec: squares of numbers between them stay in float64's range, so norms and bounds hold."""


def _in_range(value: float) -> float:
    if not MIN_MAGNITUDE <= value <= MAX_MAGNITUDE:
        raise ValueError(f"a size must lie within [{MIN_MAGNITUDE:g}, {MAX_MAGNITUDE:g}]")
    return value


def _require_magnitude(value: float) -> float:
    if not abs(value) <= MAX_MAGNITUDE:
        raise ValueError(f"a number must lie within [-{MAX_MAGNITUDE:g}, {MAX_MAGNITUDE:g}]")
    return value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_in_range)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_require_magnitude)]
Finite = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_require_magnitude)]

Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
"""Duration in seconds, up to thirty years: timers accept no more."""


class Section(BaseModel):
    """Part of a spec: frozen; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def select_class(cls, fields: Mapping[str, Any]) -> type[Section]:
        """Return the class for these fields, not validated yet, where one kind has several classes."""
        return cls

    @classmethod
    def get_field_docs(cls) -> dict[str, str]:
        """Return the docstring of each documented field: the text below it in the source."""
        docs = dict[str, str]()
        for base in reversed(cls.__mro__):
            if issubclass(base, Section):
                body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
                for field, text in itertools.pairwise(ast.iter_child_nodes(body)):
                    match field, text:
                        case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(doc))):
                            docs[name] = inspect.cleandoc(doc)
        return docs

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler(schema)
        cls._describe_fields(handler.resolve_ref_schema(described))
        return described

    @classmethod
    def _describe_fields(cls, schema: dict[str, Any]) -> None:
        """Add the docstrings of the fields to a JSON schema of this section."""
        docs = cls.get_field_docs()
        for name in schema["properties"].keys() & docs.keys():
            schema["properties"][name]["description"] = " ".join(docs[name].split())

    @model_validator(mode="before")
    @classmethod
    def _reject_booleans(cls, fields: Any) -> Any:
        """Keep true and false out of numeric fields: Pydantic takes them for 1 and 0."""
        if not isinstance(fields, Mapping):
            return fields
        known = cls.model_fields
        return {
            name: _replace_booleans(value, known[name]) if name in known else value for name, value in fields.items()
        }


@dataclass(frozen=True, slots=True)
class MisplacedBoolean:
    """True or false in place of a number: not a number to Pydantic."""

    value: bool

    def __repr__(self) -> str:
        return repr(self.value)


def _replace_booleans(value: object, field: FieldInfo) -> object:
    """Replace true and false in a value, or in a list, by `MisplacedBoolean` if the field takes numbers and no text."""
    listed = isinstance(value, list | tuple)
    types = set(_iterate_types(field.annotation, listed=listed))
    if types & {bool, str, Any, object} or not types & {int, float}:
        return value
    given = [
        MisplacedBoolean(each) if isinstance(each, bool) else each
        for each in (value if isinstance(value, list | tuple) else [value])
    ]
    return given if listed else given[0]


def _iterate_types(annotation: Any, *, listed: bool) -> Iterator[Any]:
    """Iterate over the types that an annotation allows for a value, or for the items of a list."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (tuple, list):
        for each in inner if listed else ():
            yield from (*_iterate_types(each, listed=False), *_iterate_types(each, listed=True))
    elif inner:
        for each in () if origin is Literal else inner[:1] if origin is Annotated else inner:
            yield from _iterate_types(each, listed=listed)
    elif not listed:
        yield annotation


SectionT = TypeVar("SectionT", bound=Section)

Count = Annotated[int, Field(gt=0, le=2**53)]
"""Number of things: exact in a float64, and within the integers of the wire and of NumPy."""
UNBOUNDED_ROUNDS = 2**54
"""Number of rounds of a run without a planned end: more than any run can do, and more than any `Count`."""


_MIN_NAME_SIMILARITY = 0.65
"""Similarity from which a name is suggested as the one probably meant."""


@dataclass(frozen=True, eq=False)
class Registry(Generic[SectionT]):
    """Registry of the classes of a family of sections. As `Annotated` metadata of a field it builds the section of its kind.

    Attributes:
        base: base class of all of them.
        built_in_classes: name to `module:Class`, imported on first use, or to a class of the module of `base`.
        group: group of the entry points by which packages offer more classes, and the family's name in errors; None: only
            the built-in classes.
        key: field that names the kind.
        default: kind of a section that names none; None: the kind is required.
        suggestions: other common names of some kinds: not accepted, but answered with a suggestion.
    """

    base: type[SectionT]
    built_in_classes: Mapping[str, str]
    group: str | None
    key: str = "kind"
    default: str | None = None
    suggestions: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str, *, allow_imports: bool = True) -> type[SectionT]:
        """Return the class of a kind.

        Args:
            name: name in the spec.
            allow_imports: whether `module:Class` is allowed. Not for a spec of another party: an installed package that
                offers a short name is the owner's choice, any other code on the machine is not.

        Raises:
            SpecError: no such class, or it cannot be imported.
        """
        closed = self.group is None
        offered = {} if name in self.built_in_classes or ":" in name or closed else self._read_entry_points
        where = self._locate_built_in(name) or offered.get(name)
        if where is None and (":" not in name or closed):
            known = {*self.built_in_classes, *offered}
            hint = self._suggest(name, known)
            listed = ", ".join(sorted(known)) + ("" if closed else ", or module:Class of your own")
            raise SpecError(f"{self.key} must be one of {listed}, got {name!r}{hint}")
        if where is None:
            require_imports_allowed(name, allow_imports=allow_imports)
        found = import_object(where or name, self.key, is_own=where is None)
        if not (isinstance(found, type) and issubclass(found, self.base)):
            wanted = f"{self.base.__module__}.{self.base.__name__}"
            raise SpecError(f"{self.key}: {where or name!r} must be a subclass of {wanted}, got {found!r}")
        return found

    def find_section_class(self, section: object, *, allow_imports: bool = True) -> type[SectionT] | None:
        """Return the class of a section; None if this is no section or names no kind.

        Raises:
            SpecError: as `find`.
        """
        fields = self._fields(section)
        name = fields.get(self.key) if fields is not None else None
        if not isinstance(name, str):
            return None
        return cast("type[SectionT]", self.find(name, allow_imports=allow_imports).select_class(fields or {}))

    def _suggest(self, name: str, known: Collection[str]) -> str:
        """Suggest the name that was probably meant; of several names separated by commas, for the first unknown one."""
        parts = [part.strip() for part in name.split(",")]
        wrong = next((part for part in parts if part not in known), "")
        near = (
            [self.suggestions[wrong]]
            if wrong in self.suggestions
            else difflib.get_close_matches(wrong, known, 1, _MIN_NAME_SIMILARITY)
        )
        if len(parts) < 2:
            return f"; did you mean {near[0]}?" if near else ""
        meant = f", and {wrong!r} is none{f': did you mean {near[0]}?' if near else ''}" if wrong else ""
        return f"; it is one of them, not several{meant}"

    def _locate_built_in(self, name: str) -> str | None:
        """Return the module of the built-in class of this name, as `module:Class`."""
        where = self.built_in_classes.get(name)
        return where if where is None or ":" in where else f"{self.base.__module__}:{where}"

    def _fields(self, section: object) -> Mapping[str, Any] | None:
        """Expand a short section: `ring` means `{kind: ring}`."""
        if isinstance(section, str):
            return {self.key: section}
        if isinstance(section, Mapping):
            return {self.key: self.default, **section} if self.default else section
        return None

    @property
    def _read_entry_points(self) -> dict[str, str]:
        """Read the entry points, anew each time: a package may have been installed since."""
        return {point.name: point.value for point in entry_points(group=f"sottovoce.{self.group}")}

    # ---- as metadata of a field ------------------------------------------------------------------------------

    def _validate(self, value: object, info: ValidationInfo) -> object:
        if isinstance(value, self.base):
            return value
        fields = self._fields(value)
        try:
            found = self.find_section_class(value, allow_imports=(info.context or {}).get("imports", True))
        except SpecError as error:
            raise PydanticCustomError("kind", "{text}", {"text": str(error)}) from None
        if fields is None:
            raise PydanticCustomError("section", "{text}", {"text": f"must be a {self.key} or a mapping of fields"})
        if found is None:
            listed = ", ".join(sorted(self.built_in_classes))
            raise PydanticCustomError("kind", "{text}", {"text": f"{self.key} is required: one of {listed}"})
        return found.model_validate(fields, context=info.context)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema: any of the built-in classes, or a word if a class needs no more fields."""
        classes = {name: self.find(name) for name in self.built_in_classes}
        listed = [handler(each.__pydantic_core_schema__) for each in dict.fromkeys(classes.values())]
        for model, each in zip(dict.fromkeys(classes.values()), map(handler.resolve_ref_schema, listed), strict=True):
            each["title"] = model.__name__.removeprefix("_")
            model._describe_fields(each)
            kind = each["properties"][self.key].get("const")
            each["required"] = list(
                dict.fromkeys([*([] if kind == self.default else [self.key]), *each.get("required", ())])
            )
        words = [name for name, each in classes.items() if set(self._list_required_fields(each)) <= {self.key}]
        return {"anyOf": [*([{"enum": words}] if words else []), *listed]}

    def _list_required_fields(self, section: type[SectionT]) -> list[str]:
        return [name for name, field in section.model_fields.items() if field.is_required()]


def require_imports_allowed(name: str, *, allow_imports: bool) -> None:
    """Refuse to import code that the spec of another party names.

    Raises:
        SpecError: the spec names code, and `allow_imports` is false.
    """
    if not allow_imports:
        raise SpecError(
            f"a service imports no code named in a spec from elsewhere, got {name!r}: start it with --allow-imports, or "
            "install a package that offers it under a short name"
        )


def import_object(where: str, field: str, *, is_own: bool = False) -> Any:
    """Import the object that `module:Name` names.

    Args:
        where: module and name.
        field: field or option that names it, for errors.
        is_own: whether the user named it: then a module of the working folder is found, too, if no installed one has its name.

    Raises:
        SpecError: the import fails.
    """
    module, _, attribute = where.partition(":")
    found = None
    try:
        found = _import_own_module(module) if is_own else import_module(module)
        return getattr(found, attribute)
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError) as error:
        advice = "is it installed, or a file of the working folder, or its folder in PYTHONPATH?"
        if found is not None:
            near = difflib.get_close_matches(attribute, dir(found), 1, _MIN_NAME_SIMILARITY)
            advice = f"did you mean {near[0]}?" if near else "name one that the module has"
            top = module.partition(".")[0]
            if is_own and _is_in_folder(top) and not str(getattr(found, "__file__", "")).startswith(str(Path.cwd())):
                advice = f"an installed module has the name of {top} in the working folder: rename that"
        raise SpecError(f"{field}: cannot import {where!r}: {error}; {advice}") from None


def _import_own_module(name: str) -> ModuleType:
    """Import an installed module, else one of the working folder.

    The folder becomes the last entry of `sys.path`: it cannot replace an installed module or one of the standard library, and
    processes that multiprocessing starts receive the entry.
    """
    top = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != top or not _is_in_folder(top):
            raise
    sys.path.append(str(Path.cwd()))
    invalidate_caches()
    return import_module(name)


def _is_in_folder(module: str) -> bool:
    """Return whether the working folder has a file or a package of this name."""
    return Path(f"{module}.py").is_file() or Path(module, "__init__.py").is_file()
