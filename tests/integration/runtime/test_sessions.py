"""How connections to a real broker begin and end: a failed attempt leaves nothing behind, a stop says goodbye before it hangs up."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import pytest

from rowmill.runtime import session as session_module
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.session import Session, Subscription
from rowmill.runtime.settings import ServiceSettings
from rowmill.runtime.transport import TRANSPORT_ERRORS, BrokerConnection, broker_version, close, connect
from rowmill_contracts import topology
from rowmill_contracts.runs import AdvanceRun


async def test_a_stop_hangs_up_only_after_the_broker_has_said_goodbye(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was acknowledged before is then known to the broker: an abort discards what it has not read."""
    said_goodbye: list[bool] = []
    abort = BrokerConnection.abort

    def watched(connection: BrokerConnection) -> None:
        said_goodbye.append(connection.is_closed)
        abort(connection)

    monkeypatch.setattr(BrokerConnection, "abort", watched)
    async with Bus(ServiceSettings(broker_url=broker_url, time_scale=0.05), service="test"):
        pass
    assert said_goodbye
    assert all(said_goodbye)


async def test_who_closes_a_session_that_is_being_closed_waits_for_its_end(broker_url: str) -> None:
    async with Bus(ServiceSettings(broker_url=broker_url, time_scale=0.05), service="test") as bus:
        session = await bus.live_session()
        first = asyncio.create_task(session.close())
        await asyncio.sleep(0)
        await session.close()
        assert session.connection.is_closed
        await first


def test_an_attempt_to_connect_that_failed_leaves_nothing_to_close() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there

        async def attempt() -> None:
            with pytest.raises(TRANSPORT_ERRORS):
                await connect(f"amqp://guest:guest@127.0.0.1:{taken.getsockname()[1]}/", name="test", heartbeat=8, timeout=5.0)

        asyncio.run(attempt())
    gc.collect()  # where the destructor would close it, outside of any loop; an error there fails the test
    assert not [left for left in gc.get_objects() if isinstance(left, BrokerConnection) and not left.is_closed]


async def test_the_broker_says_its_version(broker_url: str) -> None:
    connection = await connect(broker_url, name="test", heartbeat=8, timeout=10)
    try:
        assert broker_version(connection).partition(".")[0].isdigit()
    finally:
        await close(connection)


async def test_queues_that_stand_with_other_limits_of_deliveries_are_used_as_they_are(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an upgrade of the broker to 4: what was declared before without a word about deliveries refuses the word for "no limit"."""
    async with Bus(ServiceSettings(broker_url=broker_url, time_scale=0.05), service="before"):
        pass
    monkeypatch.setattr(session_module, "broker_version", lambda _: "4.0.0")
    handled = asyncio.Event()

    async def handle(_: Delivery) -> None:
        handled.set()

    async with Bus(ServiceSettings(broker_url=broker_url, time_scale=0.05), service="test") as bus:
        await bus.consume(topology.EXECUTOR_ADVANCE, handle)
        await bus.publish(AdvanceRun(run_id="run-1"), topology.EXECUTOR_ADVANCE)
        async with asyncio.timeout(30):
            await handled.wait()


async def test_a_service_that_begins_to_consume_over_a_dying_connection_does_so_over_the_next(
    broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the library says so in a way that nobody foresaw: a service that starts while the broker restarts would end of it."""
    consume, tries = Session.consume, 0

    async def dies_at_first(session: Session, subscription: Subscription) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise AttributeError("'NoneType' object has no attribute 'rpc'")
        await consume(session, subscription)

    monkeypatch.setattr(Session, "consume", dies_at_first)
    handled = asyncio.Event()

    async def handle(_: Delivery) -> None:
        handled.set()

    async with Bus(ServiceSettings(broker_url=broker_url, time_scale=0.05), service="test") as bus:
        await bus.consume(topology.EXECUTOR_KEYS, handle)
        await bus.publish(AdvanceRun(run_id="run-1"), topology.EXECUTOR_KEYS)
        async with asyncio.timeout(30):
            await handled.wait()
    assert tries > 1


async def test_a_session_that_could_not_be_prepared_is_hung_up(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the broker counts a connection more for each attempt."""
    failed: list[Session] = []
    hear = Session.consume_replies

    async def fails_at_first(session: Session, *given: Any) -> None:
        if not failed:
            failed.append(session)
            raise ConnectionError("the broker is stopping")
        await hear(session, *given)

    monkeypatch.setattr(Session, "consume_replies", fails_at_first)
    async with Bus(ServiceSettings(broker_url=broker_url, time_scale=0.05), service="test"), asyncio.timeout(30):
        while not failed[0].connection.is_closed:
            await asyncio.sleep(0.02)
