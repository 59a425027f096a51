"""A process that hosts one service or several until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import signal
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol, TypeVar

import structlog

from rowmill.errors import UnknownName
from rowmill.runtime.limits import insist_on_turning, limit_memory
from rowmill.runtime.logging import configure
from rowmill.runtime.service import App
from rowmill.runtime.settings import ServiceSettings

log = structlog.get_logger()

SERVICES: Final[dict[str, str]] = {
    "admission": "rowmill_admission.app",
    "row-executor": "rowmill_row_executor.app",
    "tool-gateway": "rowmill_tool_gateway.app",
    "receipt-store": "rowmill_receipt_store.app",
    "sheet-writer": "rowmill_sheet_writer.app",
}
"""Services by the name that people use, with the module whose ``App`` it is. Imported by name, since shared code knows no service."""

STOPPED_LAST: Final = frozenset({"receipt-store", "sheet-writer"})
"""Services that begin no work of their own, and to which the others hand what they have paid for and done as they stop."""


class Named(Protocol):
    """A service, or a process that hosts one."""

    @property
    def name(self) -> str:
        """That of the service, as in `SERVICES`."""


NamedT = TypeVar("NamedT", bound=Named)

GC_THRESHOLDS: Final = (50_000, 20, 20)
"""Rows in flight are many young objects that reference counting frees; with Python's defaults the collector took half of a row's time, and at
10 000 it still took a fifth of the executor's, since it walked the rows in flight over and over."""

ORPHAN_POLL: Final = 0.5
"""Seconds between looks whether the process that started us is still there."""


def app_named(name: str) -> App:
    """A new instance of that service.

    Raises:
        UnknownName: there is no such service.

    """
    if name not in SERVICES:
        raise UnknownName("service", name, list(SERVICES))
    app: App = importlib.import_module(SERVICES[name]).App()
    return app


def in_stop_order(hosted: Iterable[NamedT]) -> tuple[list[NamedT], list[NamedT]]:
    """Those to stop at once, side by side, and those to stop when these have ended: what is paid for has to find who stores it."""
    first: list[NamedT] = []
    last: list[NamedT] = []
    for one in hosted:
        (last if one.name in STOPPED_LAST else first).append(one)
    return first, last


async def host(apps: Sequence[App], *, stop_with_parent: bool = False, health_port: int | None = None, loop_block_limit: float | None = None) -> None:
    """Start the apps side by side, run until SIGTERM or SIGINT (or, with ``stop_with_parent``, until our parent process is gone), stop them
    in their order (`in_stop_order`).

    ``health_port``: where to tell about their health (`HealthServer`), from before they start until they have stopped; None: nowhere.
    ``loop_block_limit``: seconds for which something may hold the loop before the process ends; None: for ever.
    """
    turning = asyncio.create_task(insist_on_turning(loop_block_limit)) if loop_block_limit is not None else None
    async with contextlib.AsyncExitStack() as stack:
        if health_port is not None:
            from rowmill.runtime.health import HealthServer  # noqa: PLC0415 - most processes serve none, and a web server is much to load

            await stack.enter_async_context(HealthServer(apps, health_port))
        await _run(apps, stop_with_parent=stop_with_parent)
    if turning is not None:
        turning.cancel()
        await asyncio.gather(turning, return_exceptions=True)


async def _run(apps: Sequence[App], *, stop_with_parent: bool) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    watch = asyncio.create_task(_watch_parent(os.getppid(), stopping)) if stop_with_parent else None
    starting: asyncio.Future[list[None]] = asyncio.gather(*(app.start() for app in apps))
    told_to_stop: asyncio.Future[bool] = asyncio.ensure_future(stopping.wait())
    waited_for: list[asyncio.Future[Any]] = [starting, told_to_stop]
    await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
        gc.collect()
        gc.freeze()  # what was imported stays; the collector need not walk it again
        gc.set_threshold(*GC_THRESHOLDS)
        log.info("services_started", services=[app.name for app in apps])
        await told_to_stop
    else:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    log.info("services_stopping", services=[app.name for app in apps])
    await _stop(apps)
    if watch is not None:
        watch.cancel()


async def _stop(apps: Sequence[App]) -> None:
    """Raises what the first of them raised, when all have stopped."""
    ends: list[BaseException | None] = []
    for together in in_stop_order(apps):
        ends += await asyncio.gather(*(app.stop() for app in together), return_exceptions=True)
    for error in ends:
        if error is not None:
            raise error


async def _watch_parent(parent: int, stopping: asyncio.Event) -> None:
    while os.getppid() == parent:  # noqa: ASYNC110 - there is no event for a parent that was killed
        await asyncio.sleep(ORPHAN_POLL)
    stopping.set()


def serve(names: Sequence[str], *, stop_with_parent: bool = False) -> None:
    """Host the named services in this process (blocking), on uvloop where it is installed."""
    settings = ServiceSettings()
    configure(settings.log_level, settings.log_format)
    limit_memory(settings.memory_limit_mb)
    apps = [app_named(name) for name in names]
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(host(apps, stop_with_parent=stop_with_parent, health_port=settings.health_port, loop_block_limit=settings.loop_block_limit))


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return None
    return uvloop.Loop
