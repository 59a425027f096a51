"""Plays whose rows wait: for calls that last, for a provider that is down."""

from __future__ import annotations

from pydantic import BaseModel

from rowmill import Context, Handle, HttpTool, Provider, RowContext, Rows, play


class Asked(BaseModel):
    name: str


class Answered(BaseModel):
    name: str


class Named(BaseModel):
    name: str


class Steady(BaseModel):
    rows: Rows[Named]


class Patient(BaseModel):
    calls: int
    rows: Rows[Named]


slow = Provider("slow", base_url="http://127.0.0.1:9", concurrency=20)
away = Provider("away", base_url="http://127.0.0.1:9", concurrency=20, rate="200/s")
there = Provider("there", base_url="http://127.0.0.1:9", concurrency=20)


@slow.post("/slow", effect="non_idempotent")
class Slow(HttpTool[Asked, Answered]):
    pass


@away.post("/away", effect="read")
class Away(HttpTool[Asked, Answered]):
    pass


@there.post("/there", effect="read")
class There(HttpTool[Asked, Answered]):
    pass


@play("patient")
async def patient(ctx: Context, input: Patient) -> Handle:  # noqa: A002 - API.md's name
    async def worked(row: Named, ctx: RowContext) -> list[str]:
        answers = [await ctx.call(Slow, Asked(name=f"{row.name}-{number}"), id=f"call-{number}") for number in range(input.calls)]
        return [answer.data.name for answer in answers if answer.data is not None]

    return await ctx.dataset("patient", input.rows, row=Named).with_column("worked", worked).run(key="name")


@play("stranded")
async def stranded(ctx: Context, input: Steady) -> Handle:  # noqa: A002 - API.md's name
    async def found(row: Named, ctx: RowContext) -> str:
        answer = await ctx.call(Away, Asked(name=row.name))
        return answer.data.name if answer.data is not None else ""

    return await ctx.dataset("stranded", input.rows, row=Named).with_column("found", found).run(key="name")


@play("steady")
async def steady(ctx: Context, input: Steady) -> Handle:  # noqa: A002 - API.md's name
    async def found(row: Named, ctx: RowContext) -> str:
        answer = await ctx.call(There, Asked(name=row.name))
        return answer.data.name if answer.data is not None else ""

    return await ctx.dataset("steady", input.rows, row=Named).with_column("found", found).run(key="name")
