"""`sottovoce data`: real downloads from a server on this machine, the ways in which they fail, and what is said of data sets."""

from __future__ import annotations

import errno
import gzip
import io
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import yaml
from rich.progress import Progress
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_client.data.catalogue import count_classes, make_example_spec
from sottovoce_client.data.convert import convert
from sottovoce_client.data.fetch import compute_digest
from sottovoce_client.data.fetch import fetch as bring
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data.catalogue import CATALOGUE, CatalogueEntry, OriginalFile
from sottovoce_core.data.dataset import read_source
from sottovoce_core.data.files import RawTable, read_npz
from sottovoce_core.data.spec import DataSpec
from sottovoce_core.errors import DataError, FailedPrecondition, SottovoceError, SpecError, Unavailable
from sottovoce_core.experiment import prepare
from sottovoce_core.spec import parse_spec
from tests.originals import rebuilt

pytest.importorskip("requests")
pytest.importorskip("pyarrow")
LETTERS = b"T,2,8,3,5,1,8,13,0,6,6,10,8,0,8,0,8\nI,5,12,3,7,2,10,5,5,4,13,3,9,2,8,4,10\n"


class Server(ThreadingHTTPServer):
    """What it has, by path: bytes; or a number, the status that it answers; bytes in a list end early."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.has: dict[str, bytes | int | list[bytes]] = {}
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        found = self.server.has.get(self.path, 404)
        if isinstance(found, int):
            self.send_error(found)
            return
        body, more = (found[0], 1_000) if isinstance(found, list) else (found, 0)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + more))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as made:
        thread = Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def letters(*places: str) -> CatalogueEntry:
    """Two letters, at these places."""
    original = OriginalFile("letter-recognition.data", places, len(LETTERS), compute_digest(LETTERS))
    return replace(CATALOGUE["letter"], records=2, originals=(original,))


def fetch(source: CatalogueEntry, folder: Path, elsewhere: str = "", retries: int = 0) -> Path:
    return bring(source, folder, Progress(disable=True), alternative_location=elsewhere, retries=retries)[0]


def zipped(name: str) -> bytes:
    with zipfile.ZipFile(packed := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, LETTERS)
    return packed.getvalue()


# ---- what comes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mushrooms", "adult", "a9a", "letter", "poker", "mnist"])
def test_originals_become_the_arrays_that_are_known(
    name: str, data_folder: Path, server: Server, tmp_path: Path
) -> None:
    """From a server of ours, with the checksums that the product has; poker's test file is there in part alone."""
    pytest.importorskip("sklearn")
    source, originals = CATALOGUE[name], rebuilt(name, data_folder)
    if name == "poker":
        train, test = source.originals
        part = replace(test, digest=compute_digest(originals[test.name]))
        source = replace(source, test_records=18_488, originals=(train, part))
    for original, content in zip(source.originals, originals.values(), strict=True):
        file = original.urls[0].rpartition("/")[2]
        server.has[f"/{file}"] = gzip.compress(content, 1) if file.endswith(".gz") else content
    made, wanted = read_npz(fetch(source, tmp_path, server.url)), read_npz(data_folder / f"{name}.npz")
    assert made.columns == wanted.columns and (made.test is None) == (wanted.test is None)
    assert np.array_equal(made.features, wanted.features) and np.array_equal(made.labels, wanted.labels)
    for found, same in zip(made.test or (), wanted.test or (), strict=True):
        assert np.array_equal(found, same)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.npz"]


def test_the_next_place_is_asked_and_may_be_an_archive(server: Server, tmp_path: Path) -> None:
    server.has["/letters.zip"] = zipped("letter-recognition.data")
    done = fetch(letters(f"{server.url}/gone", f"{server.url}/letters.zip#letter-recognition.data"), tmp_path)
    assert server.asked == ["/gone", "/letters.zip"]
    assert read_npz(done).features.shape == (2, 16)


