"""Letters that lie there more than once: what brings them about, and that whoever reads sees, replays and deletes each once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiormq import spec
from tests.integration.dead_letters.conftest import Desk, Died
from tests.integration.dead_letters.test_dlq_commands import ids, page, settled

from rowmill.client.dead_letter_queues import letter_box
from rowmill.client.dead_letters import Filter
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import MADE_ID, REPLAYED, Delivery, Rejected, death_headers
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.envelope import encode
from rowmill_contracts.rows import RowTasks
from rowmill_contracts.runs import RunStop
from rowmill_contracts.topology import ADMISSION_RUNS, EXCHANGE, EXECUTOR_ROWS, RUNS_STOP, SHEETS_SETTLE, dead

pytestmark = pytest.mark.servers

BOUND = 60.0


def sent_again(tasks: RowTasks) -> RowTasks:
    """As a page comes that is published again: the same rows, of which one has waited meanwhile."""
    return msgspec.structs.replace(tasks, rows=[msgspec.structs.replace(row, waits=1) for row in tasks.rows])


class NoId(str):
    """The id of a message that has none. Our library gives every message an id that does not look as if it had one; other clients do not."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return True


COPIES = (
    Died(page("run-1"), "a1", ago=7200),
    Died(page("run-2"), "a2"),
    Died(sent_again(page("run-1")), "a3", error=ValueError("died again")),
    Died(page("run-1"), "a1"),
    Died(settled(), "c1", SHEETS_SETTLE),
    Died(settled(), "c1", SHEETS_SETTLE),
)


def test_copies_are_listed_shown_and_exported_as_one(desk: Desk, tmp_path: Path) -> None:
    desk.bury(*COPIES)
    assert ids(desk.json("list")) == ["a1", "a2", "c1"]
    assert [group["letters"] for group in desk.json("list", "--group")] == [2, 1]
    assert desk.json("show", "a1")["error"] == "poison"
    assert desk.json("show", "a3")["error"] == "died again", "it can be named by any of its ids"
    assert desk.json("export", "letters.jsonl")["exported"] == 3
    assert ids([json.loads(line) for line in (tmp_path / "letters.jsonl").read_text().splitlines()]) == ["a1", "a2", "c1"]
    assert sorted(map(str, desk.ids(dead(EXECUTOR_ROWS)))) == ["a1", "a1", "a2", "a3"]


@pytest.mark.parametrize("named", [["a3"], ["--older-than", "1h"]])
def test_a_replay_publishes_one_copy_and_takes_all(desk: Desk, named: list[str]) -> None:
    desk.bury(*COPIES)
    assert desk.json("replay", *named, "--queue", EXECUTOR_ROWS, "--dry-run")["replayed"] == 1
    done = desk.json("replay", *named, "--queue", EXECUTOR_ROWS)
    assert (done["found"], done["looked_at"], done["replayed"]) == (2, 2, 1)
    [(_, body, headers)] = desk.taken(EXECUTOR_ROWS)
    assert (len(json.loads(body)["rows"]), bool(headers[REPLAYED])) == (1, True)
    assert desk.ids(dead(EXECUTOR_ROWS)) == ["a2"]


def test_a_purge_counts_letters_and_deletes_all_copies(desk: Desk) -> None:
    desk.bury(*COPIES)
    assert desk.json("purge", "--run", "run-1", "--yes") == {"dry_run": False, "found": 2, "purged": 2}
    assert (desk.ids(dead(EXECUTOR_ROWS)), desk.ids(dead(SHEETS_SETTLE))) == (["a2"], [])


def test_a_letter_that_a_replay_has_made_itself_is_no_copy_to_it(desk: Desk, broker_url: str) -> None:
    """The replayed page dies again, and its letter comes to the replay that made it, since another reader has taken one meanwhile."""
    desk.bury(Died(page("run-1"), "a1"), Died(page("run-2"), "a2"))

    async def replay(bus: Bus) -> list[str]:
        replayed: list[str] = []
        async with letter_box(broker_url) as box, letter_box(broker_url) as other:
            meanwhile = other.letters(Filter(queue=EXECUTOR_ROWS))
            async for got in box.letters(Filter(queue=EXECUTOR_ROWS)):
                replayed.append(got.letter.message_id)
                if len(replayed) == 1:
                    await anext(meanwhile)
                    headers = death_headers(
                        ValueError("again"), service="t", queue=EXECUTOR_ROWS, exchange="", key="", attempts=1, first_failure=1, last_failure=2
                    )
                    again = {**headers, REPLAYED: box._replay}
                    await bus.publish_body(got.letter.body, got.letter.message_type, dead(EXECUTOR_ROWS), message_id="a1", headers=again)
                await box.take([got.letter.identity])
        return replayed

    assert desk.run(replay) == ["a1"]
    assert sorted(map(str, desk.ids(dead(EXECUTOR_ROWS)))) == ["a1", "a2"]


@pytest.mark.parametrize(("message_id", "is_made"), [("m1", False), (NoId(), True)])
def test_a_process_that_dies_between_a_letter_and_its_acknowledgement_leaves_one_letter(
    desk: Desk, broker_url: str, message_id: str, *, is_made: bool
) -> None:
    handled: list[str] = []

    async def reject(delivery: Delivery) -> None:
        handled.append(delivery.message_id)
        raise Rejected("not this one")

    async def die_twice(bus: Bus) -> None:
        session = await bus.live_session()
        channel = await session.connection.channel()
        underlay = await channel.get_underlay_channel()
        properties = spec.Basic.Properties(message_id=message_id, delivery_mode=2)
        await underlay.basic_publish(encode(RunStop(run_id="r")), exchange=EXCHANGE, routing_key=RUNS_STOP, properties=properties)
        for _ in range(2):
            async with Bus(ServiceSettings(broker_url=broker_url, time_scale=0.05, drain_timeout=0.0), service="dying") as dying:
                buried = asyncio.Event()

                async def never(*_: Any, buried: asyncio.Event = buried) -> None:
                    buried.set()
                    await asyncio.Event().wait()

                dying._handling_of._acknowledge = never  # type: ignore[method-assign, assignment]
                await dying.consume(ADMISSION_RUNS, reject)
                async with asyncio.timeout(BOUND):
                    await buried.wait()

    desk.run(die_twice)
    assert handled == [message_id] * 2
    assert desk.depth(dead(ADMISSION_RUNS)) == 2
    [letter] = desk.json("list")
    assert (letter["queue"], MADE_ID in letter["headers"]) == (ADMISSION_RUNS, is_made)
    desk.taken(ADMISSION_RUNS)
    assert desk.json("replay")["replayed"] == 1
    assert desk.ids(ADMISSION_RUNS) == [letter["message_id"]], "the same if the replay is ended half-way and begun again"
    assert desk.depth(dead(ADMISSION_RUNS)) == 0
