"""What operators look for and prune in the receipt-store's tables. Each call is one transaction; beside `store` the only module that knows SQL.

Listing and pruning read pages of the table in the order of keys, whatever its size, and in a session of their own plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg
import msgspec

from rowmill.encoding.receipts import short_digest
from rowmill.runtime.db import Connection, Database
from rowmill_contracts.receipts import ListReceipts, ReceiptsPruned, ReceiptView
from rowmill_contracts.tools import ToolFailure
from rowmill_receipt_store.store import QUERIES

PRUNED_AT_ONCE = 2_000
"""Receipts that one transaction looks at."""

_failure = msgspec.json.Decoder(ToolFailure)


class Named(msgspec.Struct, frozen=True):
    """A receipt that an operator named: what its settlement is fenced by, and what is shown of it."""

    key: bytes
    lease_id: str
    reserved: Any
    view: ReceiptView


class OperatorStore:
    """Reads by the database's clock. Raises `UnavailableError` when the database is away for too long."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def named(self, prefix: str) -> list[Named]:
        """The receipts whose digest begins with ``prefix`` (hexadecimal digits), at most three."""
        first = bytes.fromhex(prefix.ljust(64, "0"))
        last = bytes.fromhex(prefix.ljust(64, "f"))
        rows = await self._database.fetch(QUERIES["receipts_named"], first, last)
        return [Named(row["key"], row["lease_id"], row["reserved"], _view(row, row["output"])) for row in rows]

    async def listed(self, request: ListReceipts) -> tuple[list[ReceiptView], str]:
        """A page, and what names the next one."""
        arguments = (bytes.fromhex(request.after), request.state, request.run_id, request.tool, request.limit)
        rows = await self._in_order("list_receipts", arguments)
        after = rows[-1]["key"].hex() if len(rows) == request.limit else ""
        return [_view(row, None) for row in rows], after

    async def retired(self, older_than: float, after: str) -> ReceiptsPruned:
        """Take the old outputs of a page out of use."""
        row = (await self._in_order("retire", (bytes.fromhex(after), older_than, PRUNED_AT_ONCE)))[0]
        return ReceiptsPruned(retired=row["retired"], at=row["at"], after="" if row["last"] is None else row["last"].hex())

    async def pruned(self, older_than: float, after: str, oldest_run: float, *, dry_run: bool) -> ReceiptsPruned:
        """Prune a page, or count what would be."""
        name = "prunable" if dry_run else "prune"
        row = (await self._in_order(name, (bytes.fromhex(after), older_than, PRUNED_AT_ONCE, oldest_run)))[0]
        return ReceiptsPruned(
            completed=row["completed"],
            ended=row["ended"],
            failures=row["failures"],
            bytes=row["bytes"],
            after="" if row["last"] is None else row["last"].hex(),
        )

    async def _in_order(self, name: str, arguments: Sequence[Any]) -> list[asyncpg.Record]:
        """Run a statement that walks the primary key, which the pinned plans of this service's sessions do not."""

        async def work(connection: Connection) -> list[asyncpg.Record]:
            await connection.execute(QUERIES["walk_in_order"])
            rows: list[asyncpg.Record] = await connection.fetch(QUERIES[name], *arguments)
            return rows

        return await self._database.transact(work)


def _view(row: asyncpg.Record, output: bytes | None) -> ReceiptView:
    live = row["state"] in {"queued", "running"}
    shown = ReceiptView(
        receipt=short_digest(row["key"].hex()),
        state=row["state"],
        tool=row["tool"],
        effect=row["effect"],
        org=row["org"],
        run_id=row["run_id"],
        caller=row["caller"],
        dispatch=row["dispatch"],
        holder=row["holder"] if live else "",
        batch_id=row["batch_id"],
        lease_seconds=row["lease_seconds"] if live else None,
        reserved=row["reserved"],
        cost=row["cost"],
        completed_at=row["completed_at"],
        output_bytes=row["output_bytes"],
        failure=None if row["last_failure"] is None else _failure.decode(row["last_failure"]),
        deaths=row["deaths"],
    )
    return shown if output is None else msgspec.structs.replace(shown, output=msgspec.Raw(output))
