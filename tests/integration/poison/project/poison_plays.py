"""Rows that are healthy, and rows that take their process with them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

from pydantic import BaseModel

from rowmill import Context, Handle, RowContext, Rows, column, play


class Item(BaseModel):
    name: str
    does: str


class Items(BaseModel):
    items: Rows[Item]


def doing(row: Item) -> str:
    """What a row does that needs no waiting."""
    if row.does == "exit":
        os._exit(3)
    if row.does == "segfault":
        ctypes.string_at(0)
    if row.does == "memory":
        held = []
        while True:
            held.append(bytes(64 << 20))
    if row.does == "hold":
        time.sleep(1e9)
    return row.name.upper()


async def doing_later(row: Item, ctx: RowContext) -> str:
    await asyncio.sleep(0.001)
    if row.does == "exit in a step":
        await ctx.step("last", lambda: os._exit(3))
    if row.does == "never":
        await asyncio.Event().wait()
    return doing(row)


@column(blocking=True)
def blocking(row: Item) -> str:
    if row.does == "stuck thread":
        time.sleep(1e9)
    return row.name.lower()


@play("waiting")
async def waiting(ctx: Context, input: Items) -> Handle:  # noqa: A002 - the authoring surface names it so
    """Rows that each have a task, and one of their columns a thread."""
    return await ctx.dataset("items", input.items, row=Item).with_column("done", doing_later).with_column("blocked", blocking).run(key="name")


def key_of(row: dict[str, str]) -> str:
    if row["does"] == "exit in its key":
        os._exit(3)
    return row["name"]


@play("keyed")
async def keyed(ctx: Context, input: Items) -> Handle:  # noqa: A002 - the authoring surface names it so
    """Rows whose keys a function gives."""
    return await ctx.dataset("items", input.items, row=Item).with_column("done", doing).run(key=key_of)


@play("inline")
async def inline(ctx: Context, input: Items) -> Handle:  # noqa: A002 - the authoring surface names it so
    """Rows that are run by hand, one after the other."""
    return await ctx.dataset("items", input.items, row=Item).with_column("done", doing).run(key="name")
