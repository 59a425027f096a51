"""Gateways, executors and the receipt-store are killed at random under a run whose answers get lost, and nobody can tell afterwards.

The seed is printed; ``ROWMILL_CHAOS_SEED`` sets it. It decides who is killed after what pause and which answers are lost; when that happens within a
run is the machine's affair.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from tests.e2e.chaos.explaining import explain, record_steps, steps_by_key
from tests.e2e.chaos.kills import VICTIMS, Killer
from tests.e2e.chaos.provider import TOOLS, ChaosProvider, answer
from tests.e2e.chaos.system import ChaosSystem
from tests.e2e.stage import BOUND

from rowmill import registry
from rowmill.client import Client, Job
from rowmill.client.receipts import ReceiptDesk
from rowmill.dev import ServerSet
from rowmill.encoding.receipts import idempotency_key
from rowmill.project import Project
from rowmill_contracts.receipts import SettleReceipt
from rowmill_contracts.rows import ReadRow

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1200)]

DROPS = 0.05
AT_ONCE = 6
"""Below what the project's providers take at once (8), so that without kills a run is over a little before they would end."""


def say(line: str) -> None:
    """For whoever reads a failure, or asks with ``-s``."""
    sys.stdout.write(f"{line}\n")


def expected(name: str) -> dict[str, str]:
    return {
        "name": name,
        "looked": answer("/look", name)["seen"],
        "graded": answer("/grade", name)["grade"],
        "ordered": answer("/order", name)["order"],
    }


def check_rows(rows: list[ReadRow], names: list[str]) -> set[str]:
    """Each row once, in order, whole, or failed since nobody knows whether its order was placed. The names of these."""
    assert [row.index for row in rows] == list(range(len(names)))
    doubtful = set()
    for row, name in zip(rows, names, strict=True):
        cells = msgspec.json.decode(row.data)
        if row.mark in {"completed", "reused"}:
            assert {column: cells.get(column) for column in expected(name)} == expected(name)
            continue
        assert row.mark == "failed", row
        assert row.error is not None
        assert (row.error.code, row.error.column) == ("outcome_unknown", "ordered"), row.error
        assert "rowmill receipts" in row.error.message
        assert {column: cells.get(column) for column in ("looked", "graded")} == {column: expected(name)[column] for column in ("looked", "graded")}
        doubtful.add(name)
    return doubtful


async def unknown_keys(database_url: str) -> dict[str, str]:
    """The idempotency keys of calls whose outcome nobody knows, by the name of the receipt."""
    connection = await asyncpg.connect(database_url)
    try:
        rows = await connection.fetch("SELECT key FROM receipts.receipts WHERE state = 'outcome_unknown'")
        return {row["key"].hex()[:12]: idempotency_key(row["key"].hex()) for row in rows}
    finally:
        await connection.close()


async def decide(system: ChaosSystem, client: Client, run_id: str) -> Counter[str]:
    """As an operator would who looks each one up at the provider: what arrived is settled with its answer, what did not is sent once more.

    The first of either kind by what a person types, the others by what that calls.
    """
    listed = await asyncio.to_thread(system.asked, "receipts", "list", "--run", run_id, "--limit", "100000")
    keys = await unknown_keys(system.database_url)
    assert {each["receipt"] for each in listed} == set(keys)
    assert {(each["state"], each["tool"], each["effect"]) for each in listed} <= {("unknown", TOOLS["/order"], "non_idempotent")}
    arrived = system.provider.arrived("/order", keys.values())
    desk = ReceiptDesk(client.bus)
    decided: Counter[str] = Counter()
    for receipt in keys:
        name = arrived.get(keys[receipt])
        decision = "sent once more" if name is None else "settled"
        output = b"" if name is None else msgspec.json.encode(answer("/order", name))
        if not decided[decision]:
            words = ["replay", receipt] if name is None else ["settle", receipt, "--output", output.decode()]
            await asyncio.to_thread(system.rowmill, "receipts", *words)
        elif name is None:
            assert (await desk.replay(receipt)).state == "decided"
        else:
            settled = await desk.settle(SettleReceipt(receipt=receipt, outcome="completed", output=msgspec.Raw(output)))
            assert settled.state == "decided"
        decided[decision] += 1
    return decided


