"""`Client`: start runs and follow them, from scripts, services and notebooks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from rowmill.budgets import BudgetLike, budget_of
from rowmill.client import finding
from rowmill.client.jobs import Event, Job
from rowmill.client.named_plays import refuse_rows
from rowmill.client.patience import Report
from rowmill.client.staging import Staged, stage
from rowmill.encoding.values import encode_value
from rowmill.errors import UsageError
from rowmill.inputs import Source, check_columns, open_source
from rowmill.names import LONGEST_ID, input_id_of
from rowmill.rows import row_model_of
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import new_id
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.events import DatasetEvent, RowsCompleted, RowsFailed, RunEvent
from rowmill_contracts.run_questions import ListRuns, RunsListed, RunSummary
from rowmill_contracts.runs import Force, Mode, RunOptions, RunStart
from rowmill_contracts.topology import ADMISSION_ASKS, EVENTS, RUNS_START

if TYPE_CHECKING:
    from rowmill.plays import Play

CONNECT_SECONDS = 10.0


class Client:
    """A connection to rowmill's services. Use ``async with Client() as client``.

    The broker's address is ``broker_url``, else ``ROWMILL_BROKER_URL``, else what the `rowmill.toml` of this folder or one above says, else that
    of the project's own servers, as `rowmill up` runs them (in no project the one that services take by themselves); nothing is started. With
    ``row_events`` false, jobs hear of runs and datasets only, not of rows. ``report`` is told in a line when nobody answers a job that is waited
    for, and when somebody does again.

    Raises:
        UnavailableError: no address is given or configured, this is a project, and its own servers do not run.

    """

    def __init__(self, broker_url: str | None = None, *, row_events: bool = True, report: Report | None = None) -> None:
        self.bus = Bus(ServiceSettings(broker_url=broker_url or finding.client_broker_url()), service="client")
        self._row_events = row_events
        self._report = report
        self._jobs: dict[str, Job] = {}
        self._heard_plays: set[str] = set()

    async def __aenter__(self) -> Self:
        """Raises UnavailableError if no broker answers within 10 seconds."""
        await self.bus.start(wait=CONNECT_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.bus.stop()

    async def start(
        self,
        play: Play[Any, Any] | str,
        *,
        input: dict[str, Any] | None = None,  # noqa: A002 - the word that authors know
        run_id: str | None = None,
        limit: int | None = None,
        budget: BudgetLike | None = None,
        force: Force | None = None,
        mode: Mode | None = None,
        concurrency: int | None = None,
        org: str | None = None,
        on_staged: Callable[[int], None] | None = None,
        **fields: Any,
    ) -> Job:
        """Stage what must be staged, start a run, and return its job.

        ``fields`` and ``input`` fill the play's input; a field of type ``Rows`` takes a list, an iterator, a frame, an Arrow stream, a path, or an
        opened `Source`, where the play itself is given and not its name. A field named like an option goes into ``input``. Starting again with the
        same ``run_id`` is the same run.
        ``budget``: money, or a mapping with limits of money, calls, retries and wall_time, of which the first that is spent lets the run wait.

        Raises:
            UsageError: a field is unknown or not storable, or takes rows of a play that is only named, or ``run_id`` is too long. InputError: a
                source is unusable. Nothing was started then.

        """
        if run_id is not None and (len(run_id) > LONGEST_ID or "\x00" in run_id):
            raise UsageError(f"run_id {run_id[:40]!r}... is not allowed: it has at most {LONGEST_ID} characters, and no NUL")
        given = {**(input or {}), **fields}
        plain, sources = await asyncio.to_thread(divided_input, play, given)
        run_id = run_id or new_id("run-")
        job = await self._attend(play if isinstance(play, str) else play.name, run_id)
        staged: dict[str, Staged] = {}
        for field, source in sources.items():
            staged[field] = await stage(self.bus, source, input_id_of(run_id, f".{field}"), on_progress=on_staged)
        message = RunStart(
            play=play if isinstance(play, str) else play.name,
            run_id=run_id,
            input=plain,
            input_ref={field: item.input_id for field, item in staged.items()} or None,
            options=RunOptions(
                force=force,
                mode=mode,
                concurrency=concurrency,
                limit=limit,
                budget=budget_of(budget),
            ),
            org=org,
        )
        await self.bus.publish(message, RUNS_START, message_id=run_id)
        return job

    async def job(self, run_id: str) -> Job:
        """A run that was started elsewhere or earlier; its events are heard from now on."""
        job = Job(self.bus, run_id, self._report)
        summary = await job.status()
        if summary is not None:
            return await self._attend(summary.play, run_id)
        return job

    async def runs(self, *, play: str | None = None, limit: int = 50) -> list[RunSummary]:
        """The newest runs, newest first."""
        return (await self.bus.ask(ListRuns(play=play, limit=limit), ADMISSION_ASKS, RunsListed)).runs

    async def _attend(self, play: str, run_id: str) -> Job:
        job = self._jobs.setdefault(run_id, Job(self.bus, run_id, self._report))
        if play not in self._heard_plays:
            self._heard_plays.add(play)
            keys = [f"run.*.{play}", f"dataset.*.{play}.*"]
            if self._row_events:
                keys.append(f"rows.*.{play}.*")
            await self.bus.listen(EVENTS, keys, self._heard)
        return job

    async def _heard(self, delivery: Delivery) -> None:
        message = delivery.message
        if isinstance(message, RunEvent | DatasetEvent | RowsCompleted | RowsFailed):
            event: Event = message
            job = self._jobs.get(event.run_id)
            if job is not None:
                job.hear(event)


def divided_input(play: Play[Any, Any] | str, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Source]]:
    """Plain values of the input, and the sources to stage: checked whole (files are read through), before anything is started or staged.

    Raises:
        UsageError: a field is unknown, missing or not storable, or takes rows of a play that is only named. InputError: a source is unusable.

    """
    if isinstance(play, str):
        refuse_rows(play, given)
        return {name: encode_value(value, name) for name, value in given.items()}, {}
    sources = {name: value if isinstance(value, Source) else open_source(value) for name, value in given.items() if name in play.rows_fields}
    plain = {name: encode_value(value, name) for name, value in given.items() if name not in sources}
    play.read_input(plain, dict.fromkeys(sources, "not staged yet"))
    unknown = sorted(set(given) - set(play.input_model.model_fields))
    if unknown:
        known = ", ".join(play.input_model.model_fields) or "none"
        raise UsageError(f"play {play.name!r} has no input field {', '.join(map(repr, unknown))}; it has: {known}")
    for name, source in sources.items():
        check_columns(source, row_model_of(play.input_model, name))
        source.check()
    return plain, sources
