"""Graph files: GraphML, and lists of edges. The nodes are the learners of a run, by name or by number.

1. If all nodes are names of learners, they are these learners. A learner that is no node has no edge.
2. Else all nodes must be numbers, and each of 0..n-1 must occur. If a learner's name is a number, only names count.
3. A duplicate edge counts once. An edge from a learner to itself is refused.
4. An undirected list has each edge once or, all of them, in both directions: a mixture may be a directed list.
"""

from __future__ import annotations

import difflib
import io
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree.ElementTree import ParseError

from sottovoce_core.errors import SpecError
from sottovoce_core.text import abbreviate_names
from sottovoce_core.yaml_files import detect_format, read_text_file

if TYPE_CHECKING:
    import networkx as nx  # slow to import: imported only for GraphML files

Edge = tuple[int, int]
_Index = Mapping[str, int]

_NUMBER = re.compile(r"0|[1-9]\d*", re.ASCII)
_COMMENT = re.compile(r"(?:^|\s)#.*")
_DATA = re.compile(r"(?P<edge>[^{]*\S)\s+(?P<data>\{.*\}|\S+)")
"""An edge with a weight, or with the dictionary of attributes that networkx writes after it."""
_GRAPH, _REMARK = re.compile(rb"<(?:\w+:)?graph[\s/>]"), re.compile(rb"<!--.*?-->", re.DOTALL)
_LABELS = ("name", "label")
"""Attributes of GraphML nodes that may hold a learner's name, in files of programs that assign their own ids."""
_MAX_QUOTED_CHARACTERS = 60
"""Maximum number of characters of a line that an error quotes: a graph is public."""


def read_edges(path: Path, names: Sequence[str], *, directed: bool) -> list[Edge]:
    """Read the edges of a graph file.

    Args:
        path: path of the file; `.graphml` is GraphML, any other suffix a list of edges.
        names: names of the learners, by index.
        directed: whether an edge carries messages only from its first learner to its second one.

    Returns:
        Pairs of learners' indices, each once.

    Raises:
        SpecError: the file is unreadable, of another format, or has a node that is no learner.
    """
    read = _read_graphml if path.suffix.lower() == ".graphml" else _read_edge_list
    edges = dict.fromkeys(read(path, names, directed=directed))
    return [*edges] if directed else [*dict.fromkeys((min(edge), max(edge)) for edge in edges)]


def _index_by_name(names: Sequence[str]) -> _Index:
    return {unicodedata.normalize("NFC", name): i for i, name in enumerate(names)}


def _index_by_number(names: Sequence[str]) -> _Index:
    """Index the learners by number, unless a name is a number."""
    return {} if any(map(_NUMBER.fullmatch, names)) else {str(i): i for i in range(len(names))}


# ---- lists of edges --------------------------------------------------------------------------------------------------


def _read_edge_list(path: Path, names: Sequence[str], *, directed: bool) -> Iterator[Edge]:
    text = read_text_file(path, "a graph file").removeprefix("\ufeff")
    bare = ((k, _COMMENT.sub("", line).strip()) for k, line in enumerate(re.split(r"\r\n|\r|\n", text), 1))
    lines = {k: unicodedata.normalize("NFC", line) for k, line in bare if line}
    if not lines:
        raise SpecError(f"{path}: a graph file must have an edge, two learners a line, got none")
    index, numbered = _index_by_name(names), _index_by_number(names)
    wanted = f"learners of the run ({abbreviate_names(names)})"
    if numbered and not any(_parse_edge(line, index) or not re.match(r"\d+\b", line) for line in lines.values()):
        index, wanted = numbered, f"numbers of learners, counted from 0 to {len(names) - 1}"
    found = dict[int, Edge]()
    for k, line in lines.items():
        edges = _parse_edge(line, index)
        if len(edges) != 1:
            shown = repr(line if len(line) <= _MAX_QUOTED_CHARACTERS else f"{line[:_MAX_QUOTED_CHARACTERS]}...")
            why = f"must be two {wanted}, with a blank between them, got {shown}"
            raise SpecError(f"{path}, line {k}: {why}; {_suggest_remedy(line, index, first=k == min(lines))}")
        ((i, j),) = edges
        if i == j:
            raise SpecError(
                f"{path}, line {k}: an edge must join two different learners, got {names[i]!r} twice; remove it"
            )
        found[k] = i, j
    if index is numbered:
        _require_all(path, {i for edge in found.values() for i in edge}, len(names))
    if not directed:
        _require_consistent_directions(path, found, names)
    return iter(found.values())


def _parse_edge(line: str, index: _Index) -> set[Edge]:
    """Return the edge of a line; several if names with blanks make it ambiguous, none if it is no edge."""
    found = _split_names(line, index)
    if (parts := _DATA.fullmatch(line)) and _is_data(parts["data"], index):
        found |= _split_names(parts["edge"], index)
    return found


def _split_names(line: str, index: _Index) -> set[Edge]:
    """Return every reading of a line as two names separated by a blank: names may contain blanks, too."""
    pairs = ((line[: blank.start()], line[blank.end() :]) for blank in re.finditer(r"\s+", line))
    return {(index[one], index[other]) for one, other in pairs if one in index and other in index}


