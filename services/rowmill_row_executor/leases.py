"""Renewing leases of runs while their bodies run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from rowmill.errors import UnavailableError
from rowmill.runtime.clock import Clock
from rowmill_row_executor.bodies import Lease
from rowmill_row_executor.ports import Admission

log = structlog.get_logger()


class RenewingLeases:
    """Renews each lease at a third of its life. An answer that does not come changes nothing: what the body asks for carries its term."""

    def __init__(self, admission: Admission, clock: Clock) -> None:
        self._admission = admission
        self._clock = clock

    @contextmanager
    def keeping(self, lease: Lease, on_lost: Callable[[], None]) -> Iterator[None]:
        task = asyncio.create_task(self._renew(lease, on_lost), name=f"lease of {lease.run_id}")
        try:
            yield
        finally:
            task.cancel()

    async def _renew(self, lease: Lease, on_lost: Callable[[], None]) -> None:
        while True:
            await self._clock.sleep(lease.seconds / 3)
            try:
                answer = await self._admission.renew(lease.run_id, lease.term, lease.lease_id)
            except UnavailableError as error:
                log.warning("lease_not_renewed", run_id=lease.run_id, error=str(error))
                continue
            if not answer.held or answer.stopped:
                on_lost()
                return
