"""From calls to requests, and from answers to what is stored."""

from __future__ import annotations

import base64
import json
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from tests.unit.tool_gateway.conftest import FindIn, FindOut

from rowmill import Batch, Bearer, HttpTool, Provider, secret
from rowmill.errors import DefinitionError, SecretMissing
from rowmill.secret import Basic, Header
from rowmill.tools import Tool, tool_of
from rowmill_tool_gateway.credentials import MASK, Credentials, Redactor
from rowmill_tool_gateway.failures import Observation
from rowmill_tool_gateway.http_requests import RequestShape
from rowmill_tool_gateway.results import Result, read_answer, read_answers

LIMIT = 1000


def tool(method: str = "post", path: str = "/find", *, output: Any = FindOut, extract: dict[str, list[str]] | None = None, **options: Any) -> Tool:
    provider = Provider("hunter", base_url="https://api.example/base/", headers={"X-App": "rowmill"})
    options.setdefault("effect", "read")
    declared = extract or {}

    @getattr(provider, method)(path, **options)
    class Find(HttpTool[FindIn, output]):
        extract = declared

    return tool_of(Find)


def request(described: Tool, *inputs: dict[str, Any]) -> tuple[str, Any]:
    made, _ = RequestShape(described).request([json.dumps(given).encode() for given in inputs], ["k0", "k1", "k2"][: len(inputs)], {}, 9.0)
    return made.url, None if made.body is None else json.loads(made.body)


def test_a_post_carries_its_input_unchanged_with_key_credential_and_headers() -> None:
    given = b'{"amount":12345678901234567890.10,"domain":"\\u00e9"}'
    made, batched = RequestShape(tool()).request([given], ["k0"], {"Authorization": "Bearer x"}, 9.0)
    assert (made.method, made.url, made.body, made.timeout, batched, made.pool) == (
        "POST",
        "https://api.example/base/find",
        given,
        9.0,
        False,
        "hunter",
    )
    assert made.headers["Idempotency-Key"] == "k0"
    assert made.headers["Authorization"] == "Bearer x"
    assert made.headers["X-App"] == "rowmill"


def test_a_get_carries_its_input_in_the_query() -> None:
    url, body = request(tool("get"), {"domain": "a b&c", "tags": ["x", "y"], "deep": {"a": 1}, "on": True, "none": None})
    assert url == "https://api.example/base/find?domain=a+b%26c&tags=x&tags=y&deep=%7B%22a%22%3A1%7D&on=true"
    assert body is None


def test_named_members_go_into_the_path_and_nowhere_else() -> None:
    url, body = request(tool("post", "/companies/{domain}/find"), {"domain": "a/../b?", "name": "x"})
    assert url == "https://api.example/base/companies/a%2F..%2Fb%3F/find"
    assert body == {"name": "x"}


@pytest.mark.parametrize("value", [None, "", "..", {"a": 1}])
def test_what_cannot_stand_in_a_path_is_refused(value: Any) -> None:
    with pytest.raises(DefinitionError, match="domain"):
        request(tool("get", "/companies/{domain}"), {"domain": value})


def test_a_lone_call_of_a_batch_tool_uses_the_single_endpoint_if_there_is_one() -> None:
    bulk = Batch(50, path="/bulk", items="items", results="results")
    assert request(tool(batch=bulk), {"domain": "a"}) == ("https://api.example/base/find", {"domain": "a"})
    assert request(tool(batch=bulk), {"domain": "a"}, {"domain": "b"}) == (
        "https://api.example/base/bulk",
        {"items": [{"domain": "a"}, {"domain": "b"}]},
    )
    assert request(tool(batch=Batch(50)), {"domain": "a"}) == ("https://api.example/base/find", [{"domain": "a"}])


