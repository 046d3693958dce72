"""No module needs another one that needs it: neither at once, nor lazily, nor for its types alone."""

from __future__ import annotations

import tomllib
from pathlib import Path

import grimp
import networkx as nx

CHECKOUT = Path(__file__).resolve().parent.parent


def test_no_imports_run_in_a_circle() -> None:
    """Grimp reads all import statements: those in functions and under TYPE_CHECKING, too."""
    linted = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    graph = grimp.build_graph(*linted["root_packages"], cache_dir=None)
    imports = nx.DiGraph(
        (one, other) for one in graph.modules for other in graph.find_modules_directly_imported_by(one)
    )
    assert len(imports) > 100
    assert [sorted(circle) for circle in nx.strongly_connected_components(imports) if len(circle) > 1] == []
