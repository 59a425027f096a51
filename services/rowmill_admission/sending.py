"""One page's way to the executors: its keys, its record at the sheet-writer, its rows published. The same for the first time and for again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import structlog

from rowmill.errors import KeyPartMissing, UnavailableError, ValueNotStorable
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import Clock, backoff, new_id
from rowmill_admission.page_cutting import CutPage
from rowmill_admission.row_keys import keys_of
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.store.feeding import Fed
from rowmill_contracts.counts import Problem
from rowmill_contracts.envelope import PAGE_BYTES
from rowmill_contracts.row_keys import KeyPage, PageKeys
from rowmill_contracts.rows import LookedRow, LookupRow, LookupRows, RowsLooked, RowTask, RowTasks
from rowmill_contracts.topology import EXECUTOR_KEYS, EXECUTOR_ROWS, SHEETS_ASKS

log = structlog.get_logger()

AnswerT = TypeVar("AnswerT")

NEVER_SENT = frozenset({"duplicate", "reused", "skipped"})
"""Marks of rows that no executor was asked for; every other mark is, or was, ``sent``."""


class PageFailed(Exception):
    """A page cannot be admitted, and with it the dataset: a row has no key, or the page cannot be looked up."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class KeyedPage:
    """A page with its rows' keys (32 bytes each) and the places of rows whose key was met before."""

    cut: CutPage
    keys: list[bytes]
    duplicates: frozenset[int] | set[int] = frozenset()
    digests: bytes = b""


@dataclass(frozen=True, slots=True)
class Return:
    """How a row comes back from waiting: how often it has waited, and when its call was first asked for."""

    waits: int
    attempt: int = 1
    asked: float | None = None


@dataclass(frozen=True, slots=True)
class LookedPage:
    """A page with the sheet-writer's answer. ``admitted`` and ``sent`` are the same however often it is asked."""

    keyed: KeyedPage
    looked: list[LookedRow]
    admitted: int
    sent: int

    @property
    def sent_bytes(self) -> int:
        """Of the rows that were sent, by the page's mean row."""
        return self.keyed.cut.size * self.sent // max(1, len(self.looked))


