"""The workloads of the bench, each through the public surface: a CSV staged, a run started, its last row committed."""

from __future__ import annotations

import asyncio
import csv
import itertools
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rig import HERE, Measurement, Rig, Usage

from rowmill.client import Client
from rowmill.plays import Play
from rowmill.runtime.clock import new_id
from rowmill_contracts.events import RowsCompleted
from rowmill_contracts.runs import RunStart
from rowmill_contracts.topology import EVENTS, RUNS_START

IN_FLIGHT = 100
PACED_RATE = 200
"""Requests a second that the provider of W9 allows."""
QUIET_SECONDS = 120.0
_numbers = itertools.count(1)


@dataclass
class Sample:
    """One measured run. ``problems`` say what was not as it must be (they are printed, and fail the bench's exit status)."""

    rows: int
    usage: Usage
    problems: list[str]
    staged_seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.rows / self.usage.seconds


def new_prefix() -> str:
    """Domains begin with it, so that nothing of an earlier run answers for this one."""
    return f"d{next(_numbers)}"


def write_rows(path: Path, prefix: str, rows: int) -> Path:
    """A CSV of rows of about 200 bytes."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "name", "domain", "city", "score", "note"])
        for number in range(rows):
            writer.writerow([number, f"Person Number {number}", f"{prefix}-{number}.example", "Utrecht", number % 100, "n" * 110])
    return path


async def run_play(rig: Rig, play: Play[Any, Any], path: Path, rows: int, *, requests: int | None) -> Sample:
    """Stage, start, wait for the end; ``requests``: how many the provider may be asked at most."""
    async with Client(rig.broker_url, row_events=False) as client:
        measurement = Measurement(rig)
        async with measurement as usage:
            began = time.perf_counter()
            job = await client.start(play, leads=str(path))
            staged = time.perf_counter() - began
            summary = await job.wait()
    problems = []
    counts = summary.counts
    if summary.state != "completed" or counts.completed + counts.reused < rows:
        problems.append(f"the run is {summary.state} with {counts}: {summary.error}")
    asked = sum(usage.provider["requests"].values())
    if requests is not None and asked > requests:
        problems.append(f"the provider was asked {asked} times, {requests} would do")
    if usage.provider["repeated_subjects"]:
        problems.append(f"{usage.provider['repeated_subjects']} items were paid a second time")
    return Sample(rows, usage, problems, staged)


async def latencies(rig: Rig, times: int) -> list[float]:
    """Seconds from a `RunStart` of one row to its `RowsCompleted`, one run after the other, the system idle between."""
    found = []
    async with Client(rig.broker_url) as client:
        arrived: dict[str, asyncio.Future[float]] = {}

        async def heard(delivery: Any) -> None:
            message = delivery.message
            if isinstance(message, RowsCompleted) and message.run_id in arrived and not arrived[message.run_id].done():
                arrived[message.run_id].set_result(time.perf_counter())

        await client.bus.listen(EVENTS, ["rows.completed.scalar.*"], heard)
        for number in range(times):
            run_id = new_id("run-")
            arrived[run_id] = asyncio.get_running_loop().create_future()
            row = {"name": "Person", "domain": f"{new_prefix()}-{number}.example"}
            message = RunStart(play="scalar", run_id=run_id, input={}, rows=json_rows([row]))
            await asyncio.sleep(0.1)
            began = time.perf_counter()
            await client.bus.publish(message, RUNS_START, message_id=run_id)
            found.append(await asyncio.wait_for(arrived[run_id], QUIET_SECONDS) - began)
    return found


def json_rows(rows: list[dict[str, Any]]) -> Any:
    import msgspec  # noqa: PLC0415 - for this alone

    return [msgspec.Raw(json.dumps(row).encode()) for row in rows]


def peer(script: str, *arguments: str) -> dict[str, float]:
    """Run a peer in a process of its own."""
    done = subprocess.run([sys.executable, str(HERE / script), *arguments], check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result
