"""That an executor is there, and its leases of steps, kept on the thread of leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.fakes.receipts import MemoryReceipts

from rowmill.errors import AskTimeout, UnavailableError
from rowmill.runtime import asking
from rowmill.runtime.clock import SystemClock
from rowmill_contracts.presences import KeepPresence
from rowmill_contracts.receipts import Claim, ClaimReceipts, LeaseRef, Renew
from rowmill_row_executor.leases import LeaseOwners, LeaseThread
from rowmill_row_executor.presence import Presence

from .conftest import until

RUN = "run-1"


class Owners:
    """`LeaseOwners`: a store in memory. ``deaf``: answers nothing; ``odd``: the next so many answers are errors that nobody foresaw."""

    def __init__(self, store: MemoryReceipts) -> None:
        self.store = store
        self.kept: list[KeepPresence] = []
        self.renewed: list[Renew] = []
        self.deaf = False
        self.odd = 0

    def check(self) -> None:
        if self.odd:
            self.odd -= 1
            raise KeyError("odd")
        if self.deaf:
            raise AskTimeout("no answer")

    async def keep_presence(self, request: KeepPresence) -> Any:
        self.check()
        self.kept.append(request)
        return self.store.answer(request)

    async def renew_receipts(self, request: Renew) -> Any:
        self.check()
        self.renewed.append(request)
        return self.store.answer(request)


@pytest.fixture
async def kept() -> AsyncIterator[tuple[Owners, Presence, LeaseThread]]:
    owners = Owners(MemoryReceipts(lambda: 1_000.0, shard=0.03, held_poll=0.001))

    @asynccontextmanager
    async def opened() -> AsyncIterator[LeaseOwners]:
        yield owners  # type: ignore[misc]

    thread = LeaseThread(opened, SystemClock())
    thread.start()
    yield owners, Presence(thread, SystemClock(), renewal=0.02), thread
    await thread.stop()


def claimed(store: MemoryReceipts, key: str, presence: str) -> LeaseRef:
    claim = Claim(key=key, lease_id=f"lease-{key}", run_id=RUN, tool="step:work", effect="idempotent", started_at=0.0)
    store.answer(ClaimReceipts(holder="me", claims=[claim], confirm=True, presence=presence))
    return LeaseRef(key=key, lease_id=claim.lease_id, run_id=RUN, dispatch=1)


async def test_nothing_is_said_before_the_first_step(kept: Any) -> None:
    owners, presence, _ = kept
    await asyncio.sleep(0.05)
    assert not owners.kept
    name = await presence.present()
    assert await presence.present() == name
    assert len({request.presence for request in owners.kept}) == 1


async def test_a_presence_is_kept_and_steps_are_renewed_while_the_loop_is_held(kept: Any) -> None:
    owners, presence, _ = kept
    lease = claimed(owners.store, "k", await presence.present())
    with presence.keeping(lease, lambda: pytest.fail("it is ours")):
        while len(owners.kept) < 4 or len(owners.renewed) < 3:
            pass  # the loop is held on purpose
    assert owners.renewed[-1].leases == [lease]


async def test_who_lost_a_step_is_told_on_its_own_loop(kept: Any) -> None:
    owners, presence, _ = kept
    lease = claimed(owners.store, "k", await presence.present())
    owners.store.receipts["k"].lease_id = "another's"
    lost = asyncio.Event()
    with presence.keeping(lease, lost.set):
        await asyncio.wait_for(lost.wait(), 10)


async def test_a_presence_that_ended_is_replaced_and_what_nobody_took_is_kept_under_the_new_one(kept: Any) -> None:
    owners, _, thread = kept
    presence = Presence(thread, SystemClock(), renewal=3600)
    first = await presence.present()
    lease = claimed(owners.store, "k", first)
    with presence.keeping(lease, lambda: pytest.fail("it is ours")):
        owners.store.answer(KeepPresence(presence=first, leave=True))
        await until(lambda: owners.store.receipts["k"].presence != first)
    assert await presence.present() == owners.store.receipts["k"].presence
    assert await presence.present(instead_of=first) == await presence.present()


async def test_an_owner_that_does_not_answer_ends_nothing(kept: Any) -> None:
    owners, presence, _ = kept
    lease = claimed(owners.store, "k", await presence.present())
    with presence.keeping(lease, lambda: pytest.fail("it is ours")):
        owners.deaf = True
        await asyncio.sleep(0.05)
        owners.deaf = False
        renewed = len(owners.renewed)
        await until(lambda: len(owners.renewed) > renewed)


async def test_an_error_that_nobody_foresaw_ends_nothing(kept: Any) -> None:
    owners, presence, _ = kept
    owners.odd = 2
    lease = claimed(owners.store, "k", await presence.present())
    with presence.keeping(lease, lambda: pytest.fail("it is ours")):
        owners.odd = 10
        await until(lambda: not owners.odd)
        kept_before, renewed_before = len(owners.kept), len(owners.renewed)
        await until(lambda: len(owners.kept) > kept_before + 1 and len(owners.renewed) > renewed_before + 1)


async def test_a_presence_that_no_owner_survives_is_given_up_by_all_who_wait_for_it_and_can_be_asked_for_again(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "GIVEN_UP_AFTER", 2)
    owners, presence, _ = kept
    owners.odd = 2
    async with asyncio.timeout(20):
        ended = await asyncio.gather(*(presence.present() for _ in range(5)), return_exceptions=True)
    assert {type(error) for error in ended} == {KeyError}
    assert await presence.present()


async def test_a_process_that_stops_leaves(kept: Any) -> None:
    owners, presence, thread = kept
    name = await presence.present()
    await thread.stop()
    assert owners.kept[-1] == KeepPresence(presence=name, leave=True)
    with pytest.raises(UnavailableError):
        await presence.present()
