"""Who waits for a run outlasts an outage, also while its rows are read, and says so once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from rowmill.client import patience
from rowmill.client.jobs import Job
from rowmill.errors import AskDied, AskTimeout, UnavailableError
from rowmill.runtime.bus import Bus
from rowmill_contracts.counts import Counts
from rowmill_contracts.rows import ReadRow, ReadRows, RowsRead
from rowmill_contracts.run_questions import DatasetSummary, GetRun, RunShown, RunSummary

COUNTS = Counts(admitted=1, failed=1)
RUN = RunSummary(
    run_id="r1",
    number=1,
    org="default",
    play="leads",
    state="completed",
    counts=COUNTS,
    created_at=1.0,
    output=msgspec.Raw(b"null"),
    datasets=[DatasetSummary(dataset="leads", state="closed", counts=COUNTS)],
)
ROWS = RowsRead(rows=[ReadRow(index=0, key="k", mark="failed", data=msgspec.Raw(b'{"a": 1}'))])


class Answering:
    """A bus that answers as it is told, in turn; an error is raised."""

    def __init__(self, **answers: list[Any]) -> None:
        self._answers: dict[type, Iterator[Any]] = {GetRun: iter(answers["run"]), ReadRows: iter(answers["rows"])}

    async def ask(self, message: Any, key: str, answer: type, *, timeout: float | None = None) -> Any:
        assert isinstance(key, str)
        assert issubclass(answer, RunShown | RowsRead)
        assert timeout is None
        found = next(self._answers[type(message)])
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.0)


def job(bus: Answering, said: list[str]) -> Job:
    return Job(cast("Bus", bus), "r1", said.append)


async def test_a_result_comes_over_two_outages_each_said_once() -> None:
    said: list[str] = []
    away = [AskTimeout("no answer"), UnavailableError("away")]
    result = await job(Answering(run=[*away, RunShown(run=RUN)], rows=[*away, ROWS]), said).result()
    assert [row.data for row in result.failed] == [{"a": 1}]
    assert len(said) == 4
    assert said[0].startswith("no answer from the services for 0 s; the run r1 is stored and goes on as they do; waiting for them")
    assert said[1].startswith("the services answer again, after 0 s")


async def test_a_caller_who_bounds_the_wait_is_heard() -> None:
    waiting = job(Answering(run=[AskTimeout("no answer")] * 100_000, rows=[]), [])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await waiting.wait()


async def test_what_asking_again_does_not_mend_ends_the_wait_and_one_question_is_not_patient() -> None:
    with pytest.raises(AskDied):
        await job(Answering(run=[AskDied("dead")], rows=[]), []).wait()
    with pytest.raises(AskTimeout):
        await job(Answering(run=[AskTimeout("no answer")], rows=[]), []).status()
