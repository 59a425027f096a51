"""Why each request beyond the first of its item was made: by what the provider saw, who was killed when, and every step of every receipt."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import asyncpg
from tests.e2e.chaos.kills import Kill
from tests.e2e.chaos.provider import Arrival

from rowmill.encoding.receipts import idempotency_key

RECORD = """
DROP FUNCTION IF EXISTS public.note_step CASCADE;
DROP TABLE IF EXISTS public.receipt_steps;
CREATE TABLE public.receipt_steps (
    number bigserial PRIMARY KEY, key bytea NOT NULL, at double precision NOT NULL, state text NOT NULL, dispatch integer NOT NULL,
    lease_id text NOT NULL, holder text NOT NULL
);
CREATE FUNCTION public.note_step() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.receipt_steps (key, at, state, dispatch, lease_id, holder)
    VALUES (NEW.key, extract(epoch FROM clock_timestamp()), NEW.state, NEW.dispatch, NEW.lease_id, NEW.holder);
    RETURN NULL;
END $$;
CREATE TRIGGER note_step AFTER INSERT OR UPDATE ON receipts.receipts FOR EACH ROW EXECUTE FUNCTION public.note_step();
"""
"""Has the database note every step of every receipt."""


@dataclass(frozen=True)
class Step:
    """A receipt after a change. ``at``: seconds since the epoch, before the commit."""

    at: float
    state: str
    dispatch: int
    lease_id: str
    holder: str


@dataclass
class Dispatch:
    """One confirmed dispatch of a receipt: from its confirmation to what ended it (None: nothing did)."""

    number: int
    confirmed: Step
    ended: Step | None = None
    requests: list[Arrival] = field(default_factory=list)

    @property
    def taken_over(self) -> bool:
        return self.ended is not None and self.ended.lease_id != self.confirmed.lease_id

    @property
    def succeeded(self) -> bool:
        return self.ended is not None and self.ended.state == "completed"


@dataclass
class Explained:
    """``requests``: those beyond the first of their item, by reason. ``unsent``: dispatches that no request came of, by reason."""

    requests: Counter[str] = field(default_factory=Counter)
    unsent: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def record_steps(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(RECORD)
    finally:
        await connection.close()


async def steps_by_key(database_url: str) -> dict[str, list[Step]]:
    """All steps in their order, by the idempotency key that the provider is sent."""
    connection = await asyncpg.connect(database_url)
    try:
        rows = await connection.fetch("SELECT key, at, state, dispatch, lease_id, holder FROM public.receipt_steps ORDER BY number")
    finally:
        await connection.close()
    found: dict[str, list[Step]] = defaultdict(list)
    for row in rows:
        found[idempotency_key(row["key"].hex())].append(Step(row["at"], row["state"], row["dispatch"], row["lease_id"], row["holder"]))
    return found


def dispatches(steps: Sequence[Step]) -> list[Dispatch]:
    """The dispatches of one receipt, in their order."""
    found: list[Dispatch] = []
    for step in steps:
        if step.state == "running" and (not found or step.dispatch > found[-1].number):
            if found and found[-1].ended is None:
                found[-1].ended = step
            found.append(Dispatch(step.dispatch, step))
        elif found and found[-1].ended is None and (step.state != "running" or step.lease_id != found[-1].confirmed.lease_id):
            found[-1].ended = step
    return found


def explain(steps: dict[str, list[Step]], trace: Sequence[Arrival], kills: Sequence[Kill]) -> Explained:
    """Match each arrival with the dispatch that it belongs to, and say of each dispatch that brought nothing why another had to follow."""
    died = {holder: kill.at for kill in kills for holder in kill.holders}
    stores = [kill.at for kill in kills if kill.service == "receipt-store"]
    result = Explained()
    by_key: dict[str, list[Arrival]] = defaultdict(list)
    for arrival in sorted(trace, key=lambda each: each.at):
        by_key[arrival.key].append(arrival)
    for key in by_key.keys() - steps.keys():
        result.wrong.append(f"{by_key[key]} were asked without a receipt")
    for key, taken in steps.items():
        of_key = dispatches(taken)
        begins = [each.confirmed.at for each in of_key]
        for arrival in by_key[key]:
            place = bisect_right(begins, arrival.at)
            if place == 0:
                result.wrong.append(f"{arrival} came before any dispatch of it was confirmed")
            else:
                of_key[place - 1].requests.append(arrival)
        _judge(of_key, died, stores, result)
    return result


def _judge(of_key: Sequence[Dispatch], died: dict[str, float], stores: Sequence[float], result: Explained) -> None:
    """All but the last dispatch of a receipt gave no output: for a reason, where a request came of it. Without a request nothing was paid for."""
    asked = [dispatch for dispatch in of_key if dispatch.requests]
    for dispatch in of_key:
        reason = _why_fruitless(dispatch, died, stores)
        if len(dispatch.requests) > 1:
            result.wrong.append(f"one dispatch, several requests: {dispatch}")
        elif not dispatch.requests:
            result.unsent[reason or "its gateway did not hear of it in time"] += 1
        elif reason is None and dispatch is not of_key[-1]:
            result.wrong.append(f"nothing explains what became of {dispatch}, one of {len(of_key)}")
        elif reason is not None and dispatch is not asked[-1]:
            result.requests[reason] += 1


def _why_fruitless(dispatch: Dispatch, died: dict[str, float], stores: Sequence[float]) -> str | None:
    """Why this dispatch gave no output; None: it did, or there is no reason that we know."""
    if dispatch.succeeded:
        return None
    if any(arrival.dropped for arrival in dispatch.requests):
        return "answer dropped"
    if dispatch.ended is not None and dispatch.ended.state == "released" and not dispatch.taken_over and not dispatch.requests:
        return "given back unsent"
    ended_at = float("inf") if dispatch.ended is None else dispatch.ended.at
    if died.get(dispatch.confirmed.holder, float("inf")) <= ended_at:
        return "gateway killed"
    if any(dispatch.confirmed.at <= at <= ended_at for at in stores):
        return "receipt-store killed"
    return None
