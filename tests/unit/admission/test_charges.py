"""Asking what runs were charged, of a receipt-store that is silent."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from rowmill.errors import AskTimeout
from rowmill_admission.charges import Charges
from rowmill_admission.settings import AdmissionSettings
from rowmill_contracts.charges import AskCharges, ChargesTold, RunCharges

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
