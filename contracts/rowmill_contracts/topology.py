"""Exchanges, queues and bindings: what must stand on the broker before anyone publishes.

Work queues are durable quorum queues, bounded with ``reject-publish`` and dead-lettered at least once (DESIGN.md, "Contracts"). A queue's name
is its routing key on `rowmill` unless it has public keys. Names carry a version: other arguments need another name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rowmill_contracts.digests import SHARDS

EXCHANGE: Final = "rowmill"
EVENTS: Final = "rowmill.events"
CONTROL: Final = "rowmill.control"

RUNS_START: Final = "runs.start"
RUNS_STOP: Final = "runs.stop"
RUNS_RETRY: Final = "runs.retry"
RUNS_EVENT: Final = "runs.event"
INPUTS: Final = "inputs"

ADMISSION_RUNS: Final = "admission.runs.v1"
ADMISSION_INPUTS: Final = "admission.inputs.v1"
ADMISSION_ASKS: Final = "admission.asks.v1"
ADMISSION_COUNTS: Final = "admission.counts.v1"
ADMISSION_PARKED: Final = "admission.parked.v1"
ADMISSION_DEAD: Final = "admission.dead.v1"
EXECUTOR_ADVANCE: Final = "executor.advance.v1"
EXECUTOR_KEYS: Final = "executor.keys.v1"
EXECUTOR_ROWS: Final = "executor.rows.v1"
SHEETS_ASKS: Final = "sheets.asks.v1"
SHEETS_SETTLE: Final = "sheets.settle.v1"
RECEIPTS_CLAIMS: Final = "receipts.claims.v1"
RECEIPTS_SETTLE: Final = "receipts.settle.v1"


def gateway_calls(shard: int) -> str:
    """The queue of one shard of lanes."""
    return f"gateway.calls.{shard}.v1"


@dataclass(frozen=True)
class Exchange:
    name: str
    kind: Literal["direct", "topic", "fanout"]


@dataclass(frozen=True)
class Queue:
    """A durable queue. ``bindings``: (exchange, routing key)."""

    name: str
    bindings: tuple[tuple[str, str], ...]
    arguments: dict[str, Any] = field(default_factory=dict)


WORK_QUEUE_LENGTH: Final = 100_000
"""Messages in a work queue at most: far over twice the room (50 000 rows in pages), so reaching it is an alarm, not flow control."""

DELAYS: Final[dict[str, int]] = {"rowmill.delay.1s": 1_000, "rowmill.delay.5s": 5_000}
"""Delay exchanges and their TTL in ms. Publish with the target's routing key; it survives the hop."""


def dead(queue: str) -> str:
    return f"{queue}.dead"


def suspect(queue: str) -> str:
    """Where messages of a work queue wait that may have crashed who handled them (DESIGN.md, "When something dies")."""
    return f"{queue}.suspect"


LIMITED_SINCE: Final = 4
"""Major version of RabbitMQ from which on a quorum queue that says nothing of a delivery limit has one of 20."""


def arguments_at(queue: Queue, broker_version: str) -> dict[str, Any]:
    """What to declare a queue with at a broker of that version (``3.13.7``): without a limit of deliveries, whichever way that is said there.

    The twenty-first reader of a dead letter would otherwise be its last: those queues dead-letter nowhere.
    """
    major = broker_version.partition(".")[0]
    if queue.arguments.get("x-queue-type") == "quorum" and major.isdigit() and int(major) >= LIMITED_SINCE:
        return {**queue.arguments, "x-delivery-limit": -1}
    return dict(queue.arguments)


def work_queue(name: str, *keys: str, single_active: bool = False) -> Queue:
    arguments: dict[str, Any] = {
        "x-queue-type": "quorum",
        "x-overflow": "reject-publish",
        "x-max-length": WORK_QUEUE_LENGTH,
        "x-dead-letter-strategy": "at-least-once",
        "x-dead-letter-exchange": EXCHANGE,
        "x-dead-letter-routing-key": dead(name),
    }
    if single_active:
        arguments["x-single-active-consumer"] = True
    return Queue(name, tuple((EXCHANGE, key) for key in (keys or (name,))), arguments)


def dead_queue(name: str) -> Queue:
    return Queue(dead(name), ((EXCHANGE, dead(name)),), {"x-queue-type": "quorum"})


def suspect_queue(work: Queue) -> Queue:
    """Any process that serves the work queue takes from it, one message at a time and only while it does nothing else: nobody stays subscribed."""
    return Queue(
        suspect(work.name),
        ((EXCHANGE, suspect(work.name)),),
        {name: value for name, value in work.arguments.items() if name != "x-single-active-consumer"},
    )


def delay_queue(exchange: str, ttl_ms: int) -> Queue:
    arguments = {
        "x-queue-type": "quorum",
        "x-overflow": "reject-publish",
        "x-dead-letter-strategy": "at-least-once",
        "x-dead-letter-exchange": EXCHANGE,
        "x-message-ttl": ttl_ms,
    }
    return Queue(f"{exchange.removeprefix('rowmill.')}.v1.{ttl_ms}", ((exchange, ""),), arguments)


WORK_QUEUES: Final[tuple[Queue, ...]] = (
    work_queue(ADMISSION_RUNS, RUNS_START, RUNS_STOP, RUNS_EVENT, RUNS_RETRY),
    work_queue(ADMISSION_INPUTS, INPUTS),
    work_queue(ADMISSION_ASKS),
    work_queue(ADMISSION_COUNTS),
    work_queue(ADMISSION_PARKED),
    work_queue(EXECUTOR_ADVANCE),
    work_queue(EXECUTOR_KEYS),
    work_queue(EXECUTOR_ROWS),
    work_queue(SHEETS_ASKS),
    work_queue(SHEETS_SETTLE),
    work_queue(RECEIPTS_CLAIMS),
    work_queue(RECEIPTS_SETTLE),
    *(work_queue(gateway_calls(shard), single_active=True) for shard in range(SHARDS)),
)

EXCHANGES: Final[tuple[Exchange, ...]] = (
    Exchange(EXCHANGE, "direct"),
    Exchange(EVENTS, "topic"),
    Exchange(CONTROL, "fanout"),
    *(Exchange(name, "fanout") for name in DELAYS),
)


def topology(delay_scale: float = 1.0) -> tuple[tuple[Exchange, ...], tuple[Queue, ...]]:
    """Everything to declare. ``delay_scale`` shortens the delay queues in tests; their names carry the TTL, so sets never mix.

    Admission's dead-letter queue is a second binding on every ``.dead`` key: what died ends the waiting of others, and stays for the operator.
    """
    dead_letters = Queue(
        ADMISSION_DEAD,
        tuple((EXCHANGE, dead(queue.name)) for queue in WORK_QUEUES),
        {"x-queue-type": "quorum", "x-overflow": "reject-publish"},
    )
    delays = tuple(delay_queue(name, max(1, int(ttl * delay_scale))) for name, ttl in DELAYS.items())
    beside = (part for queue in WORK_QUEUES for part in (dead_queue(queue.name), suspect_queue(queue)))
    return EXCHANGES, (*WORK_QUEUES, *beside, dead_letters, *delays)
