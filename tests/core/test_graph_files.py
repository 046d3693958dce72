"""Graph files: nodes are the learners that they name, whatever is no edge of two of them is refused, and nothing is lost."""

from __future__ import annotations

import re
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sottovoce_core.errors import SottovoceError, SpecError
from sottovoce_core.network.graph_files import read_edges
from sottovoce_core.network.participation_schedule import ParticipationSchedule
from sottovoce_core.network.topology import Topology
from sottovoce_core.spec import LEARNER_NAME_PATTERN, dump_spec, load_spec

pytestmark = pytest.mark.each

NAMES = ("north", "east", "south")


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def edges_of(
    path: Path, content: str | bytes, names: tuple[str, ...] = NAMES, *, directed: bool = False
) -> set[object]:
    return {*read_edges(written(path, content), names, directed=directed)}


def graphml(nodes: str, edges: str, default: str = "undirected") -> str:
    return (
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns"><key id="v" for="node" attr.name="name" attr.type="string"/>'
        f'<graph edgedefault="{default}">{nodes}{edges}</graph></graphml>'
    )


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_nodes_that_bear_the_learners_names_are_these_learners(tmp_path: Path) -> None:
    assert edges_of(tmp_path / "net.txt", "north east\neast south\n") == {(0, 1), (1, 2)}


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffnorth east\neast south",  # a byte order mark is no part of a name
        "# north south\nnorth east # north south\n\n  east\tsouth  \r\n",
        "north east\reast south\r",
        "north east 0.9\neast south 1e-3\n",  # weights come from the spec's rule
        "north east {}\neast south {'weight': 0.5}\n",  # as networkx.write_edgelist writes them
        "north east\nnorth east\neast south\n",
        "north east\neast north\neast south\nsouth east\n",
        "0 1\n1 2\n",
        "2 1\n1 0\n",
    ],
)
def test_lists_that_say_the_same(tmp_path: Path, text: str) -> None:
    assert edges_of(tmp_path / "net.txt", text) == {(0, 1), (1, 2)}


def test_names_may_be_numbers_and_have_blanks(tmp_path: Path) -> None:
    path = tmp_path / "net.txt"
    assert edges_of(path, "3 1\n1 2\n", ("3", "2", "1")) == {(0, 2), (1, 2)}
    assert edges_of(path, "ward 1 ward 2\nward 2 Süd\n", ("ward 1", "ward 2", "Su\u0308d")) == {(0, 1), (1, 2)}
    with pytest.raises(SpecError, match="several readings"):
        edges_of(path, "a b c\n", ("a", "a b", "b c", "c"))


def test_a_learner_that_no_edge_names_has_none(tmp_path: Path) -> None:
    assert edges_of(tmp_path / "net.txt", "south north\n") == {(0, 2)}
    nodes = '<node id="south"/><node id="north"/><node id="east"/>'
    assert edges_of(tmp_path / "n.graphml", graphml(nodes, '<edge source="south" target="north"/>')) == {(0, 2)}


def test_graphml_whose_ids_are_a_program_s_own_has_names_as_attributes(tmp_path: Path) -> None:
    """As igraph writes it."""
    nodes = "".join(f'<node id="n{k}"><data key="v">{name}</data></node>' for k, name in enumerate(reversed(NAMES)))
    edges = '<edge source="n2" target="n1"/><edge source="n1" target="n0"/>'
    assert edges_of(tmp_path / "n.graphml", graphml(nodes, edges)) == {(0, 1), (1, 2)}


NAME = st.text("ab1 .-üЖ", min_size=1, max_size=6)


