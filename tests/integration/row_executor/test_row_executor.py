"""The executor on a real broker: bodies, rows, calls, and what holds when answers are lost or it dies in the middle."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel
from structlog.testing import capture_logs

from rowmill import Context, HttpTool, Provider, play
from rowmill.runtime.clock import new_id
from rowmill_contracts.envelope import PAGE_ROWS
from rowmill_contracts.events import Control
from rowmill_contracts.row_keys import KeyPage, PageKeys
from rowmill_contracts.tools import CallItem, CallOutcome
from rowmill_contracts.topology import CONTROL, EXECUTOR_ADVANCE, EXECUTOR_KEYS, EXECUTOR_ROWS
from rowmill_row_executor.app import App

pytestmark = pytest.mark.servers


class FindIn(BaseModel):
    domain: str


class FindOut(BaseModel):
    email: str


def find_tool() -> Any:
    hunter = Provider("hunter", base_url="http://127.0.0.1:1")

    @hunter.post("/find", effect="read")
    class Find(HttpTool[FindIn, FindOut]):
        pass

    return Find


def found(item: CallItem) -> CallOutcome:
    raw = {"email": f"x@{msgspec.json.decode(item.input)['domain']}"}
    return CallOutcome(call_id=item.call_id, outcome="completed", result=msgspec.Raw(msgspec.json.encode({"raw": raw, "data": raw})), receipt="r")


def emails() -> Any:
    """A play with one column that calls a tool."""
    find = find_tool()

    @play("emails")
    async def emails_play(ctx: Context) -> dict[str, Any]:
        builder = ctx.dataset("people", [{"domain": "a"}]).with_column("email", lambda row, ctx: ctx.call(find, {"domain": row["domain"]}))
        done = await builder.run(key="domain")
        return {"people": done, "count": await done.count()}

    return emails_play


def pure() -> Any:
    @play("pure")
    async def pure_play(ctx: Context) -> int:
        rows = ctx.dataset("numbers", [{"n": 1}]).with_column("twice", lambda row: row["n"] * 2)
        return await (await rows.run(key=lambda row: row["n"] % 10)).count()

    return pure_play


async def opened(neighbours: Any, run_id: str, dataset: str) -> None:
    await neighbours.advance(run_id)
    await neighbours.until(lambda: (run_id, dataset) in neighbours.admission.opened and neighbours.ending(run_id) is not None)


async def test_a_run_goes_from_its_start_to_its_output(neighbours: Any, executor: Any, close_dataset: Any) -> None:
    run_id = new_id("run-")
    neighbours.know(run_id, emails())
    neighbours.answer = found
    await opened(neighbours, run_id, "people")
    request = neighbours.admission.opened[run_id, "people"]
    await neighbours.until(lambda: request.input_id in neighbours.admission.sealed)
    assert neighbours.admission.rows_of(request.input_id) == [{"domain": "a"}]
    assert request.key == ["domain"]
    await neighbours.send_rows(run_id, "people", [{"domain": f"d{i}"} for i in range(2 * PAGE_ROWS + 50)])
    await neighbours.until(lambda: len(neighbours.rows(run_id, "people")) == 2 * PAGE_ROWS + 50)
    assert neighbours.values(run_id, "people")[7]["email"]["v"]["raw"] == {"email": "x@d7"}
    assert all(len(message.rows) <= PAGE_ROWS for message in neighbours.settled_messages)
    close_dataset(run_id, "people", admitted=2 * PAGE_ROWS + 50, completed=2 * PAGE_ROWS + 50)
    await neighbours.advance(run_id)
    await neighbours.until(lambda: neighbours.ending(run_id).outcome == "completed")
    assert msgspec.json.decode(neighbours.ending(run_id).output)["count"] == 2 * PAGE_ROWS + 50


async def test_an_advance_that_meets_a_live_lease_comes_again(neighbours: Any, executor: Any) -> None:
    run_id = new_id("run-")
    neighbours.know(run_id, pure())
    neighbours.admission.runs[run_id].holder = "another executor"
    await neighbours.advance(run_id)
    await asyncio.sleep(0.3)
    assert neighbours.ending(run_id) is None
    neighbours.admission.expire(run_id)
    await neighbours.until(lambda: neighbours.ending(run_id) is not None)


async def test_a_slow_row_does_not_hold_back_the_rows_of_its_page(neighbours: Any, executor: Any) -> None:
    run_id = new_id("run-")
    neighbours.know(run_id, emails())
    await opened(neighbours, run_id, "people")
    neighbours.answer = lambda item: None if b"slow" in bytes(item.input) else found(item)
    await neighbours.send_rows(run_id, "people", [{"domain": "slow" if i == 0 else f"d{i}"} for i in range(100)])
    await neighbours.until(lambda: len(neighbours.rows(run_id, "people")) == 99)
    neighbours.answer = found
    await neighbours.until(lambda: len(neighbours.rows(run_id, "people")) == 100)


async def test_lost_answers_are_asked_for_again(neighbours: Any, executor: Any) -> None:
    run_id = new_id("run-")
    neighbours.know(run_id, emails())
    await opened(neighbours, run_id, "people")
    lost: set[str] = set()

    def lossy(item: CallItem) -> CallOutcome | None:
        if item.receipt_key in lost:
            return found(item)
        lost.add(item.receipt_key)
        return None

    neighbours.answer = lossy
    await neighbours.send_rows(run_id, "people", [{"domain": f"d{i}"} for i in range(300)])
    await neighbours.until(lambda: len(neighbours.rows(run_id, "people")) == 300)
    assert set(neighbours.asked.values()) == {2}


async def test_rows_of_an_executor_that_dies_are_run_by_another(neighbours: Any, new_executor: Any) -> None:
    run_id = new_id("run-")
    neighbours.know(run_id, emails())
    dying = await new_executor(drain_timeout=0.2)
    await opened(neighbours, run_id, "people")
    neighbours.answer = lambda item: found(item) if int(bytes(item.input).split(b"d")[-1].strip(b'"}')) % 2 else None
    await neighbours.send_rows(run_id, "people", [{"domain": f"d{i}"} for i in range(400)])
    await neighbours.until(lambda: len(neighbours.rows(run_id, "people")) == 200)
    await dying.stop()
    neighbours.answer = found
    await new_executor()
    await neighbours.until(lambda: len(neighbours.rows(run_id, "people")) == 400)


async def test_what_a_stop_cuts_off_is_handed_in(neighbours: Any, new_executor: Any) -> None:
    @play("paying")
    async def paying(ctx: Context) -> None:
        await ctx.dataset("people", []).with_column("paid", pay).run()

    begun = asyncio.Event()

    async def begin() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def pay(row: Any, ctx: Any) -> Any:
        return await ctx.step("pay", begin, effect="non_idempotent")

    store = await neighbours.keep_receipts()
    run_id = new_id("run-")
    neighbours.know(run_id, paying)
    leaving = await new_executor(drain_timeout=0.1)
    await opened(neighbours, run_id, "people")
    await neighbours.send_rows(run_id, "people", [{"domain": "a"}])
    await neighbours.until(begun.is_set)  # not when its receipt runs: the executor may not have heard of that, and gives back what it never began
    assert [receipt.state for receipt in store.receipts.values()] == ["running"]
    await leaving.stop()
    assert [receipt.state for receipt in store.receipts.values()] == ["outcome_unknown"]


async def test_a_message_that_is_delivered_twice_at_once_is_worked_once(neighbours: Any, executor: Any) -> None:
    run_id = new_id("run-")
    neighbours.know(run_id, emails())
    await opened(neighbours, run_id, "people")
    neighbours.answer = lambda item: None
    for _ in range(2):
        await neighbours.send_rows(run_id, "people", [{"domain": "a"}], message_id="same")
    await neighbours.until(lambda: neighbours.asked)
    neighbours.answer = found
    await neighbours.until(lambda: neighbours.rows(run_id, "people"))
    assert sum(len(message.rows) for message in neighbours.settled_messages) == 1


async def test_deferred_rows_are_parked_and_their_page_is_over(neighbours: Any, executor: Any) -> None:
    run_id = new_id("run-")
    neighbours.know(run_id, emails())
    await opened(neighbours, run_id, "people")
    neighbours.answer = lambda item: CallOutcome(call_id=item.call_id, outcome="deferred", wait_ms=20_000, reason="rate_limited")
    await neighbours.send_rows(run_id, "people", [{"domain": f"d{i}"} for i in range(3)])
    await neighbours.until(lambda: len(neighbours.parked) == 3)
    message, row = neighbours.parked[0]
    assert (message.reason, row.waits, row.wait_ms) == ("rate_limited", 1, 20_000)
    await executor.stop()
    neighbours.parked.clear()
    assert not neighbours.rows(run_id, "people")


async def test_pages_for_other_code_are_passed_on_to_who_has_it(neighbours: Any, new_executor: Any, code_of: Any) -> None:
    run_id = new_id("run-")
    neighbours.know(run_id, pure())
    old = code_of("code-0")
    await new_executor(old)
    await opened(neighbours, run_id, "numbers")
    await neighbours.send_rows(run_id, "numbers", [{"n": 4}], code_digest="code-1")
    await asyncio.sleep(0.5)
    assert not neighbours.rows(run_id, "numbers")
    await new_executor(code_of("code-1"))
    await neighbours.until(lambda: neighbours.rows(run_id, "numbers"))
    assert neighbours.values(run_id, "numbers") == [{"twice": 8}]


async def test_rows_whose_code_nobody_has_fail_in_the_end(neighbours: Any, new_executor: Any) -> None:
    run_id = new_id("run-")
    neighbours.know(run_id, pure())
    await new_executor(foreign_code_patience=20.0)
    await opened(neighbours, run_id, "numbers")
    with capture_logs() as logged:
        await neighbours.send_rows(run_id, "numbers", [{"n": 4}, {"n": 5}], code_digest="gone")
        await neighbours.until(lambda: len(neighbours.rows(run_id, "numbers")) == 2)
    assert [(line["run_id"], line["play"]) for line in logged if line["event"] == "waits_for_other_code"] == [(run_id, "pure")], "once, at first"
    assert {row.error.code for row in neighbours.rows(run_id, "numbers").values()} == {"code_changed"}


async def test_keys_are_derived_by_the_authors_function(neighbours: Any, executor: Any) -> None:
    run_id = new_id("run-")
    neighbours.know(run_id, pure())
    await opened(neighbours, run_id, "numbers")
    rows = [msgspec.Raw(msgspec.json.encode({"n": n})) for n in (3, 13, 4)]
    keys = await neighbours.bus.ask(KeyPage(run_id=run_id, dataset="numbers", page=0, first_index=0, rows=rows), EXECUTOR_KEYS, PageKeys)
    assert keys.keys[0] == keys.keys[1] != keys.keys[2]
    broken = [msgspec.Raw(b'{"n":1}'), msgspec.Raw(b'{"m":1}')]
    keys = await neighbours.bus.ask(KeyPage(run_id=run_id, dataset="numbers", page=1, first_index=200, rows=broken), EXECUTOR_KEYS, PageKeys)
    assert (keys.error.code, keys.error.row) == ("key_failed", 201)


async def test_rows_of_a_stopped_run_are_cancelled(neighbours: Any, executor: Any) -> None:
    run_id = new_id("run-")
    neighbours.know(run_id, pure())
    await opened(neighbours, run_id, "numbers")
    await neighbours.bus.publish(Control(run_id=run_id, action="stop"), "", exchange=CONTROL)
    await asyncio.sleep(0.2)
    await neighbours.send_rows(run_id, "numbers", [{"n": 4}])
    await neighbours.until(lambda: neighbours.rows(run_id, "numbers"))
    assert neighbours.rows(run_id, "numbers")[0].status == "cancelled"


async def test_a_lost_connection_in_the_middle_of_a_page_loses_and_doubles_nothing(neighbours: Any, executor: Any) -> None:
    run_id = new_id("run-")
    neighbours.know(run_id, emails())
    await opened(neighbours, run_id, "people")
    neighbours.answer = lambda item: None
    await neighbours.send_rows(run_id, "people", [{"domain": f"d{i}"} for i in range(200)])
    await neighbours.until(lambda: len(neighbours.asked) == 200)
    await executor._bus._sessions.current.connection.close()
    neighbours.answer = found
    await neighbours.until(lambda: len(neighbours.rows(run_id, "people")) == 200)
    await neighbours.until(lambda: executor.ready)
    # Where the cut came after a row was settled and before its page was acknowledged, it is settled again: the same end, under the same attempt.
    ends = {(row.index, row.attempt, row.status, bytes(row.values)) for message in neighbours.settled_messages for row in message.rows}
    assert len(ends) == 200


async def test_a_resolver_that_holds_the_loop_is_named_in_the_log(neighbours: Any, new_executor: Any) -> None:
    def slow(row: Any) -> int:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            pass
        return 1

    @play("holds")
    async def holds(ctx: Context) -> None:
        await ctx.dataset("held", [{"n": 1}]).with_column("slow", slow).run()

    run_id = new_id("run-")
    neighbours.know(run_id, holds)
    with capture_logs() as logs:
        await new_executor(hold_warning=0.2)
        await opened(neighbours, run_id, "held")
        await neighbours.send_rows(run_id, "held", [{"n": 4}])
        await neighbours.until(lambda: neighbours.rows(run_id, "held"))
    told = [line for line in logs if line["event"] == "resolver_holds_loop"]
    assert [line["resolver"] for line in told] == ["column 'slow' of dataset 'held'"]


async def test_all_queues_whose_handlers_run_author_code_share_a_gate(executor: App) -> None:
    """What one of them brings may end the process under another's suspect (docs/adr/0024)."""
    handling = executor._bus._handling_of
    assert len({id(handling.gate(queue)) for queue in (EXECUTOR_KEYS, EXECUTOR_ROWS, EXECUTOR_ADVANCE)}) == 1