@pytest.mark.parametrize("name", ["letter-recognition.data", "letter-recognition.data.gz"])
def test_originals_in_a_folder_need_no_network(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(gzip.compress(LETTERS) if name.endswith(".gz") else LETTERS)
    done = fetch(letters("http://nowhere.invalid/letter-recognition.data.gz"), tmp_path / "made", str(tmp_path))
    assert read_npz(done).labels.tolist() == [19, 8]


def test_what_broke_off_is_begun_anew(server: Server, tmp_path: Path) -> None:
    server.has["/letters"] = [LETTERS]
    with pytest.raises(Unavailable, match="the connection broke off"):
        fetch(letters(f"{server.url}/letters"), tmp_path, retries=1)
    assert server.asked == ["/letters", "/letters"]


# ---- what does not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (404, "the server answered 404"),
        (500, "the server answered 500"),
        (LETTERS + b"X", "must have the digest sha256.*got .*damaged or changed"),
        (b"", "must have the digest sha256.*0 bytes"),
        (b"\xef\xbb\xbf \n<!DOCTYPE html><html>sign in</html>", "sent a web page"),
        ([LETTERS[:20]], "the connection broke off"),
    ],
)
def test_what_is_not_the_original_is_refused_and_nothing_stays(
    answer: bytes | int | list[bytes], why: str, server: Server, tmp_path: Path
) -> None:
    server.has["/letters"] = answer
    with pytest.raises(Unavailable, match=f"(?s)letter could not be fetched.*{why}.*Without internet.*SOTTOVOCE_DATA"):
        fetch(letters(f"{server.url}/letters"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_client_error_is_not_tried_again(server: Server, tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        fetch(letters(f"{server.url}/gone"), tmp_path, retries=2)
    assert server.asked == ["/gone"]


def test_a_gzip_file_that_ends_early_is_refused(server: Server, tmp_path: Path) -> None:
    server.has["/letters.gz"] = gzip.compress(LETTERS)[:-9]
    with pytest.raises(Unavailable, match="must be a gzip file, and is not, or is damaged or truncated"):
        fetch(letters(f"{server.url}/letters.gz"), tmp_path)


def test_nobody_there_is_told_so(server: Server, tmp_path: Path) -> None:
    server.server_close()
    with pytest.raises(Unavailable, match="unreachable: no internet access, or no such server"):
        fetch(letters(f"{server.url}/letters"), tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(
    number: int, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, "full")

    server.has["/letters"] = LETTERS
    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(FailedPrecondition, match=r"letter does not fit on the disk of .*nothing was kept"):
        fetch(letters(f"{server.url}/letters"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FailedPrecondition, match=r"cannot write to the folder .*--out"):
        fetch(letters("http://nowhere.invalid/x"), tmp_path / "file")


@pytest.mark.parametrize("elsewhere", ["no-such-folder", "ftp://nowhere.invalid"])
def test_a_place_that_is_none_is_refused(elsewhere: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="--from must be a folder"):
        fetch(letters("http://nowhere.invalid/x"), tmp_path, elsewhere)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("letters.gz", b"no", "must be a gzip file"),
        ("letters.gz", gzip.compress(bytes(3 << 20)), "it must contain at most 1,0[0-9,]* bytes"),
        ("letters.zip#a", b"PK\x03\x04 no", "must be a zip archive"),
        ("letters.zip#a", zipped("b"), "the zip archive must contain a, and does not"),
    ],
)
def test_archives_are_held_to_what_was_expected(
    name: str, content: bytes, why: str, server: Server, tmp_path: Path
) -> None:
    server.has[f"/{name.partition('#')[0]}"] = content
    with pytest.raises(Unavailable, match=why):
        fetch(letters(f"{server.url}/{name}"), tmp_path)


# ---- conversions of which there is no original here ------------------------------------------------------------------


def test_cifar10_pictures() -> None:
    planes = np.arange(3 * 32 * 32, dtype=np.uint8).reshape(3, 32, 32)
    batch = bytes([7]) + planes.tobytes()
    names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w:gz") as archive:
        for name in names:
            about = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            about.size = len(batch)
            archive.addfile(about, io.BytesIO(batch))
    files = {"cifar-10-binary.tar.gz": packed.getvalue()}
    arrays = convert(replace(CATALOGUE["cifar10"], records=5, test_records=1), files)
    assert arrays["X_train"].shape == (5, 32, 32, 3)
    assert np.array_equal(arrays["X_test"][0, :, :, 2], planes[2])
    assert arrays["y_train"].tolist() == [7] * 5


def test_covtype() -> None:
    row = ",".join(map(str, [2596, 51, -3, *range(51), 5]))
    arrays = convert(
        replace(CATALOGUE["covtype"], records=2), {"covtype.data.gz": gzip.compress(f"{row}\n{row}\n".encode())}
    )
    assert arrays["X_train"].shape == (2, 54) and arrays["X_train"][0, :3].tolist() == [2596, 51, -3]
    assert arrays["y_train"].tolist() == [5, 5]


def test_electricity() -> None:
    names = ["period", "nswprice", "nswdemand", "vicprice", "vicdemand", "transfer"]
    head = "".join(f"@attribute {name} numeric\n" for name in names)
    text = (
        f"% made up\n@relation e\n@attribute date numeric\n@attribute day {{1,2,3}}\n{head}"
        "@attribute class {UP,DOWN}\n\n@data\n"
    )
    rows = "0,2,0.5,1,2,3,4,5,UP\n0,3,1,1,2,3,4,5,DOWN\n"
    arrays = convert(replace(CATALOGUE["electricity"], records=2), {"electricity.arff": (text + rows).encode()})
    assert arrays["X_train"][:, 1].tolist() == [2, 3]
    assert arrays["y_train"].tolist() == [1, 0]


NO_BYTES = dict.fromkeys((each.name for each in CATALOGUE["mnist"].originals), b"\0\0\x0b\x01\0\0\0\x03abc")
"""Idx files of another type of number."""


@pytest.mark.parametrize(
    ("name", "files", "why"),
    [
        ("letter", {"letter-recognition.data": b"T,1\n"}, "Expected 17 columns, got 2"),
        ("letter", {"letter-recognition.data": LETTERS}, "must contain 20,000 records, got 2"),
        ("letter", {"letter-recognition.data": b"\xff\xfe"}, "cannot be read as UCI 'Letter"),
        ("electricity", {"electricity.arff": b"no"}, "cannot be read as OpenML"),
        ("mnist", NO_BYTES, "cannot be read as The MNIST"),
    ],
)
def test_files_of_another_form_are_refused(name: str, files: dict[str, bytes], why: str) -> None:
    with pytest.raises(DataError, match=why):
        convert(CATALOGUE[name], files)


# ---- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("platformdirs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SOTTOVOCE_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache" / "sottovoce" / "data"


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["data", *arguments])
    if isinstance(done.exception, SottovoceError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_a_second_fetch_finds_it(cache: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "letter-recognition.data").write_bytes(LETTERS)
    monkeypatch.setitem(CATALOGUE, "letter", letters("http://nowhere.invalid/letter-recognition.data"))
    assert "as published" in said("fetch", "letter", "--from", str(tmp_path))
    assert (cache / "letter.npz").is_file()
    assert "already present" in said("fetch", "letter", "digits")
    assert "cache" in said("list")
    assert "source: {kind: linear_regression, features: 10}, and optionally records, noise, seed" in said("list")


def test_unknown_and_missing_data_sets(cache: Path) -> None:
    with pytest.raises(SpecError, match="did you mean mushrooms"):
        said("fetch", "mushrom")
    with pytest.raises(SpecError, match="did you mean mushrooms"):
        said("describe", "mushrom")
    with pytest.raises(
        SpecError, match=r"those of linear_regression are generated .* write source: \{kind: linear_regression"
    ):
        said("describe", "linear_regression")
    assert "no: sottovoce data fetch poker" in said("describe", "poker")


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.arange(60.0), None),
        (np.repeat(np.arange(1950.0, 2010.0), 5), None),
        (np.repeat(np.arange(26.0), 10), 26),
        (np.arange(20.0), 20),
    ],
)
def test_many_whole_numbers_of_few_records_each_are_no_classes(labels: FloatArray, classes: int | None) -> None:
    found = count_classes(RawTable(np.ones((len(labels), 1)), labels))
    assert (None if found is None else len(found)) == classes


@pytest.mark.parametrize("labels", [["a", "b", "a", "b"], [0, 1, 2, 2], [0.5, 1.5, 2.0, 3.0]])
def test_the_spec_that_describe_shows_can_be_run(labels: list[float] | list[str], cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, X=np.arange(80.0).reshape(40, 2), y=np.array(labels * 10))
    text = make_example_spec(str(path), read_source(DataSpec(source=str(path))))
    assert text in said("describe", str(path))
    spec = parse_spec(yaml.safe_load(text), source="example", allow_imports=False)
    assert prepare(spec).data.n_features == 3  # with the intercept
