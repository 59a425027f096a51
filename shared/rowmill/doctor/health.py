"""Looking at servers, services and queues: who answers, who consumes, what lies where."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from urllib.parse import unquote, urlsplit

from aio_pika.abc import AbstractConnection
from aio_pika.exceptions import ChannelNotFoundEntity

from rowmill.client.loaded_code import LOADERS
from rowmill.dev.working_set import SIGNS
from rowmill.doctor import in_hand
from rowmill.doctor.auditing import NO_TABLES, SQL, reading
from rowmill.doctor.findings import Finding
from rowmill.errors import UnavailableError
from rowmill.runtime.transport import TRANSPORT_ERRORS, AsTransportErrors, close, connect, redacted
from rowmill_contracts.in_hand import InHandShown
from rowmill_contracts.topology import WORK_QUEUES, dead, suspect

ANSWER_SECONDS: Final = 15.0
HEARTBEAT_SECONDS: Final = 10

Control = Callable[..., str]
"""Runs ``rabbitmqctl`` with these arguments, where the broker is our own: only it says what is unacknowledged."""


@dataclass(frozen=True)
class QueueState:
    """A work queue: messages ready, unacknowledged (its suspects among them; None: not to be seen from here), consumers; its dead letters and
    the suspects that are ready.
    """

    queue: str
    ready: int
    unacknowledged: int | None
    consumers: int
    dead: int
    suspects: int


@dataclass
class Health:
    """``unfinished``: runs that are not over; ``delayed``: messages in delay queues. None: not known. ``in_hand``: what each service says it has."""

    broker: str
    database: str
    services: dict[str, bool] = field(default_factory=dict)
    queues: list[QueueState] = field(default_factory=list)
    unfinished: int | None = None
    delayed: int | None = None
    in_hand: list[InHandShown] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def queued(self) -> int | None:
        """Messages that rows may travel by; None: there may be some that cannot be seen from here."""
        seen = sum(queue.ready + queue.suspects + (queue.unacknowledged or 0) for queue in self.queues)
        return seen + self.delayed if self.delayed is not None else seen or None

    def wrong(self, check: str, problem: str, advice: str) -> None:
        self.findings.append(Finding(check, problem, advice))


async def look(broker_url: str, database_url: str, control: Control | None = None, *, own: Collection[str] = ()) -> Health:
    """Ask both servers. Never raises for what is wrong: that is what it finds. ``own``: those of "broker" and "database" that are the project's."""
    health = Health(redacted(broker_url), redacted(database_url))
    await asyncio.gather(
        _look_at_broker(health, broker_url, control, _start("broker", own)), _look_at_database(health, database_url, _start("database", own))
    )
    if health.unfinished == 0 and any(queue.unacknowledged or queue.suspects for queue in health.queues):
        await _look_at_database(health, database_url, _start("database", own))  # they may be of a run that has begun meanwhile
    judge(health)
    return health


def _start(server: str, own: Collection[str]) -> str:
    """What to do about a server that does not answer."""
    if server in own:
        return "`rowmill dev up` starts it, and services that run come back to it; `rowmill up` starts servers and services."
    return f"Start it, or see to ROWMILL_{server.upper()}_URL; services that run come back to it."


async def _look_at_database(health: Health, url: str, start: str) -> None:
    try:
        async with reading(url) as connection:
            health.unfinished = await connection.fetchval(SQL["unfinished"])
    except UnavailableError as error:
        advice = "`rowmill up` starts them." if isinstance(error.__cause__, NO_TABLES) else start
        health.wrong("database", f"{str(error)[:1].upper()}{str(error)[1:]}.", advice)


