"""Capture: the column program of a dataset, found by replaying the run's body read-only up to the wanted ``.run()``.

Calls on record answer, any other never returns. Once per run, dataset and process.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rowmill.datasets import DatasetProgram
from rowmill.errors import RowmillError
from rowmill.plays import Play
from rowmill.said import said_by
from rowmill_contracts.runs import RunOptions, RunRecord
from rowmill_row_executor.bodies import World, begin, drop, until_it_stands


class CaptureFailed(RowmillError):
    """The replayed body does not come to the dataset whose rows are to be run."""

    code = "capture_failed"


@dataclass(frozen=True, slots=True)
class Captured:
    """A dataset's program and the options of its run."""

    program: DatasetProgram
    options: RunOptions


async def capture(
    world: World, play: Play[Any, Any], run: RunRecord, dataset: str, code_digest: str, *, timeout: float, drop_patience: float
) -> Captured:
    """The program of that dataset in that run.

    Raises:
        CaptureFailed: the body ends, or stands still, before it.
        NonDeterministicPlay, InputInvalid, UnavailableError: as when the body is run.

    """
    ctx, body = begin(world, play, run, term=0, code_digest=code_digest, wanted=dataset)
    calls = ctx.calls
    try:
        async with asyncio.timeout(timeout):
            await until_it_stands(ctx, body)
        if ctx.datasets.captured is not None:
            return Captured(ctx.datasets.captured, run.options)
        if calls.outage is not None:
            raise calls.outage
        if calls.fatal is not None:
            raise calls.fatal
        where = f"play {run.play!r} does not come to dataset {dataset!r}"
        if not body.done():
            raise CaptureFailed(f"{where}: it waits for something that is not on record")
        error = None if body.cancelled() else body.exception()
        raise CaptureFailed(f"{where}: it ended" if error is None else f"{where}: {type(error).__name__}: {said_by(error)}") from error
    except TimeoutError as error:
        raise CaptureFailed(f"play {run.play!r} does not come to dataset {dataset!r} within {timeout:g} s") from error
    finally:
        await drop(ctx, body, drop_patience)


class Programs:
    """Captured programs of this process, the least recently used dropped first. Pages of a dataset that arrive together capture it once."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._known: OrderedDict[tuple[str, str], asyncio.Future[Captured]] = OrderedDict()

    async def get(self, run_id: str, dataset: str, make: Callable[[], Coroutine[Any, Any, Captured]]) -> Captured:
        """What ``make`` gave for this dataset. A failure is not kept."""
        key = (run_id, dataset)
        making = self._known.get(key)
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = self._known[key] = asyncio.ensure_future(make())
            while len(self._known) > self._kept:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return await asyncio.shield(making)
