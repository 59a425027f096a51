"""Private servers: started, stopped, killed, frozen; what they stored stays."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import aio_pika
import asyncpg
import psutil
import pytest
from tests.vhosts import DELAY_QUEUES, vhosts_of

from rowmill.dev import Servers, ServerSet, databases
from rowmill.dev.ports import LOOPBACK
from rowmill.dev.private import PrivateServers
from rowmill.dev.processes import ProcessMark, alive
from rowmill.dev.rabbitmq import PrivateRabbitMQ
from rowmill.doctor.health import listed
from rowmill.errors import ServersUnavailable
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.settings import ServiceSettings
from rowmill.runtime.work_record import BrokerWorkRecord
from rowmill_contracts import topology
from rowmill_contracts.run_questions import GetRun

pytestmark = pytest.mark.servers


async def test_each_module_gets_an_empty_database_of_its_own(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        assert await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0
        assert "test_dev_servers" in await connection.fetchval("SELECT current_database()")
    finally:
        await connection.close()


async def test_each_module_gets_an_emptied_virtual_host(servers: ServerSet) -> None:
    """Nothing of one module reaches the next: no message, binding, record of who died of a suspect, or delay of whatever scale."""
    assert isinstance(servers.broker, PrivateRabbitMQ)
    broker = servers.broker

    async def handled(_: Delivery) -> None:
        raise AssertionError("there is nothing to handle")

    with vhosts_of(servers.broker, patience=0.5) as vhosts:
        url = vhosts.empty_one()
        settings, odd = ServiceSettings(broker_url=url, time_scale=0.05), ServiceSettings(broker_url=url, time_scale=0.77)
        async with Bus(odd, service="odd") as bus, await aio_pika.connect(url) as connection:
            channel = await connection.channel()
            await bus.publish(GetRun(run_id="late"), topology.ADMISSION_ASKS, exchange="rowmill.delay.5s")
            record = BrokerWorkRecord(await bus.live_session(), topology.EXECUTOR_KEYS, "fixed")
            await record.works()
            strange = await channel.declare_queue("strange", durable=True)
            await strange.bind(topology.EXCHANGE, topology.ADMISSION_ASKS)
            await bus.publish(GetRun(run_id="before"), topology.ADMISSION_ASKS)

        assert await asyncio.to_thread(vhosts.empty_one) == url

        _, declared = topology.topology()
        assert {*await asyncio.to_thread(listed, url, broker.control)} == {queue.name for queue in declared} - DELAY_QUEUES
        async with Bus(settings, service="after") as bus:
            assert await BrokerWorkRecord(await bus.live_session(), topology.EXECUTOR_KEYS, "fixed").deaths() == 0
            assert await bus.depths([topology.ADMISSION_ASKS]) == {topology.ADMISSION_ASKS: (0, 0)}
            await bus.publish(GetRun(run_id="after"), topology.ADMISSION_ASKS)
            assert await bus.depths([topology.ADMISSION_ASKS]) == {topology.ADMISSION_ASKS: (1, 0)}
            second = await asyncio.to_thread(vhosts.empty_one)
            assert second != url, "somebody still waits for replies there"
        async with Bus(ServiceSettings(broker_url=second, time_scale=0.05), service="other") as bus:
            await bus.consume(topology.EXECUTOR_KEYS, handled)
            assert await asyncio.to_thread(vhosts.empty_one) not in {url, second}, "somebody still consumes there"


async def test_what_consumers_hold_is_told(servers: ServerSet, broker_url: str) -> None:
    assert isinstance(servers.broker, PrivateRabbitMQ)
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("hello", durable=True, arguments={"x-queue-type": "quorum"})
        for body in (b"hi", b"hello"):
            await channel.default_exchange.publish(aio_pika.Message(body), routing_key=queue.name)
        message = await queue.get(timeout=5)
        assert message.body == b"hi"
        assert (await asyncio.to_thread(servers.broker.unacknowledged, urlsplit(broker_url).path[1:]))["hello"] == 1
        await message.ack()
        await queue.delete(if_unused=False, if_empty=False)


async def test_what_was_acknowledged_survives_a_kill_of_both_servers(own_servers: PrivateServers) -> None:
    database, broker = own_servers.database, own_servers.broker
    urls = database.url, broker.url
    connection = await asyncpg.connect(database.url)
    await connection.execute("CREATE TABLE kept (value int)")
    await connection.execute("INSERT INTO kept VALUES (42)")
    async with await aio_pika.connect(broker.url) as session:
        channel = await session.channel()
        queue = await channel.declare_queue("kept", durable=True, arguments={"x-queue-type": "quorum"})
        sent = aio_pika.Message(b"kept", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(sent, routing_key=queue.name)
        await asyncio.to_thread(broker.sync_new_queues)
        await asyncio.to_thread(database.kill)
        await asyncio.to_thread(broker.kill)
        assert not database.running
        assert not broker.running
    connection.terminate()

    await asyncio.to_thread(own_servers.start)

    assert (database.url, broker.url) == urls
    connection = await asyncpg.connect(database.url)
    assert await connection.fetchval("SELECT value FROM kept") == 42
    await connection.close()
    async with await aio_pika.connect(broker.url) as session:
        channel = await session.channel()
        queue = await channel.get_queue("kept", ensure=False)
        assert (await queue.get(timeout=5, no_ack=True)).body == b"kept"


def test_stop_keeps_the_url_and_start_finds_it_again(own_servers: PrivateServers) -> None:
    urls = own_servers.broker.url, own_servers.database.url
    own_servers.stop()
    assert not own_servers.broker.running
    assert not own_servers.database.running
    own_servers.start()
    assert own_servers.running
    assert (own_servers.broker.url, own_servers.database.url) == urls


def test_nothing_is_left_of_a_stopped_pair(own_servers: PrivateServers) -> None:
    own_servers.stop()
    left = [
        process.info["cmdline"] for process in psutil.process_iter(["cmdline"]) if str(own_servers.folder) in " ".join(process.info["cmdline"] or [])
    ]
    assert left == []
    mapper = json.loads((own_servers.folder / "rabbitmq.json").read_text())["port_mapper"]
    assert not alive(ProcessMark(*mapper))


def test_what_the_broker_tells_of_messages_in_hand_is_at_most_a_second_old(own_servers: PrivateServers) -> None:
    assert "{ok,1000}" in own_servers.broker.control("eval", "application:get_env(rabbit, quorum_tick_interval).")


def test_every_port_is_on_loopback(own_servers: PrivateServers) -> None:
    folder = str(own_servers.folder)
    ours = [process for process in psutil.process_iter(["cmdline"]) if folder in " ".join(process.info["cmdline"] or [])]
    ours += [child for process in ours for child in process.children(recursive=True)]
    listening = {connection.laddr.ip for process in ours for connection in process.net_connections("inet") if connection.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


def test_as_root_the_servers_run_as_their_packages_users_in_folders_that_only_these_can_enter(own_servers: PrivateServers) -> None:
    for folder, user in ((own_servers.broker.folder, "rabbitmq"), (own_servers.database.folder, "postgres")):
        assert folder.stat().st_mode & 0o777 == 0o700
        if os.geteuid() == 0:
            assert folder.owner() == user
    for record in own_servers.folder.glob("*.json"):
        assert record.stat().st_mode & 0o777 == 0o600


def test_a_stranger_without_the_password_is_refused(own_servers: PrivateServers) -> None:
    parts = urlsplit(own_servers.database.url)
    assert parts.password
    wrong = own_servers.database.url.replace(parts.password, "guess")
    with pytest.raises(asyncpg.InvalidPasswordError):
        databases.execute(wrong, "SELECT 1")


async def test_a_frozen_database_answers_nothing_and_goes_on_when_resumed(own_servers: PrivateServers) -> None:
    connection = await asyncpg.connect(own_servers.database.url)
    await asyncio.to_thread(own_servers.database.freeze)
    asked = asyncio.create_task(connection.fetchval("SELECT 7"))
    done, _ = await asyncio.wait([asked], timeout=0.3)
    assert not done
    assert own_servers.database.running
    await asyncio.to_thread(own_servers.database.resume)
    assert await asked == 7
    await connection.close()


async def test_a_frozen_broker_answers_nothing_and_goes_on_when_resumed(own_servers: PrivateServers) -> None:
    async with await aio_pika.connect(own_servers.broker.url) as session:
        await asyncio.to_thread(own_servers.broker.freeze)
        asked = asyncio.create_task(session.channel().initialize())
        done, _ = await asyncio.wait([asked], timeout=0.3)
        assert not done
        await asyncio.to_thread(own_servers.broker.resume)
        await asked


def test_a_frozen_pair_can_be_stopped(own_servers: PrivateServers) -> None:
    own_servers.database.freeze()
    own_servers.broker.freeze()
    own_servers.stop()
    assert not own_servers.broker.running
    assert not own_servers.database.running


def test_a_server_that_took_our_port_meanwhile_is_left_alone(own_servers: PrivateServers) -> None:
    own_servers.database.stop()
    before = urlsplit(own_servers.database.url).port
    assert before is not None
    with socket.create_server((LOOPBACK, before)):
        own_servers.database.start()
        assert urlsplit(own_servers.database.url).port != before
    databases.execute(own_servers.database.url, "SELECT 1")


def test_a_killed_database_starts_though_its_old_pid_is_now_another_process(own_servers: PrivateServers) -> None:
    own_servers.database.kill()
    lock = own_servers.database.folder / "data" / "postmaster.pid"
    lock.write_text(lock.read_text().replace(lock.read_text().split("\n", 1)[0], str(os.getpid()), 1))
    own_servers.database.start()
    assert own_servers.database.running


def test_a_server_that_cannot_start_is_an_error_with_its_last_words(own_servers: PrivateServers) -> None:
    own_servers.database.stop()
    settings = own_servers.database.folder / "data" / "postgresql.conf"
    good = settings.read_text()
    settings.write_text(good + "no_such_setting = 1\n")
    with pytest.raises(ServersUnavailable, match="no_such_setting"):
        own_servers.database.start()
    settings.write_text(good)


def test_a_projects_set_is_started_once_found_again_stopped_and_reset() -> None:
    with tempfile.TemporaryDirectory(prefix="rowmill-project-", dir="/tmp") as folder:
        project = Path(folder)
        project.chmod(0o755)
        command = [sys.executable, "-m", "rowmill", "dev", "up", "--json", "--project", folder]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROWMILL_")}
        try:
            starting = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
            first, second = (json.loads(process.communicate()[0]) for process in starting)
            assert first == second
            assert first["broker"]["running"]
            assert first["database"]["running"]

            servers = Servers(project)
            database = servers.ensure().database
            assert database.url == first["database"]["url"]
            databases.execute(database.url, "CREATE TABLE paid (receipt int)")
            assert servers.stop()
            assert not servers.status()["broker"]["running"]
            databases.execute(servers.ensure().database.url, "SELECT receipt FROM paid")
        finally:
            assert Servers(project).reset()
        assert not Servers(project).status()["database"]["running"]
        assert not (project / ".rowmill" / "servers").exists()