class PageSender:
    """Asks and publishes for any dataset of this process."""

    def __init__(self, bus: Bus, clock: Clock, settings: AdmissionSettings) -> None:
        self._bus = bus
        self._clock = clock
        self._settings = settings

    async def keys(self, fed: Fed, page: CutPage) -> list[bytes]:
        """The keys of a page's rows.

        Raises:
            PageFailed: a row has none; says which and why.

        """
        definition = fed.standing.dataset.definition
        if definition.key_function:
            return await self._asked_keys(fed, page)
        try:
            return keys_of(page.rows, page.place.index, definition)
        except (KeyPartMissing, ValueNotStorable) as error:
            raise PageFailed(Problem(code=error.code, message=f"dataset {definition.dataset!r}: {error}")) from error
        except ValueError as error:  # not decodable as a JSON object after all (a lone surrogate)
            raise PageFailed(Problem(code="input", message=f"page {page.place.page} of dataset {definition.dataset!r}: {error}")) from error

    async def _asked_keys(self, fed: Fed, page: CutPage) -> list[bytes]:
        dataset = fed.standing.dataset
        request = KeyPage(run_id=dataset.run_id, dataset=dataset.dataset, page=page.place.page, first_index=page.place.index, rows=page.rows)
        asked = new_id()  # one question, however often it is asked: what ends executors is found out by its deaths, which are counted by message
        patience, again = self._settings.keys_timeout, self._settings.keys_again
        answer = await self.persist(lambda: self._bus.ask(request, EXECUTOR_KEYS, PageKeys, timeout=patience, again=again, request_id=asked))
        if answer.error is not None:
            raise PageFailed(answer.error)
        if len(answer.keys) != len(page.rows):
            raise PageFailed(Problem(code="definition", message=f"{len(page.rows)} rows were answered with {len(answer.keys)} keys"))
        return [bytes.fromhex(key) for key in answer.keys]

    async def look_up(self, fed: Fed, page: KeyedPage) -> LookedPage:
        """Have the page's record written, or read where it is.

        Raises:
            PageFailed: the sheet-writer cannot.

        """
        dataset = fed.standing.dataset
        first = page.cut.place.index
        duplicates = page.duplicates
        request = LookupRows(
            run_id=dataset.run_id,
            number=fed.number,
            org=fed.org,
            play=fed.play,
            dataset=dataset.dataset,
            page=page.cut.place.page,
            started_at=fed.started_at,
            columns=dataset.definition.columns,
            rows=[
                LookupRow(key=key.hex(), index=first + place, duplicate=place in duplicates, data=data)
                for place, (key, data) in enumerate(zip(page.keys, page.cut.rows, strict=True))
            ],
            force=fed.options.force,
            mode=fed.options.mode or dataset.definition.mode,
        )
        answer = await self.persist(lambda: self._bus.ask(request, SHEETS_ASKS, RowsLooked))
        if answer.error is not None:
            raise PageFailed(answer.error)
        if len(answer.rows) != len(page.keys):
            raise PageFailed(
                Problem(code="accounting", message=f"page {request.page}: {len(page.keys)} rows were looked up, {len(answer.rows)} answered")
            )
        skipped = sum(row.mark == "skipped" for row in answer.rows)
        never = sum(row.mark in NEVER_SENT for row in answer.rows)
        return LookedPage(page, answer.rows, admitted=len(answer.rows) - skipped, sent=len(answer.rows) - never)

    async def publish(self, fed: Fed, page: LookedPage, returning: Mapping[int, Return] | None = None) -> None:
        """Publish the rows whose mark is still ``sent``: all of them, or (``returning``, by place in the page) those that come back from waiting."""
        await asyncio.gather(*(self._bus.publish(tasks, EXECUTOR_ROWS) for tasks in _tasks(fed, page, returning)))

    async def persist(self, ask: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Ask for as long as it takes; the feeder ends it when its lease is lost."""
        failures = 0
        while True:
            try:
                return await ask()
            except UnavailableError as error:
                failures += 1
                log.warning("feeder_waits", error=str(error), failures=failures)
                await self._clock.sleep(backoff(failures, first=0.2, limit=5.0))


def _tasks(fed: Fed, page: LookedPage, returning: Mapping[int, Return] | None) -> Iterator[RowTasks]:
    """Messages of about 1 MiB at most, cells that the sheet knows included."""
    number, first = page.keyed.cut.place.page, page.keyed.cut.place.index
    rows: list[RowTask] = []
    size = 0
    for place, (key, data, looked) in enumerate(zip(page.keyed.keys, page.keyed.cut.rows, page.looked, strict=True)):
        if looked.mark != "sent":
            continue
        back = _FIRST if returning is None else returning.get(place)
        if back is None:
            continue
        length = memoryview(data).nbytes + memoryview(looked.known).nbytes
        if rows and size + length > PAGE_BYTES:
            yield _message(fed, rows)
            rows, size = [], 0
        size += length
        rows.append(
            RowTask(
                key=key.hex(),
                index=first + place,
                page=number,
                attempt=back.attempt,
                waits=back.waits,
                data=data,
                known=looked.known,
                asked=back.asked if (back.asked or 0.0) > fed.resumed_at else None,  # while the run stood nobody asked its provider
            )
        )
    if rows:
        yield _message(fed, rows)


_FIRST = Return(waits=0)


def _message(fed: Fed, rows: list[RowTask]) -> RowTasks:
    dataset = fed.standing.dataset
    return RowTasks(
        run_id=dataset.run_id,
        number=fed.number,
        org=fed.org,
        play=fed.play,
        dataset=dataset.dataset,
        started_at=fed.started_at,
        code_digest=dataset.definition.code_digest,
        rows=rows,
        force=fed.options.force,
    )
