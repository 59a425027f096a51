"""A dataset of leads, the tools that its rows call, and how it came out."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel

from rowmill import HttpTool, Provider
from rowmill.datasets import DatasetBuilder
from rowmill_contracts.tools import CallItem, CallOutcome

RUN = "run-1"


class FindIn(BaseModel):
    domain: str


class FindOut(BaseModel):
    email: str | None = None


class Tools:
    """Two providers with a tool each."""

    def __init__(self) -> None:
        hunter = Provider("hunter", base_url="http://127.0.0.1:1")
        apollo = Provider("apollo", base_url="http://127.0.0.1:1")

        @hunter.post("/find", effect="read", cost=Decimal("0.01"))
        class Find(HttpTool[FindIn, FindOut]):
            extract: ClassVar[dict[str, list[str]]] = {"email": ["email"]}

        @apollo.post("/match", effect="read", cost=Decimal("0.02"))
        class Match(HttpTool[FindIn, FindOut]):
            extract: ClassVar[dict[str, list[str]]] = {"email": ["email"]}

        self.find, self.match = Find, Match


def dataset(**columns: Any) -> DatasetBuilder:
    builder = DatasetBuilder("leads", [], None)  # type: ignore[arg-type]
    for name, resolver in columns.items():
        options = resolver if isinstance(resolver, dict) else {"resolver": resolver}
        builder = builder.with_column(name, **options)
    return builder


def settled(bench: Any) -> list[Any]:
    rows = bench.settler.settled[RUN, "leads"]
    return [rows[index] for index in sorted(rows)]


def meta(row: Any) -> dict[str, Any]:
    cells: dict[str, Any] = msgspec.json.decode(row.meta)
    return cells


def found(email: str | None, **facts: Any) -> Callable[[CallItem], CallOutcome]:
    def answer(item: CallItem) -> CallOutcome:
        raw = {"email": email}
        return CallOutcome(
            call_id=item.call_id,
            outcome="completed" if email else "no_result",
            result=msgspec.Raw(msgspec.json.encode({"raw": raw, "data": raw, "meta": {}, "job_id": None})),
            receipt=item.receipt_key[:12],
            cost=Decimal("0.01"),
            **facts,
        )

    return answer
