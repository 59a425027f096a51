"""`run`: start a run and wait for its result, without a loop of one's own."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rowmill.client.client import Client
from rowmill.client.jobs import RunResult
from rowmill.client.named_plays import refuse_rows
from rowmill.dev.working_set import working_set
from rowmill.handles import Handle, PageReader
from rowmill.paged_handle import PagedHandle
from rowmill.project import Project

if TYPE_CHECKING:
    from rowmill.plays import Play


def run(play: Play[Any, Any] | str, **options: Any) -> RunResult:
    """Run a play to its end and return the result.

    Uses the services that run, else starts a private set for as long as it takes. Works inside a running loop too (it blocks that thread).
    Handles in the output are read before it returns: they answer from memory.

    ``options`` are the fields of the play's input, and those of `Client.start`:

    - a field of type ``Rows``, such as ``leads=``: a list, an iterator, a frame, an Arrow stream, or a file's path (where the play itself is given,
      not its name); any other field: its value;
    - ``input``: fields by name in a dict, as for those that are named like an option;
    - ``run_id``: the run's name; the same name is the same run, which is waited for and not started again;
    - ``limit``: work the first so many rows only;
    - ``budget``: money such as ``Decimal("5.00")``, or ``{"money": "5.00", "calls": 1000, "retries": 50, "wall_time": "1h"}``. Once one is spent the
      run waits, and this function with it, until somebody raises it (``rowmill runs resume``) or stops the run;
    - ``force``: ``"tools"`` makes calls again that stored outputs would serve, ``"steps"`` computes steps again, ``"all"`` does both, ``"failed"``
      works only rows that failed or are new;
    - ``mode``: ``"net_new"`` works only rows that the sheet has not completed, ``"all"`` (the default) looks at every row; a dataset may say
      otherwise;
    - ``concurrency``: rows in flight at most, where the dataset does not say; ``org``: whose run it is; ``on_staged``: told how many rows are staged.

    Raises:
        RunFailed: the run failed or was cancelled. Rows that failed do not raise: see ``counts.failed`` and ``failed`` of the result.
        UsageError: a field or option is not known, or its value cannot be stored. InputError: a source is unusable. Nothing was started then.

    """
    outcome: list[RunResult] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(_run(play, options))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="rowmill run")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def _run(play: Play[Any, Any] | str, options: dict[str, Any]) -> RunResult:
    if isinstance(play, str):  # said before servers and services are started
        options_of_start = inspect.signature(Client.start).parameters
        refuse_rows(play, {**(options.get("input") or {}), **{name: value for name, value in options.items() if name not in options_of_start}})
    project = Project.find(_folder_of(play))
    with working_set(project.folder, broker_url=project.settings.broker, database_url=project.settings.database, report=_report) as found:
        return asyncio.run(_started_and_awaited(found.broker_url, play, options))


async def _started_and_awaited(broker_url: str, play: Play[Any, Any] | str, options: dict[str, Any]) -> RunResult:
    async with Client(broker_url, row_events=False, report=_report) as client:
        job = await client.start(play, **options)
        result = await job.result()
        return dataclasses.replace(result, output=await _in_memory(result.output, job.patient_reader))


async def _in_memory(value: Any, reader: PageReader) -> Any:
    """The same output with every handle's rows read, since nothing may be running when they are asked for."""
    if isinstance(value, Handle):
        if not isinstance(value, PagedHandle):
            return value
        rows = MemoryPages([row async for row in PagedHandle(value.run_id, value.dataset, reader).stored()])
        return PagedHandle(value.run_id, value.dataset, rows)
    if isinstance(value, dict):
        return {key: await _in_memory(item, reader) for key, item in value.items()}
    if isinstance(value, list):
        return [await _in_memory(item, reader) for item in value]
    return value


class MemoryPages:
    """Rows that were read already, as a handle's `PageReader`."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    async def read_page(self, run_id: str, dataset: str, page_number: int, size: int) -> list[dict[str, Any]]:  # noqa: ARG002 - the port's form
        return self._rows[page_number * size : (page_number + 1) * size]

    async def count(self, run_id: str, dataset: str) -> int:  # noqa: ARG002 - the port's form
        return len(self._rows)


def _folder_of(play: Play[Any, Any] | str) -> Path:
    """Where the play's module is, so that a script finds its project whatever folder it is called from."""
    module = None if isinstance(play, str) else sys.modules.get(play.module)
    file = getattr(module, "__file__", None)
    return Path(file).parent if file else Path(os.curdir).resolve()


def _report(line: str) -> None:
    print(f"rowmill: {line}", file=sys.stderr)  # noqa: T201 - tells a person at a terminal what is being started
