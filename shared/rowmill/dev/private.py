"""A pair of private nodes in one folder."""

from __future__ import annotations

from pathlib import Path

from rowmill.dev.nodes import ServerSet
from rowmill.dev.postgres import PrivatePostgres
from rowmill.dev.rabbitmq import PrivateRabbitMQ


class PrivateServers(ServerSet):
    """A RabbitMQ and a Postgres of our own; the same folder names the same pair for every process that opens it."""

    broker: PrivateRabbitMQ
    database: PrivatePostgres

    def __init__(self, folder: Path) -> None:
        super().__init__(PrivateRabbitMQ(folder), PrivatePostgres(folder))
        self.folder = folder


def private_servers(folder: Path) -> PrivateServers:
    """The pair of private nodes whose data live in `folder`, running or not; nothing is started.

    The folder is made if it is missing, passable but not readable by others (0711): the nodes' own 0700 folders inside belong to their
    packages' users when we are root, and those users must be able to reach it (not under /root, and a plain path: no spaces).
    """
    folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    folder.chmod(0o711)
    return PrivateServers(folder)
