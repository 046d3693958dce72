"""Images: built as a user would, on a base that stands in for the official one where no registry can be reached."""

from __future__ import annotations

import hashlib
import tarfile
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from tests.deploy.engine import Engine, run

CHECKOUT = Path(__file__).parents[2]
TARGETS = ("learner", "coordinator", "tools", "eavesdropper")
VERSION: str = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
SETTINGS = dict(
    line.split("=", 1)
    for line in (CHECKOUT / "deploy" / ".env").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)
BASE = SETTINGS["SOTTOVOCE_PYTHON"]
STANDINS = {"nats": "nats:2.10.22-alpine", "prometheus": "prom/prometheus:v2.55.1"}
_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_HOOKS = (
    f'cp {_AUTHORITIES} "$1{_AUTHORITIES}"',  # whom this machine believes, for its way to packages
    'rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED',
    f'printf "[global]\\ncert = {_AUTHORITIES}\\n" > "$1/etc/pip.conf"',
)


def name_of(target: str) -> str:
    """Of an image of ours."""
    return f"sottovoce/{target}:{VERSION}"


def make_base(engine: Engine) -> None:
    """Debian's Python under the name of the official image, unless it is there."""
    if engine("images", "--quiet", BASE):
        return
    tar = engine.folder / "base.tar"
    hooks = [f"--customize-hook={hook}" for hook in _HOOKS]
    wanted = "--include=python3,python3-pip,python3-venv,ca-certificates"
    run(["mmdebstrap", "--variant=apt", "--mode=root", wanted, *hooks, "bookworm", str(tar)])
    engine("import", str(tar), BASE)
    tar.unlink()


def build(engine: Engine, targets: Iterable[str] = TARGETS, *, tag: str = "", anew: bool = False) -> None:
    """Build images at the same time, as Compose does: the engine builds once what they share."""
    build_args = ["--build-arg", f"BASE={BASE}", "--build-arg", f"VERSION={VERSION}", *(["--no-cache"] if anew else [])]
    file = str(CHECKOUT / "deploy" / "Dockerfile")

    def build_one(target: str) -> None:
        print(f"building {target}", flush=True)
        named = ["--target", target, "-t", f"{name_of(target)}{tag}"]
        engine("build", "--network", "host", *build_args, "-f", file, *named, str(CHECKOUT))

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(build_one, targets):
            pass


def make_standins(engine: Engine) -> None:
    """Servers of others that the compose file names."""
    file = str(Path(__file__).with_name("standins.Dockerfile"))
    for target, name in STANDINS.items():
        build_args = ["--build-arg", f"BASE={BASE}", "--network", "host"]
        engine("build", *build_args, "-f", file, "--target", target, "-t", name, str(Path(__file__).parent))


def contents(engine: Engine, image: str) -> dict[str, str]:
    """Every file of an image's layers: mode, owner, time, and a digest of what is in it."""
    tar = engine.folder / "saved.tar"
    engine("save", "--output", str(tar), image)
    try:
        with tarfile.open(tar) as saved:
            layers = [each for each in saved.getmembers() if each.name.endswith("layer.tar")]
            return {
                f"{number}:{member.name}": about
                for number, layer in enumerate(sorted(layers, key=lambda each: each.size))
                for member, about in _members(saved.extractfile(layer))
            }
    finally:
        tar.unlink()


def _members(layer: IO[bytes] | None) -> Iterator[tuple[tarfile.TarInfo, str]]:
    with tarfile.open(fileobj=layer) as files:
        for member in files:
            content = files.extractfile(member) if member.isfile() else None
            digest = hashlib.file_digest(content, "sha256").hexdigest() if content else member.linkname  # type: ignore[arg-type]
            yield member, f"{member.mode:o} {member.uid}:{member.gid} {member.mtime} {digest}"
