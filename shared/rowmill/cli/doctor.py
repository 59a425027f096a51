"""`rowmill doctor`: whether servers, services and queues are well, and whether a run's books add up."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rowmill.cli.typed import seconds_typed
from rowmill.cli.wording import numbered, rows_told

if TYPE_CHECKING:
    from rowmill.doctor.auditing import Audit
    from rowmill.doctor.findings import Finding
    from rowmill.doctor.health import Health


def doctor(
    audit: Annotated[str | None, typer.Option("--audit", metavar="RUN", help="Look through the books of this run, too.")] = None,
    provider_stats: Annotated[
        str | None, typer.Option("--provider-stats", metavar="URL", help="Compare with a provider's own count of effects by idempotency key.")
    ] = None,
    patience: Annotated[str, typer.Option(help="How long something may be under way before it counts as stuck.")] = "90s",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether all is well, and what to do where it is not. Changes nothing. Exits with 1 if anything is wrong.

    With --audit: each row is there once and in order, marks add up to counts and counts to what was admitted, nobody holds what he should not,
    nothing is owed for long, and whatever waits waits for something.
    """
    from rowmill.cli.connecting import servers  # noqa: PLC0415 - commands load what they need

    within = seconds_typed("--patience", patience)
    health, audited, findings = asyncio.run(_look(servers(), audit, provider_stats, within))
    if as_json:
        print(json.dumps(_document(health, audited, findings), indent=2))
    else:
        print("\n".join(_lines(health, audited, findings)))
    if findings:
        raise typer.Exit(1)


async def _look(found: Any, run_id: str | None, stats: str | None, patience: float) -> tuple[Health, Audit | None, list[Finding]]:
    from rowmill.doctor.auditing import audit  # noqa: PLC0415
    from rowmill.doctor.health import look  # noqa: PLC0415
    from rowmill.doctor.providers import provider_findings  # noqa: PLC0415

    health = await look(found.broker_url, found.database_url, found.control, own=found.own)
    findings = list(health.findings)
    audited = None
    if run_id is not None and not any(finding.check == "database" for finding in findings):
        audited = await audit(found.database_url, run_id, queued=health.queued, patience=patience)
        findings += audited.findings
    if stats is not None:
        findings += await provider_findings(stats)
    return health, audited, findings


def _document(health: Health, audited: Audit | None, findings: list[Finding]) -> dict[str, Any]:
    import msgspec  # noqa: PLC0415

    document = {
        "well": not findings,
        "findings": [vars(finding) for finding in findings],
        "broker": health.broker,
        "database": health.database,
        "services": health.services,
        "unfinished_runs": health.unfinished,
        "queues": [vars(queue) for queue in health.queues],
        "in_hand": [msgspec.to_builtins(shown) for shown in health.in_hand],
    }
    if audited is not None:
        counts = {name: msgspec.to_builtins(each) for name, each in audited.counts.items()}
        document["audit"] = {
            "run_id": audited.run_id,
            "state": audited.state,
            "rows": audited.rows,
            "counts": counts,
            "unknown_outcomes": audited.unknown,
            "calls": audited.calls,
            "cost": str(audited.cost),
        }
    return document


def _lines(health: Health, audited: Audit | None, findings: list[Finding]) -> list[str]:
    lines = [f"broker    {health.broker}", f"database  {health.database}"]
    if health.services:
        lines.append("services  " + ", ".join(f"{name}{'' if runs else ' (not running)'}" for name, runs in health.services.items()))
    for queue in health.queues:
        if queue.ready or queue.unacknowledged or queue.dead or queue.suspects:
            held = "?" if queue.unacknowledged is None else queue.unacknowledged
            lines.append(f"queue     {queue.queue}: {queue.ready} ready, {held} unacknowledged, {queue.dead} dead, {queue.suspects} suspect")
    for shown in health.in_hand:
        for each in shown.queues:
            if each.oldest is not None:
                held = f"{numbered(each.messages, 'message')} of {each.queue}, the oldest for {each.oldest:.0f} s of {each.deadline:.0f} s at most"
                lines.append(f"in hand   {shown.service} ({shown.place}): {held}")
    if audited is not None:
        for name, counts in audited.counts.items():
            lines.append(f"run       {audited.run_id} ({audited.state}), dataset {name}: {rows_told(counts)}")
        lines.append(f"charged   {audited.cost} for {numbered(audited.calls, 'call')}")
        if audited.unknown:
            lines.append(f"receipts  {numbered(audited.unknown, 'call')} of unknown outcome to be decided (`rowmill receipts list`)")
    if not findings:
        return [*lines, "all is well"]
    return [*lines, *(f"WRONG     {finding}" for finding in findings)]