async def audit(system: ChaosSystem, job: Job) -> dict[str, Any]:
    """What the doctor says, to whom nothing may be wrong however short it has lasted."""
    arguments = ("doctor", "--audit", job.run_id, "--provider-stats", f"{system.provider.url}/_stats", "--patience", "0s")
    found: dict[str, Any] = json.loads(await asyncio.to_thread(system.rowmill, *arguments, "--json", status=None))
    assert not found["findings"]
    audited: dict[str, Any] = found["audit"]
    return audited


async def chaos(system: ChaosSystem, *, rows: int, seconds: float, seed: int, within: float) -> None:
    names = [f"item-{number:05d}" for number in range(rows)]
    Project.find(system.project).load()
    play = registry.play_named("chaos")
    await record_steps(system.database_url)
    killer = Killer(system.services, seed=seed, shortest=0.2, longest=1.0)
    provider = system.provider
    async with Client(system.broker_url) as client:
        job = await client.start(play, items=[{"name": name} for name in names])
        over = asyncio.create_task(system.ended(job, within=within))
        await killer.kill_for(seconds, over.done)
        summary = await over
        say(f"killed {killer.summary()}")
        assert {kill.service for kill in killer.kills} == set(VICTIMS), "too fast to show anything"

        doubtful = check_rows(await system.rows(client, job), names)
        counts = summary.counts
        assert (summary.state, counts.admitted, counts.completed, counts.failed) == ("completed", rows, rows - len(doubtful), len(doubtful))
        await system.quiet()
        first = await audit(system, job)
        assert first["unknown_outcomes"] <= len(doubtful)  # an answer that came late was stored, too late for its row
        decided = await decide(system, client, job.run_id)
        assert decided.total() == first["unknown_outcomes"]

        provider.drops = 0.0
        if doubtful:
            await asyncio.to_thread(system.rowmill, "runs", "retry", job.run_id)
        summary = await system.ended(job, within=BOUND)
        assert check_rows(await system.rows(client, job), names) == set()
        assert (summary.state, summary.counts.failed, summary.counts.terminal) == ("completed", 0, rows)
        await system.quiet()
        assert (await audit(system, job))["unknown_outcomes"] == 0

    explained = explain(await steps_by_key(system.database_url), provider.trace, killer.kills)
    beyond = sum(provider.arrivals(path).total() - rows for path in TOOLS)
    say(f"{beyond} requests beyond one per item: {dict(explained.requests)}; dispatches without one: {dict(explained.unsent)}")
    say(f"{len(doubtful)} rows failed with an unknown outcome: {dict(decided)}")
    assert not explained.wrong, "\n".join(explained.wrong[:10])
    assert explained.requests.total() == beyond
    for path in TOOLS:
        assert {name: len(keys) for name, keys in provider.keys(path).items()} == dict.fromkeys(names, 1), f"{path}: an item went under two keys"
    assert provider.arrivals("/order") == dict.fromkeys(names, 1)
    assert set(provider.effects.values()) == {1}
    assert len(provider.effects) == 2 * rows


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [pytest.param(600, 10.0, id="small"), pytest.param(5_000, 60.0, id="full", marks=pytest.mark.long)],
)
async def test_nobody_can_tell_that_processes_were_killed_at_random(
    servers: ServerSet, broker_url: str, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, seconds: float
) -> None:
    seed = int(os.environ.get("ROWMILL_CHAOS_SEED") or random.randrange(1_000_000))
    say(f"\nROWMILL_CHAOS_SEED={seed}")
    latency = AT_ONCE * seconds / rows
    with registry.isolated(), ChaosProvider(seed=seed, latency=latency, drops=DROPS) as provider:
        system = ChaosSystem(tmp_path, broker_url, database_url, getattr(servers.broker, "control", None), provider)
        monkeypatch.chdir(system.project)
        try:
            await system.start()
            await chaos(system, rows=rows, seconds=seconds, seed=seed, within=2 * BOUND + 8 * seconds)
        finally:
            await asyncio.to_thread(system.services.stop)
            sys.modules.pop("chaos_plays", None)
            while str(system.project) in sys.path:
                sys.path.remove(str(system.project))
