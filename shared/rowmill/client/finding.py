"""Where a project's broker is, for whoever only talks to services that run: the configured one, else that of the project's own servers."""

from __future__ import annotations

from pathlib import Path

from rowmill.dev.servers import Servers
from rowmill.errors import UnavailableError
from rowmill.project import Project
from rowmill.runtime.settings import ServiceSettings


def broker_url(project: Project | None = None) -> str:
    """The broker that this project's commands and clients talk to; the project is that of the current folder unless it is given.

    Nothing is started, and a broker that is configured is not asked whether it answers.

    Raises:
        UnavailableError: none is configured and the project's own does not run; says how to start one.

    """
    project = project or Project.find(Path.cwd())
    if project.settings.broker is not None:
        return project.settings.broker
    found = Servers(project.folder).running_broker_url()
    if found is None:
        raise UnavailableError(
            f"no broker: ROWMILL_BROKER_URL is not set, and no servers of {project.folder} run; `rowmill up` starts servers and services, "
            "`rowmill dev up` the servers alone, to which services that run come back"
        )
    return found


def client_broker_url() -> str:
    """The same for who may be in no project: where none has a file here or above, the address is the one that services take by themselves.

    Raises:
        UnavailableError: as `broker_url`, in a project.

    """
    try:
        return broker_url()
    except UnavailableError:
        if Project.find(Path.cwd()).file is not None:
            raise
        return ServiceSettings().broker_url
