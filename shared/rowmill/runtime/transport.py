"""One TCP connection to the broker that can be cut from our side, and what the client library raises when it is gone.

Owns the library's edges: a connection whose peer is silent is aborted rather than closed, and every way in which the library says "closed" becomes
an error that callers can tell from being cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final

import aio_pika
from aio_pika.abc import AbstractConnection
from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
from aiormq.exceptions import AMQPError, ChannelInvalidStateError
from yarl import URL

TRANSPORT_ERRORS: Final = (AMQPError, ChannelInvalidStateError, ConnectionError, OSError, TimeoutError)
"""What a publish or a connection attempt can raise; each means that the outcome is unknown."""

ANSWER_SECONDS: Final = 10.0
"""How long the broker may take to answer one request (declare, consume, passive declare) before the session counts as broken."""

CLOSE_SECONDS: Final = 2.0
"""How long a connection may take to say goodbye before it is aborted."""


class AsTransportErrors:
    """``with AsTransportErrors():`` around the library's calls.

    A closed connection also shows as a RuntimeError, a StopAsyncIteration, a plain Exception, and as a CancelledError where nobody
    cancelled: the library cancels who waits for its answers. The last would end a task of ours without a trace. All become a
    ConnectionError.
    """

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None or error is None:
            return
        closed = type(error) in {Exception, StopAsyncIteration} or (
            isinstance(error, RuntimeError) and not isinstance(error, (NotImplementedError, RecursionError))
        )
        if closed:
            raise ConnectionError(f"the connection is closed: {error!r}") from error
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise ConnectionError("the connection was closed while its answer was awaited") from error


@asynccontextmanager
async def answer_awaited() -> AsyncIterator[None]:
    """Around one request to the broker: raises `TimeoutError` where it is not answered in time, and `ConnectionError` as `AsTransportErrors` does."""
    with AsTransportErrors():
        async with asyncio.timeout(ANSWER_SECONDS):
            yield


class _Remembering(TransportFactory):
    """Opens the transport as usual and keeps its writing end."""

    def __init__(self) -> None:
        self.writer: asyncio.StreamWriter | None = None

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        usual = TLSTransportFactory() if url.scheme == "amqps" else TCPTransportFactory()
        reader, self.writer = await usual.create(url, **kwargs)
        return reader, self.writer


class BrokerConnection(aio_pika.Connection):
    """A connection of the library's that can also be aborted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._opening = _Remembering()
        self.kwargs["transport_factory"] = self._opening

    async def connect(self, timeout: float | None = None) -> None:
        """As the library's; an attempt that failed is closed, else its destructor tries to, where there may be no loop any more."""
        try:
            await super().connect(timeout)
        except BaseException:
            await self.close()
            raise

    def abort(self) -> None:
        """Drop the connection without a word: nothing that is buffered is sent, nobody is waited for."""
        if self._opening.writer is not None:
            self._opening.writer.transport.abort()

    async def is_blocked(self) -> bool:
        """Whether the broker has said that it takes no messages now (a memory or disk alarm)."""
        if self.transport is None:
            return False
        try:
            async with asyncio.timeout(0.01):
                await self.transport.ready()
        except TimeoutError:
            return True
        return False


async def connect(url: str, *, name: str, heartbeat: int, timeout: float) -> BrokerConnection:
    """Connect within ``timeout`` seconds. Raises one of `TRANSPORT_ERRORS`."""
    separator = "&" if "?" in url else "?"
    with AsTransportErrors():
        async with asyncio.timeout(timeout):
            return await aio_pika.connect(
                f"{url}{separator}heartbeat={heartbeat}", client_properties={"connection_name": name}, connection_class=BrokerConnection
            )


async def close(connection: AbstractConnection) -> None:
    """Close; abort what does not close in time. Never raises a transport error."""
    closing = asyncio.ensure_future(connection.close())
    closing.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait({closing}, timeout=CLOSE_SECONDS)
    if isinstance(connection, BrokerConnection):
        connection.abort()
    await asyncio.wait({closing}, timeout=CLOSE_SECONDS)


def broker_version(connection: BrokerConnection) -> str:
    """What the broker says of itself (``3.13.7``); empty where it says nothing."""
    underlay = connection.transport.connection if connection.transport is not None else None
    said = getattr(underlay, "server_properties", {}).get("version", "")
    return said.decode() if isinstance(said, bytes) else str(said)


def redacted(url: str) -> str:
    """A server's URL without its password."""
    scheme, found, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    if not found or not at:
        return url
    return f"{scheme}://{credentials.partition(':')[0]}:***@{host}"
