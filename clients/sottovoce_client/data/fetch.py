"""`sottovoce data fetch`: downloads the files that a data set's owner publishes, checks them, and writes what a run reads.

All is done in a folder of its own beside the result, which is moved to its place when it is whole: a fetch that fails or is
interrupted leaves nothing.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from rich.progress import Progress

from sottovoce_client.atomic_files import create_scratch_folder
from sottovoce_client.data.convert import convert
from sottovoce_core.data.catalogue import DATA_FOLDER_VARIABLE, CatalogueEntry, OriginalFile
from sottovoce_core.errors import DataError, FailedPrecondition, SpecError, Unavailable
from sottovoce_core.optional import import_optional
from sottovoce_rpc.addresses import parse_url

MAX_RETRIES = 2
"""How often a download is begun anew that broke off, or that a server in trouble did not give; after 1 s, then 2."""
MAX_DOWNLOAD_BYTES = 1 << 29
"""Of a download, as it comes."""
_TIMEOUT_S = 30
_PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<script")
_CHUNK_BYTES = 1 << 16
_ARCHIVE_ERRORS = (EOFError, OSError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError)
"""What Python's readers raise of a file that is torn, of another kind, encrypted, or packed as they do not know."""


def fetch(
    source: CatalogueEntry,
    folder: Path,
    progress: Progress,
    *,
    alternative_location: str = "",
    retries: int = MAX_RETRIES,
) -> tuple[Path, dict[str, str]]:
    """Download, check, convert and store a data set.

    Args:
        source: that has originals.
        folder: where to; made where it is missing.
        progress: shows how far it is.
        elsewhere: a folder, or a URL of one, that has the originals; empty: where their owners have them.
        retries: how often a download that broke off is begun anew.

    Returns:
        Its file, and the place that each original came from, by its name.

    Raises:
        Unavailable: an original could not be had from any of its places.
        DataError: they came, and cannot be converted.
        FailedPrecondition: the folder cannot be written, or there is no room in it.
        SpecError: `elsewhere` is nowhere; or what downloads or reads is not installed.
    """
    with _workplace(folder, source) as work:
        files, came = {}, {}
        for original in source.originals:
            came[original.name], files[original.name] = _had(
                original, source, _places(original, alternative_location), progress, retries
            )
        progress.add_task(f"{source.name}: converting", total=None)
        arrays: dict[str, Any] = convert(source, files)
        draft, path = work / f"{source.name}.npz", folder / f"{source.name}.npz"
        np.savez_compressed(draft, **arrays)
        os.replace(draft, path)
    return path, came


def compute_digest(content: bytes, kind: str = "sha256") -> str:
    """`KIND:` and hexadecimal figures."""
    return f"{kind}:{hashlib.new(kind, content, usedforsecurity=False).hexdigest()}"


