"""Issuer of the identities of the demo: one for every service of deploy/compose.yaml, in its own volume.

    python identities.py DOMAIN ROLE/NAME[@USER]...

The script may run again at any time: it keeps an existing identity, and renews it after half of its validity. It runs as root
with one capability: to change the owner of a new volume.
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
"""User id of all services in the images."""


def main(domain: str, *principals: str) -> None:
    """Issue missing identities and renew old ones."""
    exists = (AUTHORITY / AUTHORITY_KEY).exists()
    authority = Authority(AUTHORITY) if exists else Authority.init(AUTHORITY, domain)
    for each in principals:
        name, _, user = each.partition("@")
        folder = IDENTITIES / name.replace("/", "-")
        _change_owner(folder, 0)
        if not (folder / "tls.crt").exists():
            ends = authority.issue(name, folder).not_valid_after_utc
        elif (ends := read_certificate(folder).not_valid_after_utc) < datetime.now(UTC) + timedelta(
            days=DEFAULT_VALIDITY_DAYS / 2
        ):
            ends = authority.renew(folder).not_valid_after_utc
        _change_owner(folder, int(user or USER))
        print(f"{name}: until {ends:%Y-%m-%d}", flush=True)


def _change_owner(folder: Path, user: int) -> None:
    """Change the owner of a folder and its files; the folder comes last, because only its owner may list it."""
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
            f"no identities: {error}. With volumes of an older demo: docker compose -f deploy/compose.yaml down --volumes"
        )
