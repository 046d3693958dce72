"""Identities: a certificate authority of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sottovoce_client.cli.app import pki_app

AuthorityFolder = Annotated[
    Path, typer.Option("--authority", envvar="SOTTOVOCE_AUTHORITY", help="Folder of the authority; its key is in it.")
]
Days = Annotated[int, typer.Option(min=1, max=3_650, help="Valid for so many days.")]
HERE = Path("sottovoce-authority")


@pki_app.command("init")
def init(
    domain: Annotated[str, typer.Option(help="Trust domain of the deployment, such as ward.example.")],
    authority: AuthorityFolder = HERE,
    days: Days = 3_650,
) -> None:
    """Make a certificate authority. Keep its folder where nobody else reads it: whoever has it can be anybody."""
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority

    Authority.init(authority, domain, days)
    terminal.console().print(
        Text(f"authority of {domain} in {authority}; next: sottovoce pki issue coordinator/main learner/NAME ...")
    )


@pki_app.command("issue")
def issue(
    whom: Annotated[
        list[str],
        typer.Argument(
            metavar="ROLE/NAME...",
            help="learner, coordinator, eavesdropper, feeder or operator, and a name: learner/north.",
            show_default=False,
        ),
    ],
    authority: AuthorityFolder = HERE,
    out: Annotated[Path, typer.Option("--out", help="Each gets a folder ROLE-NAME in this one.")] = Path("identities"),
    days: Days = 90,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address by which other clients than ours know it; repeatable.", show_default="none"
        ),
    ] = None,
) -> None:
    """Issue identities: folders with a key, a certificate and whom to believe, for --identity."""
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority

    own, console = Authority(authority), terminal.console()
    for each in whom:
        folder = out / each.replace("/", "-", 1)
        issued = own.issue(each, folder, days=days, hosts=host or [])
        console.print(Text(f"{each}: {folder}, until {issued.ends:%Y-%m-%d}"))


@pki_app.command("renew")
def renew(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Of identities, as `issue` wrote them.", show_default=False),
    ],
    authority: AuthorityFolder = HERE,
    days: Days = 90,
) -> None:
    """Give identities new keys and certificates. Services that run take them up by themselves."""
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority

    own, console = Authority(authority), terminal.console()
    for folder in folders:
        issued = own.renew(folder, days=days)
        console.print(Text(f"{issued.principal}: {folder}, until {issued.ends:%Y-%m-%d}"))


@pki_app.command("revoke")
def revoke(
    whom: Annotated[list[str], typer.Argument(metavar="ROLE/NAME...", help="Whose certificates.", show_default=False)],
    authority: AuthorityFolder = HERE,
    identities: Annotated[Path, typer.Option(help="Folders of identities in this one are given the new list.")] = Path(
        "identities"
    ),
) -> None:
    """Take back certificates. A service honours that as soon as the new crl.pem is in the folder of its own identity."""
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority, spread

    own, console = Authority(authority), terminal.console()
    for each in whom:
        for issued in own.revoke(each):
            console.print(Text(f"{each}: certificate {issued.serial:x} is revoked"))
    given = spread(authority, identities)
    console.print(
        Text(f"{authority / 'crl.pem'} was copied to {len(given)} identities in {identities}; copy it to all others")
    )


@pki_app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of an authority, or of an identity.")] = HERE,
) -> None:
    """Who has certificates, and until when. Exits with 1 if one that is in use ends within two weeks."""
    from sottovoce_client import terminal
    from sottovoce_client.pki import shown

    raise typer.Exit(shown(folder, terminal.console()))
