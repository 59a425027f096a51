"""The `rowmill` command: what all of its commands share, and the place where each is registered.

Each command or group has a module of its own here, which imports what is heavy (drivers, brokers, Arrow) inside its functions, so that
`rowmill --help` and short commands answer at once. Errors that rowmill raises on purpose end as one sentence on stderr. The exit status is 2 when
nothing was begun, since the command was used wrongly, the file that it was given is unusable or something must be installed first; 1 otherwise.
With `--debug` or `ROWMILL_DEBUG=1` the error's traceback is shown.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rowmill.cli import dev, dlq, doctor, lanes, plays, receipts, run, runs, serve, tools, up
from rowmill.errors import InputError, RowmillError, UsageError


class _ErrorsAsSentences(TyperGroup):
    """Ends a command that failed with a sentence instead of a traceback."""

    show_tracebacks = False

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except RowmillError as error:
            if self.show_tracebacks:
                raise
            typer.echo(f"rowmill: {error}", err=True)
            sys.exit(2 if isinstance(error, UsageError | InputError) else 1)
        except Exception as error:
            if self.show_tracebacks:
                raise
            typer.echo(f"rowmill: unexpected {type(error).__name__}: {error} (a bug; `rowmill --debug …` shows where)", err=True)
            sys.exit(1)


app = typer.Typer(
    name="rowmill",
    cls=_ErrorsAsSentences,
    help="Works tables row by row with paid, rate-limited tools: never pays twice, never loses a row.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 - reads every installed package's metadata

        typer.echo(f"rowmill {version('rowmill')}")
        raise typer.Exit


DebugOption = Annotated[bool, typer.Option("--debug", envvar="ROWMILL_DEBUG", help="Show tracebacks of errors.")]
VersionOption = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")]


@app.callback()
def _options(context: typer.Context, *, debug: DebugOption = False, version: VersionOption = False) -> None:  # noqa: ARG001 - its callback answers
    """Options before the command's name."""
    for client in ("aiormq", "aio_pika"):  # they print tracebacks for connections that are replaced as a matter of course
        logging.getLogger(client).setLevel(logging.CRITICAL)
    if isinstance(context.command, _ErrorsAsSentences):
        context.command.show_tracebacks = debug


# One line per command or group of commands.
app.command("run")(run.run)
app.command("up")(up.up)
app.command("serve")(serve.serve)
app.command("doctor")(doctor.doctor)
app.command("lanes")(lanes.lanes)
app.add_typer(plays.app, name="plays")
app.add_typer(tools.app, name="tools")
app.add_typer(runs.app, name="runs")
app.add_typer(dlq.app, name="dlq")
app.add_typer(receipts.app, name="receipts")
app.add_typer(dev.servers_app, name="dev")
