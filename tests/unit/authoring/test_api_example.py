"""The documented example, run over one row with contexts made here: what it declares, computes and records."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, assert_type

import httpx
import pytest

import rowmill
from rowmill import Batch, Context, Handle, RowContext, ToolCall, ToolError
from rowmill.context import Budget, RunFacts, Tools
from rowmill.datasets import DatasetBuilder, DatasetProgram
from rowmill.paged_handle import PagedHandle
from rowmill.resolvers import Step, call_inline
from rowmill.row_views import OpenRow, ReadSet
from rowmill.steps import run_program
from rowmill.tools import FunctionTool, ToolResult, tool_of

EXAMPLES = [Path(__file__).parent / "api_plays.py", Path(__file__).parents[3] / "examples" / "leads" / "plays.py"]


@pytest.fixture(params=EXAMPLES, ids=["documented", "example"])
def plays(request: pytest.FixtureRequest) -> ModuleType:
    spec = importlib.util.spec_from_file_location("authored_plays", request.param)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeTools(Tools):
    def __init__(self, answers: dict[str, Callable[[Any], Any]]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, Any]] = []

    async def execute(self, *, tool: Any, input: Any, id: str | None = None, **_: Any) -> ToolResult[Any]:  # noqa: A002
        known = tool_of(tool)
        encoded = known.encode_input(input)
        self.calls.append((known.id, encoded))
        return known.result(self.answers[known.id](encoded))


class FakeRow(RowContext):
    def __init__(self, tools: FakeTools) -> None:
        self._tools = tools

    @property
    def tools(self) -> Tools:
        return self._tools

    @property
    def run(self) -> RunFacts:
        raise NotImplementedError

    @property
    def budget(self) -> Budget:
        raise NotImplementedError

    async def step(self, id: str, fn: Callable[[], Any], **_: Any) -> Any:  # noqa: A002
        raise NotImplementedError

    def log(self, message: str, **fields: Any) -> None:
        raise NotImplementedError


class FakeBody(FakeRow, Context):
    """Captures the program, as an executor does, and answers with an empty dataset."""

    program: DatasetProgram

    def dataset(self, key: str, source: Any, *, row: Any = None) -> DatasetBuilder:  # type: ignore[override]
        return DatasetBuilder(key, source, self, row=row)

    async def run_dataset(self, program: DatasetProgram) -> Handle:
        self.program = program
        return PagedHandle("r1", program.key, EmptyPages())


class EmptyPages:
    async def read_page(self, run_id: str, dataset: str, page_number: int, size: int) -> list[dict[str, Any]]:
        return []

    async def count(self, run_id: str, dataset: str) -> int:
        return 7


async def captured(plays: ModuleType, tools: FakeTools) -> tuple[DatasetProgram, Any]:
    body = FakeBody(tools)
    output = await plays.leads.start(body, plays.leads.read_input({}, {"": "in-1"}))
    return body.program, output


async def test_the_body_builds_its_dataset_and_returns_its_handle(plays: ModuleType) -> None:
    program, output = await captured(plays, FakeTools({}))
    assert output == {"leads": PagedHandle("r1", "leads", EmptyPages()), "found": 7}
    assert (program.key, program.key_spec, program.row_model) == ("leads", ("domain",), plays.Lead)
    assert [column.name for column in program.columns] == ["contact", "score"]
    assert program.columns[0].stale_after == 7 * 86400


@pytest.mark.parametrize(
    ("by_hunter", "by_apollo", "contact", "calls"),
    [
        ({"email": "h@a.com"}, None, "h@a.com", ["hunter.find", "crm.score"]),
        ({"data": {"emails": [{"value": "d@a.com"}]}}, None, "d@a.com", ["hunter.find", "crm.score"]),
        ({}, {"email": "p@a.com"}, "p@a.com", ["hunter.find", "apollo.match", "crm.score"]),
        ({}, {}, None, ["hunter.find", "apollo.match"]),
    ],
)
async def test_a_row_goes_through_the_waterfall_and_is_scored(
    plays: ModuleType, by_hunter: Any, by_apollo: Any, contact: Any, calls: list[str]
) -> None:
    tools = FakeTools({"hunter.find": lambda _: by_hunter, "apollo.match": lambda _: by_apollo, "crm.score": lambda _: 80})
    program, _ = await captured(plays, tools)
    ctx = FakeRow(tools)
    row = OpenRow({"domain": "a.com", "name": "A"}, program.shape)
    cells, read = {}, {}
    for column in program.columns:
        reads = ReadSet()
        view = row.view(reads)
        if column.run_if is None or column.run_if(view):
            cells[column.name] = await _value(column.resolver, view, ctx)
            row.put(column.name, cells[column.name])
        read[column.name] = reads.columns
    assert cells["contact"] == contact
    assert [tool for tool, _ in tools.calls] == calls
    assert all(sent == {"domain": "a.com"} for _, sent in tools.calls)
    assert read == {"contact": ["domain"], "score": ["contact", "domain"] if contact else ["contact"]}
    if contact:
        assert cells["score"].data == 80


async def _value(resolver: Any, view: Any, ctx: Any) -> Any:
    async def call_step(step: Step, seen: Any, ctx: Any) -> Any:
        assert step.waterfall
        return await call_inline(step.resolver, seen, ctx)

    if resolver.program is None:
        return await call_inline(resolver, view, ctx)
    return (await run_program(resolver.program, view, ctx, call_step)).value


def test_the_tools_are_described_as_documented(plays: ModuleType) -> None:
    find, match, score = tool_of(plays.Find), tool_of(plays.Match), tool_of(plays.score)
    assert [tool.id for tool in (find, match, score)] == ["hunter.find", "apollo.match", "crm.score"]
    assert (find.cost, find.batch.max, find.batch.path) == (Decimal("0.01"), 50, "/v2/bulk")  # type: ignore[union-attr]
    assert (score.kind, score.effect, score.output_type) == ("function", "idempotent", int)
    assert plays.hunter.rate == (10, 1.0)


async def test_the_tool_function_sends_a_key_with_each_item(plays: ModuleType) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url == "https://crm.example/score"
        assert request.content == b'[{"key":"k1","domain":"a"},{"key":"k2","domain":"b"}]'
        return httpx.Response(200, json=[1, 2])

    async with httpx.AsyncClient(base_url="https://crm.example", transport=httpx.MockTransport(answer)) as http:
        call = ToolCall(http=http, keys=["k1", "k2"], deadline=0)
        assert await plays.score([plays.FindIn(domain="a"), plays.FindIn(domain="b")], call) == [1, 2]


@pytest.mark.parametrize("module", ["rowmill", "rowmill.project", "rowmill.paged_handle"])
def test_importing_rowmill_loads_no_driver_and_no_library_of_frames(module: str) -> None:
    heavy = {"aio_pika", "faststream", "asyncpg", "pyarrow", "httpx", "aiohttp", "pandas", "polars"}
    script = f"import sys, {module}; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_rowmill_exports_the_documented_names() -> None:
    documented = "Basic Batch Bearer Client Context Handle Header HttpTool Provider RowContext Rows ToolCall ToolError column play run secret steps"
    assert rowmill.__all__ == documented.split()
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        rowmill.nothing_of_the_kind  # type: ignore[attr-defined]  # noqa: B018


if TYPE_CHECKING:
    from tests.unit.authoring.api_plays import Find, FindIn, FindOut, hunter, leads, score

    @hunter.tool("one", effect="read")
    async def one(item: FindIn, call: ToolCall) -> str | ToolError:
        return item.domain

    @hunter.tool("plain", effect="read", blocking=True)
    def plain(item: FindIn, call: ToolCall) -> str:
        return item.domain

    @hunter.tool("many", effect="read", batch=Batch(5), blocking=True)
    def many(items: list[FindIn], call: ToolCall) -> list[FindOut]:
        return []

    async def types_reach_the_author(ctx: RowContext, body: Context) -> None:
        """Checked by mypy, never run."""
        assert_type(await ctx.call(Find, FindIn(domain="a")), ToolResult[FindOut])
        assert_type((await ctx.call(Find, {"domain": "a"})).data, FindOut)
        assert_type(score, FunctionTool[FindIn, int])
        assert_type(one, FunctionTool[FindIn, str])
        assert_type(plain, FunctionTool[FindIn, str])
        assert_type(many, FunctionTool[FindIn, FindOut])
        assert_type((await ctx.call(score, FindIn(domain="a"))).data, int)
        assert_type((await ctx.tools.execute(tool="hunter.find", input={}, id="x")).data, Any)
        assert_type(await leads(body), dict[str, Handle | int])
        await ctx.call(Find, 5)  # type: ignore[misc]
