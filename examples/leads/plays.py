"""The leads example: find a contact for each lead with two paid providers in turn, then score it.

python provider.py &                                   # the local stand-in for the providers
HUNTER_KEY=demo APOLLO_KEY=demo rowmill run plays:leads --csv leads.csv --out enriched.csv
"""

from decimal import Decimal
from typing import ClassVar

from pydantic import BaseModel

from rowmill import Batch, Bearer, Context, Handle, HttpTool, Provider, RowContext, Rows, ToolCall, ToolError, column, play, secret, steps


class Lead(BaseModel):
    domain: str
    name: str | None = None


class FindIn(BaseModel):
    domain: str


class FindOut(BaseModel):
    email: str | None = None


# A provider: where, with which credential, how fast. Tools hang off it. A tool's id is `<provider>.<name>`.
hunter = Provider("hunter", base_url="https://api.hunter.example", auth=Bearer(secret("HUNTER_KEY")), rate="10/s", concurrency=20)
apollo = Provider("apollo", base_url="https://api.apollo.example", auth=Bearer(secret("APOLLO_KEY")), rate="5/s")
crm = Provider("crm", base_url="https://crm.example", rate="60/min")


@hunter.post("/v2/find", effect="read", cost=Decimal("0.01"), batch=Batch(50, path="/v2/bulk", items="items", results="results"))
class Find(HttpTool[FindIn, FindOut]):
    extract: ClassVar[dict[str, list[str]]] = {"email": ["email", "data.emails.0.value"]}


@apollo.post("/match", effect="read", cost=Decimal("0.02"))
class Match(HttpTool[FindIn, FindOut]):
    extract: ClassVar[dict[str, list[str]]] = {"email": ["email"]}


# Or a tool that is a function over a batch; it runs in the gateway and may be sync (blocking=True: in a thread).
@crm.tool("score", effect="idempotent", cost=Decimal(0), batch=Batch(100))
async def score(inputs: list[FindIn], call: ToolCall) -> list[int | ToolError]:
    body = [{"key": key, **item.model_dump()} for key, item in zip(call.keys, inputs, strict=True)]
    answer = await call.http.post("/score", json=body)  # httpx, with the provider's base URL and auth
    answer.raise_for_status()  # httpx's errors are told apart: a 429 waits, a 503 is tried again, a 404 fails the row
    scores: list[int | ToolError] = answer.json()
    return scores


# A column: sync or async. With `row=Lead` on the dataset, `row` is a Lead that also answers row["x"]; without, a dict.
@column(stale_after="7d", version="1")
async def hunter_email(row: Lead, ctx: RowContext) -> str | None:
    found = await ctx.call(Find, FindIn(domain=row.domain))  # id defaults to the tool's id
    email: str | None = found.get("email")
    return email


@column(stale_after="7d", version="1")
async def apollo_email(row: Lead, ctx: RowContext) -> str | None:
    found = await ctx.call(Match, FindIn(domain=row.domain))
    email: str | None = found.get("email")
    return email


contact = (
    steps(continue_on_provider_unavailable=True)  # a waterfall
    .step("hunter", hunter_email)
    .step("apollo", apollo_email, run_if=lambda row: row["hunter"] is None)
    .returns(lambda row: row["hunter"] or row["apollo"])
)


class LeadsInput(BaseModel):
    leads: Rows[Lead]  # a staged input: CSV, JSONL, Parquet, rows in the message
    min_score: int = 50


@play("leads", description="Find and score a contact for each lead")
async def leads(ctx: Context, input: LeadsInput) -> dict[str, Handle | int]:
    done = await (
        ctx.dataset("leads", input.leads, row=Lead)
        .with_column("contact", contact)
        .with_column("score", lambda row, ctx: ctx.call(score, FindIn(domain=row.domain)), run_if=lambda row: row["contact"])
        .run(key="domain")
    )
    return {"leads": done, "found": await done.count()}