def test_an_idempotent_batch_is_always_a_batch_with_a_key_per_item() -> None:
    bulk = Batch(50, path="/bulk", items="items", results="results", item_key="key")
    described = tool(batch=bulk, effect="idempotent")
    assert request(described, {"domain": "a"}) == ("https://api.example/base/bulk", {"items": [{"key": "k0", "domain": "a"}]})
    assert request(described, {}, {"key": "author's", "domain": "b"})[1] == {"items": [{"key": "k0"}, {"key": "k1", "domain": "b"}]}


def test_the_providers_json_is_stored_as_it_came() -> None:
    body = b' {"email": "a", "big": 12345678901234567890123, "text": "\\u0000"}\n'
    result = read_answer(tool(), 200, b"\xef\xbb\xbf" + body, LIMIT)
    assert isinstance(result, Result)
    assert result.output == b'{"raw":' + body.strip() + b',"meta":{"http_status":200}}'
    assert not result.no_result


@pytest.mark.parametrize(
    ("body", "code"), [(b"<html>", "not_json"), (b'{"email": ', "not_json"), (b'"\\ud800"', "not_json"), (b"\xff", "not_json"), (b"NaN", "not_json")]
)
def test_what_is_no_json_is_a_bad_answer(body: bytes, code: str) -> None:
    seen = read_answer(tool(), 200, body, LIMIT)
    assert isinstance(seen, Observation)
    assert (seen.kind, seen.code) == ("bad_answer", code)


def test_what_does_not_fit_the_output_type_is_a_wrong_answer_that_names_the_field() -> None:
    seen = read_answer(tool(), 200, b'{"email": {"a": 1}}', LIMIT)
    assert isinstance(seen, Observation)
    assert seen.kind == "wrong_answer"
    assert "email" in seen.message


@pytest.mark.parametrize(("size", "fits"), [(LIMIT - 1, True), (LIMIT, True), (LIMIT + 1, False)])
def test_results_have_a_limit(size: int, fits: bool) -> None:
    body = b'"' + b"x" * (size - 2) + b'"'
    assert isinstance(read_answer(tool(output=str), 200, body, LIMIT), Result) is fits


def test_an_empty_answer_is_null() -> None:
    result = read_answer(tool(output=str | None), 204, b"", LIMIT)
    assert isinstance(result, Result)
    assert msgspec.json.decode(result.output)["raw"] is None


@pytest.mark.parametrize(
    ("status", "output", "ended"),
    [(200, FindOut, "bad_answer"), (204, FindOut, "wrong_answer"), (200, FindOut | None, "result"), (200, dict[str, Any], "bad_answer")],
)
def test_an_empty_answer_is_no_json_but_where_it_may_be_null(status: int, output: Any, ended: str) -> None:
    seen = read_answer(tool(output=output), status, b" \n", LIMIT)
    assert (seen.kind if isinstance(seen, Observation) else "result") == ended


def test_null_says_that_there_is_nothing_where_the_tool_has_extractors() -> None:
    result = read_answer(tool(extract={"email": ["email"]}), 200, b"null", LIMIT)
    assert isinstance(result, Result)
    assert result.no_result
    seen = read_answer(tool(), 200, b"null", LIMIT)
    assert isinstance(seen, Observation)
    assert seen.kind == "wrong_answer"


def test_no_result_is_when_every_extractor_is_null() -> None:
    described = tool(extract={"email": ["email", "data.0.email"]}, output=dict)
    for body, nothing in ((b'{"email": null}', True), (b'{"data": [{"email": "x"}]}', False), (b"{}", True)):
        result = read_answer(described, 200, body, LIMIT)
        assert isinstance(result, Result)
        assert result.no_result is nothing


def test_a_tool_may_say_what_a_result_did_cost() -> None:
    described = tool(output=dict, actual_cost=lambda result: Decimal(str(result.raw["credits"])) / 100)
    result = read_answer(described, 200, b'{"credits": 3}', LIMIT)
    assert isinstance(result, Result)
    assert result.cost == Decimal("0.03")
    seen = read_answer(described, 200, b"{}", LIMIT)
    assert isinstance(seen, Observation)
    assert seen.category == "definition"


