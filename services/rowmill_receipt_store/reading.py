"""Rows of the receipt-store's tables, as they are decided on."""

from __future__ import annotations

from typing import Any

import asyncpg
import msgspec

from rowmill_contracts.tools import ToolFailure
from rowmill_receipt_store.charges import UNLIMITED, Account, Spend
from rowmill_receipt_store.leases import FailureOnRecord, Found, Output, Receipt

_failure = msgspec.json.Decoder(ToolFailure)


def found_in(row: asyncpg.Record) -> Found:
    """What the statement `load` read for one key."""
    failure = row["failure"]
    return Found(
        receipt=None if row["revision"] is None else _receipt(row),
        failure=None if failure is None else FailureOnRecord(_failure.decode(failure), row["failed_dispatch"]),
        run_state=row["run_state"] or "running",
        run_reason=row["run_reason"] or "",
        account=UNLIMITED if row["run_state"] is None else _account(row),
        tried=row["tried"],
        shard_term=row["shard_term"],
        shard_held=row["shard_held"],
        present=bool(row["present"]),
    )


def _account(row: Any) -> Account:
    return Account(
        money=row["money"],
        money_left=row["money_left"],
        calls=row["calls_limit"],
        calls_left=row["calls_left"],
        retries=row["retries_limit"],
        retries_left=row["retries_left"],
        wall_time=row["wall_limit"],
        late=row["late"],
        open=Spend(row["open"], row["open_calls"], row["open_retries"]),
    )


def _receipt(row: Any) -> Receipt:
    output = None
    if row["completed_at"] is not None:
        output = Output(
            body=row["output"],
            no_result=row["no_result"],
            cost=row["cost"],
            completed_at=row["completed_at"],
            retired_at=row["retired_at"],
            dispatch=row["output_dispatch"],
            run_id=row["output_run"],
            caller=row["output_caller"],
        )
    return Receipt(
        revision=row["revision"],
        state=row["state"],
        dispatch=row["dispatch"],
        lease_id=row["lease_id"],
        run_id=row["run_id"],
        tool=row["tool"],
        effect=row["effect"],
        held=Spend(row["reserved"], row["held_calls"], row["held_retries"]),
        took_over=row["took_over"],
        over=row["over"],
        remaining=row["remaining_seconds"],
        output=output,
        last_failure=None if row["last_failure"] is None else _failure.decode(row["last_failure"]),
        run_term=row["run_term"],
        lapsed=row["lapsed"],
        deaths=row["deaths"],
        alone=row["alone"],
        counted=row["counted"],
    )
