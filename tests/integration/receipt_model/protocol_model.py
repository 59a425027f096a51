"""What must hold of receipts whatever happens, kept apart from how the store does it: a ledger of what callers were told, and looks into the tables.

It predicts nothing. It says which answers and which tables are wrong, given what callers were told before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import asyncpg

QUEUED, RUNNING, SHARD = 10.0, 60.0, 6.0


@dataclass(eq=False)
class Told:
    """A lease that its holder was told it has, and believes in until ``until`` at least. ``dispatch`` 0: not confirmed. ``outcome``: the request by
    which its holder has given its outcome.
    """

    key: bytes
    lease_id: str
    run: str
    holder: str
    shard: int | None
    term: int | None
    cost: Decimal
    until: float = 0.0
    dispatch: int = 0
    outcome: Any = None


@dataclass
class KeyLedger:
    """One key's past. ``settled``: dispatches of which an outcome was reported, or an operator decided. ``unsent``: those that nobody sent.
    ``paid``: those whose cost was reported. ``under``: the dispatches of each lease, whether or not its holder has heard of them.
    """

    effect: str
    told: dict[str, Told] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    unsent: set[int] = field(default_factory=set)
    paid: set[int] = field(default_factory=set)
    under: dict[str, set[int]] = field(default_factory=dict)
    failed_in: set[str] = field(default_factory=set)
    outputs: dict[int, bytes] = field(default_factory=dict)
    newest: tuple[int, float] | None = None


@dataclass
class Ledger:
    """All keys of one history. ``ended``: by shard, the term up to which leases ended with it."""

    keys: dict[bytes, KeyLedger]
    run_states: dict[str, str] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    before: dict[bytes, asyncpg.Record] = field(default_factory=dict)
    charged: dict[str, Decimal] = field(default_factory=dict)

    # ---- answers ----------------------------------------------------------------------------------------------------------------------

    def live(self, lease: Told, now: float) -> bool:
        """Whether nothing that may end this lease has happened."""
        if lease.outcome is not None or lease.until <= now:
            return False
        if lease.shard is not None and lease.term is not None and lease.term <= self.ended.get(lease.shard, 0):
            return False
        return lease.dispatch > 0 or self.run_states[lease.run] == "running"

    def end_unsent(self, run: str) -> None:
        """The run was halted: whoever wants them may have its unsent claims from now on."""
        for key in self.keys.values():
            for lease in key.told.values():
                if lease.run == run and not lease.dispatch:
                    lease.until = 0.0

    def nobody_else(self, lease: Told, now: float) -> None:
        """At an answer that gives ``lease``: no other lease of its key lives."""
        others = [other for other in self.keys[lease.key].told.values() if other is not lease and self.live(other, now)]
        assert not others, f"{lease} given while {others} live at {now}"

    # ---- tables -----------------------------------------------------------------------------------------------------------------------

    async def look(self, connection: asyncpg.Connection[Any], budgets: dict[str, Decimal]) -> None:
        """Compare the tables with what they held at the last look, and with what was reported meanwhile."""
        receipts = {row["key"]: row for row in await connection.fetch(_RECEIPTS, list(self.keys))}
        for key, row in receipts.items():
            self._receipt(self.keys[key], self.before.get(key), row)
        assert set(self.before) <= set(receipts), "a receipt is gone"
        runs = {row["run_id"]: row for row in await connection.fetch(_RUNS, list(self.run_states))}
        sums: dict[str, Decimal] = {}
        for charge in await connection.fetch(_CHARGES, list(self.run_states)):
            self._charge(charge, receipts[charge["key"]])
            amount = charge["reserved"] if charge["spent"] is None else charge["spent"]
            sums[charge["run_id"]] = sums.get(charge["run_id"], Decimal(0)) + amount
        for run, row in runs.items():
            total = sums.get(run, Decimal(0))
            assert row["charged"] == total, f"{run} is charged {row['charged']}, its charges sum up to {total}"
            assert row["budget"] == budgets.get(run), f"{run} has the budget {row['budget']}"
            if row["budget"] is not None and total > self.charged.get(run, Decimal(0)):
                assert total <= row["budget"], f"{run} is charged {total} of {row['budget']}"
        self.before, self.charged = receipts, sums

    def _receipt(self, key: KeyLedger, before: asyncpg.Record | None, now: asyncpg.Record) -> None:
        if now["state"] in {"running", "outcome_unknown"}:
            key.under.setdefault(now["lease_id"], set()).add(now["dispatch"])
        if now["output_dispatch"] is not None:
            assert key.outputs[now["output_dispatch"]] == now["output"], "an output is not what its dispatch gave"
        if key.newest is not None:
            assert now["output_dispatch"] is not None, "a completed output is lost"
            assert now["output_dispatch"] >= key.newest[0], "a completed output was overwritten by an older one"
        if before is None:
            return
        assert now["revision"] >= before["revision"]
        assert now["dispatch"] >= before["dispatch"], "a dispatch number went back"
        if key.effect == "non_idempotent" and now["dispatch"] > before["dispatch"]:
            unsettled = set(range(1, before["dispatch"] + 1)) - key.settled
            assert not unsettled, f"confirmed as {now['dispatch']} while the outcome of {unsettled} is not known"

    def _charge(self, charge: asyncpg.Record, receipt: asyncpg.Record) -> None:
        key, dispatch = self.keys[charge["key"]], charge["dispatch"]
        if charge["spent"] is not None:
            assert dispatch in key.paid, f"{charge} is settled, but nobody said what it cost"
        elif charge["unknown"]:
            assert dispatch <= receipt["dispatch"], f"{charge} stands for a dispatch that never was"
            assert dispatch not in key.unsent, f"{charge} stands, but it was not sent"
        else:
            current = receipt["dispatch"] + (1 if receipt["state"] == "queued" else 0)
            holds = receipt["state"] in {"queued", "running"} and receipt["run_id"] == charge["run_id"] and dispatch == current
            assert holds, f"{charge} is reserved, but {receipt} does not hold it"
            assert charge["reserved"] == receipt["reserved"]


_RECEIPTS = """
SELECT key, revision, state, dispatch, run_id, lease_id, reserved, output, output_dispatch FROM receipts WHERE key = ANY ($1::bytea[])
"""
_RUNS = "SELECT run_id, state, budget, charged FROM runs WHERE run_id = ANY ($1::text[])"
_CHARGES = "SELECT run_id, key, dispatch, reserved, spent, unknown FROM charges WHERE run_id = ANY ($1::text[])"
