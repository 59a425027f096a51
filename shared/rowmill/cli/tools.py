"""`rowmill tools`: what tools a project has, and one call of one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rowmill.cli.typed import seconds_typed, text_typed
from rowmill.errors import UsageError

if TYPE_CHECKING:
    from rowmill.tools import Tool
    from rowmill_contracts.tools import CallOutcome

app = typer.Typer(help="The project's tools.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ToolArgument = Annotated[str, typer.Argument(help="A tool's id (provider.name), or module:attribute.")]


@app.command("list")
def list_tools(as_json: JsonOption = False) -> None:
    """List the project's tools. Needs no server."""
    from rowmill import registry  # noqa: PLC0415 - commands load what they need

    _project()
    tools = [registry.tool_named(name) for name in registry.known_tools()]
    if as_json:
        print(json.dumps([_document(tool) for tool in tools], indent=2))
        return
    if not tools:
        print("no tools; `plays` and `tools` in rowmill.toml name the modules that define them")
    for tool in tools:
        where = f"{tool.method} {tool.provider.base_url}{tool.path}" if tool.kind == "http" else f"function {_name_of(tool)}"
        print(f"{tool.id:28} {tool.effect:15} {_cost(tool):>14}  {where}")


@app.command("show")
def show(tool: ToolArgument, as_json: JsonOption = False) -> None:
    """Show one tool with its provider's limits and its input. Needs no server, and resolves no secret."""
    described = _project().tool(tool)
    document = _document(described) | {"input_schema": _schema(described.input_adapter), "output_schema": _schema(described.output_adapter)}
    if as_json:
        print(json.dumps(document, indent=2))
        return
    for name, value in document.items():
        if value is not None:
            print(f"{name:16} {json.dumps(value) if isinstance(value, dict | list) else value}")


@app.command("call")
def call(
    tool: ToolArgument,
    given: Annotated[list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Its input: JSON values, or text.")] = None,
    document: Annotated[str | None, typer.Option("--input", help="Its whole input: JSON, or @FILE.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Make the call, and pay for it, though a stored result would serve.")] = False,
    timeout: Annotated[str | None, typer.Option(help="For the request, from its dispatch, such as 30s.")] = None,
    wait: Annotated[str, typer.Option(help="How long to wait for the outcome in all.")] = "5min",
    org: Annotated[str, typer.Option(help="The organisation that pays.")] = "default",
    as_json: JsonOption = False,
) -> None:
    """Make one call through the gateway, under a receipt as a run's call has one, and print its result and what it cost.

    A stored result of a `read` tool serves it free of charge, and its result serves later runs.
    A call of any other tool is made and paid for each time.
    """
    import asyncio  # noqa: PLC0415 - commands load what they need

    from rowmill.client.calls import ToolCaller  # noqa: PLC0415
    from rowmill.client.client import Client  # noqa: PLC0415
    from rowmill.client.finding import broker_url  # noqa: PLC0415

    described = _project().tool(tool)
    value = _input(given or [], document)
    described.encode_input(value)  # a wrong input is said before anybody is asked
    limits = {"wait": seconds_typed("--wait", wait), "timeout": None if timeout is None else seconds_typed("--timeout", timeout)}

    def waiting(outcome: CallOutcome) -> None:
        typer.echo(f"rowmill: waits {outcome.wait_ms / 1000:.0f} s: {outcome.reason}", err=True)

    async def question(url: str) -> CallOutcome:
        async with Client(url, row_events=False) as client:
            return await ToolCaller(client.bus, org=org).call(described, value, force=force, waiting=waiting, **limits)  # type: ignore[arg-type]

    outcome = asyncio.run(question(broker_url()))
    print(json.dumps(_outcome(outcome)) if as_json else _told(outcome))
    if outcome.outcome not in {"completed", "no_result"}:
        raise typer.Exit(1)


def _project() -> Any:
    from rowmill.project import Project  # noqa: PLC0415

    project = Project.find(Path.cwd())
    project.load()
    return project


def _document(tool: Tool) -> dict[str, Any]:
    provider = tool.provider
    return {
        "id": tool.id,
        "kind": tool.kind,
        "effect": tool.effect,
        "cost": _cost(tool),
        "method": tool.method if tool.kind == "http" else None,
        "url": f"{provider.base_url}{tool.path}" if tool.kind == "http" else None,
        "function": _name_of(tool) if tool.kind == "function" else None,
        "batch": None if tool.batch is None else tool.batch.max,
        "timeout": tool.timeout,
        "max_wait": tool.max_wait,
        "rate": None if tool.rate is None else tool.rate.text,
        "retry_5xx": tool.retry_5xx,
        "no_result": sorted(tool.no_result),
        "extract": {name: list(paths) for name, paths in tool.extract.items()},
        "version": tool.version,
        "provider": provider.name,
        "provider_rate": None if provider.rate is None else provider.rate.text,
        "concurrency": provider.concurrency,
        "secrets": [ref.name for ref in provider.secrets],
    }


def _name_of(tool: Tool) -> str:
    return f"{getattr(tool.function, '__module__', '')}:{getattr(tool.function, '__qualname__', '')}"


def _cost(tool: Tool) -> str:
    return "by its input" if callable(tool.cost) else str(tool.cost)


def _schema(adapter: Any) -> Any:
    from pydantic.errors import PydanticInvalidForJsonSchema  # noqa: PLC0415

    try:
        return adapter.json_schema()
    except PydanticInvalidForJsonSchema:
        return None


def _input(given: list[str], document: str | None) -> Any:
    if document is not None:
        if given:
            raise UsageError("say --input JSON for the whole input, or NAME=VALUE for its parts, not both")
        try:
            return json.loads(text_typed("--input", document))
        except json.JSONDecodeError as error:
            raise UsageError(f"--input is not JSON: {error}") from None
    value: dict[str, Any] = {}
    for part in given:
        name, found, text = part.partition("=")
        if not found or not name:
            raise UsageError(f"{part!r} is no part of an input; write NAME=VALUE, or --input JSON")
        try:
            value[name] = json.loads(text)
        except json.JSONDecodeError:
            value[name] = text
    return value


def _outcome(outcome: CallOutcome) -> dict[str, Any]:
    import msgspec  # noqa: PLC0415

    document: dict[str, Any] = {"outcome": outcome.outcome, "receipt": outcome.receipt, "cost": str(outcome.cost), "execution": outcome.execution}
    if outcome.outcome in {"completed", "no_result"}:
        document["result"] = msgspec.json.decode(outcome.result)["raw"]
    if outcome.failure is not None:
        document["failure"] = msgspec.to_builtins(outcome.failure)
    if outcome.reason:
        document["reason"] = outcome.reason
    return document


def _told(outcome: CallOutcome) -> str:
    document = _outcome(outcome)
    how = {"live": "sent now", "cache": "served by a stored result", "in_flight": "joined an equal call"}[outcome.execution]
    receipt = f"receipt {outcome.receipt}, cost {outcome.cost}"
    match outcome.outcome:
        case "completed" | "no_result":
            found = "" if outcome.outcome == "completed" else "\nthe provider has no result"
            return f"{json.dumps(document['result'], indent=2, ensure_ascii=False)}{found}\n{receipt}, {how}"
        case "unknown":
            return f"an earlier request was sent and its outcome is not known; `rowmill receipts show {outcome.receipt}` says how to decide"
        case _:
            failure = outcome.failure
            reason = outcome.reason if failure is None else f"{failure.message} ({failure.code}, {failure.category})"
            return f"{outcome.outcome}: {reason}\n{receipt}"