@st.composite
def networks(draw: st.DrawFn) -> tuple[tuple[str, ...], list[tuple[int, int]], bool]:
    """Names of two to seven learners, edges that leave none of them out, and whether these are directed."""
    names = [name.strip() for name in draw(st.lists(NAME, min_size=2, max_size=7, unique_by=str.strip))]
    assume(all(re.fullmatch(LEARNER_NAME_PATTERN, name) for name in names))
    n, directed = len(names), draw(st.booleans())
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j and (directed or i < j)]
    some = draw(st.lists(st.sampled_from(pairs), unique=True))
    ring = [(i, (i + 1) % n) for i in range(n)]
    edges = dict.fromkeys(edge if directed else (min(edge), max(edge)) for edge in [*some, *ring])
    return tuple(names), draw(st.permutations([*edges])), directed


FORMATS = ("graphml", "plain", "data", "weighted", "numbers", "numbered graphml")


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(networks(), st.sampled_from(FORMATS), st.randoms(use_true_random=False))
def test_any_graph_reads_back_as_the_same_edges(
    tmp_path: Path, network: tuple[tuple[str, ...], list[tuple[int, int]], bool], form: str, random: object
) -> None:
    names, edges, directed = network
    called = [str(i) for i in range(len(names))] if "number" in form else names
    if "number" in form:
        names = tuple(f"learner-{i}" for i in range(len(names)))
    graph: nx.Graph[str] = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from(sorted(called, key=lambda _: random.random()))  # type: ignore[attr-defined]
    graph.add_edges_from((called[i], called[j], {"weight": 0.5}) for i, j in edges)
    path = tmp_path / ("net.graphml" if "graphml" in form else "net.txt")
    if "graphml" in form:
        nx.write_graphml(graph, path)
    elif form == "weighted":
        nx.write_weighted_edgelist(graph, path)
    else:
        nx.write_edgelist(graph, path, data=form == "data")
    found, refused = list[tuple[int, int]](), ""
    try:
        found = read_edges(path, names, directed=directed)
    except SpecError as error:
        refused = str(error)
    if refused:  # names with blanks, of which some begin or end as others do, are the only ones
        assert "several readings" in refused and any(" " in name for name in names)
    else:
        assert len(set(found)) == len(found)
        assert {*found} == {*edges}


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "advice"),
    [
        ("north east\neast,south\n", 2, "on a line of its own"),
        ("north;east\n", 1, "without other signs"),
        ("north east south\neast south\n", 1, "on a line of its own"),
        ("0 1 7\n1 2\n2\n", 1, "with a point"),
        ("north east\neast so#uth\n", 2, "'south'"),
        ("north East\neast south\n", 1, "'east'"),
        ("north easst\neast south\n", 1, "'east'"),
        ("source target\nnorth east\n", 1, "on a line of its own"),
        ("north hq\neast south\n", 1, "two learners of the run"),
        ("1 2\n2 3\n", 2, "counted from 0 to 2"),
        ("00 1\n1 2\n", 1, "counted from 0 to 2"),
        ("0 1 0\n", 1, "on a line of its own"),
        ("north east 0\neast south 1\n", 1, "above 0"),
        ("north east nan\neast south 1\n", 1, "above 0"),
        ("north north\n", 1, "different learners"),
        ("north east\neast north\neast south\n", 3, "topology.graph.directed if"),
        ('[["north", "east"]]\n', 1, "JSON"),
        ('{"north": ["east"]}\n', 1, "JSON"),
        ("<graphml>\n", 1, "must end in .graphml"),
        ("north\0 east\n", 1, "'east'|learners"),
    ],
)
def test_a_line_that_is_no_edge_is_refused_with_its_number(tmp_path: Path, text: str, line: int, advice: str) -> None:
    with pytest.raises(SpecError, match=rf"net\.txt.*line {line}\b.*({advice})"):
        edges_of(tmp_path / "net.txt", text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must have an edge"),
        ("# north east\n", "must have an edge"),
        ("0 1\n", "all of 0 to 2.*no edge of 2.*names"),
        ("1 2\n", "all of 0 to 2.*no edge of 0"),
        (b"\xff\xfen\0o\0", "UTF-16"),
        (b"\xfcst north\n", "must be UTF-8, and line 1"),
        (b"\x1f\x8b\x08\x00\xff", "gzip"),
    ],
)
def test_a_list_without_edges_of_learners_is_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        edges_of(tmp_path / "net.txt", content)


