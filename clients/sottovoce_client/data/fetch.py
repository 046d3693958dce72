"""`sottovoce data fetch`: download the published files of a data set, verify them, and write the file that runs read.

The work is done in a scratch folder next to the result, which is moved when it is complete: a failed or interrupted fetch
leaves nothing.
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
"""Maximum retries of a download after a broken connection or a server error; the first after 1 s, the second after 2 s."""
MAX_DOWNLOAD_BYTES = 1 << 29
"""Maximum size of a download, before decompression."""
_TIMEOUT_S = 30
_PAGE_PREFIXES = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<script")
_CHUNK_BYTES = 1 << 16
_ARCHIVE_ERRORS = (EOFError, OSError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError)
"""Errors that Python's readers raise for a truncated, encrypted or unsupported archive, or another file."""


def fetch(
    source: CatalogueEntry,
    folder: Path,
    progress: Progress,
    *,
    alternative_location: str = "",
    retries: int = MAX_RETRIES,
) -> tuple[Path, dict[str, str]]:
    """Download, verify, convert and store a data set.

    Args:
        source: Entry with original files.
        folder: Output folder, created if it is missing.
        progress: Display of the progress.
        alternative_location: Folder, or base URL, of the original files; empty: the publishers' URLs.
        retries: Maximum retries of a download.

    Returns:
        Path of the data file, and the location of each original by its name.

    Raises:
        Unavailable: An original is not available from any of its locations.
        DataError: The originals cannot be converted.
        FailedPrecondition: The folder cannot be written to, or the disk is full.
        SpecError: `alternative_location` does not exist; or a package that downloads or reads is not installed.
    """
    with _create_workspace(folder, source) as work:
        files, locations = {}, {}
        for original in source.originals:
            locations[original.name], files[original.name] = _download_first(
                original, source, _list_locations(original, alternative_location), progress, retries
            )
        progress.add_task(f"{source.name}: converting", total=None)
        arrays: dict[str, Any] = convert(source, files)
        draft, path = work / f"{source.name}.npz", folder / f"{source.name}.npz"
        np.savez_compressed(draft, **arrays)
        os.replace(draft, path)
    return path, locations


def compute_digest(content: bytes, kind: str = "sha256") -> str:
    """Compute the digest, as `KIND:` and hexadecimal digits."""
    return f"{kind}:{hashlib.new(kind, content, usedforsecurity=False).hexdigest()}"


