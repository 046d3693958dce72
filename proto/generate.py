"""Generator of the Python code of the wire: from `sottovoce_wire/v1/*.proto` to `generated/sottovoce_wire/v1`.

    python proto/generate.py            # write
    python proto/generate.py --check    # exit 1 and name the files if the committed code differs from the output of protoc

The proto path equals the Python path, so the generated imports need no rewriting. The protoc of tools.txt is older
than every protobuf version that the services support, so its code runs with all of them: uv runs it in its own environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from uv import find_uv_bin

HERE = Path(__file__).resolve().parent
GENERATED = HERE / "generated"
TOOLS = HERE / "tools.txt"


def generate(into: Path) -> None:
    """Run protoc; write messages, services and the stubs of both below the folder `into`."""
    protos = sorted(path.relative_to(HERE).as_posix() for path in HERE.glob("sottovoce_wire/**/*.proto"))
    outputs = [
        f"--python_out={into}",
        f"--grpc_python_out={into}",
        f"--mypy_out=quiet:{into}",
        f"--mypy_grpc_out=quiet:{into}",
    ]
    # 3.11: the tools have no wheels from 3.13 on.
    tools = [
        find_uv_bin(),
        "run",
        "--quiet",
        "--no-project",
        "--isolated",
        "--python=3.11",
        f"--with-requirements={TOOLS}",
    ]
    # protoc finds this environment's mypy-protobuf, which writes the stubs, on the PATH; the environment may not be activated.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    command = [*tools, "python", "-W", "ignore", "-m", "grpc_tools.protoc", "-I.", *outputs, *protos]
    subprocess.run(command, cwd=HERE, env={**os.environ, "PATH": path}, check=True)


def read_generated(folder: Path) -> dict[str, bytes]:
    """Read the generated files below a folder; return content by path."""
    found = (path for path in folder.rglob("*_pb2*.py*") if path.suffix != ".pyc")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def list_differences(committed: dict[str, bytes], fresh: dict[str, bytes]) -> list[str]:
    """List the differences between committed and fresh files, one line each."""
    return [
        *(f"missing: {name}" for name in sorted(fresh.keys() - committed.keys())),
        *(f"stale, no .proto makes it: {name}" for name in sorted(committed.keys() - fresh.keys())),
        *(f"differs: {name}" for name in sorted(fresh.keys() & committed.keys()) if fresh[name] != committed[name]),
    ]


def main() -> int:
    """Run the command; return 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(description="Write the Python code of the wire.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the code is not fresh")
    check = parser.parse_args().check

    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        committed, fresh = read_generated(GENERATED), read_generated(Path(folder))
    if check:
        problems = list_differences(committed, fresh)
        print("\n".join(problems) or f"{len(fresh)} generated files are fresh")
        return 1 if problems else 0

    for name in committed.keys() - fresh.keys():
        (GENERATED / name).unlink()
    for name, content in fresh.items():
        (GENERATED / name).parent.mkdir(parents=True, exist_ok=True)
        (GENERATED / name).write_bytes(content)
    print(f"wrote {len(fresh)} files below {GENERATED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
