"""Identities: a certificate authority of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sottovoce_client.cli.app import AsJson, pki_app

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
    as_json: AsJson = False,
) -> None:
    """Make a certificate authority. Keep its folder where nobody else reads it: whoever has it can be anybody."""
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority

    Authority.init(authority, domain, days)
    terminal.tell(lambda: {"authority": authority, "domain": domain})
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
    as_json: AsJson = False,
) -> None:
    """Issue identities: folders with a key, a certificate and whom to believe, for --identity."""
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority

    own, console, told = Authority(authority), terminal.console(), []
    for each in whom:
        folder = out / each.replace("/", "-", 1)
        issued = own.issue(each, folder, days=days, hosts=host or [])
        console.print(Text(f"{each}: {folder}, until {issued.ends:%Y-%m-%d}"))
        told.append({"identity": each, "folder": folder, "until": issued.ends})
    terminal.tell(lambda: told)


@pki_app.command("renew")
def renew(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Of identities, as `issue` wrote them.", show_default=False),
    ],
    authority: AuthorityFolder = HERE,
    days: Days = 90,
    as_json: AsJson = False,
) -> None:
    """Give identities new keys and certificates. Services that run take them up by themselves."""
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority

    own, console, told = Authority(authority), terminal.console(), []
    for folder in folders:
        issued = own.renew(folder, days=days)
        console.print(Text(f"{issued.principal}: {folder}, until {issued.ends:%Y-%m-%d}"))
        told.append({"identity": str(issued.principal), "folder": folder, "until": issued.ends})
    terminal.tell(lambda: told)


@pki_app.command("revoke")
def revoke(
    whom: Annotated[list[str], typer.Argument(metavar="ROLE/NAME...", help="Whose certificates.", show_default=False)],
    authority: AuthorityFolder = HERE,
    identities: Annotated[Path, typer.Option(help="Folders of identities in this one are given the new list.")] = Path(
        "identities"
    ),
    as_json: AsJson = False,
) -> None:
    """Take back certificates. A service honours that as soon as the new crl.pem is in the folder of its own identity."""
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority, spread

    own, console, told = Authority(authority), terminal.console(), []
    for each in whom:
        for issued in own.revoke(each):
            told.append({"identity": each, "serial": f"{issued.serial:x}"})
            console.print(Text(f"{each}: certificate {issued.serial:x} is revoked"))
    given = spread(authority, identities)
    console.print(
        Text(f"{authority / 'crl.pem'} was copied to {len(given)} identities in {identities}; copy it to all others")
    )
    terminal.tell(lambda: {"revoked": told, "list": authority / "crl.pem", "copied_to": given})


@pki_app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of an authority, or of an identity.")] = HERE,
    as_json: AsJson = False,
) -> None:
    """Who has certificates, and until when. Exits with 1 if one that is in use ends within two weeks."""
    from sottovoce_client import terminal
    from sottovoce_client.pki import shown

    raise typer.Exit(shown(folder, terminal.console()))