def _is_data(text: str, index: _Index) -> bool:
    """Return whether the text may follow an edge: attributes, or a weight, and not a third learner."""
    if text.startswith("{"):
        return True
    try:
        return text not in index and not ("0" in index and text.isdigit()) and 0.0 < float(text) < math.inf
    except ValueError:
        return False


def _require_all(path: Path, there: set[int], n: int) -> None:
    """Require every number: numbers that begin at 1, or leave one out, may mean other learners than intended."""
    if lacking := sorted(set(range(n)) - there):
        raise SpecError(
            f"{path}: a graph of numbers must have all of 0 to {n - 1}, one for each learner, got no edge of {lacking[0]}; "
            "write the learners' names if one has no edge"
        )


def _require_consistent_directions(path: Path, found: Mapping[int, Edge], names: Sequence[str]) -> None:
    edges = set(found.values())
    alone = [k for k, (i, j) in found.items() if (j, i) not in edges]
    if alone and len({found[k] for k in alone}) < len(edges):
        i, j = found[alone[0]]
        raise SpecError(
            f"{path}: an undirected graph must have each edge once, or all in both directions, got {names[i]} {names[j]} (line "
            f"{alone[0]}) in one, and others in both; set topology.graph.directed if it is directed"
        )


def _suggest_remedy(line: str, index: _Index, *, first: bool) -> str:
    """Suggest a correction of a line that is no edge."""
    if first and (found := detect_format(line.encode())):
        return f"it looks like {found}"
    if len(_parse_edge(line, index)) > 1:
        return "the line has several readings: give learners names without blanks"
    words = line.split()
    near = [difflib.get_close_matches(word.casefold(), index, 1) for word in words if word not in index]
    if len(words) == 2 and (hints := list(dict.fromkeys(each[0] for each in near if each))):
        return f"did you mean {' and '.join(map(repr, hints))}?"
    return (
        "write each edge on a line of its own, without other signs; only a weight above 0, with a point (1.0), may follow; a "
        "GraphML file's name must end in .graphml"
    )


# ---- GraphML ---------------------------------------------------------------------------------------------------------


def _read_graphml(path: Path, names: Sequence[str], *, directed: bool) -> Iterator[Edge]:
    graph = _read_networkx_graph(path)
    if graph.is_directed() and not directed:
        raise SpecError(
            f"{path}: the graph must be undirected, got a directed one; set edgedefault to undirected, "
            "or topology.graph.directed to true"
        )
    if directed and not graph.is_directed():
        raise SpecError(f"{path}: the graph must be directed, got an undirected one; set edgedefault to directed")
    place = _match_nodes(path, graph, names)
    for one, other in graph.edges():
        if one == other:
            raise SpecError(f"{path}: an edge must join two different nodes, got {one!r} twice; remove it")
        yield place[one], place[other]


def _read_networkx_graph(path: Path) -> nx.Graph[str]:
    import networkx as nx

    try:
        content = path.read_bytes()
        found: nx.Graph[str] = nx.read_graphml(io.BytesIO(content))
    except OSError as error:
        raise SpecError(f"cannot read the graph file {path}: {error.strerror}") from None
    # Errors of networkx on malformed GraphML, in addition to its own: missing or mistyped attributes, broken XML.
    except (ValueError, KeyError, TypeError, AttributeError, LookupError, ParseError, nx.NetworkXException) as error:
        raise SpecError(
            f"{path}: must be readable as GraphML (.graphml), got {type(error).__name__}: {error}; check the file"
        ) from None
    many = len(_GRAPH.findall(_REMARK.sub(b"", content)))
    if many > 1:  # networkx reads only one
        raise SpecError(
            f"{path}: a GraphML file must hold one graph, got {many}, and nested ones count; keep one of them"
        )
    return found


def _match_nodes(path: Path, graph: nx.Graph[str], names: Sequence[str]) -> Mapping[str, int]:
    """Return the learner of each node: by id, or by the attribute with its name."""
    nodes = [*graph]
    index, numbered = _index_by_name(names), _index_by_number(names)
    for labels in (nodes, *([str(graph.nodes[node].get(label, "")) for node in nodes] for label in _LABELS)):
        plain = [unicodedata.normalize("NFC", label).strip() for label in labels]
        if len(set(plain)) < len(plain):
            continue
        known = index if index.keys() >= set(plain) else numbered if numbered.keys() == set(plain) else None
        if known is not None:
            return {node: known[label] for node, label in zip(nodes, plain, strict=True)}
    raise SpecError(
        f"{path}: nodes must be learners of the run ({abbreviate_names(names)}), or the numbers 0 to {len(names) - 1}, "
        f"by id, name or label, got {_list_some_nodes(nodes, index)}; change the file or the run's learners"
    )


def _list_some_nodes(nodes: Iterable[str], index: _Index) -> str:
    """List a few nodes, unknown ones first."""
    return abbreviate_names(
        [repr(node)[:_MAX_QUOTED_CHARACTERS] for node in sorted(nodes, key=lambda node: node in index)]
    )
