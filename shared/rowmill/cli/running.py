"""Carrying out `rowmill run`: start or find what is needed, show progress, write rows, say how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rowmill.cli.connecting import LAG_SECONDS
from rowmill.cli.named_runs import not_compared
from rowmill.cli.outages import watch
from rowmill.cli.progress import Progress, shown
from rowmill.cli.wording import failed_told, hidden_told, kept_budget_told, numbered, other_code_told
from rowmill.client.client import Client, divided_input
from rowmill.client.finding import broker_url
from rowmill.client.jobs import Job
from rowmill.client.loaded_code import ask_code
from rowmill.client.staging import sealed
from rowmill.dev.working_set import missing_services, working_set
from rowmill.errors import UnavailableError
from rowmill.handles import Handle, HandleReference
from rowmill.inputs import Source
from rowmill.outputs import RowWriter
from rowmill.plays import Play
from rowmill.project import Project
from rowmill.runtime.logging import configure
from rowmill_contracts.events import DatasetEvent, RunEvent
from rowmill_contracts.run_questions import DatasetSummary, RunSummary


@dataclass(frozen=True)
class RunRequest:
    """What a person asked for."""

    project: Project
    play: Play[Any, Any]
    given: dict[str, Any]
    options: dict[str, Any]
    out: Path | None = None
    flatten: bool = False
    detach: bool = False
    as_json: bool = False


@dataclass
class RunStatus:
    """How the command ended."""

    completed: bool = False
    failed_rows: int = 0
    interrupted: bool = False
    summary: dict[str, Any] = field(default_factory=dict)


def carry_out(request: RunRequest) -> RunStatus:
    """Run to the end (or detach), with progress on stderr and the summary on stdout."""
    divided_input(request.play, request.given)  # what is wrong with a file is said before anything is started
    settings = request.project.settings
    if request.detach:
        url = broker_url(request.project)
        missing = asyncio.run(missing_services(url, patience=LAG_SECONDS))
        if missing:
            raise UnavailableError(f"--detach needs services that stay; missing: {', '.join(missing)} (`rowmill up` starts services and keeps them)")
        return asyncio.run(_detached(url, request))
    with working_set(request.project.folder, broker_url=settings.broker, database_url=settings.database, report=_say) as found:
        configure("error", "console")  # of an outage a person is told in one line, and stdout is the summary's alone
        return asyncio.run(_followed(found.broker_url, request, fresh=found.private))


async def _detached(broker_url: str, request: RunRequest) -> RunStatus:
    async with Client(broker_url, row_events=False) as client:
        await _meet_named(client, request)
        await _say_other_code(client, request)
        job = await client.start(request.play, input=request.given, **request.options)
    _say_set_aside(request)
    print(json.dumps({"run_id": job.run_id}) if request.as_json else job.run_id)
    return RunStatus(completed=True)


async def _followed(broker_url: str, request: RunRequest, *, fresh: bool) -> RunStatus:
    """``fresh``: the services were started for this command, and have the code that there is."""
    async with Client(broker_url, row_events=False, report=_say) as client:
        await _meet_named(client, request)
        if not fresh:
            await _say_other_code(client, request)
        started = time.monotonic()
        with Progress() as progress:
            job = await client.start(request.play, input=request.given, on_staged=progress.staged, **request.options)
            progress.run_started(job.run_id)
        _say_set_aside(request)
        try:
            status = await _unless_interrupted(_to_its_end(job, progress, request, started))
        except Exception:  # whatever it is, the run is stored, which who reads of the error has to know
            _say(_stored(job.run_id, request))
            raise
        if status is None:
            _say(f"interrupted. {_stored(job.run_id, request)}")
            return RunStatus(interrupted=True)
        return status


async def _meet_named(client: Client, request: RunRequest) -> None:
    """Before anything is staged: a run that exists goes on with what it was started with, so a command that has something else is refused. Its budget
    stays, whatever the command says.
    """
    run_id, budget = request.options.get("run_id"), request.options.get("budget")
    run = None if run_id is None else await Job(client.bus, run_id).status()
    if run is None:
        return
    plain, sources = await asyncio.to_thread(divided_input, request.play, request.given)
    seals = {field: (source.name, await asyncio.to_thread(sealed, source, run.run_id)) for field, source in sources.items()}
    for line in not_compared(
        run, play=request.play.name, plain=plain, seals=seals, limit=request.options.get("limit"), force=request.options.get("force")
    ):
        _say(line)
    kept = None if budget is None else kept_budget_told(run, budget)
    if kept is not None:
        _say(kept)


def _say_set_aside(request: RunRequest) -> None:
    for source in request.given.values():
        if isinstance(source, Source) and source.stats.set_aside:
            _say(f"{numbered(source.stats.set_aside, 'bad record')} of {source.name} set aside")


async def _say_other_code(client: Client, request: RunRequest) -> None:
    """Services load code once, so what was edited since is not what they run."""
    loaded = await ask_code(client.bus, request.play.name)
    line = other_code_told(request.play.name, request.project.code_digest(request.play), loaded)
    if line is not None:
        _say(line)


async def _to_its_end(job: Job, progress: Progress, request: RunRequest, started: float) -> RunStatus:
    with progress:
        summary = await _follow(job, progress)
    if summary.state == "waiting":
        _say(_waiting(summary))
        print(shown(summary, time.monotonic() - started, None, None, as_json=request.as_json))
        return RunStatus()
    failures: Counter[str] = Counter()
    written = None if request.out is None else await _write(job, summary, request, failures)
    columns = {f"{job.run_id}.{name}": source.columns or [] for name, source in request.given.items() if isinstance(source, Source)}
    for line in hidden_told(summary, columns):
        _say(line)
    failed = failed_told(summary, failures)
    if failed is not None:
        _say(failed)
    print(shown(summary, time.monotonic() - started, None if written is None else request.out, written, as_json=request.as_json))
    return RunStatus(completed=summary.state == "completed", failed_rows=summary.counts.failed)


def _stored(run_id: str, request: RunRequest) -> str:
    """What became of a run that its command leaves, and how to come back to it."""
    named = "" if request.options.get("run_id") else f" with `--run-id {run_id}`"
    fetches = "waits for its end and writes its rows" if request.out is not None else "waits for its end"
    return (
        f"The run {run_id} is stored as far as it got; nothing paid for is lost. The same command{named} goes on with it, {fetches}; "
        f"`rowmill up` lets it go on without you"
    )


async def _unless_interrupted(work: Coroutine[Any, Any, RunStatus]) -> RunStatus | None:
    """What comes of the work, or None when the person pressed Ctrl-C."""
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    following = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(interrupted.wait())
    try:
        both: list[asyncio.Future[Any]] = [following, waiting]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return following.result() if following.done() else None
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        for task in (following, waiting):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _follow(job: Job, progress: Progress) -> RunSummary:
    """Until the run is over, or waits for a person."""
    beside = [asyncio.ensure_future(_hear(job, progress)), asyncio.ensure_future(watch(job, progress))]
    try:
        return await job.wait(standing=True)
    finally:
        for task in beside:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _hear(job: Job, progress: Progress) -> None:
    async for event in job.events():
        if isinstance(event, DatasetEvent):
            progress.dataset(event)
        elif isinstance(event, RunEvent):
            progress.run_state(event)


def _waiting(summary: RunSummary) -> str:
    """How to go on with a run that waits for a person."""
    run_id = summary.run_id
    reason = (summary.waiting_for or "").removeprefix("halted:")
    word, _, which = reason.partition(": ")
    kind = which.partition(",")[0].replace(" ", "-")
    then = {
        "budget": f"raise it with `rowmill runs resume {run_id} --budget {'AMOUNT' if kind in {'', 'money'} else kind + '=MORE'}`",
        "payment": f"pay the provider, then `rowmill runs resume {run_id}`",
    }.get(word, f"`rowmill runs resume {run_id}` lets it go on")
    return (
        f"run {run_id} waits for {reason}; what it has is stored, nothing paid for is lost. To go on, {then} "
        f"while `rowmill up` runs; `rowmill runs stop {run_id}` ends it"
    )


async def _write(job: Job, summary: RunSummary, request: RunRequest, failures: Counter[str]) -> int | None:
    """Write the rows of the run's main dataset to the output file; returns how many. None: nothing came of the run, and the file stays as it was.
    ``failures``: rows that failed are counted there by the code of their error.
    """
    dataset = _main_dataset(summary)
    path = request.out
    if dataset is None or path is None:
        _say("the run has no dataset, so there are no rows to write")
        return None
    inputs = next((source.columns for source in request.given.values() if hasattr(source, "encoded_pages")), None)
    rows = (row async for row in job.patient_reader.rows(summary.run_id, dataset.dataset) if row.mark != "skipped")
    row = await anext(rows, None)
    if row is None and summary.state != "completed":
        _say(f"the run has no rows, so {path} {'stays as it was' if path.exists() else 'is not written'}")
        return None
    with RowWriter(path, input_columns=inputs, output_columns=dataset.columns, flatten=request.flatten) as writer:
        while row is not None:
            if row.mark == "failed" and row.error is not None:
                failures[row.error.code] += 1
            writer.write(msgspec.json.decode(row.data), row.mark, None if row.error is None else f"{row.error.code}: {row.error.message}")
            row = await anext(rows, None)
        return writer.rows


def _main_dataset(summary: RunSummary) -> DatasetSummary | None:
    """The dataset that the play's output names first, else the first one it opened."""
    by_name = {dataset.dataset: dataset for dataset in summary.datasets}
    for name in _handles(msgspec.json.decode(summary.output)):
        if name in by_name:
            return by_name[name]
    return summary.datasets[0] if summary.datasets else None


def _handles(output: Any) -> list[str]:
    from rowmill.encoding.values import decode_value  # noqa: PLC0415

    def walk(value: Any) -> list[str]:
        if isinstance(value, Handle | HandleReference):
            return [value.dataset]
        members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return [name for member in members for name in walk(member)]

    return walk(decode_value(output, "output"))


def _say(line: str) -> None:
    print(f"rowmill: {line}", file=sys.stderr)
