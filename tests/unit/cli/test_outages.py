"""What is said while a run stands still: which provider keeps its rows waiting, once for each change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
from rich.console import Console

from rowmill.cli import outages as cli_outages
from rowmill.cli.outages import AGAIN_SECONDS, News, outage_told, watch
from rowmill.cli.progress import Progress
from rowmill.cli.wording import why_told
from rowmill.client.jobs import Job
from rowmill.client.outages import Outage
from rowmill.errors import UnavailableError
from rowmill_contracts.counts import Counts
from rowmill_contracts.events import DatasetEvent

AWAY = Outage("clearbit", 412, "http_503", 1000.0)


def counted(admitted: int, completed: int) -> DatasetEvent:
    counts = Counts(admitted=admitted, completed=completed)
    return DatasetEvent(event_id="e", run_id="r1", play="leads", dataset="leads", state="progress", counts=counts, at=1.0)


def test_a_line_names_the_provider_why_until_when_and_how_many_rows_wait() -> None:
    clock = time.strftime("%H:%M:%S", time.localtime(1000.0))
    assert outage_told(AWAY) == f"waiting for provider clearbit: answers 503, asked again at {clock}; 412 rows wait"
    assert outage_told(Outage("apollo", 1)) == "waiting for provider apollo: does not serve, asked again now and then; 1 row waits"
    assert [why_told(code) for code in ("connection_failed", "http_429", "full")] == ["cannot be reached", "answers 429", "fails with full"]


def test_the_same_is_said_once_and_what_is_another_reason_or_provider_at_once() -> None:
    news = News()
    other = Outage("apollo", 3, "connection_failed", None)
    assert news.of([AWAY], 0.0) == [AWAY]
    assert news.of([Outage("clearbit", 400, "http_503", 1000.5)], 2.0) == [], "fewer rows, and a time that was on its way, are no change"
    assert news.of([AWAY, other], 4.0) == [other]
    refused = Outage("clearbit", 412, "connection_failed", 1000.0)
    assert news.of([refused, other], 6.0) == [refused]
    assert news.of([Outage("clearbit", 412, "", 1000.0), other], 8.0) == [], "the lane's next gateway has yet to see why"


def test_that_it_is_asked_again_later_is_said_after_a_while_and_an_outage_that_was_over_anew() -> None:
    news = News()
    later = Outage("clearbit", 412, "http_503", 1030.0)
    assert news.of([AWAY], 0.0) == [AWAY]
    assert news.of([later], AGAIN_SECONDS - 1) == []
    assert news.of([AWAY], AGAIN_SECONDS) == [], "nothing changed since it was said"
    assert news.of([later], AGAIN_SECONDS) == [later]
    assert news.of([], AGAIN_SECONDS + 1) == []
    assert news.of([later], AGAIN_SECONDS + 2) == [later]


def test_without_a_terminal_each_change_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    for _ in range(3):
        progress.waits_for([AWAY])
    assert capsys.readouterr().err.splitlines() == [f"rowmill: {outage_told(AWAY)}"]


def test_at_a_terminal_it_stands_below_the_counts_until_they_move() -> None:
    progress = Progress()
    progress._live = cast("Any", type("Live", (), {"update": lambda _self, _table: None})())
    progress.dataset(counted(5, 1))
    progress.waits_for([AWAY])
    assert outage_told(AWAY) in shown(progress)
    progress.dataset(counted(5, 1))
    assert outage_told(AWAY) in shown(progress), "no row has ended since"
    progress.dataset(counted(5, 2))
    assert "waiting for provider" not in shown(progress)


def shown(progress: Progress) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(progress._table())
    return captured.get()


def test_counts_stand_still_from_the_last_row_on_that_was_admitted_or_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress()
    for at, event in ((1.0, counted(5, 0)), (2.0, counted(6, 0)), (3.0, counted(6, 1))):
        now = at
        progress.dataset(event)
        assert not progress.stands_still(0.5)
    now = 4.0
    progress.dataset(counted(6, 1))
    assert progress.stands_still(1.0)
    assert not progress.stands_still(1.5)


class Still:
    """Counts that stand still when they are told to."""

    def __init__(self) -> None:
        self.still = False
        self.shown: list[Sequence[Outage]] = []

    def stands_still(self, seconds: float) -> bool:
        assert seconds == cli_outages.LOOK_SECONDS
        return self.still

    def waits_for(self, outages: Sequence[Outage]) -> None:
        self.shown.append(outages)


ERRORS = [UnavailableError("nobody answers"), ConnectionResetError("the broker went away"), ValueError("whatever it is")]


class Answering:
    """A run whose outages are asked for: errors are raised, and come first."""

    def __init__(self) -> None:
        self.asked = 0

    async def outages(self) -> list[Outage]:
        self.asked += 1
        if self.asked <= len(ERRORS):
            raise ERRORS[self.asked - 1]
        return [AWAY]


async def test_nobody_is_asked_while_rows_end_and_who_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_outages, "LOOK_SECONDS", 0.001)
    display, job = Still(), Answering()
    watching = asyncio.ensure_future(watch(cast("Job", job), display))
    await asyncio.sleep(0.05)
    assert job.asked == 0
    display.still = True
    async with asyncio.timeout(10):
        while not display.shown:
            await asyncio.sleep(0.001)
    watching.cancel()
    assert display.shown[0] == [AWAY]
    assert job.asked > len(ERRORS)
