"""Parked rows: kept while they wait. What ends their waiting is `releasing`."""

from __future__ import annotations

from collections.abc import Callable

from rowmill.runtime.db import Connection, Database
from rowmill_admission import halting, waits
from rowmill_admission.owed import Postman
from rowmill_admission.room_desk import RoomDesk
from rowmill_admission.settings import AdmissionSettings
from rowmill_admission.store import datasets as dataset_store
from rowmill_admission.store import runs as run_store
from rowmill_admission.store import waits as wait_store
from rowmill_contracts.runs import ProviderServes, RowsParked


class Parking:
    """``on_parked``: called when rows were stored, after the commit."""

    def __init__(self, database: Database, postman: Postman, desk: RoomDesk, settings: AdmissionSettings, on_parked: Callable[[], None]) -> None:
        self._database = database
        self._postman = postman
        self._desk = desk
        self._settings = settings
        self._on_parked = on_parked

    async def store(self, parked: RowsParked) -> None:
        """Keep rows while they wait. ``halted`` rows have no due time, and their run waits with them until it is resumed or stopped."""

        async def work(connection: Connection) -> list[str]:
            dataset = await dataset_store.by_name(connection, parked.run_id, parked.dataset)
            if dataset is None or dataset.state != "open":
                return []
            rows = waits.newest(parked.rows)
            if not parked.halted:
                await wait_store.add(connection, dataset.dataset_seq, rows, parked.reason)
                return []
            run = await run_store.lock(connection, parked.run_id)
            goes_on = run is not None and run.halt_reason is None and not run.stopped
            if goes_on and await run_store.resumed_within(connection, parked.run_id, self._settings.halt_grace):
                await wait_store.add(connection, dataset.dataset_seq, waits.soon(rows), parked.reason)
                return []
            await wait_store.add(connection, dataset.dataset_seq, rows, parked.reason, halted=True)
            return [] if run is None else await halting.halt_run(connection, run, parked.reason)

        self._postman.wake(await self._database.transact(work))
        self._on_parked()

    async def provider_serves(self, message: ProviderServes) -> None:
        """Let the rows that wait for a provider come back now at the rate that it allows: of each run the oldest first, and before any new one, but
        where it merely has nothing to do (``sooner``).
        """
        changed = await wait_store.provider_serves(self._database, message.org, message.provider, waits.turns_of(message))
        if not message.sooner:
            await self._desk.look()
        if changed:
            self._on_parked()
