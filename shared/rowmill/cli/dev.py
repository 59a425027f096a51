"""`rowmill dev`: the project's two servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rowmill.dev import Servers

servers_app = typer.Typer(help="Start, stop and look at this project's broker and database.", no_args_is_help=True)

ProjectOption = Annotated[
    Path | None, typer.Option(envvar="ROWMILL_PROJECT", help="The folder of rowmill.toml; default: the nearest one upwards from here.")
]
BrokerOption = Annotated[str | None, typer.Option(envvar="ROWMILL_BROKER_URL", help="Use this broker instead of starting one.")]
DatabaseOption = Annotated[str | None, typer.Option(envvar="ROWMILL_DATABASE_URL", help="Use this database instead of starting one.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


@servers_app.command()
def up(
    *,
    install: Annotated[bool, typer.Option("--install", help="Install Debian's packages if they are missing (root or sudo).")] = False,
    project: ProjectOption = None,
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find or start both servers; they go on running when this command ends."""
    servers = _servers(project, broker_url, database_url)
    servers.ensure(install=install, report=_say)
    _print_status(servers, as_json=as_json)


@servers_app.command()
def down(
    *,
    project: ProjectOption = None,
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop this project's own servers; what they stored stays."""
    servers = _servers(project, broker_url, database_url)
    stopped = servers.stop()
    if as_json:
        _print_status(servers, as_json=True)
    else:
        _say("stopped; the data stay for the next start" if stopped else "nothing of this project's own was running")


@servers_app.command()
def status(
    *,
    project: ProjectOption = None,
    broker_url: BrokerOption = None,
    database_url: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the servers are; exit status 1 if one of them does not run."""
    servers = _servers(project, broker_url, database_url)
    found = _print_status(servers, as_json=as_json)
    if not all(server["running"] for server in found.values()):
        raise typer.Exit(1)


@servers_app.command()
def reset(
    *,
    project: ProjectOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop this project's own servers and delete everything in them: sheets, runs, and receipts of what was paid. Asks first."""
    from rowmill.cli.consent import consents, need_consent  # noqa: PLC0415 - keeps `rowmill --help` fast

    need_consent("delete this project's sheets, runs and receipts", yes=yes, as_json=as_json)
    servers = _servers(project, None, None)
    if not consents("Delete this project's sheets, runs and receipts? What was paid would be paid again.", yes=yes):
        raise typer.Abort
    deleted = servers.reset()
    if as_json:
        typer.echo(json.dumps({"deleted": deleted}))
    else:
        _say("deleted" if deleted else "there was nothing to delete")


def _servers(project: Path | None, broker_url: str | None, database_url: str | None) -> Servers:
    from rowmill.dev import Servers  # noqa: PLC0415 - keeps `rowmill --help` fast
    from rowmill.dev.servers import project_folder  # noqa: PLC0415

    return Servers(project or project_folder(Path.cwd()), broker_url=broker_url, database_url=database_url)


def _print_status(servers: Servers, *, as_json: bool) -> dict[str, dict[str, object]]:
    found = servers.status()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return found
    for name, server in found.items():
        state = "running" if server["running"] else "not running"
        typer.echo(f"{name:<9} {state}" + (f"  {server['kind']}  {server['url']}" if server["url"] else ""))
    return found


def _say(message: str) -> None:
    typer.echo(f"rowmill: {message}", err=True)
