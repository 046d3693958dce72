"""Identities: a certificate authority of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from sottovoce_client.cli.app import pki_app
from sottovoce_core.errors import FailedPrecondition, SottovoceError, SpecError

AuthorityFolder = Annotated[
    Path, typer.Option("--authority", envvar="SOTTOVOCE_AUTHORITY", help="Folder of the authority; its key is in it.")
]
ValidityDays = Annotated[int, typer.Option(min=1, max=3_650, help="Valid for so many days.")]
DEFAULT_AUTHORITY = Path("sottovoce-authority")


@pki_app.command("init")
def init(
    domain: Annotated[str, typer.Option(help="Trust domain of the deployment, such as ward.example.")],
    authority: AuthorityFolder = DEFAULT_AUTHORITY,
    days: ValidityDays = 3_650,
    replaces: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="An authority whose place this one takes: both, and all identities, get its certificate, and it can revoke "
            "what that one has issued.",
            show_default="none",
        ),
    ] = None,
    identities: Annotated[
        Path, typer.Option(help="With --replaces: folders of identities in this one are given the new certificate.")
    ] = Path("identities"),
) -> None:
    """Make a certificate authority. Keep its folder where nobody else reads it: whoever has it can be anybody."""
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority

    old, console = None if replaces is None else Authority(replaces), terminal.create_console()
    own = Authority.init(authority, domain, days, replaced_authority=old)
    if old is None:
        terminal.print_json_if_requested(lambda: {"authority": authority, "domain": domain})
        console.print(
            Text(f"authority of {domain} in {authority}; next: sottovoce pki issue coordinator/main learner/NAME ...")
        )
        return
    given, skipped = own.distribute_revocations(identities, replaced_authority=old)
    console.print(
        Text(
            f"authority of {domain} in {authority}; {len(given)} identities in {identities} believe both now; next, when all "
            f"others do: sottovoce pki issue --authority {authority} {identities}/*"
        )
    )
    _name_skipped(skipped)
    facts = {"authority": authority, "domain": domain, "copied_to": given, "skipped": _as_facts(skipped)}
    terminal.print_json_if_requested(lambda: facts)
    if skipped:
        raise typer.Exit(1)


@pki_app.command("issue")
def issue(
    whom: Annotated[
        list[str],
        typer.Argument(
            metavar="ROLE/NAME|FOLDER...",
            help="learner, coordinator, eavesdropper, feeder or operator, and a name: learner/north. Or folders of identities, "
            "as this command wrote them, to renew.",
            show_default=False,
        ),
    ],
    authority: AuthorityFolder = DEFAULT_AUTHORITY,
    out: Annotated[Path, typer.Option("--out", help="Each gets a folder ROLE-NAME in this one.")] = Path("identities"),
    days: ValidityDays = 90,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--hostname",
            help="A name or address by which other clients than ours know it; repeatable.",
            show_default="none",
        ),
    ] = None,
    csr: Annotated[
        Path | None,
        typer.Option(
            "--csr",
            metavar="FILE",
            help="Certify the key of this certificate signing request, of `sottovoce pki request` or another tool; the key "
            "stays with its owner. The name is the one given here, whatever the request asks for. For one name.",
            show_default="a new key",
        ),
    ] = None,
) -> None:
    """Issue identities: folders with a key, a certificate and whom to believe, for --identity. Renew those of folders.

    A renewed identity has a new key and certificate, which services that run take up by themselves. Other authorities in ca.crt,
    and their lists in crl.pem, stay.
    """
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority, list_requested_names, read_request
    from sottovoce_rpc.certificates import read_principal

    own, console = Authority(authority), terminal.create_console()
    if csr is not None and len(whom) != 1:
        raise SpecError(f"--csr must come with one name, got {len(whom)}: a request is for one key")

    def issue_one(each: str) -> dict[str, object]:
        if (Path(each) / "tls.crt").exists():
            if csr is not None or host:
                raise SpecError(f"{each} is renewed for the names that it has: --csr and --hostname go with ROLE/NAME")
            renewed = own.renew(Path(each), days=days)
            who, ends = str(read_principal(renewed)), renewed.not_valid_after_utc
            console.print(Text(f"{who}: {each}, until {ends:%Y-%m-%d}"))
            return {"identity": who, "folder": Path(each), "until": ends}
        folder = out / each.replace("/", "-", 1)
        issued = own.issue(each, folder, days=days, hosts=host or [], request=csr)
        console.print(Text(f"{each}: {folder}, until {issued.not_valid_after_utc:%Y-%m-%d}"))
        facts: dict[str, object] = {"identity": each, "folder": folder, "until": issued.not_valid_after_utc}
        if csr is not None and (principal := read_principal(issued)) is not None:
            facts["list_requested_names"] = asked = list_requested_names(read_request(csr))
            if others := [name for name in asked if name not in (each, principal.uri)]:
                console.print(Text(f"the request asked for {', '.join(others)[:200]}; the certificate is for {each}"))
            console.print(Text("copy tls.crt, ca.crt and crl.pem to the folder that has the key"))
        return facts

    done, failed = list[dict[str, object]](), list[tuple[str, SottovoceError | OSError]]()
    for each in whom:  # all that can be done, then what could not be
        try:
            done.append(issue_one(each))
        except (SottovoceError, OSError) as error:
            failed.append((each, error))
    terminal.print_json_if_requested(lambda: done)
    if len(failed) == 1:
        raise failed[0][1]
    if failed:
        raise FailedPrecondition("; ".join(f"{each}: {error}" for each, error in failed))


@pki_app.command("request")
def request(
    whom: Annotated[str, typer.Argument(metavar="ROLE/NAME", help="Whom the certificate is to name.")],
    out: Annotated[Path, typer.Option("--out", help="The folder ROLE-NAME is made in this one.")] = Path("identities"),
) -> None:
    """Make a key that stays here, and a request (tls.csr) that the authority certifies it by. A key that is there is kept."""
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import create_request as make

    written = make(whom, out / whom.replace("/", "-", 1))
    terminal.print_json_if_requested(lambda: {"identity": whom, "request": written})
    terminal.create_console().print(Text(f"{written}; the authority: sottovoce pki issue {whom} --csr FILE"))


@pki_app.command("revoke")
def revoke(
    whom: Annotated[list[str], typer.Argument(metavar="ROLE/NAME...", help="Whose certificates.", show_default=False)],
    authority: AuthorityFolder = DEFAULT_AUTHORITY,
    identities: Annotated[Path, typer.Option(help="Folders of identities in this one are given the new list.")] = Path(
        "identities"
    ),
) -> None:
    """Take back certificates. A service honours that as soon as the new crl.pem is in the folder of its own identity.

    Exit code 1: a folder of identities did not get the list, or another authority of this domain is believed, too.
    """
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority

    own, console, told = Authority(authority), terminal.create_console(), []
    wrong = ""
    for each in whom:
        try:
            revoked = own.revoke(each)
        except SottovoceError as error:
            wrong = wrong or str(error)
            continue
        for issued in revoked:
            serial = f"{issued.serial_number:x}"
            told.append({"identity": each, "serial": serial})
            console.print(Text(f"{each}: certificate {serial} is revoked"))
    given, skipped = own.distribute_revocations(identities)
    console.print(
        Text(f"{authority / 'crl.pem'} was copied to {len(given)} identities in {identities}; copy it to all others")
    )
    _name_skipped(skipped)
    others = [
        f"{each.subject.rfc4514_string()}, serial number {each.serial_number:x}" for each in own.other_authorities
    ]
    for each in others:
        console.print(
            Text(
                f"not revoked is what another authority of {own.domain} issued: revoke there, too ({each})",
                style="bold red",
            )
        )
    terminal.print_json_if_requested(
        lambda: {
            "revoked": told,
            "list": authority / "crl.pem",
            "copied_to": given,
            "skipped": _as_facts(skipped),
            "other_authorities": others,
        }
    )
    if wrong:
        raise SpecError(wrong)
    if skipped or others:
        raise typer.Exit(1)


@pki_app.command("show")
def show(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Of an authority, or of an identity.")
    ] = DEFAULT_AUTHORITY,
) -> None:
    """Who has certificates, and until when. Exits with 1 if one that is in use ends within two weeks."""
    from sottovoce_client import terminal
    from sottovoce_client.pki import print_certificates

    raise typer.Exit(print_certificates(folder, terminal.create_console()))


def _name_skipped(skipped: Mapping[Path, str]) -> None:
    from rich.text import Text

    from sottovoce_client import terminal

    for folder, why in skipped.items():
        terminal.create_console().print(Text(f"not to {folder}: {why}", style="bold red"))


def _as_facts(skipped: Mapping[Path, str]) -> list[dict[str, object]]:
    return [{"folder": folder, "reason": why} for folder, why in skipped.items()]
