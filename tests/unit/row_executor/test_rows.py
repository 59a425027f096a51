"""Rows: columns in order, cells reused, errors isolated, calls made, rows parked."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel
from structlog.testing import capture_logs
from tests.unit.row_executor.leads import RUN, Tools, dataset, found, meta, settled

from rowmill import RowContext, column
from rowmill.datasets import DatasetBuilder
from rowmill.errors import AskTimeout, Cancelled, Suspended, UnavailableError
from rowmill_contracts.tools import CallItem, CallOutcome
from rowmill_row_executor.endings import NeighbourAway


class Lead(BaseModel):
    domain: str
    size: int | None = None


async def test_columns_run_in_order_and_see_earlier_ones(bench: Any) -> None:
    program = dataset(full=lambda row: f"{row['a']}-{row['b']}", size=lambda row: len(row["full"])).program()
    await bench.run_rows(program, [{"a": "x", "b": "y"}, {"a": "longer", "b": ""}])
    assert bench.settler.values(RUN, "leads") == [{"full": "x-y", "size": 3}, {"full": "longer-", "size": 7}]
    assert [row.status for row in settled(bench)] == ["completed", "completed"]


async def test_what_a_resolver_read_is_kept_with_its_cell(bench: Any) -> None:
    program = dataset(one=lambda row: row["a"], none=lambda row: 1, every=lambda row: len([*row]), chained=lambda row: row["one"]).program()
    await bench.run_rows(program, [{"a": "x", "b": "y"}])
    reads = {name: cell.get("reads") for name, cell in meta(settled(bench)[0]).items()}
    assert reads == {"one": ["a"], "none": None, "every": "*", "chained": ["one"]}


async def test_an_error_fails_its_row_at_its_column_and_no_other_row(bench: Any) -> None:
    program = dataset(fine=lambda row: row["n"], half=lambda row: 10 // row["n"], after=lambda row: row["half"]).program()
    await bench.run_rows(program, [{"n": 5}, {"n": 0}, {"n": 2}])
    assert bench.settler.values(RUN, "leads") == [{"fine": 5, "half": 2, "after": 2}, {"fine": 0, "half": None}, {"fine": 2, "half": 5, "after": 5}]
    failed = settled(bench)[1]
    assert failed.status == "failed"
    assert (failed.error.code, failed.error.column, failed.error.row) == ("resolver_failed", "half", 1)
    assert "ZeroDivisionError" in failed.error.message
    cell = meta(failed)["half"]
    assert (cell["status"], cell["reads"], cell["error"]["column"]) == ("failed", ["n"], "half")


async def test_a_row_that_does_not_fit_its_model_fails_naming_the_field(bench: Any) -> None:
    builder = DatasetBuilder("leads", [], None, row=Lead).with_column("d", lambda row: row.domain)  # type: ignore[arg-type]
    await bench.run_rows(builder.program(), [{"domain": "a", "size": "huge"}, {"domain": "b"}])
    first, second = settled(bench)
    assert (first.status, first.error.code) == ("failed", "row_invalid")
    assert "size" in first.error.message
    assert second.status == "completed"


async def test_a_column_whose_condition_is_false_is_skipped_with_its_else_value(bench: Any) -> None:
    program = dataset(big={"resolver": lambda row: "big", "run_if": lambda row: row["n"] > 5, "else_value": "small"}).program()
    await bench.run_rows(program, [{"n": 9}, {"n": 1}])
    assert bench.settler.values(RUN, "leads") == [{"big": "big"}, {"big": "small"}]
    assert [meta(row)["big"]["status"] for row in settled(bench)] == ["completed", "skipped"]


async def test_columns_with_an_underscore_are_not_kept(bench: Any) -> None:
    program = dataset(_raw=lambda row: row["n"] * 2, twice=lambda row: row["_raw"]).program()
    await bench.run_rows(program, [{"n": 3}])
    assert bench.settler.values(RUN, "leads") == [{"twice": 6}]
    assert list(meta(settled(bench)[0])) == ["twice"]


async def test_an_output_named_like_an_input_column_is_said(bench: Any) -> None:
    with capture_logs() as logs:
        await bench.run_rows(dataset(n=lambda row: 1, _n=lambda row: 1).program(), [{"n": 3, "_n": 4}, {"n": 4}, {"m": 3}])
    assert [row.shadows for row in settled(bench)] == [True, True, False]
    assert [entry for entry in logs if entry["event"] == "input_columns_hidden"] == [
        {"event": "input_columns_hidden", "log_level": "warning", "dataset": "leads", "columns": ["n"]}
    ]


async def test_a_value_that_json_cannot_carry_fails_its_row_naming_the_column(bench: Any) -> None:
    program = dataset(odd=lambda row: object() if row["n"] else Decimal("1.10")).program()
    await bench.run_rows(program, [{"n": 1}, {"n": 0}])
    first, second = settled(bench)
    assert (first.status, first.error.code) == ("failed", "value_not_storable")
    assert "'odd'" in first.error.message
    assert msgspec.json.decode(second.values) == {"odd": {"$rowmill": "decimal", "v": "1.10"}}


@pytest.mark.parametrize(("excess", "status"), [(-1, "completed"), (0, "completed"), (1, "failed")])
async def test_a_row_may_have_exactly_one_mebibyte(bench: Any, excess: int, status: str) -> None:
    length = 1024 * 1024 - len(b'{"n":1}') - len(b'{"text":""}') + excess
    await bench.run_rows(dataset(text=lambda row: "x" * length).program(), [{"n": 1}])
    row = settled(bench)[0]
    assert row.status == status
    if status == "failed":
        assert (row.error.code, row.error.column) == ("row_too_large", "text")
        assert bytes(row.values) == b'{"text":null}'


async def test_a_later_column_cannot_change_what_an_earlier_one_gave(bench: Any) -> None:
    program = dataset(items=lambda row: [1], spoils=lambda row: row["items"].append(2)).program()
    await bench.run_rows(program, [{"n": 1}])
    assert bench.settler.values(RUN, "leads") == [{"items": [1], "spoils": None}]


# ---- reuse ------------------------------------------------------------------------------------------------------------------------------


def cell(value: Any, *, reusable: bool = True, **facts: Any) -> dict[str, Any]:
    return {"value": value, "meta": {"status": "completed", "version": "v", **facts}, "reusable": reusable}


async def test_a_reusable_cell_is_taken_over_without_calling_its_resolver(bench: Any) -> None:
    called = []
    program = dataset(a=lambda row: called.append("a"), b=lambda row: f"{row['a']}!").program()
    await bench.run_rows(program, [{"n": 1}], known={0: {"a": cell("kept", completed_at=5.0, reads=["n"])}})
    assert bench.settler.values(RUN, "leads") == [{"a": "kept", "b": "kept!"}]
    assert meta(settled(bench)[0])["a"] == {"status": "cached", "version": "v", "completed_at": 5.0, "reads": ["n"]}
    assert not called


async def test_a_cell_is_not_reused_when_a_column_that_it_read_came_out_otherwise(bench: Any) -> None:
    program = dataset(a=lambda row: row["n"], b=lambda row: f"new {row['a']}", c=lambda row: "new").program()
    known = {"a": cell(0, reusable=False), "b": cell("old", reads=["a"]), "c": cell("old", reads=["n"])}
    await bench.run_rows(program, [{"n": 0}, {"n": 1}], known={0: known, 1: known})
    assert bench.settler.values(RUN, "leads") == [{"a": 0, "b": "old", "c": "old"}, {"a": 1, "b": "new 1", "c": "old"}]


# ---- calls ------------------------------------------------------------------------------------------------------------------------------


async def test_a_dataset_in_a_resolver_is_refused_with_advice(bench: Any) -> None:
    await bench.run_rows(dataset(a=lambda row, ctx: ctx.dataset("b", [])).program(), [{"n": 1}])
    assert settled(bench)[0].error.code == "definition"
    assert "play's body" in settled(bench)[0].error.message


# ---- how rows are run -------------------------------------------------------------------------------------------------------------------


async def test_blocking_resolvers_run_in_threads_with_context_variables(bench: Any) -> None:
    here = ContextVar("here", default="unset")
    here.set("kept")

    @column(blocking=True)
    def blocking(row: Any) -> list[Any]:
        return [threading.current_thread().name, here.get()]

    await bench.run_rows(dataset(where=blocking).program(), [{"n": 1}])
    thread, seen = bench.settler.values(RUN, "leads")[0]["where"]
    assert thread != threading.main_thread().name
    assert seen == "kept"


async def test_concurrency_bounds_the_rows_that_wait_at_once(bench: Any, tools: Tools) -> None:
    under_way = highest = 0

    async def answer(item: CallItem) -> CallOutcome:
        nonlocal under_way, highest
        under_way += 1
        highest = max(highest, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return found("x")(item)

    bench.answer = answer
    program = dataset(e=lambda row, ctx: ctx.call(tools.find, {"domain": row["d"]})).program()
    await bench.run_rows(program, [{"d": str(i)} for i in range(50)], concurrency=4)
    assert highest == 4
    assert len(settled(bench)) == 50


async def test_a_row_that_waits_although_earlier_ones_did_not_is_run_whole(bench: Any, tools: Tools) -> None:
    async def sometimes(row: Any, ctx: RowContext) -> str:
        async with asyncio.timeout(10):
            if row["n"] < 500:
                return "at once"
            await ctx.call(tools.find, {"domain": "a"})
            return "waited"

    bench.answer = found("x")
    await bench.run_rows(dataset(s=sometimes).program(), [{"n": n} for n in range(600)])
    values = [row["s"] for row in bench.settler.values(RUN, "leads")]
    assert values == ["at once"] * 500 + ["waited"] * 100


async def test_whatever_a_resolver_raises_is_its_rows_error(bench: Any) -> None:
    def raises(row: Any) -> None:
        raise {"exit": SystemExit(2), "cancelled": asyncio.CancelledError(), "odd": BaseException("odd")}[row["kind"]]

    await bench.run_rows(dataset(r=raises).program(), [{"kind": "exit"}, {"kind": "cancelled"}, {"kind": "odd"}])
    assert [row.status for row in settled(bench)] == ["failed"] * 3


@pytest.mark.parametrize("ending", [GeneratorExit, Suspended, Cancelled])
@pytest.mark.parametrize("later", [False, True])
async def test_a_row_whose_code_raises_what_the_engine_ends_rows_with_fails_and_ends_no_other(
    bench: Any, ending: type[BaseException], later: bool
) -> None:
    def raises(row: Any) -> int:
        if row["n"] == 1:
            raise ending
        return 7

    async def raises_later(row: Any) -> int:
        await asyncio.sleep(0)
        return raises(row)

    async with asyncio.timeout(20):
        await bench.run_rows(dataset(r=raises_later if later else raises).program(), [{"n": n} for n in range(3)])
    assert [row.status for row in settled(bench)] == ["completed", "failed", "completed"]


async def test_an_error_message_that_cannot_travel_is_made_to(bench: Any) -> None:
    def raises(row: Any) -> None:
        raise ValueError("nul \x00 and surrogate \ud800")

    await bench.run_rows(dataset(r=raises).program(), [{"n": 1}])
    message = settled(bench)[0].error.message
    assert message.encode()
    assert "\x00" not in message


async def test_an_error_that_cannot_be_put_in_words_fails_its_row(bench: Any) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise LookupError("no words")

    def raises(row: Any) -> None:
        raise Unspeakable

    await bench.run_rows(dataset(r=raises).program(), [{"n": 1}])
    assert "its str() raised LookupError" in settled(bench)[0].error.message


async def test_rows_of_a_stopped_run_that_were_not_begun_are_cancelled(bench: Any) -> None:
    called = []
    runner = bench.runner()
    runner.stop_run(RUN)
    bench.runner = lambda: runner
    await bench.run_rows(dataset(a=lambda row: called.append(1)).program(), [{"n": 1}, {"n": 2}])
    assert [row.status for row in settled(bench)] == ["cancelled", "cancelled"]
    assert not called


async def test_rows_that_cannot_be_read_back_now_have_the_page_worked_again(bench: Any) -> None:
    async def reads(row: Any) -> int:
        return len(await row["handle"].peek(1))

    async def silent(run_id: str, dataset: str, page_number: int, size: int) -> list[Any]:
        raise NeighbourAway("no answer")

    bench.sheets.read_page = silent
    with pytest.raises(NeighbourAway):
        await bench.run_rows(dataset(r=reads).program(), [{"handle": {"$handle": {"run_id": "r", "dataset": "d"}}}])
    assert (RUN, "leads") not in bench.settler.settled


@pytest.mark.parametrize("error", [UnavailableError, AskTimeout])
async def test_an_outage_that_author_code_reports_is_its_rows_error(bench: Any, error: type[Exception]) -> None:
    def asks_another(row: Any) -> None:
        raise error("the CRM is down")

    await bench.run_rows(dataset(r=asks_another).program(), [{"n": 1}])
    assert settled(bench)[0].error.message == "the CRM is down"
