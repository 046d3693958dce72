"""Gather the content of an image: a Python, the packages of a virtual environment, and the libraries that both load.

    python gather.py VENV OUT

Run by deploy/packages.sh in a build stage. OUT has no shell, no package manager, and no unused module. Third-party
modules are included only in compiled form, to save space; the project's own modules also as source. Every file has the time
SOURCE_DATE_EPOCH, so that the same inputs give the same image.
"""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# No service imports them; `config-*` is for linking Python.
UNUSED = ("__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data")
NOWHERE = ("*.pyc", "*.pyi", "*.pyx", "*.pxd", "*.c", "*.h", "*.a", "config-*", "activate*", "Activate*")
SYSTEM = ("site-packages", "dist-packages")
# Modules of the standard library that bring libraries, or test Python itself.
UNWANTED = (
    "_dbm.*",
    "_gdbm.*",
    "nis.*",
    "readline.*",
    "_curses*",
    "_test*",
    "_xx*",
    "xx*",
    "ossaudiodev.*",
    "_tkinter.*",
)
# Files of the base image: users, name resolution, trusted TLS authorities, library paths.
ETC = ("passwd", "group", "nsswitch.conf", "ssl/certs/ca-certificates.crt", "ld.so.conf", "ld.so.conf.d")


def main(venv: Path, out: Path) -> None:
    """Gather the files into a new folder."""
    keep = shutil.ignore_patterns(*UNUSED, *NOWHERE, "include")
    shutil.copytree(venv, _inside(out, venv), symlinks=True, ignore=keep)
    stdlib = Path(sysconfig.get_path("stdlib"))
    unused = shutil.ignore_patterns(*UNUSED, *NOWHERE, *SYSTEM, *UNWANTED)
    shutil.copytree(stdlib, _inside(out, stdlib), symlinks=True, ignore=unused)
    _copy_base_links(out)
    for link in _chain(venv / "bin" / "python"):
        _copy(link, out)
    for library in sorted(_libraries(out)):
        for link in _chain(library):
            _copy(link, out)
    for name in ETC:
        if (path := Path("/etc", name)).exists():
            _copy(path, out)
    subprocess.run(["/sbin/ldconfig", "-r", str(out)], check=True)  # noqa: S603
    shutil.rmtree(out / "var", ignore_errors=True)  # ldconfig's cache for itself
    for folder in (stdlib, venv):
        _compile(_inside(out, folder), out)
    (out / "tmp").mkdir()
    (out / "tmp").chmod(0o1777)
    _date(out, int(os.environ["SOURCE_DATE_EPOCH"]))


def _compile(folder: Path, out: Path) -> None:
    """Compile modules: the project's next to their sources, others in their place; strip debugging symbols."""
    for path in [*folder.rglob("*.py")]:
        own = any(part == "sottovoce" or part.startswith("sottovoce_") for part in path.relative_to(out).parts[4:])
        # Never compared with the source, whose time is meaningless.
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        name = "/" + str(path.relative_to(out))
        to = None if own else str(path.with_suffix(".pyc"))
        try:
            py_compile.compile(str(path), to, name, doraise=True, invalidation_mode=mode)
        except py_compile.PyCompileError:  # templates of code, for other Pythons
            continue
        if not own:
            path.unlink()
    for path in folder.rglob("*.so"):
        if not path.parent.name.endswith(".libs"):  # those were patched, and strip does not understand them
            subprocess.run(["/usr/bin/strip", "--strip-unneeded", str(path)], check=True)  # noqa: S603


def _inside(out: Path, path: Path) -> Path:
    return out / path.relative_to("/")


def _copy_base_links(out: Path) -> None:
    """Copy links of the base image, such as /lib to /usr/lib."""
    for name in ("bin", "lib", "lib64"):
        if (path := Path("/", name)).is_symlink() and not (out / name).exists():
            (out / name).symlink_to(os.readlink(path))
            _inside(out, path.resolve()).mkdir(parents=True, exist_ok=True)


def _chain(path: Path) -> Iterator[Path]:
    """Yield a path and the targets of its links, each in a folder that is no link."""
    while True:
        path = path.parent.resolve() / path.name
        yield path
        if not path.is_symlink():
            return
        path = path.parent / os.readlink(path)


def _copy(path: Path, out: Path) -> None:
    to = _inside(out, path)
    to.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, to, symlinks=True, dirs_exist_ok=True)
    elif not to.is_symlink() and not to.exists():
        shutil.copy2(path, to, follow_symlinks=False)


def _libraries(out: Path) -> set[Path]:
    """Return the libraries that Python and its modules load, according to ldd."""
    found = set[Path]()
    for path in [Path(sys.executable).resolve(), *out.rglob("*.so"), *out.rglob("*.so.*")]:
        # ldd fails for scripts and broken links, which load nothing.
        result = subprocess.run(["/usr/bin/ldd", str(path)], capture_output=True, text=True, check=False)  # noqa: S603
        words = [word for line in result.stdout.splitlines() for word in line.split() if word.startswith("/")]
        found |= {Path(word) for word in words if not Path(word).is_relative_to(out)}
    return found


def _date(out: Path, seconds: int) -> None:
    for folder, folders, names in os.walk(out, topdown=False):  # links to folders are among the folders
        for path in [*(Path(folder, name) for name in (*folders, *names)), Path(folder)]:
            os.utime(path, (seconds, seconds), follow_symlinks=False)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
