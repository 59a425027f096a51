"""`rowmill up`: servers and all five services, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rowmill.dev.services import ServiceProcess


def up(
    executors: Annotated[int, typer.Option(min=1, help="Row-executor processes.")] = 1,
    gateways: Annotated[int, typer.Option(min=1, help="Tool-gateway processes.")] = 1,
) -> None:
    """Start the broker, the database (unless given) and the five services for this project, and keep them up until Ctrl-C."""
    from rowmill.dev.servers import FOLDER_NAME, Servers  # noqa: PLC0415 - commands load what they need
    from rowmill.dev.services import ServiceSet  # noqa: PLC0415
    from rowmill.dev.working_set import missing_services  # noqa: PLC0415
    from rowmill.errors import UsageError  # noqa: PLC0415
    from rowmill.project import Project  # noqa: PLC0415
    from rowmill.runtime.hosting import SERVICES  # noqa: PLC0415

    project = Project.find(Path.cwd())
    project.load()
    servers = Servers(project.folder, broker_url=project.settings.broker, database_url=project.settings.database)
    nodes = servers.ensure(report=_say)
    running = [name for name in SERVICES if name not in asyncio.run(missing_services(nodes.broker.url))]
    if running:
        raise UsageError(
            f"services run on this broker already, or are still stopping: {', '.join(running)}. Wait until they have ended, or stop them with Ctrl-C "
            "(or `kill -TERM`) where `rowmill up`, `rowmill run` or `rowmill serve` started them; then try again"
        )
    environment = {
        "ROWMILL_BROKER_URL": nodes.broker.url,
        "ROWMILL_DATABASE_URL": nodes.database.url,
        "ROWMILL_PROJECT": str(project.folder),
    }
    copies = {"row-executor": executors, "tool-gateway": gateways}
    services = ServiceSet(environment, project.folder / FOLDER_NAME / "logs", copies=copies, ended=_say_ended)
    services.start()
    _say(f"services are starting; logs are in {project.folder / FOLDER_NAME / 'logs'}; Ctrl-C stops them (the servers stay: `rowmill dev down`)")
    signal.signal(signal.SIGTERM, _interrupt)
    ready = False
    try:
        while True:
            time.sleep(1.0)
            if ready:
                continue
            services.raise_if_broken()
            if _all_consume(nodes.broker.url):
                ready = True
                _say("ready: all services consume; in another terminal, `rowmill run PLAY --csv FILE --out FILE` (`rowmill plays list` names plays)")
    except KeyboardInterrupt:
        _say("stopping the services")
    finally:
        services.stop()


def _say_ended(process: ServiceProcess) -> None:
    status = process.exit_status
    how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
    _say(f"the {process.name} service {how} and is started again; its log is {process.log_file}")


def _all_consume(broker_url: str) -> bool:
    from rowmill.dev.working_set import missing_services  # noqa: PLC0415
    from rowmill.errors import UnavailableError  # noqa: PLC0415

    try:
        return not asyncio.run(missing_services(broker_url))
    except UnavailableError:  # the broker is away: the services wait for it, too
        return False


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(f"rowmill: {line}", file=sys.stderr)
