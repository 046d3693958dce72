"""The command `sottovoce`."""

from __future__ import annotations

import sys

from sottovoce.errors import SottovoceError
from sottovoce.plain import plain_lines
from sottovoce_client.cli.app import (
    INTERRUPTED,
    app,
    data_app,
    eavesdropper_app,
    feed_app,
    models_app,
    pki_app,
    runs_app,
    spec_app,
    transcript_app,
)

# Importing them registers their commands: in the order of the help, which begins with what newcomers need.
# isort: off
from sottovoce_client.cli import starting as starting
from sottovoce_client.cli import runs as runs
from sottovoce_client.cli import experiments as experiments
from sottovoce_client.cli import data as data
from sottovoce_client.cli import feeding as feeding
from sottovoce_client.cli import brokers as brokers
from sottovoce_client.cli import models as models
from sottovoce_client.cli import transcripts as transcripts
from sottovoce_client.cli import services as services
from sottovoce_client.cli import operating as operating
from sottovoce_client.cli import console as console
from sottovoce_client.cli import pki as pki
from sottovoce_client.cli import auditing as auditing
from sottovoce_client.cli import privacy as privacy
from sottovoce_client.cli import specs as specs
# isort: on

__all__ = [
    "app",
    "auditing",
    "console",
    "data",
    "experiments",
    "feeding",
    "main",
    "models",
    "operating",
    "pki",
    "privacy",
    "runs",
    "services",
    "specs",
    "starting",
    "transcripts",
]

app.add_typer(data_app, name="data", rich_help_panel="Runs")
app.add_typer(feed_app, name="feed", rich_help_panel="Runs")
app.add_typer(models_app, name="models", rich_help_panel="Runs")
app.add_typer(runs_app, name="runs", rich_help_panel="Runs")
app.add_typer(transcript_app, name="transcript", rich_help_panel="Runs")
app.add_typer(eavesdropper_app, name="eavesdropper", rich_help_panel="Services")
app.add_typer(pki_app, name="pki", rich_help_panel="Services")
app.add_typer(spec_app, name="spec", rich_help_panel="Specs")


def main(*, service: bool = False) -> None:
    """Run the command; print an error in a line and exit with code 2.

    Args:
        service: whether the command is a service, which writes a log.
    """
    try:
        app(obj=service)
    except SottovoceError as error:
        print(f"sottovoce: {plain_lines(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    except MemoryError as error:
        asked = f" ({error})" if str(error) else ""
        print(
            f"sottovoce: this needs more memory than there is{asked}: ask for less, or for fewer at a time",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except OSError as error:  # a full disk, a folder that nobody may write to: what to do is its owner's to know
        print(f"sottovoce: {plain_lines(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception as error:
        from sottovoce_rpc.logs import others_fault

        if not (told := others_fault(error)):
            raise  # a mistake of ours: all that is known of it is wanted
        print(f"sottovoce: {plain_lines(told)}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(INTERRUPTED, end="", file=sys.stderr)
        raise SystemExit(130) from None
