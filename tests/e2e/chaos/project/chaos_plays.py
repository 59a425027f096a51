"""A play whose rows each ask three providers: one that may be asked again, one that recognises repetitions, one that does not."""

from __future__ import annotations

from decimal import Decimal

from pydantic import BaseModel

from rowmill import Batch, Context, Handle, HttpTool, Provider, RowContext, Rows, column, play


class Item(BaseModel):
    name: str


class Items(BaseModel):
    items: Rows[Item]


class Seen(BaseModel):
    seen: str


class Graded(BaseModel):
    grade: str


class Ordered(BaseModel):
    order: str


looking = Provider("looking", base_url="https://looking.example", concurrency=8)
grading = Provider("grading", base_url="https://grading.example", concurrency=4)
ordering = Provider("ordering", base_url="https://ordering.example", concurrency=8)


@looking.post("/look", effect="read", cost=Decimal("0.001"))
class Look(HttpTool[Item, Seen]):
    pass


@grading.post("/grade", effect="idempotent", cost=Decimal("0.01"), batch=Batch(20, items="items", results="results", item_key="key"))
class Grade(HttpTool[Item, Graded]):
    pass


@ordering.post("/order", effect="non_idempotent", cost=Decimal("0.1"))
class Order(HttpTool[Item, Ordered]):
    pass


@column(version="1")
async def looked(row: Item, ctx: RowContext) -> str:
    return (await ctx.call(Look, Item(name=row.name))).raw["seen"]  # type: ignore[no-any-return]


@column(version="1")
async def graded(row: Item, ctx: RowContext) -> str:
    return (await ctx.call(Grade, Item(name=row.name))).raw["grade"]  # type: ignore[no-any-return]


@column(version="1")
async def ordered(row: Item, ctx: RowContext) -> str:
    return (await ctx.call(Order, Item(name=row.name))).raw["order"]  # type: ignore[no-any-return]


@play("chaos")
async def chaos(ctx: Context, input: Items) -> Handle:  # noqa: A002 - the authoring surface names it so
    """Each row asks all three."""
    return await (
        ctx.dataset("items", input.items, row=Item)
        .with_column("looked", looked)
        .with_column("graded", graded)
        .with_column("ordered", ordered)
        .run(key="name")
    )