@contextmanager
def _create_workspace(folder: Path, source: CatalogueEntry) -> Iterator[Path]:
    """Create a scratch folder, on the disk of the result."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with create_scratch_folder(f".{source.name}-", folder) as work:
            yield work
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"{source.name} does not fit on the disk of {folder}, and nothing was kept: free some space"
        else:
            text = f"cannot write to the folder {folder}: {error.strerror or error}"
        raise FailedPrecondition(f"{text}, or give another folder with --out or {DATA_FOLDER_VARIABLE}") from None


# ---- locations -------------------------------------------------------------------------------------------------------


def require_location(location: str, option: str) -> None:
    """Require a folder or a URL.

    Args:
        location: Alternative location of original files.
        option: Name of the option, for errors.

    Raises:
        SpecError: It is neither.
    """
    if "://" in location:
        wanted = f"{option} must be a folder that exists, or a URL, which"
        parse_url(location, {"https": 443, "http": 80}, wanted, allow_path=True)
    elif not Path(location).is_dir():
        raise SpecError(f"{option} must be a folder that exists, or a URL of http or https, got {location!r}")


def _list_locations(original: OriginalFile, alternative: str) -> tuple[str, ...]:
    """List the locations of an original, in the order in which they are tried."""
    if not alternative:
        return original.urls
    require_location(alternative, "--from")
    name = urlsplit(original.urls[0]).path.rpartition("/")[2]
    if "://" in alternative:
        return (f"{alternative.rstrip('/')}/{name}",)
    paths = [Path(alternative) / name, Path(alternative) / original.name]  # as published, or decompressed
    return (str(next((path for path in paths if path.is_file()), paths[0])),)


def _download_first(
    original: OriginalFile, source: CatalogueEntry, locations: tuple[str, ...], progress: Progress, retries: int
) -> tuple[str, bytes]:
    """Return the first location of an original that has it, and its content."""
    refusals = []
    for location in locations:
        try:
            content = _decompress(_download(location, original, progress, retries), location, original)
            return location, _verify(content, original)
        except (Unavailable, DataError) as error:
            refusals.append(f"  {location}: {error}")
    files = ", ".join(each.name for each in source.originals)
    lines = [
        f"{source.name} could not be fetched, and nothing was kept:",
        *refusals,
        "Without internet access: fetch it on another machine, and copy "
        f"{source.name}.npz into a folder that {DATA_FOLDER_VARIABLE} names;",
        f"or give a folder or URL of its originals ({files}) with --from.",
    ]
    raise Unavailable("\n".join(lines))


def _decompress(content: bytes, location: str, original: OriginalFile) -> bytes:
    """Decompress a downloaded file, if it is compressed; read at most the expected size.

    Raises:
        DataError: It is a web page, has another compression than its location suggests, or is too large.
    """
    if content[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_PAGE_PREFIXES):
        raise DataError(
            "the server must send the file, and sent a web page, as proxies and networks with a login do: open the address in "
            "a browser, or set HTTPS_PROXY"
        )
    url, _, member = location.partition("#")
    if not member and (not url.endswith(".gz") or original.name.endswith(".gz")):
        return content
    max_bytes = 2 * original.size_bytes + (1 << 20)
    try:
        with ExitStack() as stack:
            file: Any
            if member:
                file = stack.enter_context(zipfile.ZipFile(io.BytesIO(content))).open(member)
            else:
                file = gzip.GzipFile(fileobj=io.BytesIO(content))
            found: bytes = stack.enter_context(file).read(max_bytes + 1)
    except KeyError:
        raise DataError(f"the zip archive must contain {member}, and does not") from None
    except _ARCHIVE_ERRORS:
        kind = "zip archive" if member else "gzip file"
        raise DataError(f"must be a {kind}, and is not, or is damaged or truncated") from None
    if len(found) > max_bytes:
        raise DataError(f"it must contain at most {max_bytes:,} bytes, and contains more")
    return found


def _verify(content: bytes, original: OriginalFile) -> bytes:
    """Return the content if it has the published digest.

    Raises:
        DataError: It has another digest.
    """
    kind = original.digest.partition(":")[0]
    if (found := compute_digest(content, kind)) != original.digest:
        raise DataError(
            f"{original.name} must have the digest {original.digest}, got {found} ({len(content):,} bytes): it was damaged or "
            "changed in transit, or its publisher has a new version"
        )
    return content


# ---- downloads -------------------------------------------------------------------------------------------------------


def _download(location: str, original: OriginalFile, progress: Progress, retries: int) -> bytes:
    """Download, or read, the file at a location.

    Raises:
        Unavailable: It is not available.
        DataError: It is longer than any expected file.
    """
    if "://" not in location:
        try:
            return Path(location).read_bytes()
        except OSError as error:
            raise Unavailable(f"cannot be read: {error.strerror}") from None
    requests = import_optional("requests", "requests", "sottovoce data fetch")
    url, task, attempt = location.partition("#")[0], progress.add_task(original.name, total=None), 0
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
            if attempt == retries or not _is_temporary(error, len(content), requests.exceptions):
                raise Unavailable(_explain(error, len(content), requests.exceptions)) from None
        attempt += 1
        time.sleep(attempt)


def _is_temporary(error: Any, received: int, errors: Any) -> bool:
    """Return whether a server error or broken connection may be temporary."""
    if isinstance(error, errors.HTTPError):
        status = error.response.status_code
        return bool(status == 429 or status >= 500)
    return received > 0 or isinstance(error, errors.Timeout | errors.ChunkedEncodingError)


def _explain(error: Any, received: int, errors: Any) -> str:
    """Describe an error in words."""
    if isinstance(error, errors.HTTPError):
        return f"the server answered {error.response.status_code} {error.response.reason}".rstrip()
    if isinstance(error, errors.SSLError):
        return "its certificate is not trusted; behind a proxy that intercepts TLS, name its authority in REQUESTS_CA_BUNDLE"
    if isinstance(error, errors.ProxyError):
        return "the proxy that HTTPS_PROXY or HTTP_PROXY names cannot be reached"
    if received or isinstance(error, errors.ChunkedEncodingError):
        return f"the connection broke off after about {received:,} bytes"
    if isinstance(error, errors.Timeout):
        return f"no answer within {_TIMEOUT_S} s"
    if isinstance(error, errors.ConnectionError):
        return "unreachable: no internet access, or no such server"
    return f"cannot be fetched ({type(error).__name__})"
