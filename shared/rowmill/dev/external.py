"""Servers that somebody else runs and a URL names: found, never started, stopped or deleted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from urllib.parse import urlsplit, urlunsplit

from rowmill.dev import databases
from rowmill.dev.ports import speaks_amqp, speaks_postgres
from rowmill.errors import ServersUnavailable, UsageError


def without_password(url: str) -> str:
    """The URL as it may be shown and logged."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    address = f"{parts.username or ''}:***@{parts.hostname or ''}" + (f":{parts.port}" if parts.port else "")
    return urlunsplit(parts._replace(netloc=address))


class _ExternalServer(ABC):
    kind = "external"
    _name: str
    _variable: str

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    @abstractmethod
    def running(self) -> bool: ...

    def start(self) -> None:
        """Only looks whether it answers; raises ServersUnavailable if not."""
        if not self.running:
            raise ServersUnavailable(
                f"{self._variable} names the {self._name} at {without_password(self.url)}, and none answers there; "
                f"start it, or unset {self._variable} to have rowmill start a private one"
            )

    def stop(self) -> None:  # noqa: B027 - nothing to do is the whole of it
        """Leaves it running: it is not ours."""

    def kill(self) -> None:
        raise self._not_ours("kill")

    def restart(self) -> None:
        raise self._not_ours("restart")

    def freeze(self) -> None:
        raise self._not_ours("freeze")

    def resume(self) -> None:
        raise self._not_ours("resume")

    def delete(self) -> None:  # noqa: B027 - likewise
        """Leaves it and its data alone: they are not ours."""

    def describe(self) -> dict[str, object]:
        return {"kind": self.kind, "running": self.running, "url": without_password(self.url), "data": None, "log": None}

    def _not_ours(self, action: str) -> UsageError:
        return UsageError(f"the {self._name} at {without_password(self.url)} is not ours to {action}: {self._variable} names it")


class ExternalBroker(_ExternalServer):
    """The broker that `ROWMILL_BROKER_URL` names."""

    _name = "broker"
    _variable = "ROWMILL_BROKER_URL"

    @property
    def running(self) -> bool:
        parts = urlsplit(self.url)
        return speaks_amqp(parts.hostname or "localhost", parts.port or 5672)

    def add_vhost(self, name: str) -> str:
        raise self._not_ours(f"make the virtual host {name!r} in")

    def drop_vhost(self, name: str) -> None:
        raise self._not_ours(f"drop the virtual host {name!r} of")


class ExternalDatabase(_ExternalServer):
    """The database that `ROWMILL_DATABASE_URL` names."""

    _name = "database"
    _variable = "ROWMILL_DATABASE_URL"

    @property
    def running(self) -> bool:
        parts = urlsplit(self.url)
        return speaks_postgres(parts.hostname or "localhost", parts.port or 5432)

    def create_database(self, name: str) -> str:
        return databases.create_database(self.url, name)

    def drop_database(self, name: str) -> None:
        databases.drop_database(self.url, name)
