"""The plays that `tests/bench/run.py` measures: one scalar call a row (also at a provider with a rate), one batchable call a row, two pure
columns.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from rowmill import Batch, Context, Handle, HttpTool, Provider, RowContext, Rows, play


class Lead(BaseModel):
    domain: str
    name: str


class FindIn(BaseModel):
    domain: str


class FindOut(BaseModel):
    email: str | None = None


class BenchInput(BaseModel):
    leads: Rows[Lead]


bench = Provider("bench", base_url="http://127.0.0.1:8799", concurrency=100)
paced_bench = Provider("paced", base_url="http://127.0.0.1:8799", rate="200/s", concurrency=100)
EMAIL: dict[str, list[str]] = {"email": ["email", "data.emails.0.value"]}


@bench.post("/v2/find", effect="read")
class Find(HttpTool[FindIn, FindOut]):
    extract: ClassVar[dict[str, list[str]]] = EMAIL


@bench.post("/v2/find", effect="read", batch=Batch(50, path="/v2/bulk", items="items", results="results"))
class FindMany(HttpTool[FindIn, FindOut]):
    extract: ClassVar[dict[str, list[str]]] = EMAIL


@paced_bench.post("/v2/find", effect="read")
class FindPaced(HttpTool[FindIn, FindOut]):
    extract: ClassVar[dict[str, list[str]]] = EMAIL


async def found(row: Lead, ctx: RowContext) -> str | None:
    email: str | None = (await ctx.call(Find, FindIn(domain=row.domain))).get("email")
    return email


async def found_in_batch(row: Lead, ctx: RowContext) -> str | None:
    email: str | None = (await ctx.call(FindMany, FindIn(domain=row.domain))).get("email")
    return email


async def found_in_turn(row: Lead, ctx: RowContext) -> str | None:
    email: str | None = (await ctx.call(FindPaced, FindIn(domain=row.domain))).get("email")
    return email


@play("scalar")
async def scalar(ctx: Context, input: BenchInput) -> Handle:
    return await ctx.dataset("leads", input.leads, row=Lead).with_column("email", found).run(key="domain")


@play("paced")
async def paced(ctx: Context, input: BenchInput) -> Handle:
    return await ctx.dataset("leads", input.leads, row=Lead).with_column("email", found_in_turn).run(key="domain")


@play("batch")
async def batch(ctx: Context, input: BenchInput) -> Handle:
    return await ctx.dataset("leads", input.leads, row=Lead).with_column("email", found_in_batch).run(key="domain")


@play("pure")
async def pure(ctx: Context, input: BenchInput) -> Handle:
    return await (
        ctx.dataset("leads", input.leads)
        .with_column("upper", lambda row: row["name"].upper())
        .with_column("length", lambda row: len(row["upper"]))
        .run(key="domain")
    )
