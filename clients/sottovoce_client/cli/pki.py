"""Commands for identities: a certificate authority of your own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from sottovoce_client.cli.app import pki_app
from sottovoce_core.errors import FailedPrecondition, SottovoceError, SpecError

AuthorityFolder = Annotated[
    Path, typer.Option("--authority", envvar="SOTTOVOCE_AUTHORITY", help="Folder of the authority, with its key.")
]
ValidityDays = Annotated[int, typer.Option(min=1, max=3_650, help="Validity in days.")]
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
            help="Authority to replace: both, and all identities, receive the new certificate, and the new authority can revoke "
            "certificates of the old one.",
            show_default="none",
        ),
    ] = None,
    identities: Annotated[
        Path, typer.Option(help="With --replaces: parent folder of the identities that receive the new certificate.")
    ] = Path("identities"),
) -> None:
    """Create a certificate authority. Keep its folder private: its key can issue any identity."""
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
    updated, skipped = own.distribute_revocations(identities, replaced_authority=old)
    console.print(
        Text(
            f"authority of {domain} in {authority}; {len(updated)} identities in {identities} trust both now; next, when all "
            f"others do: sottovoce pki issue --authority {authority} {identities}/*"
        )
    )
    _print_skipped_folders(skipped)
    facts = {"authority": authority, "domain": domain, "copied_to": updated, "skipped": _skipped_documents(skipped)}
    terminal.print_json_if_requested(lambda: facts)
    if skipped:
        raise typer.Exit(1)


@pki_app.command("issue")
def issue(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="ROLE/NAME|FOLDER...",
            help="learner, coordinator, eavesdropper, feeder or operator, and a name: learner/north. Or folders of identities, "
            "written by this command, to renew.",
            show_default=False,
        ),
    ],
    authority: AuthorityFolder = DEFAULT_AUTHORITY,
    out: Annotated[Path, typer.Option("--out", help="Parent folder of the identity folders ROLE-NAME.")] = Path(
        "identities"
    ),
    days: ValidityDays = 90,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--hostname",
            help="Name or address under which other gRPC clients reach it; repeatable.",
            show_default="none",
        ),
    ] = None,
    csr: Annotated[
        Path | None,
        typer.Option(
            "--csr",
            metavar="FILE",
            help="Certify the key of this certificate signing request, of `sottovoce pki request` or another tool; the key "
            "stays with its owner. The name is the one given here; names in the request are ignored. For one name.",
            show_default="a new key",
        ),
    ] = None,
) -> None:
    """Issue identities for --identity: folders with a key, a certificate and trusted authorities. Renew those of folders.

    A renewed identity has a new key and certificate, which running services load automatically. Other authorities in ca.crt, and
    their lists in crl.pem, remain.
    """
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority, list_requested_names, read_request
    from sottovoce_rpc.certificates import read_principal

    own, console = Authority(authority), terminal.create_console()
    if csr is not None and len(subjects) != 1:
        raise SpecError(f"--csr requires exactly one name, got {len(subjects)}: a request has one key")

    def issue_one(each: str) -> dict[str, object]:
        if (Path(each) / "tls.crt").exists():
            if csr is not None or host:
                raise SpecError(f"{each} is renewed with its existing names: --csr and --hostname require ROLE/NAME")
            renewed = own.renew(Path(each), days=days)
            name, ends = str(read_principal(renewed)), renewed.not_valid_after_utc
            console.print(Text(f"{name}: {each}, valid until {ends:%Y-%m-%d}"))
            return {"identity": name, "folder": Path(each), "expires_at": ends}
        folder = out / each.replace("/", "-", 1)
        issued = own.issue(each, folder, days=days, hosts=host or [], request=csr)
        console.print(Text(f"{each}: {folder}, valid until {issued.not_valid_after_utc:%Y-%m-%d}"))
        facts: dict[str, object] = {"identity": each, "folder": folder, "expires_at": issued.not_valid_after_utc}
        if csr is not None and (principal := read_principal(issued)) is not None:
            facts["requested_names"] = requested = list_requested_names(read_request(csr))
            if others := [name for name in requested if name not in (each, principal.uri)]:
                console.print(Text(f"the request names {', '.join(others)[:200]}; the certificate is for {each}"))
            console.print(Text("copy tls.crt, ca.crt and crl.pem to the folder that has the key"))
        return facts

    done, failed = list[dict[str, object]](), list[tuple[str, SottovoceError | OSError]]()
    for each in subjects:  # issue as many as possible, then report the failures
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
    subject: Annotated[str, typer.Argument(metavar="ROLE/NAME", help="Name of the certificate.")],
    out: Annotated[Path, typer.Option("--out", help="Parent folder of the new folder ROLE-NAME.")] = Path("identities"),
) -> None:
    """Create a key that stays here, and a signing request (tls.csr) for the authority. An existing key is kept."""
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import create_request

    written = create_request(subject, out / subject.replace("/", "-", 1))
    terminal.print_json_if_requested(lambda: {"identity": subject, "request": written})
    terminal.create_console().print(Text(f"{written}; at the authority: sottovoce pki issue {subject} --csr FILE"))


@pki_app.command("revoke")
def revoke(
    subjects: Annotated[
        list[str], typer.Argument(metavar="ROLE/NAME...", help="Names of the certificates.", show_default=False)
    ],
    authority: AuthorityFolder = DEFAULT_AUTHORITY,
    identities: Annotated[Path, typer.Option(help="Parent folder of the identities that receive the new list.")] = Path(
        "identities"
    ),
) -> None:
    """Revoke certificates. A service applies this as soon as the new crl.pem is in the folder of its own identity.

    Exit code 1: an identity folder did not receive the list, or another authority of this domain is trusted, too.
    """
    from rich.text import Text

    from sottovoce_client import terminal
    from sottovoce_client.pki import Authority

    own, console, revocations = Authority(authority), terminal.create_console(), []
    error_text = ""
    for each in subjects:
        try:
            revoked = own.revoke(each)
        except SottovoceError as error:
            error_text = error_text or str(error)
            continue
        for issued in revoked:
            serial = f"{issued.serial_number:x}"
            revocations.append({"identity": each, "serial": serial})
            console.print(Text(f"{each}: certificate {serial} is revoked"))
    updated, skipped = own.distribute_revocations(identities)
    console.print(
        Text(f"{authority / 'crl.pem'} was copied to {len(updated)} identities in {identities}; copy it to all others")
    )
    _print_skipped_folders(skipped)
    others = [
        f"{each.subject.rfc4514_string()}, serial number {each.serial_number:x}" for each in own.other_authorities
    ]
    for each in others:
        console.print(
            Text(
                f"certificates of another authority of {own.domain} are not revoked: revoke them there ({each})",
                style="bold red",
            )
        )
    terminal.print_json_if_requested(
        lambda: {
            "revoked": revocations,
            "list": authority / "crl.pem",
            "copied_to": updated,
            "skipped": _skipped_documents(skipped),
            "other_authorities": others,
        }
    )
    if error_text:
        raise SpecError(error_text)
    if skipped or others:
        raise typer.Exit(1)


@pki_app.command("show")
def show(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of an authority, or of an identity.")
    ] = DEFAULT_AUTHORITY,
) -> None:
    """Show certificates and their expiry dates. Exits with 1 if one that is in use expires within two weeks."""
    from sottovoce_client import terminal
    from sottovoce_client.pki import print_certificates

    raise typer.Exit(print_certificates(folder, terminal.create_console()))


def _print_skipped_folders(skipped: Mapping[Path, str]) -> None:
    from rich.text import Text

    from sottovoce_client import terminal

    for folder, reason in skipped.items():
        terminal.create_console().print(Text(f"not copied to {folder}: {reason}", style="bold red"))


def _skipped_documents(skipped: Mapping[Path, str]) -> list[dict[str, object]]:
    return [{"folder": folder, "reason": reason} for folder, reason in skipped.items()]