def test_numbers_are_no_learners_where_names_are_numbers(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"line 1: must be two learners of the run \(1, 2, 3\)"):
        edges_of(tmp_path / "net.txt", "0 1\n1 2\n", ("1", "2", "3"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<graphml", "must be readable as GraphML.*ParseError"),
        ("<html/>", "must be readable as GraphML.*NetworkXError"),
        ("north east\n", "must be readable as GraphML"),
        (
            graphml('<node id="a"/><node id="b"/>', '<edge source="a" target="b"/>'),
            r"nodes must be learners .*'a', 'b'",
        ),
        (graphml("", '<edge source="north" target="norht"/>'), "nodes must be learners.*'norht'"),
        (graphml('<node id="1"/><node id="2"/>', '<edge source="1" target="2"/>'), "numbers 0 to 2"),
        (graphml("", '<edge source="north" target="north"/>'), "two different nodes, got 'north'"),
        (graphml("", '<edge source="north" target="east"/>', "directed"), "must be undirected"),
        (
            graphml("", '<edge source="north" target="east"/></graph><graph edgedefault="undirected">'),
            "one graph, got 2",
        ),
    ],
)
def test_graphml_of_other_nodes_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        edges_of(tmp_path / "net.graphml", content)


@pytest.mark.parametrize("name", ["absent.txt", "absent.graphml"])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match=f"cannot read the graph file .*{name}: No such file"):
        read_edges(tmp_path / name, NAMES, directed=False)
    (tmp_path / name).mkdir()
    with pytest.raises(SpecError, match=f"cannot read the graph file .*{name}: Is a directory"):
        read_edges(tmp_path / name, NAMES, directed=False)


# ---- in a spec -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["graph", "sequence"])
def test_a_network_is_that_of_the_file_whoever_reads_it(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path / "net.txt", "north east\neast south\n")
    graph = {"kind": "file", "path": path}
    section = {"graph": graph} if kind == "graph" else {"sequence": {"kind": "periodic", "graphs": [graph, graph]}}
    topology = Topology.model_validate(section)
    for network in (
        topology.build_network(3, 4, ParticipationSchedule(NAMES)),
        topology.to_edge_list(NAMES).build_network(3, 4),
        topology.inline_files(NAMES).build_network(3, 4),
    ):
        assert network.edges == ((0, 1), (1, 2))


def test_paths_of_all_graphs_of_a_spec_begin_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "specs").mkdir()
    written(tmp_path / "specs" / "net.txt", "0 1\n1 2\n")
    spec = written(
        tmp_path / "specs" / "spec.yaml",
        "rounds: 4\nlearners: 3\nalgorithm: {name: dpps, epsilon: 1.0}\n"
        "topology: {sequence: {kind: periodic, graphs: [{kind: file, path: net.txt}, ring]}}\n",
    )
    monkeypatch.chdir(tmp_path)
    loaded = load_spec(spec)
    assert loaded.topology.build_network(3, 4, loaded.participation).edges == ((0, 1), (0, 2), (1, 2))
    (tmp_path / "kept").mkdir()
    copy = written(tmp_path / "kept" / "spec.yaml", dump_spec(loaded, tmp_path / "kept"))
    assert load_spec(copy).topology == loaded.topology


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=60), st.text(alphabet="north eas,;\n#{}01.\t", max_size=40).map(str.encode)))
def test_any_bytes_are_read_or_refused_in_words(tmp_path: Path, content: bytes) -> None:
    for name in ("net.txt", "net.graphml"):
        told = name
        try:
            read_edges(written(tmp_path / name, content), NAMES, directed=False)
        except SottovoceError as error:
            told = str(error)
        assert name in told
