"""Providers and tools: what can be declared, what is refused when it is defined, and how values cross the wire."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, Field

from rowmill import Batch, Bearer, HttpTool, Provider, ToolCall, ToolError, registry, secret
from rowmill.durations import Rate
from rowmill.errors import DefinitionError, InputInvalid, OutputInvalid, UnknownName
from rowmill.secret import Header
from rowmill.tools import FunctionTool, Tool, tool_of


class FindIn(BaseModel):
    domain: str
    limit: int = Field(default=1, alias="maxResults")


class FindOut(BaseModel):
    email: str | None = None
    score: Decimal = Decimal(0)


def provider(name: str = "hunter", **options: Any) -> Provider:
    return Provider(name, **{"base_url": "https://api.hunter.example", **options})


def finder(**options: Any) -> Tool:
    class Find(HttpTool[FindIn, FindOut]):
        extract: ClassVar[dict[str, list[str]]] = {"email": ["email", "data.emails.0.value"], "name": ["name"]}

    return tool_of(provider().post("/find", **{"effect": "read", **options})(Find))


def test_an_http_tool_is_described_whole() -> None:
    hunter = provider(rate="10/s", concurrency=5, timeout="1m")

    @hunter.put("/v2/x", effect="idempotent", cost=Decimal("0.5"), no_result=(404,), max_wait="2h", rate="1/s", version="3")
    class HTTPLookup(HttpTool[FindIn, FindOut]):
        extract: ClassVar[dict[str, list[str]]] = {"email": ["email"]}

    tool = tool_of(HTTPLookup)
    assert (tool.id, tool.name, tool.kind, tool.method, tool.path) == ("hunter.http_lookup", "http_lookup", "http", "PUT", "/v2/x")
    assert (tool.effect, tool.cost, tool.no_result, tool.version) == ("idempotent", Decimal("0.5"), frozenset({404}), "3")
    assert (tool.timeout, tool.max_wait, tool.rate, tool.retry_5xx) == (60.0, 7200.0, Rate(1, 1.0), True)
    assert (tool.input_type, tool.output_type, tool.extract) == (FindIn, FindOut, {"email": ["email"]})
    assert (tool.provider, tool.definition) == (hunter, HTTPLookup)
    assert tool_of("hunter.http_lookup") is tool_of(tool) is tool


def test_a_tool_can_be_given_its_name() -> None:
    assert finder(id="find-2").id == "hunter.find-2"


def test_what_cannot_be_repeated_does_not_repeat_5xx_unless_it_says_so() -> None:
    assert finder(effect="non_idempotent", id="a").retry_5xx is False
    assert finder(effect="non_idempotent", id="b", retry_5xx=True).retry_5xx is True


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"effect": "write"}, "effect must be one of read, idempotent, non_idempotent"),
        ({"cost": 0.01}, "cost is a Decimal"),
        ({"cost": Decimal(-1)}, "not negative"),
        ({"id": "Find It"}, "tool name 'Find It'"),
        ({"timeout": "soon"}, "'soon' is not a duration"),
        ({"rate": "fast"}, "'fast' is not a rate"),
        ({"effect": "idempotent", "batch": Batch(10)}, "each item must carry its key"),
    ],
)
def test_options_that_cannot_work_are_refused_when_defined(options: dict[str, Any], told: str) -> None:
    with pytest.raises(DefinitionError, match=told):
        finder(**options)


def test_an_idempotent_batch_is_allowed_with_an_item_key_or_as_a_function() -> None:
    assert finder(effect="idempotent", batch=Batch(10, item_key="key")).batch == Batch(10, item_key="key")

    @provider("crm").tool("score", effect="idempotent", batch=Batch(10))
    def score(inputs: list[FindIn], call: ToolCall) -> list[int]:
        return [len(call.keys)] * len(inputs)

    assert score.tool.effect == "idempotent"


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_batch_holds_at_least_one_call(size: Any) -> None:
    with pytest.raises(DefinitionError, match="at least one"):
        Batch(size)


def test_a_tool_without_types_or_provider_is_refused() -> None:
    class Bare(HttpTool):  # type: ignore[type-arg]
        pass

    class Loose(HttpTool[FindIn, FindOut]):
        pass

    with pytest.raises(DefinitionError, match="say its input and output types"):
        provider().get("/x", effect="read")(Bare)
    with pytest.raises(DefinitionError, match="not attached to a provider"):
        tool_of(Loose)
    with pytest.raises(DefinitionError, match="starts with '/'"):
        provider("other").get("x", effect="read")
    with pytest.raises(DefinitionError, match="not made to be instantiated"):
        Loose()
    with pytest.raises(DefinitionError, match="42 is not a tool"):
        tool_of(42)


def test_a_subclass_of_a_tool_is_a_tool_of_its_own() -> None:
    hunter = provider()

    @hunter.post("/a", effect="read")
    class First(HttpTool[FindIn, FindOut]):
        pass

    class Second(First):
        pass

    with pytest.raises(DefinitionError, match="Second is not attached"):
        tool_of(Second)
    assert tool_of(hunter.post("/b", effect="read")(Second)).id == "hunter.second"
    assert tool_of(First).path == "/a"


def test_an_unknown_tool_lists_the_known_ones() -> None:
    finder()
    with pytest.raises(UnknownName, match=r"unknown tool 'hunter.fnid'; known: hunter.find"):
        tool_of("hunter.fnid")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"name": "Hunter"}, "provider name 'Hunter'"),
        ({"base_url": "ftp://x"}, "must be an http or https URL"),
        ({"base_url": "api.hunter.example"}, "must be an http or https URL"),
        ({"base_url": "https://me:pw@x.example"}, "holds a credential"),
        ({"base_url": "https://x.example?key=1"}, "query"),
        ({"base_url": "http://x.example", "auth": Bearer(secret("K"))}, "only over https or to this machine"),
        ({"headers": {"authorization": "Bearer x"}}, "may not carry a credential"),
        ({"headers": {"X-Key": secret("K")}}, "may not carry a credential"),
        ({"auth": secret("K")}, "auth is Bearer"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"burst": 0}, "burst must be at least 1"),
    ],
)
def test_providers_that_cannot_be_used_are_refused_when_defined(options: dict[str, Any], told: str) -> None:
    with pytest.raises(DefinitionError, match=told) as raised:
        provider(**options)
    assert "pw" not in str(raised.value)


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.1:8799", "http://[::1]:2", "https://api.example"])
def test_a_secret_goes_over_https_or_to_this_machine(url: str) -> None:
    assert provider(base_url=url, auth=Header("X-Api-Key", secret("K"))).base_url == url


def test_a_project_may_override_a_provider_within_the_same_rules() -> None:
    hunter = provider(auth=Bearer(secret("K")), rate="10/s")
    hunter.configure(base_url="http://127.0.0.1:9/", concurrency=3)
    assert (hunter.base_url, hunter.rate, hunter.concurrency) == ("http://127.0.0.1:9", Rate(10, 1.0), 3)
    with pytest.raises(DefinitionError, match="only over https"):
        hunter.configure(base_url="http://elsewhere.example")
    assert hunter.base_url == "http://127.0.0.1:9"


# Tool functions


def test_types_of_a_function_tool_come_from_its_annotations() -> None:
    @provider().tool("score", effect="read", batch=Batch(3))
    async def score(inputs: Sequence[FindIn], call: ToolCall) -> list[FindOut | ToolError | None]:
        return [None for _ in inputs]

    @provider("crm").tool("one", effect="read", blocking=True)
    def one(item: FindIn, call: ToolCall) -> int | ToolError:
        return 1

    @provider("free").tool("any", effect="read")
    def anything(item, call):  # type: ignore[no-untyped-def]
        return item

    assert isinstance(score, FunctionTool)
    assert (score.tool.input_type, score.tool.output_type) == (FindIn, FindOut | None)
    assert (one.tool.input_type, one.tool.output_type, one.tool.blocking) == (FindIn, int, True)
    assert (anything.tool.input_type, anything.tool.output_type) == (Any, Any)
    assert one(FindIn(domain="a"), None) == 1


def test_function_tools_that_cannot_work_are_refused_when_defined() -> None:
    def not_a_list(inputs: FindIn, call: ToolCall) -> None: ...

    def too_few(inputs: FindIn) -> None: ...

    async def waits(inputs: FindIn, call: ToolCall) -> None: ...

    crm: Any = provider("crm")  # mypy refuses some of them too
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (not_a_list, {"batch": Batch(3)}, "works on batches, so it takes a list"),
        (too_few, {}, "takes 1 arguments"),
        (waits, {"blocking": True}, "async, so it cannot be blocking"),
        (FindIn, {}, "decorates a function"),
    ]
    for function, options, told in cases:
        with pytest.raises(DefinitionError, match=told):
            crm.tool("a", effect="read", **options)(function)


# Values


def test_inputs_cross_the_wire_under_their_aliases_and_come_back() -> None:
    tool = finder()
    encoded = tool.encode_input(FindIn(domain="a.com", maxResults=2))
    assert encoded == {"domain": "a.com", "maxResults": 2}
    assert tool.encode_input({"domain": "a.com", "limit": 2}) == encoded
    assert tool.decode_input(encoded) == FindIn(domain="a.com", maxResults=2)


def test_an_input_that_does_not_fit_names_field_and_value() -> None:
    with pytest.raises(InputInvalid, match=r"input of tool 'hunter.find': domain: .* \(given: 3\)"):
        finder().encode_input({"domain": 3})


def test_a_result_is_typed_and_keeps_unknown_fields_raw() -> None:
    result = finder().result({"email": "x@a.com", "score": "0.5", "more": 1})
    assert (result.status, result.data) == ("completed", FindOut(email="x@a.com", score=Decimal("0.5")))
    assert result.raw["more"] == 1
    assert result.get("email") == "x@a.com"


@pytest.mark.parametrize(
    ("raw", "http_status", "status"),
    [
        ({"email": None}, 200, "no_result"),
        ({}, 200, "no_result"),
        ({"name": "A"}, 200, "completed"),
        ({"data": {"emails": [{"value": "x"}]}}, 200, "completed"),
        ({"email": "x"}, 404, "no_result"),
        ("not found", 404, "no_result"),
        ({"email": "x"}, 500, "completed"),
    ],
)
def test_no_result_is_a_listed_status_or_nothing_extracted(raw: Any, http_status: int, status: str) -> None:
    assert finder(no_result=[404]).result(raw, http_status=http_status).status == status


def test_without_extractors_an_empty_answer_is_a_result() -> None:
    @provider("crm").tool("note", effect="read")
    def note(item: FindIn, call: ToolCall) -> None: ...

    assert note.tool.result(None).status == "completed"


def test_an_answer_that_does_not_fit_names_field_and_value() -> None:
    with pytest.raises(OutputInvalid, match=r"answer of tool 'hunter.find': score: .* \(given: 'high'\)"):
        finder().result({"score": "high"})


def test_costs_are_values_or_functions_and_checked_when_asked() -> None:
    per_item = finder(cost=lambda item: Decimal("0.1") * item.limit, actual_cost=lambda result: Decimal(result.raw["credits"]))
    assert per_item.cost_of(FindIn(domain="a", maxResults=3)) == Decimal("0.3")
    assert per_item.actual_cost_of(per_item.result({"credits": 2}), Decimal(9)) == 2
    fixed = finder(id="fixed", cost=Decimal("0.01"))
    assert (fixed.cost_of(None), fixed.actual_cost_of(fixed.result({}), Decimal(9))) == (Decimal("0.01"), Decimal(9))
    with pytest.raises(DefinitionError, match=r"not 0\.5"):
        finder(id="float", cost=lambda item: 0.5).cost_of(None)


# Names


def test_the_same_place_defines_again_and_another_place_is_refused() -> None:
    for _ in range(2):
        finder()
    assert registry.known_tools() == ["hunter.find"]
    with pytest.raises(DefinitionError, match=r"provider 'hunter' is defined twice: at .*test_tool_definitions.*py:\d+\) and at .*py:\d+\)"):
        Provider("hunter", base_url="https://other.example")

    class Find(HttpTool[FindIn, FindOut]):
        pass

    with pytest.raises(DefinitionError, match=r"tool 'hunter\.find' is defined twice"):
        provider().post("/other", effect="read")(Find)
