"""The demo's authority: gives every service of deploy/compose.yaml an identity, into a volume of its own.

    python identities.py DOMAIN ROLE/NAME[@USER]...

May run again at any time: who has an identity keeps it, and gets a new one when half of its time is over. Runs as root, with the
one capability that it takes to give a new volume to its owner.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sottovoce_client.pki import AUTHORITY_KEY, DEFAULT_VALIDITY_DAYS, Authority, read_certificate
from sottovoce_core.errors import SottovoceError

AUTHORITY, IDENTITIES = Path("/authority"), Path("/identities")
USER = 65532
"""As which all services of ours run."""


def main(domain: str, *everybody: str) -> None:
    """Issue what is not there, and renew what is old."""
    there = (AUTHORITY / AUTHORITY_KEY).exists()
    authority = Authority(AUTHORITY) if there else Authority.init(AUTHORITY, domain)
    for each in everybody:
        whom, _, user = each.partition("@")
        folder = IDENTITIES / whom.replace("/", "-")
        _give(folder, 0)
        if not (folder / "tls.crt").exists():
            ends = authority.issue(whom, folder).not_valid_after_utc
        elif (ends := read_certificate(folder).not_valid_after_utc) < datetime.now(UTC) + timedelta(
            days=DEFAULT_VALIDITY_DAYS / 2
        ):
            ends = authority.renew(folder).not_valid_after_utc
        _give(folder, int(user or USER))
        print(f"{whom}: until {ends:%Y-%m-%d}", flush=True)


def _give(folder: Path, user: int) -> None:
    """Owner may look inside: so the folder is taken first, and given last."""
    if user == 0:
        os.chown(folder, 0, 0)
        folder.chmod(0o700)
    for path in folder.iterdir():
        os.chown(path, user, user)
    os.chown(folder, user, user)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (SottovoceError, OSError) as error:
        sys.exit(
            f"no identities: {error}. Volumes of an older demo? docker compose -f deploy/compose.yaml down --volumes"
        )
