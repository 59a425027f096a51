"""Admission, wired: the only place that builds its bus, its database and what stands on them."""

from __future__ import annotations

from typing import ClassVar

from rowmill.runtime import deadlines
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.db import Database
from rowmill_admission.charges import Charges
from rowmill_admission.counting import Counting
from rowmill_admission.datasets import Dataset
from rowmill_admission.dying import Burials
from rowmill_admission.feeder import FeederTools
from rowmill_admission.feeders import Feeders
from rowmill_admission.halting import Halting
from rowmill_admission.handlers import Handlers
from rowmill_admission.opening import Opening
from rowmill_admission.owed import Postman
from rowmill_admission.parking import Parking
from rowmill_admission.progress import ProgressTeller
from rowmill_admission.public import consume_public
from rowmill_admission.releasing import Releasing
from rowmill_admission.repair import Repair
from rowmill_admission.retrying import Retrying
from rowmill_admission.room_desk import RoomDesk
from rowmill_admission.rooms import RoomLimits, Rooms
from rowmill_admission.running import Runs
from rowmill_admission.sending import PageSender
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.staging import Staging
from rowmill_contracts import topology


class App:
    """Owns runs, datasets, inputs and waits. Several instances share the work."""

    name: ClassVar[str] = "admission"

    def __init__(self, settings: AdmissionSettings | None = None) -> None:
        self._settings = settings or AdmissionSettings()
        self._clock = SystemClock()
        self._bus = Bus(self._settings, service=self.name)
        self._parts: _Parts | None = None

    async def start(self) -> None:
        database = await Database.connect(
            self._settings.database_url, schema="admission", size=self._settings.database_connections, clock=self._clock
        )
        database.report_to(self._bus.outages.noting("the database"))
        await database.migrate("rowmill_admission")
        await self._bus.start()
        self._parts = parts = _Parts(self._settings, self._bus, database, self._clock)
        parts.feeders.start()
        parts.releasing.start()
        parts.repair.start()
        settings, bus, handlers = self._settings, self._bus, parts.handlers
        stored, commands = deadlines.stored(settings), deadlines.commands(settings, halt_timeout=settings.halt_timeout)
        await bus.consume(topology.ADMISSION_ASKS, handlers.handle_ask, prefetch=settings.ask_prefetch, deadline=commands)
        await bus.consume(topology.ADMISSION_COUNTS, handlers.handle_count, prefetch=settings.count_prefetch, deadline=stored)
        await bus.consume(topology.ADMISSION_PARKED, handlers.handle_parked, prefetch=settings.parked_prefetch, deadline=stored)
        await consume_public(bus, settings, handlers)

    async def stop(self) -> None:
        """Feeders hand over, messages in hand are finished; what is owed and not confirmed is sent at the next start."""
        if self._parts is None:
            await self._bus.stop()
            return
        await self._parts.stop_loops()
        await self._bus.stop()
        await self._parts.close()

    @property
    def ready(self) -> bool:
        return self._parts is not None and self._bus.ready and self._parts.database.reachable


class _Parts:
    """What one instance is made of."""

    def __init__(self, settings: AdmissionSettings, bus: Bus, database: Database, clock: SystemClock) -> None:
        self.database = database
        charges = Charges(database, bus, clock, settings)
        self.postman = Postman(database, bus, charges.booked)
        rooms = Rooms(RoomLimits(settings.room_rows, settings.room_bytes))
        self.desk = RoomDesk(rooms, database, clock, poll=settings.room_poll, back_for=settings.back_for)
        sender = PageSender(bus, clock, settings)
        tools = FeederTools(database, bus, sender, self.desk, self.postman, settings)
        self.feeders = Feeders(tools, bus.process_id)
        self.progress = ProgressTeller(database, bus, clock, charges, interval=settings.progress_interval)
        staging = Staging(database, self.postman, self.feeders.inputs_ended)
        counting = Counting(database, self.postman, self._counted)
        self.releasing = Releasing(database, bus, sender, self.desk, clock, settings)
        self.repair = Repair(database, bus, self.postman, settings, staging=staging, counting=counting, releasing=self.releasing)
        runs = Runs(database, self.postman, charges, settings, self.feeders.run_stopped)
        self.handlers = Handlers(
            bus,
            settings,
            postman=self.postman,
            runs=runs,
            halting=Halting(database, self.postman, runs, charges, settings, self._resumed),
            staging=staging,
            opening=Opening(database, self.postman, settings, self._opened),
            counting=counting,
            parking=Parking(database, self.postman, self.desk, settings, self.releasing.nudge),
            retrying=Retrying(database, bus, self.postman, runs, settings, self._resumed),
            burials=Burials(database, bus, self.postman, staging),
        )

    def _counted(self, dataset: Dataset) -> None:
        self.feeders.changed(dataset)
        self.progress.changed(dataset)

    def _resumed(self, run_id: str) -> None:
        self.releasing.nudge()
        self.feeders.run_stood(run_id)

    async def _opened(self, run_id: str) -> None:
        self.releasing.nudge()
        await self.feeders.take(run_id=run_id)

    async def stop_loops(self) -> None:
        await self.repair.stop()
        await self.releasing.stop()
        await self.feeders.stop()
        await self.progress.stop()

    async def close(self) -> None:
        await self.postman.stop()
        await self.desk.stop()
        await self.database.close()
