"""Plays with steps that write down each time they are run, and that wait for the test where they are told to."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rowmill import Context, RowContext, Rows, column, play

FOLDER = Path(os.environ.get("STEPS_FOLDER", "."))


def note(what: str) -> int:
    """One more line for ``what``; how many there are."""
    path = FOLDER / f"{what}.done"
    with path.open("a") as file:
        file.write("done\n")
    return path.read_text().count("\n")


async def opened(gate: str) -> None:
    """Return once the test opens the gate."""
    while not (FOLDER / f"{gate}.gate").exists():
        await asyncio.sleep(0.005)


async def noted_then_held(what: str, gate: str) -> int:
    times = note(what)
    await opened(gate)
    return times


class Item(BaseModel):
    name: str
    stands: str
    """Where it waits for the test: ``between`` its steps, or ``within`` the second."""


class Items(BaseModel):
    items: Rows[Item]


@column(version="1")
async def made(row: Item, ctx: RowContext) -> list[int]:
    first = await ctx.step("make", lambda: note(f"first-{row.name}"))
    if row.stands == "between":
        await opened("rows")
        return [first, await ctx.step("make", lambda: note(f"second-{row.name}"))]
    return [first, await ctx.step("make", lambda: noted_then_held(f"second-{row.name}", "rows"))]


@play("making")
async def making(ctx: Context, input: Items) -> dict[str, Any]:  # noqa: A002 - the authoring surface names it so
    salt = await ctx.step("salt", lambda: note("salt"))
    return {"salt": salt, "items": await ctx.dataset("items", input.items, row=Item).with_column("made", made).run(key="name")}


@play("holding")
async def holding(ctx: Context) -> list[int]:
    """Its second step stands until the test lets it."""
    return [await ctx.step("one", lambda: note("one"), blocking=True), await ctx.step("two", lambda: noted_then_held("two", "body"))]


async def noted_slowly(what: str) -> int:
    times = note(what)
    await asyncio.sleep(0.05)
    return times


class Named(BaseModel):
    name: str


class NamedRows(BaseModel):
    items: Rows[Named]


@play("many")
async def many(ctx: Context, input: NamedRows) -> Any:  # noqa: A002 - the authoring surface names it so
    """Rows of two steps each, twenty at a time."""

    async def both(row: Named, ctx: RowContext) -> list[int]:
        return [await ctx.step("first", lambda: noted_slowly(f"{row.name}-1")), await ctx.step("second", lambda: noted_slowly(f"{row.name}-2"))]

    return await ctx.dataset("many", input.items, row=Named).with_column("both", both).run(key="name", concurrency=20)


class Asked(BaseModel):
    of: str


@play("priced")
async def priced(ctx: Context, input: Asked) -> int:  # noqa: A002 - the authoring surface names it so
    return await ctx.step("price", lambda: note("price"), semantic_key=input.of, stale_after="1h")


@play("priced-elsewhere")
async def priced_elsewhere(ctx: Context, input: Asked) -> int:  # noqa: A002 - the authoring surface names it so
    return await ctx.step("price", lambda: note("price"), semantic_key=input.of, stale_after="1h")
