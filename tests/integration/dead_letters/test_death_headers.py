"""What a letter says that a bus has buried: everything that a person or a filter needs, without reading its body."""

from __future__ import annotations

import asyncio
import time

import aio_pika
import msgspec
import pytest

from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import REPLAYED, Delivery, Rejected
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.envelope import Message, encode
from rowmill_contracts.rows import RowTask, RowTasks
from rowmill_contracts.runs import RunStop
from rowmill_contracts.tools import CallItem, ToolCalls
from rowmill_contracts.topology import ADMISSION_RUNS, EXCHANGE, EXECUTOR_ROWS, RUNS_STOP, dead, gateway_calls

pytestmark = pytest.mark.servers

BOUND = 60.0
KEYS = ["aa" * 32, "bb" * 32]


async def buried(broker_url: str, message: Message, queue: str) -> list[dict[str, object]]:
    """The headers of two copies of a message whose handler fails, after they have died."""

    async def fails(delivery: Delivery) -> None:
        del delivery
        raise ZeroDivisionError("no such number")

    async with Bus(ServiceSettings(broker_url=broker_url, time_scale=0.05), service="handler") as bus:
        await bus.consume(queue, fails)
        for number in range(2):
            await bus.publish(message, queue, message_id=f"m{number}")
        async with asyncio.timeout(BOUND), await aio_pika.connect(broker_url) as connection:
            letters = await (await connection.channel()).get_queue(dead(queue), ensure=False)
            found: list[dict[str, object]] = []
            while len(found) < 2:
                letter = await letters.get(fail=False, no_ack=True)
                if letter is None:
                    await asyncio.sleep(0.02)
                else:
                    found.append({name.removeprefix("x-rowmill-"): value for name, value in letter.headers.items()})
    return found


async def test_a_dead_page_says_what_happened_to_whom_where_and_when(broker_url: str) -> None:
    rows = [RowTask(key=key, index=index, page=0) for index, key in enumerate(KEYS)]
    page = RowTasks(run_id="run-1", number=1, org="o", play="leads", dataset="people", started_at=0, code_digest="c", rows=rows)
    began = int(time.time() * 1000)
    first, second = await buried(broker_url, page, EXECUTOR_ROWS)
    assert {name: first[name] for name in ("service", "queue", "error-type", "error", "attempts", "exchange", "key")} == {
        "service": "handler",
        "queue": EXECUTOR_ROWS,
        "error-type": "ZeroDivisionError",
        "error": "no such number",
        "attempts": 3,
        "exchange": EXCHANGE,
        "key": EXECUTOR_ROWS,
    }
    assert {name: first[name] for name in ("run-id", "play", "dataset", "row-keys")} == {
        "run-id": "run-1",
        "play": "leads",
        "dataset": "people",
        "row-keys": ",".join(KEYS),
    }
    assert began <= int(str(first["first-failure-ms"])) < int(str(first["last-failure-ms"])) <= time.time() * 1000, "it was tried again between"
    assert first["traceback-digest"] == second["traceback-digest"]
    assert len(str(first["traceback-digest"])) == 16


async def test_dead_calls_say_which_rows_asked(broker_url: str) -> None:
    calls = [
        CallItem(call_id=str(number), tool="p.t", receipt_key="k", input=msgspec.Raw(b"{}"), row=f"people/{key}")
        for number, key in enumerate([*KEYS, KEYS[0]])
    ]
    first, _ = await buried(broker_url, ToolCalls(run_id="run-1", org="o", play="leads", started_at=0, calls=calls), gateway_calls(5))
    assert (first["run-id"], first["dataset"], first["row-keys"]) == ("run-1", "people", ",".join(KEYS))


async def test_a_letter_is_the_message_that_came_but_for_its_headers(broker_url: str) -> None:
    """Who asked can be told, and a replay knows what it has made itself."""
    died = asyncio.Event()

    async def refuses(delivery: Delivery) -> None:
        died.set()
        raise Rejected(f"not {delivery.message_id}")

    body = encode(RunStop(run_id="run-1"))
    async with Bus(ServiceSettings(broker_url=broker_url, time_scale=0.05), service="handler") as bus, asyncio.timeout(BOUND):
        await bus.consume(ADMISSION_RUNS, refuses)
        await bus.publish_body(
            body, "RunStop.v1", RUNS_STOP, message_id="m", correlation_id="asked", reply_to="replies.nobody", headers={REPLAYED: "r", "x-other": "o"}
        )
        await died.wait()
        async with await aio_pika.connect(broker_url) as connection:
            letters = await (await connection.channel()).get_queue(dead(ADMISSION_RUNS), ensure=False)
            while (letter := await letters.get(fail=False, no_ack=True)) is None:
                await asyncio.sleep(0.02)
    assert (letter.body, letter.type, letter.message_id) == (body, "RunStop.v1", "m")
    assert (letter.correlation_id, letter.reply_to, letter.headers[REPLAYED]) == ("asked", "replies.nobody", "r")
    assert (letter.headers["x-rowmill-key"], letter.headers["x-rowmill-attempts"]) == (RUNS_STOP, 1)
