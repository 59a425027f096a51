"""What each queue's messages are handed to. Thin: acknowledging, repeating and dead-lettering are the bus's."""

from __future__ import annotations

from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery, Rejected
from rowmill_admission import inputs
from rowmill_admission.batching import Batches
from rowmill_admission.counting import Counting
from rowmill_admission.dying import Burials
from rowmill_admission.halting import Halting
from rowmill_admission.opening import Opening
from rowmill_admission.owed import Postman
from rowmill_admission.parking import Parking
from rowmill_admission.retrying import Retrying
from rowmill_admission.running import Runs
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.staging import Staged, Staging
from rowmill_contracts.envelope import Message
from rowmill_contracts.retries import RunRetry
from rowmill_contracts.run_questions import AskOldestRun, GetRun, ListRuns, PauseRun, ResumeRun
from rowmill_contracts.runs import (
    EventArrived,
    InputPage,
    InputSealed,
    OpenDataset,
    ProviderServes,
    RecordCalls,
    ReleaseRun,
    RenewRun,
    RowsCommitted,
    RowsParked,
    RunStart,
    RunStop,
    TakeRun,
)


class Handlers:
    """One method per queue."""

    def __init__(
        self,
        bus: Bus,
        settings: AdmissionSettings,
        *,
        postman: Postman,
        runs: Runs,
        halting: Halting,
        staging: Staging,
        opening: Opening,
        counting: Counting,
        parking: Parking,
        retrying: Retrying,
        burials: Burials,
    ) -> None:
        self._bus = bus
        self._postman = postman
        self._runs = runs
        self._halting = halting
        self._opening = opening
        self._parking = parking
        self._retrying = retrying
        self._burials = burials
        self._staged: Batches[Staged] = Batches(
            staging.store,
            max_items=settings.input_prefetch,
            max_age=settings.page_gather,
            max_bytes=settings.input_batch_bytes,
            size=_staged_bytes,
        )
        self._counted: Batches[RowsCommitted] = Batches(counting.store, max_items=settings.count_prefetch, max_age=settings.page_gather)

    async def handle_run(self, delivery: Delivery) -> None:
        """``admission.runs.v1``"""
        match delivery.message:
            case RunStart() as start:
                await self._runs.start(start, delivery)
            case RunStop() as stop:
                await self._runs.stop(stop)
            case RunRetry() as retry:
                await self._bus.reply(delivery, await self._retrying.retry(retry, delivery))
            case EventArrived() as event:
                await self._runs.event(event, delivery)
            case other:
                raise unexpected(other)

    async def handle_input(self, delivery: Delivery) -> None:
        """``admission.inputs.v1``"""
        match delivery.message:
            case InputPage() as page:
                await self._staged.handle(inputs.page_of(page.input_id, page.page, page.rows))
            case InputSealed() as seal:
                await self._staged.handle(seal)
            case other:
                raise unexpected(other)

    async def handle_ask(self, delivery: Delivery) -> None:
        """``admission.asks.v1``: every message is answered."""
        answer: Message
        match delivery.message:
            case TakeRun() as request:
                answer = await self._runs.take(request)
            case RenewRun() as request:
                answer = await self._runs.renew(request)
            case RecordCalls() as request:
                answer = await self._runs.record(request)
            case ReleaseRun() as request:
                answer = await self._runs.release(request)
            case OpenDataset() as request:
                answer = await self._opening.open(request)
            case PauseRun() as request:
                answer = await self._halting.pause(request, delivery.message_id)
            case ResumeRun() as request:
                answer = await self._halting.resume(request, delivery.message_id)
            case ListRuns() as request:
                answer = await self._runs.listed(request)
            case AskOldestRun():
                answer = await self._runs.oldest()
            case GetRun() as request:
                answer = await self._runs.shown(request)
            case other:
                raise unexpected(other)
        await self._bus.reply(delivery, answer)

    async def handle_count(self, delivery: Delivery) -> None:
        """``admission.counts.v1``"""
        match delivery.message:
            case RowsCommitted() as committed:
                await self._counted.handle(committed)
                if delivery.deliveries > 1:  # stored before, perhaps; what it called for goes again
                    self._postman.wake([committed.run_id])
            case other:
                raise unexpected(other)

    async def handle_parked(self, delivery: Delivery) -> None:
        """``admission.parked.v1``"""
        match delivery.message:
            case RowsParked() as parked:
                await self._parking.store(parked)
            case ProviderServes() as message:
                await self._parking.provider_serves(message)
            case other:
                raise unexpected(other)

    async def handle_dead(self, delivery: Delivery) -> None:
        """``admission.dead.v1``: a copy of each dead letter; the letter itself stays for the operator."""
        await self._burials.bury(delivery)


def unexpected(message: Message) -> Rejected:
    return Rejected(f"{message.message_type} is not for this queue")


def _staged_bytes(staged: Staged) -> int:
    return len(staged.body) if isinstance(staged, inputs.StoredPage) else 0
