"""Release steps that change the repository. The session `release` of noxfile.py runs them in order, with the checks between them.

    python .ci/release.py prepare     # on a clean tree: write the version and its date into the files; prints the version
    python .ci/release.py tag         # commit what `prepare` changed, signed off, and tag it
    python .ci/release.py last        # print the last release, which this version must work with

The first heading of CHANGELOG.md, `## 1.2.3 - unreleased`, names the version. `prepare` commits nothing, because the checks run
after it: `git restore .` undoes it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

HEADING = re.compile(r"^## (\d+\.\d+\.\d+) - (unreleased|\d{4}-\d\d-\d\d)$", re.MULTILINE)


def git(*arguments: str) -> str:
    """Run git and return its output."""
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def replace_line(path: str, pattern: str, by: str) -> None:
    """Replace a line that occurs exactly once in a file.

    Raises:
        SystemExit: the line occurs never or more than once.
    """
    file = Path(path)
    text, n = re.subn(pattern, by, file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if n != 1:
        sys.exit(f"{path} must have one line {pattern}, found {n}")
    file.write_text(text, encoding="utf-8")


def read_newest_section() -> tuple[str, str, str]:
    """Return version, date and text of the newest section of the changelog."""
    text = Path("CHANGELOG.md").read_text(encoding="utf-8")
    found = HEADING.search(text)
    if found is None:
        sys.exit("CHANGELOG.md must begin with a heading such as: ## 1.2.3 - unreleased")
    after = HEADING.search(text, found.end())
    return found[1], found[2], text[found.end() : after.start() if after else None].strip()


def last_release() -> str | None:
    """Return the newest release tag in the history of this commit."""
    return next(iter(git("tag", "--merged", "HEAD", "--list", "v*", "--sort=-v:refname").splitlines()), None)


def print_last_release() -> None:
    """Print the last release.

    Raises:
        SystemExit: this clone has no release tag.
    """
    print(
        last_release()
        or sys.exit("there is no release yet, or no tag of it in this clone: git fetch --unshallow --tags")
    )


def prepare() -> None:
    """Write version and date into the files, if all checks pass.

    Raises:
        SystemExit: the tree has changes, the version is released already, or the wire format breaks the last release.
    """
    if git("status", "--porcelain"):
        sys.exit("the tree is not clean: commit or stash first")
    version, date, _ = read_newest_section()
    if date != "unreleased":
        sys.exit(f"CHANGELOG.md says that {version} was released on {date}: begin a section for the next version")
    if git("tag", "--list", f"v{version}"):
        sys.exit(f"there is a tag v{version} already")
    if before := last_release():
        against = f"{git('rev-parse', '--git-common-dir')}#ref={before},subdir=proto"
        if subprocess.run(["buf", "breaking", "proto", "--against", against], check=False).returncode:
            sys.exit(f"the wire breaks what {before} can read")
    today = datetime.now(UTC).date().isoformat()
    replace_line("CHANGELOG.md", rf"^## {re.escape(version)} - unreleased$", f"## {version} - {today}")
    replace_line("pyproject.toml", r'^version = ".*"$', f'version = "{version}"')
    replace_line("CITATION.cff", r"^version: .*$", f"version: {version}")
    replace_line("deploy/.env", r"^SOTTOVOCE_VERSION=.*$", f"SOTTOVOCE_VERSION={version}")
    replace_line("deploy/helm/sottovoce/Chart.yaml", r"^version: .*$", f"version: {version}")
    replace_line("deploy/helm/sottovoce/Chart.yaml", r"^appVersion: .*$", f'appVersion: "{version}"')
    print(version)


def tag() -> None:
    """Commit and tag the changes of `prepare`, both signed off; the tag has the text of the changelog's section."""
    version, _, text = read_newest_section()
    signed = f"Signed-off-by: {git('config', 'user.name')} <{git('config', 'user.email')}>"
    git("commit", "--all", "--signoff", "--message", f"Release {version}")
    # `verbatim`: headings of the changelog begin with git's comment character.
    git("tag", "--annotate", "--cleanup=verbatim", f"v{version}", "--message", f"{version}\n\n{text}\n\n{signed}\n")
    print(f"tagged v{version}")


if __name__ == "__main__":
    steps = {"prepare": prepare, "tag": tag, "last": print_last_release}
    if len(sys.argv) != 2 or sys.argv[1] not in steps:
        sys.exit(__doc__)
    steps[sys.argv[1]]()
