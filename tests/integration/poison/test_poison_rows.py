"""Rows that exit the process, eat its memory, never return or hold it: they end, and every row beside them is worked and settled once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Collection, Iterable

import msgspec
import pytest
from tests.integration.poison.conftest import BOUND, PAGE_ROWS, Ward

from rowmill.client import Client
from rowmill.client.dead_letter_queues import dead_letters
from rowmill.client.dead_letters import Filter
from rowmill_contracts.envelope import decode
from rowmill_contracts.rows import ReadRow, RowTasks
from rowmill_contracts.run_questions import RunSummary
from rowmill_contracts.topology import EXCHANGE, EXECUTOR_KEYS, EXECUTOR_ROWS

EXITED, OUT_OF_MEMORY, STOOD_STILL = 3, 70, 1
"""How an executor ended, by its exit status."""


def items(word: str, count: int, poison: dict[int, str]) -> list[dict[str, str]]:
    """``word``: that no other test uses, so that no row is known from elsewhere."""
    return [{"name": f"{word}-{number:04d}", "does": poison.get(number, "well")} for number in range(count)]


def check(
    summary: RunSummary,
    rows: list[ReadRow],
    given: list[dict[str, str]],
    *,
    dead: Iterable[int],
    late: Iterable[int] = (),
    late_codes: Collection[str] = ("row_timeout",),
) -> None:
    """Each row once, in order; the poison ones failed for what they did, all others completed."""
    dead, late = set(dead), set(late)
    assert summary.state == "completed", summary.error
    assert [row.index for row in rows] == list(range(len(given)))
    wrong = {row.index: (row.mark, row.error) for row in rows if (row.mark == "failed") != (row.index in dead | late)}
    assert not wrong
    for row in rows:
        if row.mark == "failed":
            assert row.error is not None
            assert row.error.code in (("dead_lettered",) if row.index in dead else late_codes)
        else:
            assert msgspec.json.decode(row.data)["done"] == given[row.index]["name"].upper()
    assert (summary.counts.completed, summary.counts.failed) == (len(given) - len(dead | late), len(dead | late))
    assert summary.counts.terminal == summary.counts.admitted == len(given)


async def publish_nonsense(client: Client) -> None:
    """A page that nobody can decode."""
    await client.bus.publish_body(b'{"rows": [', RowTasks.message_type, EXECUTOR_ROWS, exchange=EXCHANGE, message_id="nonsense")


async def test_poison_rows_of_every_kind_end_and_the_rows_beside_them_complete(ward: Ward, client: Client) -> None:
    poison = {1: "exit", 9: "memory", 18: "hold", 13: "never", 22: "stuck thread"}
    given = items("kinds", 6 * PAGE_ROWS, poison)
    job = await client.start(ward.play("waiting"), items=given)
    await publish_nonsense(client)
    summary, rows = await ward.ended(client, job)

    check(summary, rows, given, dead=[1, 9, 18], late=[13, 22])
    assert set(ward.deaths["row-executor"]) == {EXITED, OUT_OF_MEMORY, STOOD_STILL}
    letters = await dead_letters(ward.broker_url, Filter(queue=EXECUTOR_ROWS))
    reasons = {letter.message_id: letter.error for letter in letters}
    assert "truncated" in reasons.pop("nonsense"), "dead at once, as it was"
    assert all("poison: crashed its consumer" in reason for reason in reasons.values())
    died = [decode(letter.message_type, letter.body) for letter in letters if letter.message_id != "nonsense"]
    assert sorted(row.index for page in died if isinstance(page, RowTasks) for row in page.rows) == [1, 9, 18]
    await ward.nobody_holds_any()
    await ward.letters()


async def test_rows_run_by_hand_end_likewise(ward: Ward, client: Client) -> None:
    given = items("by-hand", 2 * PAGE_ROWS, {2: "memory"})
    summary, rows = await ward.ended(client, await client.start(ward.play("inline"), items=given))
    check(summary, rows, given, dead=[2])
    assert set(ward.deaths["row-executor"]) == {OUT_OF_MEMORY}
    await ward.letters()


async def test_a_key_function_that_exits_the_process_fails_its_run_and_no_other(ward: Ward, client: Client) -> None:
    """Its page is one message, whose deaths are counted, and is not asked for anew while its executors come back."""
    bad = await client.start(ward.play("keyed"), items=items("keys", PAGE_ROWS, {2: "exit in its key"}))
    good = await client.start(ward.play("keyed"), items=items("good-keys", PAGE_ROWS, {}))
    given = items("beside-keys", PAGE_ROWS, {})
    summary, rows = await ward.ended(client, await client.start(ward.play("inline"), items=given))
    check(summary, rows, given, dead=[])
    async with asyncio.timeout(BOUND):
        ended, other = await bad.wait(), await good.wait()
    assert ended.error is not None
    assert (ended.state, ended.error.code) == ("failed", "dead_lettered"), ended.error
    assert (other.state, other.counts.completed) == ("completed", PAGE_ROWS)
    assert set(ward.deaths["row-executor"]) == {EXITED}
    assert ward.deaths["row-executor"][EXITED] <= 8, "four, and two for each copy"
    await ward.letters(EXECUTOR_KEYS)


@pytest.mark.long
async def test_healthy_rows_complete_beside_poison_while_executors_are_killed_every_second(ward: Ward, client: Client) -> None:
    poison = {7: "exit", 101: "segfault", 102: "memory", 230: "never"}
    given = items("killed", 80 * PAGE_ROWS, poison)
    job = await client.start(ward.play("waiting"), items=given)
    killing = asyncio.create_task(ward.kill_executors(every=1.0, times=30))
    summary, rows = await ward.ended(client, job)
    await killing
    # The one that never returns is at the end of its time, or had too many executors killed under it before.
    check(summary, rows, given, dead=[7, 101, 102], late=[230], late_codes=("row_timeout", "dead_lettered"))
    assert set(ward.deaths["row-executor"]) >= {EXITED, -signal.SIGSEGV, OUT_OF_MEMORY, -signal.SIGKILL}
    await ward.nobody_holds_any()
    await ward.letters()
