"""What a row costs in admission: CPU per row of staging an input and of feeding it, its neighbours in another process.

Run by hand: ``python tests/bench/admission_micro.py BROKER_URL DATABASE_URL [ROWS]`` with an empty virtual host and database. Prints figures and
asserts nothing. The played neighbours answer at once; neither they nor the servers are part of the figures.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time

import msgspec
import uvloop

from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import new_id
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.settings import ServiceSettings
from rowmill_admission.app import App
from rowmill_admission.settings import AdmissionSettings
from rowmill_contracts import topology
from rowmill_contracts.counts import Counts
from rowmill_contracts.events import RunEvent
from rowmill_contracts.rows import LookedRow, LookupRows, RowsLooked, RowTasks
from rowmill_contracts.runs import (
    AdvanceRun,
    ColumnInfo,
    DatasetOpened,
    InputPage,
    InputSealed,
    OpenDataset,
    ReleaseRun,
    RowsCommitted,
    RunStart,
    RunTaken,
    TakeRun,
    TermAnswer,
)

PAGE = 200


def row(number: int) -> msgspec.Raw:
    """About 200 bytes."""
    fields = {"id": number, "name": f"Person {number}", "domain": f"{number}.example", "notes": "x" * 120, "score": number % 100}
    return msgspec.Raw(msgspec.json.encode(fields))


class Neighbours:
    """A sheet-writer that sends every row, an executor that completes each page at once."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._completed = self._admitted = self._version = 0
        self.ended = asyncio.Event()

    async def join(self) -> None:
        await self._bus.consume(topology.SHEETS_ASKS, self._look_up)
        await self._bus.consume(topology.EXECUTOR_ROWS, self._complete)
        await self._bus.consume(topology.EXECUTOR_ADVANCE, self._advance)
        await self._bus.listen(topology.EVENTS, ["run.completed.#"], self._end)

    async def _look_up(self, delivery: Delivery) -> None:
        assert isinstance(delivery.message, LookupRows)
        self._admitted += len(delivery.message.rows)
        await self._bus.reply(delivery, RowsLooked(rows=[LookedRow(mark="sent")] * len(delivery.message.rows)))

    async def _complete(self, delivery: Delivery) -> None:
        tasks = delivery.message
        assert isinstance(tasks, RowTasks)
        self._completed += len(tasks.rows)
        self._version += 1
        counts = Counts(admitted=self._admitted, completed=self._completed)
        await self._bus.publish(
            RowsCommitted(run_id=tasks.run_id, dataset=tasks.dataset, counts=counts, version=self._version), topology.ADMISSION_COUNTS
        )

    async def _advance(self, delivery: Delivery) -> None:
        assert isinstance(delivery.message, AdvanceRun)
        run_id, lease = delivery.message.run_id, new_id()
        taken = await self._bus.ask(TakeRun(run_id=run_id, lease_id=lease), topology.ADMISSION_ASKS, RunTaken)
        if taken.run is None:
            return
        request = OpenDataset(
            run_id=run_id,
            term=taken.term,
            dataset="leads",
            input_id=taken.run.inputs[0].input_id,
            columns=[ColumnInfo(name="a", version="1")],
            code_digest="c",
            key=["domain"],
        )
        opened = await self._bus.ask(request, topology.ADMISSION_ASKS, DatasetOpened)
        release = ReleaseRun(
            run_id=run_id,
            term=taken.term,
            lease_id=lease,
            outcome="completed" if opened.outcome == "closed" else "waiting",
            waiting_for="dataset:leads",
        )
        await self._bus.ask(release, topology.ADMISSION_ASKS, TermAnswer)

    async def _end(self, delivery: Delivery) -> None:
        assert isinstance(delivery.message, RunEvent)
        self.ended.set()


async def play(rows: int, broker_url: str) -> None:
    """The other process: stages when told to, starts when told to, says when each is done."""
    pages = [[row(number) for number in range(first, min(rows, first + PAGE))] for first in range(0, rows, PAGE)]
    async with Bus(ServiceSettings(broker_url=broker_url), service="neighbours") as bus:
        neighbours = Neighbours(bus)
        await neighbours.join()
        loop = asyncio.get_running_loop()
        print("ready", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        for first in range(0, len(pages), 16):
            window = enumerate(pages[first : first + 16], start=first)
            await asyncio.gather(*(bus.publish(InputPage(input_id="i", page=page, rows=content), topology.INPUTS) for page, content in window))
        await bus.publish(InputSealed(input_id="i", pages=len(pages), rows=rows), topology.INPUTS)
        print("published", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        await bus.publish(RunStart(play="leads", run_id="r", input_ref="i"), topology.RUNS_START)
        await neighbours.ended.wait()
        print("ended", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)


async def measure(rows: int, broker_url: str, database_url: str) -> None:
    app = App(AdmissionSettings(broker_url=broker_url, database_url=database_url, log_level="WARNING"))
    await app.start()
    loop = asyncio.get_running_loop()
    with subprocess.Popen(  # noqa: ASYNC220 - a bench; started once, before anything is measured
        [sys.executable, __file__, "--play", str(rows), broker_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None

        async def step(expected: str) -> None:
            line = await loop.run_in_executor(None, other.stdout.readline)  # type: ignore[union-attr]
            if line.strip() != expected:
                raise RuntimeError(f"the other process said {line!r}, not {expected!r}")

        await step("ready")
        for name, expected in (("staging", "published"), ("feeding", "ended")):
            cpu, started = time.process_time(), time.monotonic()
            other.stdin.write("go\n")
            other.stdin.flush()
            await step(expected)
            if name == "staging":
                await asyncio.sleep(1)  # the last pages
            print(f"{name}: {(time.process_time() - cpu) / rows * 1e6:.1f} us CPU per row, {rows / (time.monotonic() - started):.0f} rows/s")
        other.stdin.write("go\n")
        other.stdin.flush()
    await app.stop()
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB, process {os.getpid()}")


if __name__ == "__main__":
    if sys.argv[1] == "--play":
        uvloop.run(play(int(sys.argv[2]), sys.argv[3]))
    else:
        uvloop.run(measure(int(sys.argv[3]) if len(sys.argv) > 3 else 40_000, sys.argv[1], sys.argv[2]))
