"""What must hold of receipts whatever happens, kept apart from how the store does it: a ledger of what callers were told, and looks into the tables.

It predicts nothing. It says which answers and which tables are wrong, given what callers were told before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import asyncpg

from rowmill_contracts.budgets import Limits, limits_of
from rowmill_contracts.receipts import HaltRun
from rowmill_receipt_store.deaths import DeathRule

QUEUED, RUNNING, SHARD, PRESENCE = 1000.0, 6000.0, 600.0, 600.0
"""A hundred times as long as by default, as is all time that passes in a history: so that none does for the machine's being slow."""

RULE = DeathRule(suspected_after=1, deaths_alone=1)
NOTHING = (Decimal(0), 0, 0)


@dataclass(eq=False)
class Told:
    """A lease that its holder was told it has, and believes in until ``until`` at least. ``dispatch`` 0: not confirmed. ``outcome``: the request by
    which its holder has given its outcome. ``presence``: of its holder; ``run_term``: of the body that has it.
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
    presence: str = ""
    run_term: int | None = None


@dataclass
class KeyLedger:
    """One key's past. ``settled``: dispatches of which an outcome was reported, or an operator decided. ``unsent``: those that nobody sent.
    ``paid``: those whose cost was reported. ``under``: the dispatches of each lease, whether or not its holder has heard of them. ``alone``: those
    that were confirmed as going alone.
    """

    effect: str
    told: dict[str, Told] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    unsent: set[int] = field(default_factory=set)
    paid: set[int] = field(default_factory=set)
    under: dict[str, set[int]] = field(default_factory=dict)
    alone: set[int] = field(default_factory=set)
    failed_in: set[str] = field(default_factory=set)
    outputs: dict[int, bytes] = field(default_factory=dict)
    newest: tuple[int, float] | None = None


@dataclass
class RunLedger:
    """How a run stands by the newest decision that has arrived. ``decided``: how many were taken, arrived or not."""

    state: str = "running"
    decision: int = 0
    limits: Limits = field(default_factory=Limits)
    deadline: float | None = None
    decided: int = 0

    def arrived(self, request: HaltRun) -> bool:
        """A decision has arrived, in whatever order; whether it is newer than all before."""
        newer = request.decision > self.decision
        if newer:
            self.decision, self.limits, self.deadline = request.decision, limits_of(request.budget), request.deadline
        if self.state != "stopped" and (newer or request.action == "stop"):
            self.state = {"stop": "stopped", "halt": "halted", "resume": "running"}[request.action]
        return newer

    def late(self, now: float) -> bool:
        return self.deadline is not None and self.deadline <= now


@dataclass
class Ledger:
    """All keys of one history. ``ended``: by shard, the term up to which leases ended with it. ``there``: until when a holder believes that its
    presence holds; ``gone``: presences that have ended. ``bodies``: the newest term of each run's body.
    """

    keys: dict[bytes, KeyLedger]
    runs: dict[str, RunLedger] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    there: dict[str, float] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    bodies: dict[str, int] = field(default_factory=dict)
    before: dict[bytes, asyncpg.Record] = field(default_factory=dict)
    charged: dict[str, tuple[Decimal, int, int]] = field(default_factory=dict)

    # ---- answers ----------------------------------------------------------------------------------------------------------------------

    def live(self, lease: Told, now: float) -> bool:
        """Whether nothing that may end this lease has happened."""
        if lease.outcome is not None or lease.until <= now:
            return False
        if lease.shard is not None and lease.term is not None and lease.term <= self.ended.get(lease.shard, 0):
            return False
        if lease.presence in self.gone or (lease.run_term is not None and lease.run_term < self.bodies[lease.run]):
            return False
        return lease.dispatch > 0 or (self.runs[lease.run].state == "running" and not self.runs[lease.run].late(now))

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

    async def look_for_presences(self, connection: asyncpg.Connection[Any], now: float) -> None:
        """See which presences have ended. None does while its process believes that it holds."""
        holding = self.there.keys() - self.gone
        for row in await connection.fetch(_ENDED, list(holding)) if holding else ():
            assert self.there[row["presence"]] <= now, f"{row['presence']} ended at {now} although it holds"
            self.gone.add(row["presence"])

    # ---- tables -----------------------------------------------------------------------------------------------------------------------

    async def look(self, connection: asyncpg.Connection[Any]) -> None:
        """Compare the tables with what they held at the last look, and with what was reported meanwhile."""
        receipts = {row["key"]: row for row in await connection.fetch(_RECEIPTS, list(self.keys))}
        for key, row in receipts.items():
            self._receipt(self.keys[key], self.before.get(key), row)
        assert set(self.before) <= set(receipts), "a receipt is gone"
        runs = {row["run_id"]: row for row in await connection.fetch(_RUNS, list(self.runs))}
        sums: dict[str, tuple[Decimal, int, int]] = {}
        called: set[tuple[str, bytes]] = set()
        for charge in await connection.fetch(_CHARGES, list(self.runs)):
            self._charge(charge, receipts[charge["key"]])
            money, calls, retries = sums.get(charge["run_id"], NOTHING)
            amount = charge["reserved"] if charge["spent"] is None else charge["spent"]
            sums[charge["run_id"]] = (money + amount, calls + charge["calls"], retries + charge["retries"])
            assert charge["calls"] + charge["retries"] in {0, 1}, f"{charge} is one dispatch"
            if charge["calls"]:
                assert (charge["run_id"], charge["key"]) not in called, f"{charge} is not the first dispatch of its call"
                called.add((charge["run_id"], charge["key"]))
        told = {row["run_id"]: row for row in await connection.fetch(_TALLIES, list(self.runs))}
        for run in self.runs:
            money, calls = (told[run]["charged"], told[run]["calls"]) if run in told else (Decimal(0), 0)
            spent = sums.get(run, NOTHING)
            assert money == spent[0], f"{run} is told to be charged {money}, its charges sum up to {spent}"
            assert calls >= spent[1] + spent[2], f"{run} is told to have made {calls} calls, of which {spent} are charged"
        for run, row in runs.items():
            known = self.runs[run]
            assert (row["state"], row["decision"]) == (known.state, known.decision), f"{run} is {row['state']} under decision {row['decision']}"
            spent, before = sums.get(run, NOTHING), self.charged.get(run, NOTHING)
            assert (row["charged"], row["calls"], row["retries"]) == spent, f"{run} is charged {row}, its charges sum up to {spent}"
            limits: tuple[Any, ...] = (known.limits.money, known.limits.calls, known.limits.retries)
            assert (row["budget"], row["calls_limit"], row["retries_limit"]) == limits, f"{run} has the budgets {row}"
            for number, limit in enumerate(limits):
                assert limit is None or spent[number] <= max(before[number], limit), f"{run} is charged {spent} of {limits}"
        self.before, self.charged = receipts, sums

    async def swept(self, connection: asyncpg.Connection[Any], now: float, patience: float) -> None:
        """After a sweep: nothing is reserved for a claim that has been over for longer, and no lease that lives was given up."""
        left = await connection.fetch(_STANDING, list(self.keys), now - patience)
        assert not left, f"{left} are reserved by nobody"
        receipts = {row["key"]: row for row in await connection.fetch(_RECEIPTS, list(self.keys))}
        for key, ledger in self.keys.items():
            for lease in ledger.told.values():
                row = receipts.get(key)
                lives = row is not None and row["lease_id"] == lease.lease_id and row["state"] in {"queued", "running"}
                assert lives or not self.live(lease, now), f"{lease} was swept away"

    def _receipt(self, key: KeyLedger, before: asyncpg.Record | None, now: asyncpg.Record) -> None:
        if now["alone"]:
            key.alone.add(now["dispatch"])
        assert now["deaths"] <= RULE.suspected_after + len(key.alone), "a death beside others was counted against a suspect"
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
        claimed = receipt["state"] == "queued" and receipt["run_id"] == charge["run_id"] and dispatch == receipt["dispatch"] + 1
        assert charge["unsent"] == claimed, f"{charge} does not say whether {receipt} is confirmed"
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


_ENDED = "SELECT presence FROM presences WHERE ended AND presence = ANY ($1::text[])"
_RECEIPTS = """
SELECT key, revision, state, dispatch, run_id, lease_id, reserved, output, output_dispatch, deaths, alone FROM receipts
WHERE key = ANY ($1::bytea[])
"""
_STANDING = """
SELECT c.run_id, c.key, c.dispatch FROM charges c JOIN receipts r ON r.key = c.key AND r.run_id = c.run_id AND r.dispatch + 1 = c.dispatch
WHERE c.key = ANY ($1::bytea[]) AND c.spent IS NULL AND NOT c.unknown AND r.state = 'queued' AND r.expires_at <= to_timestamp($2)
"""
_RUNS = """
SELECT run_id, state, decision, budget, charged, calls_limit, calls, retries_limit, retries FROM runs
WHERE run_id = ANY ($1::text[])
"""
_TALLIES = "SELECT run_id, sum(charged) AS charged, sum(calls) AS calls FROM tallies WHERE run_id = ANY ($1::text[]) GROUP BY run_id"
_CHARGES = "SELECT run_id, key, dispatch, reserved, spent, unknown, calls, retries, unsent FROM charges WHERE run_id = ANY ($1::text[])"