async def _look_at_broker(health: Health, url: str, control: Control | None, start: str) -> None:
    try:
        connection = await connect(url, name="rowmill doctor", heartbeat=HEARTBEAT_SECONDS, timeout=ANSWER_SECONDS)
        try:
            depths = await _depths(connection)
            consumers = {work.name: depths[work.name][1] for work in WORK_QUEUES}
            looked = await in_hand.look(connection, consumers, None if control is None else partial(asyncio.to_thread, listed, url, control))
        finally:
            await close(connection)
    except ChannelNotFoundEntity:
        health.wrong(
            "broker", f"The broker at {health.broker} has no queues of rowmill's: no service has run on it yet.", "`rowmill up` starts them."
        )
        return
    except (*TRANSPORT_ERRORS, UnavailableError) as error:
        health.wrong("broker", f"No broker answers at {health.broker}: {error or error!r}.", start)
        return
    health.in_hand, health.findings = looked.answers, health.findings + looked.findings
    for work in WORK_QUEUES:
        name = work.name
        held = None if looked.listed is None else sum(looked.listed.get(each, (0, 0))[1] for each in (name, suspect(name)))
        health.queues.append(QueueState(name, depths[name][0], held, depths[name][1], depths[dead(name)][0], depths[suspect(name)][0]))
    if looked.listed is not None:
        health.delayed = sum(messages for name, (messages, _) in looked.listed.items() if name.startswith("delay."))
    health.services = {service: depths[queue][1] > 0 for service, queue in SIGNS.items()}


async def _depths(connection: AbstractConnection) -> dict[str, tuple[int, int]]:
    """(messages ready, consumers) of every work queue and of what stands beside it."""
    found: dict[str, tuple[int, int]] = {}
    with AsTransportErrors():
        async with asyncio.timeout(ANSWER_SECONDS):
            channel = await connection.channel(publisher_confirms=False)
            for work in WORK_QUEUES:
                for name in (work.name, dead(work.name), suspect(work.name)):
                    result = (await channel.declare_queue(name, passive=True)).declaration_result
                    found[name] = (result.message_count or 0, result.consumer_count or 0)
    return found


def listed(url: str, control: Control) -> Mapping[str, tuple[int, int]]:
    """(messages, unacknowledged ones among them) of every queue, as the broker's own tool says."""
    vhost = unquote(urlsplit(url).path.removeprefix("/")) or "/"
    table = control("list_queues", "-q", "-p", vhost, "name", "messages", "messages_unacknowledged", "--no-table-headers")
    lines = (line.rsplit("\t", 2) for line in table.splitlines() if line.count("\t") >= 2)
    return {name: (int(messages), int(held)) for name, messages, held in lines}


def judge(health: Health) -> None:
    """Find what is wrong with what was seen."""
    for service, runs in health.services.items():
        if not runs:
            advice = f"`rowmill serve {service}` starts it, `rowmill up` all."
            if service in LOADERS:  # the broker takes one for gone that author code has held up for long
                advice += " If it runs, author code holds it up: see its log, or a stack of its process."
            health.wrong("services", f"Nobody runs the {service} service on this broker.", advice)
    limits = {work.name: work.arguments.get("x-max-length", 0) for work in WORK_QUEUES}
    idle = health.unfinished == 0
    for queue in health.queues:
        if queue.dead:
            problem = f"{queue.dead} dead letter{'s lie' if queue.dead > 1 else ' lies'} in {dead(queue.queue)}."
            health.wrong("dead letters", problem, f"`rowmill dlq list --group --queue {queue.queue}` says why; then replay or purge them.")
        if queue.ready and not queue.consumers:
            problem = f"{queue.ready} messages lie in {queue.queue}, and nobody consumes it."
            health.wrong("queues", problem, "Start the service that it belongs to, or look why it does not consume (its log, /readyz).")
        if queue.ready > limits[queue.queue] / 2:
            problem = f"{queue.queue} holds {queue.ready} messages, over half of its bound."
            health.wrong("queues", problem, "Start more of the service that consumes it; what is over the bound waits with its sender.")
        if idle and queue.suspects:
            problem = f"{queue.suspects} messages lie in {suspect(queue.queue)} although every run is over."
            health.wrong("messages", problem, "If that lasts, look at the log of the service that takes them, one at a time: they may crash it.")
        if idle and queue.unacknowledged:
            problem = f"{queue.unacknowledged} messages of {queue.queue} are unacknowledged although every run is over."
            health.wrong("messages", problem, "If that lasts, restart the service that holds them; they are delivered again, and have one effect.")