@contextmanager
def _workplace(folder: Path, source: CatalogueEntry) -> Iterator[Path]:
    """A folder in which to work, on the disk of the result."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with create_scratch_folder(f".{source.name}-", folder) as work:
            yield work
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"there is no room for {source.name} on the disk of {folder}, and nothing was kept: free some"
        else:
            text = f"cannot write to the folder {folder}: {error.strerror or error}"
        raise FailedPrecondition(f"{text}, or give another folder with --out or {DATA_FOLDER_VARIABLE}") from None


# ---- where originals are ---------------------------------------------------------------------------------------------


def require_location(location: str, what: str) -> None:
    """Refuse what is neither a folder nor a URL.

    Args:
        elsewhere: than at their owners originals are.
        what: it is, in errors: an option.

    Raises:
        SpecError: it is neither.
    """
    if "://" in location:
        wanted = f"{what} must be a folder that exists, or a URL, which"
        parse_url(location, {"https": 443, "http": 80}, wanted, allow_path=True)
    elif not Path(location).is_dir():
        raise SpecError(f"{what} must be a folder that exists, or a URL of http or https, got {location!r}")


def _places(original: OriginalFile, elsewhere: str) -> tuple[str, ...]:
    """Where to ask for an original, in this order."""
    if not elsewhere:
        return original.urls
    require_location(elsewhere, "--from")
    name = urlsplit(original.urls[0]).path.rpartition("/")[2]
    if "://" in elsewhere:
        return (f"{elsewhere.rstrip('/')}/{name}",)
    paths = [Path(elsewhere) / name, Path(elsewhere) / original.name]  # as it is published, or unpacked already
    return (str(next((path for path in paths if path.is_file()), paths[0])),)


def _had(
    original: OriginalFile, source: CatalogueEntry, places: tuple[str, ...], progress: Progress, retries: int
) -> tuple[str, bytes]:
    """The content of an original, from the first of its places that has it, and that place."""
    refusals = []
    for place in places:
        try:
            return place, _checked(_unpacked(_brought(place, original, progress, retries), place, original), original)
        except (Unavailable, DataError) as error:
            refusals.append(f"  {place}: {error}")
    files = ", ".join(each.name for each in source.originals)
    lines = [
        f"{source.name} could not be fetched, and nothing was kept:",
        *refusals,
        f"Without internet: fetch it on another machine, and copy {source.name}.npz into a folder that {DATA_FOLDER_VARIABLE} names;",
        f"or give a folder or URL that has its originals ({files}) with --from.",
    ]
    raise Unavailable("\n".join(lines))


def _unpacked(content: bytes, place: str, original: OriginalFile) -> bytes:
    """What is in a file that came, packed or not: never more than was expected.

    Raises:
        DataError: it is a web page, is not packed as its place says, or has too many bytes.
    """
    if content[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_PAGES):
        raise DataError(
            "a web page came in place of the file: of a proxy, or of a network that wants you to sign in; open the address in "
            "a browser, or set HTTPS_PROXY"
        )
    url, _, member = place.partition("#")
    if not member and (not url.endswith(".gz") or original.name.endswith(".gz")):
        return content
    most = 2 * original.size_bytes + (1 << 20)
    try:
        with ExitStack() as opened:
            file: Any
            if member:
                file = opened.enter_context(zipfile.ZipFile(io.BytesIO(content))).open(member)
            else:
                file = gzip.GzipFile(fileobj=io.BytesIO(content))
            found: bytes = opened.enter_context(file).read(most + 1)
    except KeyError:
        raise DataError(f"the zip archive must hold {member}, and does not") from None
    except _ARCHIVE_ERRORS:
        kind = "zip archive" if member else "gzip file"
        raise DataError(f"must be a {kind}, and is none, or is broken or did not arrive whole") from None
    if len(found) > most:
        raise DataError(f"there must be at most {most:,} bytes in it, and there are more")
    return found


def _checked(content: bytes, original: OriginalFile) -> bytes:
    """The content, if it is what its owner published.

    Raises:
        DataError: it is not.
    """
    kind = original.digest.partition(":")[0]
    if (found := compute_digest(content, kind)) != original.digest:
        raise DataError(
            f"{original.name} must have the digest {original.digest}, got {found} ({len(content):,} bytes): it was damaged or "
            "changed on the way, or its owner has published another version"
        )
    return content


# ---- downloads -------------------------------------------------------------------------------------------------------


def _brought(place: str, original: OriginalFile, progress: Progress, retries: int) -> bytes:
    """What lies at a place.

    Raises:
        Unavailable: it cannot be had.
        DataError: it is longer than anything that is expected.
    """
    if "://" not in place:
        try:
            return Path(place).read_bytes()
        except OSError as error:
            raise Unavailable(f"cannot be read: {error.strerror}") from None
    requests = import_optional("requests", "requests", "sottovoce data fetch")
    url, task, tried = place.partition("#")[0], progress.add_task(original.name, total=None), 0
    while True:
        content = bytearray()
        try:
            with requests.get(url, stream=True, timeout=_TIMEOUT_S, headers={"Accept-Encoding": "identity"}) as answer:
                answer.raise_for_status()
                progress.update(task, total=int(answer.headers.get("Content-Length", 0)) or None)
                for chunk in answer.iter_content(_CHUNK_BYTES):
                    content += chunk
                    if len(content) > MAX_DOWNLOAD_BYTES:
                        raise DataError(f"it must be at most {MAX_DOWNLOAD_BYTES:,} bytes, and is more")
                    progress.update(task, completed=len(content))
            return bytes(content)
        except requests.RequestException as error:
            if tried == retries or not _worth_another_try(error, len(content), requests.exceptions):
                raise Unavailable(_why(error, len(content), requests.exceptions)) from None
        tried += 1
        time.sleep(tried)


def _worth_another_try(error: Any, received: int, errors: Any) -> bool:
    """Whether a server or a connection was in trouble that may pass soon."""
    if isinstance(error, errors.HTTPError):
        status = error.response.status_code
        return bool(status == 429 or status >= 500)
    return received > 0 or isinstance(error, errors.Timeout | errors.ChunkedEncodingError)


def _why(error: Any, received: int, errors: Any) -> str:
    """What went wrong, in words."""
    if isinstance(error, errors.HTTPError):
        return f"the server answered {error.response.status_code} {error.response.reason}".rstrip()
    if isinstance(error, errors.SSLError):
        return (
            "its certificate is not believed; behind a proxy that reads along, name its authority in REQUESTS_CA_BUNDLE"
        )
    if isinstance(error, errors.ProxyError):
        return "the proxy that HTTPS_PROXY or HTTP_PROXY names cannot be reached"
    if received or isinstance(error, errors.ChunkedEncodingError):
        return f"the connection broke off after about {received:,} bytes"
    if isinstance(error, errors.Timeout):
        return f"no answer within {_TIMEOUT_S} s"
    if isinstance(error, errors.ConnectionError):
        return "cannot be reached: no internet, or no such server"
    return f"cannot be fetched ({type(error).__name__})"
