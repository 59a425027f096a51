"""What one row costs the executor: two pure columns, without a broker. Prints microseconds of CPU per row; asserts nothing.

python tests/bench/executor_micro.py [--rows 40000] [--profile [--calls]]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import msgspec
import uvloop
from pydantic import BaseModel

from rowmill import HttpTool, Provider, RowContext
from rowmill.datasets import DatasetBuilder, DatasetProgram
from rowmill.handles import Handle
from rowmill.paged_handle import PagedHandle
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.hosting import GC_THRESHOLDS
from rowmill_contracts.envelope import Message, decode, encode
from rowmill_contracts.rows import RowTask, RowTasks
from rowmill_contracts.tools import CallOutcome, ToolCalls, ToolResults
from rowmill_row_executor.calls import BusCallDesk
from rowmill_row_executor.in_memory import MemorySettler, MemorySheets, MemoryStepReceipts
from rowmill_row_executor.ports import Asker, DatasetOfRun
from rowmill_row_executor.row_runner import Lane, RowRunner
from rowmill_row_executor.row_work import RowWork
from rowmill_row_executor.settings import RowExecutorSettings
from rowmill_row_executor.settling import BusSettler, PageTicket
from rowmill_row_executor.step_runner import StepRunner


class Lead(BaseModel):
    domain: str
    name: str


class EncodingBus:
    """Encodes what is published, as the bus does, and drops it."""

    def __init__(self) -> None:
        self.bytes = 0

    async def publish(self, message: Message, key: str) -> None:
        del key
        self.bytes += len(encode(message))


class FindIn(BaseModel):
    domain: str


class FindOut(BaseModel):
    email: str | None = None


class AnsweringBus(EncodingBus):
    """Answers calls as a gateway would, on the next turn of the loop; what the executor encodes and decodes for it is done."""

    reply_to = "here"

    def __init__(self) -> None:
        super().__init__()
        self._answered: Callable[[Any], None] | None = None

    async def publish(self, message: Message, key: str, *, reply_to: str | None = None) -> None:
        await super().publish(message, key)
        if isinstance(message, ToolCalls):
            raw = msgspec.Raw(b'{"raw":{"email":"someone@example.com"},"meta":{},"job_id":null}')
            results = [CallOutcome(call_id=call.call_id, outcome="completed", result=raw, receipt="abc") for call in message.calls]
            body = encode(ToolResults(results=results))
            asyncio.get_running_loop().call_soon(lambda: self._answered and self._answered(decode("ToolResults.v1", body)))

    def on_reply(self, message: type[Any], callback: Callable[[Any], None]) -> None:
        self._answered = callback

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        del callback


class NoDriver:
    async def run_dataset(self, program: DatasetProgram) -> Handle:
        raise AssertionError(program)


def calling_program() -> DatasetProgram:
    hunter = Provider("hunter", base_url="http://127.0.0.1:1")

    @hunter.post("/find", effect="read")
    class Find(HttpTool[FindIn, FindOut]):
        extract: ClassVar[dict[str, list[str]]] = {"email": ["email"]}

    async def email(row: Lead, ctx: RowContext) -> Any:
        return (await ctx.call(Find, FindIn(domain=row.domain))).get("email")

    return DatasetBuilder("bench", [], NoDriver(), row=Lead).with_column("email", email).program(key="domain")


def program_of(*, model: bool, asynchronous: bool) -> DatasetProgram:
    async def shout(row: Lead) -> str:
        return row.name.upper()

    builder = DatasetBuilder("bench", [], NoDriver(), row=Lead if model else None)
    first = shout if asynchronous else (lambda row: row["name"].upper())
    return builder.with_column("upper", first).with_column("size", lambda row: len(row["upper"])).program(key="domain")


def page(number: int) -> bytes:
    rows = [
        RowTask(
            key=f"{number * 200 + i:064x}",
            index=number * 200 + i,
            page=number,
            data=msgspec.Raw(
                msgspec.json.encode(
                    {"id": i, "name": f"person {i}", "domain": f"d{number}-{i}.example", "city": "Utrecht", "note": "x" * 80, "score": 12.5}
                )
            ),
        )
        for i in range(200)
    ]
    return encode(RowTasks(run_id="run", number=1, org="default", play="bench", dataset="bench", started_at=0, code_digest="c", rows=rows))


async def work(program: DatasetProgram, pages: list[bytes]) -> float:
    settler = MemorySettler()
    sheets = MemorySheets(settler)
    clock = SystemClock()
    bus = AnsweringBus()
    runner = RowRunner(BusSettler(bus, page_gather=0.005), clock, rows_at_once=10_000, row_timeout=3600, loop_slice=0.005)
    with ThreadPoolExecutor(1) as threads:
        desk = BusCallDesk(bus, RowExecutorSettings(), clock)
        row_work = RowWork(
            program,
            Asker("run", "default", "bench", 0),
            desk,
            clock,
            make_handle=lambda run_id, dataset: PagedHandle(run_id, dataset, sheets),
            threads=threads,
            steps=StepRunner(MemoryStepReceipts(clock.now), clock, threads, hold=5, patience=12, again=5, body_limit=600, row_limit=3600),
        )
        of = DatasetOfRun("run", 1, "default", "bench", "bench")
        lane = Lane(of, row_work, None)
        runner.start()
        started = time.process_time()
        for start in range(0, len(pages), 10):
            await asyncio.gather(*(handle(runner, lane, body) for body in pages[start : start + 10]))
        spent = time.process_time() - started
        await runner.stop()
    return spent


async def handle(runner: RowRunner, lane: Lane, body: bytes) -> None:
    message = decode("RowTasks.v1", body)
    assert isinstance(message, RowTasks)
    ticket = PageTicket(len(message.rows))
    runner.submit(lane, message.rows, ticket)
    await ticket.wait()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=40_000)
    arguments.add_argument("--profile", action="store_true")
    arguments.add_argument("--calls", action="store_true", help="profile the rows that call")
    given = arguments.parse_args()
    pages = [page(number) for number in range(given.rows // 200)]
    calling = calling_program()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)  # as in a service
    for name, program in {
        "dict rows, two columns": program_of(model=False, asynchronous=False),
        "model rows, two columns": program_of(model=True, asynchronous=False),
        "model rows, one column async": program_of(model=True, asynchronous=True),
        "model rows, one call": calling,
    }.items():
        spent = min(uvloop.run(work(program, pages)) for _ in range(3))
        print(f"{name:32} {spent / given.rows * 1e6:6.1f} µs CPU per row")
    if given.profile:
        profiler = cProfile.Profile()
        profiler.runcall(asyncio.run, work(calling if given.calls else program_of(model=True, asynchronous=False), pages))
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
