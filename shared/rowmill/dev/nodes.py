"""What every kind of server node can do, whoever runs it, and the pair of them.

All calls block: wrap them in ``asyncio.to_thread`` in async code. A node keeps its URL over stop, kill and restart, unless another program
took its port meanwhile and keeps it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol


class Node(Protocol):
    """One server that we may start and stop."""

    @property
    def kind(self) -> str:
        """Who runs it: `private`, `compose` or `external`."""
        ...

    @property
    def url(self) -> str:
        """Where clients connect, with user and password; known once the node was started."""
        ...

    @property
    def running(self) -> bool:
        """Whether the process is there; frozen counts as running."""
        ...

    def start(self) -> None:
        """Start it and return when it serves clients; nothing happens if it runs. Raises ServersUnavailable with its last words."""
        ...

    def stop(self) -> None:
        """End it cleanly and return when it is gone; data stay. Nothing happens if it does not run."""
        ...

    def kill(self) -> None:
        """End it and all of its children by SIGKILL, as a power cut would; what it had acknowledged is on disk."""
        ...

    def restart(self) -> None:
        """Stop cleanly, start again, same URL."""
        ...

    def freeze(self) -> None:
        """Make it stand still without ending it (SIGSTOP): connections stay open and nothing answers."""
        ...

    def resume(self) -> None:
        """Let a frozen node go on (SIGCONT)."""
        ...

    def delete(self) -> None:
        """End it and remove its data."""
        ...

    def describe(self) -> dict[str, object]:
        """What `rowmill dev status` shows: kind, url, running, and where it keeps its data and logs."""
        ...


class BrokerNode(Node, Protocol):
    """A RabbitMQ."""

    def add_vhost(self, name: str) -> str:
        """Create a virtual host that our user may do everything in; returns its URL."""
        ...

    def drop_vhost(self, name: str) -> None:
        """Remove a virtual host with everything in it; connections to it are closed by the broker."""
        ...


class DatabaseNode(Node, Protocol):
    """A Postgres."""

    def create_database(self, name: str) -> str:
        """Create an empty database; returns its URL."""
        ...

    def drop_database(self, name: str) -> None:
        """Remove a database, ending the connections to it; nothing happens if there is none."""
        ...


class ServerSet:
    """A broker and a database that belong together."""

    def __init__(self, broker: BrokerNode, database: DatabaseNode) -> None:
        self.broker = broker
        self.database = database

    @property
    def running(self) -> bool:
        return self.broker.running and self.database.running

    def start(self) -> None:
        """Start both, side by side; the first error is raised when both have ended their attempt."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            started = [pool.submit(self.database.start), pool.submit(self.broker.start)]
        for attempt in started:
            attempt.result()

    def stop(self) -> None:
        """Stop both cleanly, side by side."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            stopped = [pool.submit(self.database.stop), pool.submit(self.broker.stop)]
        for attempt in stopped:
            attempt.result()

    def delete(self) -> None:
        """End both and remove what they stored."""
        self.broker.delete()
        self.database.delete()
