"""The topology, declared at a broker: what is missing is made, what stands is left as it is.

Owns how it is asked for. What there is to declare is the contracts' (`rowmill_contracts.topology`), and when is the session's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import structlog
from aio_pika.abc import AbstractChannel
from aiormq.exceptions import ChannelPreconditionFailed

from rowmill.runtime.transport import ANSWER_SECONDS, TRANSPORT_ERRORS, AsTransportErrors, BrokerConnection, answer_awaited
from rowmill_contracts.topology import Exchange, Queue, arguments_at

log = structlog.get_logger()

TOGETHER: Final = 16
"""Queues that are declared, with their bindings, before the broker is asked whether they are; a new one takes it about 10 ms."""


async def declare(connection: BrokerConnection, exchanges: Sequence[Exchange], queues: Sequence[Queue], version: str) -> None:
    """Many at once; where that fails one by one, which tells of what, and copes with queues that stand without our limit of deliveries.

    ``version``: the broker's, since what a queue is declared with depends on it.

    Raises one of `TRANSPORT_ERRORS`.
    """
    try:
        await _declare_together(connection, exchanges, queues, version)
    except TRANSPORT_ERRORS as error:
        log.info("declared_one_by_one", error=repr(error))
        with AsTransportErrors():
            await _declare_each(connection, exchanges, queues, version)


async def _declare_together(connection: BrokerConnection, exchanges: Sequence[Exchange], queues: Sequence[Queue], version: str) -> None:
    """To await one answer for many requests costs both sides a third of what an answer to each does, at each start of a session."""
    async with answer_awaited():
        channel = await (await connection.channel(publisher_confirms=False)).get_underlay_channel()
        for exchange in exchanges:
            await channel.exchange_declare(exchange.name, exchange_type=exchange.kind, durable=True, nowait=True)
    for first in range(0, len(queues), TOGETHER):
        async with answer_awaited():
            for queue in queues[first : first + TOGETHER]:
                await channel.queue_declare(queue.name, durable=True, arguments=arguments_at(queue, version), nowait=True)
                for exchange_name, key in queue.bindings:
                    await channel.queue_bind(queue.name, exchange_name, key, nowait=True)
            await channel.queue_declare(queue.name, passive=True)  # answered when all before it is done, and with an error if any of that failed
    async with answer_awaited():
        await channel.close()


async def _declare_each(connection: BrokerConnection, exchanges: Sequence[Exchange], queues: Sequence[Queue], version: str) -> None:
    channel = await connection.channel(publisher_confirms=False)
    for exchange in exchanges:
        async with answer_awaited():
            await channel.declare_exchange(exchange.name, exchange.kind, durable=True)
    for queue in queues:
        arguments = arguments_at(queue, version)
        try:
            await _declare_queue(channel, queue, arguments)
        except ChannelPreconditionFailed as error:
            if arguments == queue.arguments:
                raise
            # It was declared before the broker came to limit deliveries, and its arguments cannot be changed.
            log.warning("queue_limits_deliveries", queue=queue.name, error=str(error), remedy="a policy with delivery-limit -1")
            channel = await connection.channel(publisher_confirms=False)
            await _declare_queue(channel, queue, queue.arguments)
    async with answer_awaited():
        await channel.close()


async def _declare_queue(channel: AbstractChannel, queue: Queue, arguments: dict[str, Any]) -> None:
    try:
        async with answer_awaited():
            declared = await channel.declare_queue(queue.name, durable=True, arguments=dict(arguments))
            for exchange_name, key in queue.bindings:
                await declared.bind(exchange_name, key)
    except TimeoutError as error:
        raise TimeoutError(f"queue {queue.name} could not be declared within {ANSWER_SECONDS:g} s") from error
