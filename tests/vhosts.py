"""The virtual host of a test session: made once, emptied for each module that asks for one.

To make one with its queues takes 2.5 s of a processor, to empty it 0.15 s, and 0.5 s to have the broker list what stands there. One that cannot be
emptied (somebody still consumes there, a queue stands with other arguments, the broker lists nothing) is given up for a new one, so that no module
can harm another.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count

from aiormq.abc import AbstractChannel

from rowmill.dev.nodes import BrokerNode
from rowmill.doctor.health import listed
from rowmill.errors import ServersUnavailable
from rowmill.runtime.declaring import declare
from rowmill.runtime.transport import ANSWER_SECONDS, TRANSPORT_ERRORS, broker_version, close, connect
from rowmill_contracts.topology import DELAYS, delay_queue, topology

DELAY_QUEUES = frozenset(delay_queue(name, ttl).name for name, ttl in DELAYS.items())
"""Those that nobody shortened: deleted as all others are, whose names depend on by how much."""

_numbers = count(1)


class Vhosts:
    """Those of one session at its broker, one at a time. Its calls block. ``patience``: seconds for which one may take to become empty."""

    def __init__(self, broker: BrokerNode, patience: float) -> None:
        self._broker = broker
        self._patience = patience
        self._made: dict[str, str] = {}

    def empty_one(self) -> str:
        """The URL of a virtual host without a message, a consumer, or a binding, and without a queue that not all have."""
        control = getattr(self._broker, "control", None)
        if self._made and control is not None:
            last = list(self._made.values())[-1]
            with ThreadPoolExecutor(max_workers=1) as beside:  # a loop may be running here
                if beside.submit(asyncio.run, _emptied(last, self._patience, partial(asyncio.to_thread, listed, last, control))).result():
                    return last
        name = f"tests_{os.getpid()}_{next(_numbers)}"
        self._made[name] = self._broker.add_vhost(name)
        return self._made[name]

    def drop(self) -> None:
        for name in self._made:
            self._broker.drop_vhost(name)


@contextmanager
def vhosts_of(broker: BrokerNode, patience: float = ANSWER_SECONDS) -> Iterator[Vhosts]:
    vhosts = Vhosts(broker, patience)
    try:
        yield vhosts
    finally:
        vhosts.drop()


async def _emptied(url: str, patience: float, names: Callable[[], Awaitable[Collection[str]]]) -> bool:
    """Whether it is. ``names``: has the broker list all queues there."""
    exchanges, declared = topology()
    queues = [queue for queue in declared if queue.name not in DELAY_QUEUES]
    try:
        connection = await connect(url, name="emptying", heartbeat=10, timeout=ANSWER_SECONDS)
        try:
            await declare(connection, exchanges, queues, broker_version(connection))  # what a test has deleted cannot be looked at
            channel = await (await connection.channel(publisher_confirms=False)).get_underlay_channel()
            for exchange in exchanges:
                await channel.exchange_delete(exchange.name)  # with its bindings, those of queues that we do not know as well
            ours = [queue.name for queue in queues]
            async with asyncio.timeout(patience):
                await _purge(channel, ours)
            others = {*await names()} - {*ours}  # delay queues, work records, replies to the dead, a test's own
            async with asyncio.timeout(patience):
                while any([(await _found(channel, name))[1] for name in others]):
                    await asyncio.sleep(0.02)
            for name in others:  # not before: who still consumes would lose its session, and come back
                await channel.queue_delete(name)
        finally:
            await close(connection)
    except (*TRANSPORT_ERRORS, ServersUnavailable):
        return False
    return True


async def _purge(channel: AbstractChannel, queues: list[str]) -> None:
    """Return when all of them are empty and nobody consumes them: what a consumer holds comes back when it leaves."""
    while left := [name for name in queues if any(await _found(channel, name))]:
        for name in left:
            await channel.queue_purge(name)
        await asyncio.sleep(0.02)


async def _found(channel: AbstractChannel, name: str) -> tuple[int, int]:
    """(messages ready, consumers)."""
    found = await channel.queue_declare(name, passive=True)
    return found.message_count or 0, found.consumer_count or 0
