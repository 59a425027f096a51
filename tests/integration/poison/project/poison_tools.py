"""Tool functions that are well, end their gateway, hold it, or never return; and a play that asks them."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from pydantic import BaseModel

from rowmill import Batch, Context, Handle, Provider, RowContext, Rows, ToolCall, play


class Asked(BaseModel):
    name: str
    does: str


class AskedItems(BaseModel):
    items: Rows[Asked]


mill = Provider("mill", base_url="https://mill.example", concurrency=20)


def note(name: str, file: str) -> None:
    """Add a line to a file beside this, for who looks on."""
    with Path(__file__).with_name(file).open("a") as noted:
        noted.write(f"{name}\n")


def _does(asked: Asked) -> str:
    if asked.does == "exit":
        os._exit(4)
    if asked.does == "hold":
        time.sleep(1e9)
    return asked.name.upper()


@mill.tool("ask", effect="read", timeout=0.5)
async def ask(asked: Asked, call: ToolCall) -> str:
    if asked.does == "never":
        await asyncio.Event().wait()
    return _does(asked)


@mill.tool("ask_in_thread", effect="read", blocking=True, timeout=0.5)
def ask_in_thread(asked: Asked, call: ToolCall) -> str:
    if asked.does == "stuck thread":
        time.sleep(1e9)
    return asked.name.lower()


@mill.tool("pay", effect="non_idempotent", timeout=0.5)
async def pay(asked: Asked, call: ToolCall) -> str:
    if asked.does == "exit while paying":
        os._exit(4)
    return "paid"


@mill.tool("pay_at_the_gate", effect="non_idempotent", timeout=600)
async def pay_at_the_gate(asked: Asked, call: ToolCall) -> str:
    """Says in a file that it is there, and is not over before another says that the gate is open."""
    note(asked.name, "paid")
    while not Path(__file__).with_name("open").exists():
        await asyncio.sleep(0.01)
    return "paid"


press = Provider("press", base_url="https://press.example", concurrency=2)


@press.tool("ask_many", effect="read", timeout=0.5, batch=Batch(10))
async def ask_many(asked: list[Asked], call: ToolCall) -> list[str]:
    await asyncio.sleep(0.005)
    if any(one.does == "exit among others" for one in asked):
        os._exit(4)
    return [one.name.upper() for one in asked]


async def asked_of_all(row: Asked, ctx: RowContext) -> str:
    given = Asked(name=row.name, does=row.does)
    loud = (await ctx.call(ask, given)).raw
    quiet = (await ctx.call(ask_in_thread, given)).raw
    return f"{loud} {quiet} {(await ctx.call(pay, given)).raw}"


async def asked_together(row: Asked, ctx: RowContext) -> str:
    given = Asked(name=row.name, does=row.does)
    loud = (await ctx.call(ask_many, given)).raw
    return f"{loud} {(await ctx.call(ask, given)).raw}"


async def asked_at_the_gate(row: Asked, ctx: RowContext) -> str:
    note(row.name, "begun")
    answers = await asyncio.gather(ctx.call(pay_at_the_gate, Asked(name=row.name, does=row.does)))
    return f"{row.name} {answers[0].raw}"


@play("asking_at_the_gate")
async def asking_at_the_gate(ctx: Context, input: AskedItems) -> Handle:  # noqa: A002 - the authoring surface names it so
    """Each row waits for its call for as long as the gate is closed."""
    return await ctx.dataset("items", input.items, row=Asked).with_column("done", asked_at_the_gate).run(key="name")


@play("asking_together")
async def asking_together(ctx: Context, input: AskedItems) -> Handle:  # noqa: A002 - the authoring surface names it so
    """Each row asks a tool that is asked for many at once, and one that is not."""
    return await ctx.dataset("items", input.items, row=Asked).with_column("done", asked_together).run(key="name")


@play("asking")
async def asking(ctx: Context, input: AskedItems) -> Handle:  # noqa: A002 - the authoring surface names it so
    """Each row asks three tools that are functions."""
    return await ctx.dataset("items", input.items, row=Asked).with_column("done", asked_of_all).run(key="name")
