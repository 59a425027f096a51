"""Asking what runs were charged, of a receipt-store that is silent."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from rowmill.errors import AskTimeout, UnavailableError
from rowmill_admission.charges import Charges
from rowmill_admission.settings import AdmissionSettings
from rowmill_contracts.charges import AskCharges, ChargesTold, RunCharges
from rowmill_contracts.events import RunEvent

RUNS = ["r"]
TOLD = {"r": RunCharges(run_id="r")}


class Books:
    """A receipt-store that answers when it is told to; and the clock."""

    def __init__(self) -> None:
        self.time = 0.0
        self.asked: list[asyncio.Future[None]] = []

    def monotonic(self) -> float:
        return self.time

    async def ask(self, question: AskCharges, *_: object, timeout: float | None) -> ChargesTold:
        self.asked.append(asyncio.get_running_loop().create_future())
        await self.asked[-1]
        return ChargesTold(runs=[RunCharges(run_id=run_id) for run_id in question.run_ids])

    async def silent(self, charges: Charges) -> None:
        """Somebody asks, and is not answered."""
        asking = asyncio.create_task(charges.at_once(RUNS))
        await asyncio.sleep(0)
        self.asked[-1].set_exception(AskTimeout("no answer"))
        assert await asking is None


async def test_after_a_silence_one_at_a_time_finds_out_whether_it_is_over() -> None:
    books, settings = Books(), AdmissionSettings()
    charges = Charges(cast("Any", None), cast("Any", books), cast("Any", books), settings)
    await books.silent(charges)
    assert await charges.at_once(RUNS) is None
    assert len(books.asked) == 1, "nobody waits for it now"

    books.time += settings.charges_pause
    await books.silent(charges)
    books.time += settings.charges_pause
    first = asyncio.create_task(charges.at_once(RUNS))
    await asyncio.sleep(0)
    assert await charges.at_once(RUNS) is None
    assert len(books.asked) == 3, "one finds out"
    books.asked[-1].set_result(None)
    assert await first == TOLD

    together = [asyncio.create_task(charges.at_once(RUNS)) for _ in range(2)]
    await asyncio.sleep(0)
    for asked in books.asked[3:]:
        asked.set_result(None)
    assert [await each for each in together] == [TOLD, TOLD]


def ended(run_id: str) -> RunEvent:
    return RunEvent(event_id=run_id, run_id=run_id, play="play", state="completed")


async def test_runs_that_end_together_are_asked_for_together_one_question_at_a_time() -> None:
    """While the receipt-store is away each of many would leave questions of its own in the queue of the leases."""
    books = Books()
    charges = Charges(cast("Any", None), cast("Any", books), cast("Any", books), AdmissionSettings())
    events = [asyncio.create_task(charges.booked(ended(f"r{number}"))) for number in range(50)]
    await asyncio.sleep(0.01)
    for number in range(2):  # the first one's, and that of all who came while it was under way
        assert len(books.asked) == number + 1
        books.asked[number].set_exception(AskTimeout("no answer"))
        await asyncio.sleep(0.01)
    assert len(books.asked) == 2
    assert all(isinstance(error, AskTimeout) for error in await asyncio.gather(*events, return_exceptions=True))

    first = asyncio.create_task(charges.booked(ended("a")))
    await asyncio.sleep(0.01)
    later = [asyncio.create_task(charges.booked(ended(run_id))) for run_id in "bcd"]
    await asyncio.sleep(0.01)
    assert len(books.asked) == 3, "who comes while it is under way waits for the next"
    books.asked[2].set_result(None)
    assert (await first).run_id == "a"
    await asyncio.sleep(0.01)
    assert len(books.asked) == 4
    first = asyncio.create_task(charges.booked(ended("e")))
    await asyncio.sleep(0.01)
    later[0].cancel()  # it had asked for all three
    await asyncio.sleep(0.01)
    assert [type(error) for error in await asyncio.gather(*later[1:], return_exceptions=True)] == [UnavailableError] * 2
    assert len(books.asked) == 5
    books.asked[4].set_result(None)
    assert (await first).run_id == "e"
