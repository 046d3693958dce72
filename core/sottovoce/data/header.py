"""The columns of a table, held against the fields that its records must have."""

from __future__ import annotations

from collections.abc import Collection, Mapping

_SHOWN = 12
"""Names that are listed."""


def misfit(there: Collection[str], wanted: Mapping[str, bool], allowed: Collection[str], odd: str) -> str:
    """Why the columns of a table are not those of records; empty: they are.

    What stands there is named only where half of the fields are among it: else it may be a record, and no header.

    Args:
        there: names of columns, as they are compared.
        wanted: fields, and whether a column has each.
        allowed: columns that may be there.
        odd: what to do with one that may not.
    """
    lacking = [field for field, found in wanted.items() if not found]
    if 2 * len(lacking) > len(wanted):
        fields = f"the fields are {listed([*wanted])}"
        found = len(wanted) - len(lacking)
        many = f"{found} of its {len(there)} are fields" if found > 1 else f"one of its {len(there)} is a field"
        many = many if found else f"none of its {len(there)} is a field"
        return f"must begin with a line of column names, and {many} of the schema; {fields}"
    told = []
    if lacking:
        told.append(f"must have a column for every field of the schema, and has none for {listed(lacking)}")
    if unknown := sorted(name for name in there if name not in allowed):
        told.append(f"every column must be in the schema, and {listed(unknown)} is not: {odd}")
    return "; ".join(told)


def listed(names: Collection[str]) -> str:
    """Names for people."""
    return ", ".join(map(repr, list(names)[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
