"""How commands that only ask find the services: the configured broker, else the project's own servers if they run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rowmill.client.finding import broker_url
from rowmill.dev.servers import Servers
from rowmill.dev.working_set import missing_services
from rowmill.errors import AskTimeout, UnavailableError
from rowmill.project import Project

ResultT = TypeVar("ResultT")


LAG_SECONDS = 5.0
"""How long a service that a command needs may take to consume again, as after a restart, before it is said to be missing."""


@dataclass(frozen=True)
class Found:
    """Both servers. ``control``: runs ``rabbitmqctl`` on the broker, where it is our own. ``own``: those of "broker" and "database" that
    `rowmill dev up` starts.
    """

    broker_url: str
    database_url: str
    control: Callable[..., str] | None
    own: frozenset[str]


def servers() -> Found:
    """Both servers that this project's commands use, whether or not they run.

    Raises:
        UnavailableError: one is neither configured nor was ever started here.

    """
    project = Project.find(Path.cwd())
    settings = project.settings
    broker, database = Servers(project.folder, broker_url=settings.broker, database_url=settings.database).nodes()
    if broker is None or database is None:
        raise UnavailableError(
            f"no {'broker' if broker is None else 'database'} is configured for {project.folder}, and none was started there; "
            "`rowmill up` starts servers and services"
        )
    own = frozenset(name for name, given in (("broker", settings.broker), ("database", settings.database)) if given is None)
    return Found(broker.url, database.url, getattr(broker, "control", None), own)


def asked(question: Callable[[str], Awaitable[ResultT]], *, of: str | None = None) -> ResultT:
    """Ask a question, given the broker's URL.

    ``of``: the service that is to answer; nothing is asked unless it runs, so that no question is left behind that nobody waits for.

    Raises:
        UnavailableError: no broker, or no such service, runs; says how to start it. Or it does not answer.

    """
    url = broker_url()

    async def ask() -> ResultT:
        if of is not None and await missing_services(url, of=(of,), patience=LAG_SECONDS):
            raise UnavailableError(f"the {of} service does not run on this broker; `rowmill up` starts all services and keeps them")
        try:
            return await question(url)
        except AskTimeout as error:
            raise UnavailableError(f"{error}: it or what it needs is away; `rowmill doctor` says what is wrong") from error

    return asyncio.run(ask())