def test_one_bad_item_of_a_batch_fails_alone() -> None:
    described = tool(batch=Batch(9, results="out.list"))
    ended = read_answers(described, 200, b'{"out": {"list": [{"email": "a"}, {"email": 7}, {"email": null}]}}', ["a", "b", "c"], [b"{}"] * 3, LIMIT)
    assert [type(one).__name__ for one in ended] == ["Result", "Observation", "Result"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{}", "wrong_answer"),
        (b'{"out": 1}', "wrong_answer"),
        (b'{"out": {"list": {}}}', "wrong_answer"),
        (b"null", "wrong_answer"),
        (b"[", "bad_answer"),
        (b"", "bad_answer"),
        (b"<html>", "bad_answer"),
        (b'{"out": {"list": [{}, {}', "bad_answer"),
    ],
)
def test_a_batch_answer_without_its_list_fails_all_and_is_asked_for_again_only_if_it_is_no_json(body: bytes, kind: str) -> None:
    ended = read_answers(tool(batch=Batch(9, results="out.list")), 200, body, ["a", "b"], [b"{}"] * 2, LIMIT)
    assert [one.kind if isinstance(one, Observation) else None for one in ended] == [kind] * 2


async def test_credentials_are_resolved_once_and_again_when_refused(tmp_path: Any) -> None:
    environ = {"KEY": "first-value", "PASSWORD_FILE": str(tmp_path / "password")}
    (tmp_path / "password").write_text("p w\n")
    credentials = Credentials(environ, Redactor())
    bearer = Provider("a", base_url="https://a.example", auth=Bearer(secret("KEY")))
    basic = Provider("b", base_url="https://b.example", auth=Basic("user", secret("PASSWORD")))
    custom = Provider("c", base_url="https://c.example", auth=Header("X-Key", secret("KEY")))
    assert await credentials.headers(bearer) == {"Authorization": "Bearer first-value"}
    assert await credentials.headers(basic) == {"Authorization": "Basic " + base64.b64encode(b"user:p w").decode()}
    assert await credentials.headers(custom) == {"X-Key": "first-value"}
    assert not await credentials.refresh(bearer, credentials.version(bearer))
    environ["KEY"] = "second-value"
    refused = credentials.version(bearer)
    assert await credentials.refresh(bearer, refused)
    assert await credentials.refresh(bearer, refused)  # another call that was refused with the old one
    assert credentials.version(bearer) == refused + 1
    assert await credentials.headers(bearer) == {"Authorization": "Bearer second-value"}


async def test_a_secret_without_a_value_is_named_and_one_whose_function_fails_says_no_more_than_that() -> None:
    def failing() -> str:
        raise RuntimeError("the vault says hunter2")

    credentials = Credentials({}, Redactor())
    with pytest.raises(SecretMissing, match="NOT_THERE"):
        await credentials.headers(Provider("a", base_url="https://a.example", auth=Bearer(secret("NOT_THERE"))))
    with pytest.raises(SecretMissing) as caught:
        await credentials.headers(Provider("b", base_url="https://b.example", auth=Bearer(secret("VAULT", function=failing))))
    assert "hunter2" not in str(caught.value)


def test_known_secrets_are_cut_out_in_every_spelling() -> None:
    value = 'p/w "ä" & more'
    redactor = Redactor()
    redactor.learn(value)
    encoded = base64.b64encode(value.encode()).decode()
    for spelling in (value, quote(value, safe=""), encoded, json.dumps(value, ensure_ascii=False)[1:-1]):
        assert redactor.text(f"<{spelling}>") == f"<{MASK}>"
        assert redactor.body(f"<{spelling}>".encode()) == f"<{MASK}>".encode()


def test_short_secrets_are_cut_out_of_messages_but_results_are_not_changed_by_chance() -> None:
    redactor = Redactor()
    redactor.learn("demo")
    assert redactor.text("the key demo is bad") == f"the key {MASK} is bad"
    assert redactor.body(b'{"domain": "demo.example"}') == b'{"domain": "demo.example"}'
