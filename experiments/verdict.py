"""Verdict on an item: whether its checks hold, and whether new results equal the stored ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.item import Check, Item
from experiments.run import get_last

_VALUE_RULES = ("within", "above")


def judge(item: Item, document: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the verdict, and descriptions of the checks that fail.

    Of the paper's claims: `reproduced`, the numbers are near the printed ones; `in shape`, only the checks of order hold; `not
    reproduced`; `not stated`, there is nothing to check. Of a finding: `confirmed` or `not confirmed`.
    """
    rows = {(row["variant"], row["setting"]): row for row in document["rows"]}
    failed: dict[bool, list[str]] = {check.rule in _VALUE_RULES: [] for check in item.checks}
    for check in item.checks:
        has_values = check.rule in _VALUE_RULES
        failed[has_values] += (_check_values if has_values else _check_order)(item, check, rows)
    lines = [line for each in failed.values() for line in each]
    if item.is_finding:
        return ("not confirmed" if lines else "confirmed"), lines
    if not item.checks:
        return "not stated", []
    if not lines and True in failed:
        return "reproduced", []
    return ("in shape" if failed.get(False) == [] else "not reproduced"), lines


def _check_values(item: Item, check: Check, rows: Mapping[Any, Any]) -> Iterator[str]:
    for (variant, setting), row in rows.items():
        printed, ours = item.get_paper_value(variant, setting, check.measure), get_last(row, check.measure)
        if printed is None or variant not in (check.variants or item.variants):
            continue
        if setting not in (check.settings or item.settings):
            continue
        if ours is None or not _agrees(check, ours, printed):
            yield f"{check.measure} of {_name(variant, setting)}: the paper has {printed:g}, we have {_show(ours)}"


def _agrees(check: Check, ours: float, printed: float) -> bool:
    if check.rule == "above":
        return ours >= check.factor * printed
    is_near = ours > 0 < printed and max(ours / printed, printed / ours) <= check.factor
    return is_near or abs(ours - printed) <= check.tolerance


def _check_order(item: Item, check: Check, rows: Mapping[Any, Any]) -> Iterator[str]:
    variants, settings = check.variants or tuple(item.variants), check.settings or tuple(item.settings)
    if check.along == "variants":
        sequences = [[(name, setting) for name in variants] for setting in settings]
    else:
        sequences = [[(variant, name) for name in settings] for variant in variants]
    for sequence in sequences:
        if check.along == "rounds":
            for key in sequence:
                means = rows[key]["measures"][check.measure]["mean"]
                yield from _require_order(check, [(f"{_name(*key)} at the start", means[0]), ("at the end", means[-1])])
        else:
            yield from _require_order(check, [(_name(*key), get_last(rows[key], check.measure)) for key in sequence])


def _require_order(check: Check, values: Sequence[tuple[str, Any]]) -> Iterator[str]:
    sign = 1 if check.rule == "increasing" else -1
    for (first, a), (second, b) in itertools.pairwise(values):
        if a is None or b is None or not sign * (float(b) - float(a)) >= -check.tolerance:
            yield f"{check.measure} is not {check.rule}: {first} {_show(a)}, {second} {_show(b)}"


def compare_with_stored(document: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> list[str]:
    """Return descriptions of the numbers that differ from the stored ones, relatively; seconds are left out."""

    def are_equal(a: Any, b: Any) -> bool:
        if a is None or b is None:
            return a is b
        return a == b or math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=1e-9)

    before = {(row["variant"], row["setting"]): row for row in stored.get("rows", ())}
    lines = []
    for row in document["rows"]:
        key = (row["variant"], row["setting"])
        for measure, now in row["measures"].items():
            was = before.get(key, {}).get("measures", {}).get(measure)
            if measure.startswith("seconds"):
                continue
            if was is None or was["rounds"] != now["rounds"] or not all(map(are_equal, was["mean"], now["mean"])):
                lines.append(f"{measure} of {_name(*key)}: stored {was and was['mean']}, now {now['mean']}")
    return lines


def _name(variant: str, setting: str) -> str:
    return ", ".join(filter(None, (variant, setting))) or "the run"


def _show(value: Any) -> str:
    return "nothing" if value is None else f"{float(value):.4g}"
