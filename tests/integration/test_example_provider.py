"""The example's provider answers, misbehaves and counts as the tests and the demo that lean on it assume."""

import asyncio
import csv
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import aiohttp
import httpx
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "leads"
sys.path.insert(0, str(EXAMPLE))

from make_leads import write_leads  # noqa: E402 - found through the path above
from provider import LeadsProvider, ProviderProcess, apollo_answer, crm_score, hunter_answer  # noqa: E402
from provider_books import Control  # noqa: E402

DOMAINS = [f"d{number}.example" for number in range(200)]


@pytest.fixture
async def provider() -> AsyncIterator[LeadsProvider]:
    async with LeadsProvider() as running:
        yield running


@pytest.fixture
async def client(provider: LeadsProvider) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(provider.url) as session:
        yield session


async def post(client: aiohttp.ClientSession, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
    headers = {"Idempotency-Key": key} if key is not None else {}
    async with client.post(path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def order(client: aiohttp.ClientSession, **what: Any) -> None:
    assert await post(client, "/_control", what) == (200, {"ok": True})


async def test_each_path_answers_by_the_domain(client: aiohttp.ClientSession) -> None:
    for domain in DOMAINS[:20]:
        assert await post(client, "/v2/find", {"domain": domain}) == (200, hunter_answer(domain))
        assert await post(client, "/match", {"domain": domain}) == (200, apollo_answer(domain))
    items = [{"domain": domain} for domain in DOMAINS]
    assert await post(client, "/v2/bulk", {"items": items}) == (200, {"results": [hunter_answer(domain) for domain in DOMAINS]})
    keyed = [{"domain": domain, "key": domain} for domain in DOMAINS]
    assert await post(client, "/score", keyed) == (200, [crm_score(domain) for domain in DOMAINS])


def test_some_domains_are_found_by_one_provider_only() -> None:
    hunter = {domain for domain in DOMAINS if hunter_answer(domain) != {"email": None}}
    apollo = {domain for domain in DOMAINS if apollo_answer(domain)["email"]}
    assert hunter - apollo
    assert apollo - hunter
    assert set(DOMAINS) - hunter - apollo
    assert {tuple(hunter_answer(domain)) for domain in hunter} == {("email",), ("data",)}


async def test_echo_shows_what_came(client: aiohttp.ClientSession) -> None:
    async with client.post("/echo?a=1", data=b"hello", headers={"Authorization": "Bearer x"}) as response:
        shown = await response.json()
    assert (shown["method"], shown["query"], shown["body"], shown["headers"]["Authorization"]) == ("POST", "a=1", "hello", "Bearer x")


async def test_effects_are_counted_by_key_and_by_subject(provider: LeadsProvider, client: aiohttp.ClientSession) -> None:
    await post(client, "/v2/find", {"domain": "a"}, key="k1")
    await post(client, "/v2/find", {"domain": "a"}, key="k1")
    await post(client, "/v2/find", {"domain": "b"}, key="k2")
    await post(client, "/score", [{"domain": "a", "key": "s1"}, {"domain": "b", "key": "s2"}])
    await post(client, "/score", [{"domain": "a", "key": "s3"}])
    await post(client, "/match", {"domain": "a"})
    stats = provider.stats()
    assert stats["requests"] == {"/v2/find": 3, "/score": 2, "/match": 1}
    assert stats["items"] == {"/v2/find": 3, "/score": 3, "/match": 1}
    assert stats["effects"] == {"k1": 1, "k2": 1, "s1": 1, "s2": 1, "s3": 1}
    assert (stats["keys"], stats["repeated_keys"], stats["max_effects_per_key"]) == (5, 1, 1)
    assert (stats["repeated_subjects"], stats["max_effects_per_subject"]) == (1, 2)  # a was scored under two keys
    assert stats["replies"] == {"200": 6}


async def test_keys_that_are_not_honoured_have_effect_each_time(provider: LeadsProvider, client: aiohttp.ClientSession) -> None:
    await order(client, honour_keys=False)
    for _ in range(3):
        await post(client, "/v2/find", {"domain": "a"}, key="k")
    assert provider.stats()["effects"] == {"k": 3}


async def test_ordered_429_names_a_time_and_has_no_effect(provider: LeadsProvider, client: aiohttp.ClientSession) -> None:
    await order(client, reply_429={"path": "/v2/find", "count": 2, "retry_after": 7})
    for _ in range(2):
        async with client.post("/v2/find", json={"domain": "a"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "7")
    assert (await post(client, "/match", {"domain": "a"}))[0] == 200
    assert (await post(client, "/v2/find", {"domain": "a"}))[0] == 200
    assert provider.stats()["items"] == {"/match": 1, "/v2/find": 1}


async def test_ordered_500_can_come_after_the_effect(provider: LeadsProvider, client: aiohttp.ClientSession) -> None:
    await order(client, reply_500={"path": "/v2/find", "effect": True})
    assert (await post(client, "/v2/find", {"domain": "a"}, key="k"))[0] == 500
    assert provider.stats()["effects"] == {"k": 1}


async def test_any_status_and_body_can_be_ordered(client: aiohttp.ClientSession) -> None:
    await order(client, reply={"status": 402, "body": "not json"})
    async with client.post("/v2/find", json={"domain": "a"}) as response:
        assert (response.status, await response.text()) == (402, "not json")


async def test_a_dropped_answer_leaves_the_effect(provider: LeadsProvider, client: aiohttp.ClientSession) -> None:
    await order(client, drop={"path": "/v2/find"})
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await post(client, "/v2/find", {"domain": "a"}, key="k")
    stats = provider.stats()
    assert (stats["effects"], stats["dropped"], stats["in_flight"]) == ({"k": 1}, 1, 0)


async def test_the_rate_limit_is_per_provider(client: aiohttp.ClientSession) -> None:
    await order(client, rate_limit=3)
    statuses = [(await post(client, "/v2/find", {"domain": "a"}))[0] for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]
    assert (await post(client, "/match", {"domain": "a"}))[0] == 200


async def test_rates_of_failure_are_the_same_every_time() -> None:
    runs = []
    for _ in range(2):
        async with LeadsProvider(fail_rate=0.3) as provider, aiohttp.ClientSession(provider.url) as client:
            runs.append([(await post(client, "/v2/find", {"domain": "a"}))[0] for _ in range(40)])
    assert runs[0] == runs[1]
    assert set(runs[0]) == {200, 500}


async def test_held_answers_wait_and_show_what_is_in_flight(provider: LeadsProvider, client: aiohttp.ClientSession) -> None:
    await order(client, hold=True)
    asked = [asyncio.create_task(post(client, "/v2/find", {"domain": domain})) for domain in DOMAINS[:5]]
    while provider.stats()["in_flight"] < 5:
        await asyncio.sleep(0)
    assert not any(task.done() for task in asked)
    await order(client, hold=False)
    assert {status for status, _ in await asyncio.gather(*asked)} == {200}
    assert provider.stats()["in_flight_max"] == {"hunter": 5}


async def test_reset_forgets_counts_and_orders(provider: LeadsProvider, client: aiohttp.ClientSession) -> None:
    await post(client, "/v2/find", {"domain": "a"})
    await order(client, reply_500={"count": 10})
    await post(client, "/_reset", None)
    assert provider.stats()["requests"] == {}
    assert (await post(client, "/v2/find", {"domain": "a"}))[0] == 200


@pytest.mark.parametrize(("path", "body"), [("/v2/find", {"name": "a"}), ("/v2/bulk", []), ("/score", {"a": 1}), ("/_control", {"typo": 1})])
async def test_a_malformed_request_is_refused(client: aiohttp.ClientSession, path: str, body: Any) -> None:
    assert (await post(client, path, body))[0] == 400


async def test_an_unknown_path_is_refused(client: aiohttp.ClientSession) -> None:
    assert (await post(client, "/nowhere", {}))[0] == 404


async def test_a_body_without_length_is_refused(client: aiohttp.ClientSession) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"{}"

    async with client.post("/v2/find", data=parts()) as response:
        assert response.status == 411


async def test_requests_may_come_in_pieces_and_in_a_row(provider: LeadsProvider) -> None:
    await asyncio.sleep(0)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(provider.url.rsplit(":", 1)[1]))
    request = b'POST /match HTTP/1.1\r\nHost: x\r\ncontent-length: 14\r\n\r\n{"domain":"a"}'
    provider.control(Control(latency_ms=1))
    for byte in request + request[:-3]:
        writer.write(bytes([byte]))
        await writer.drain()
    writer.write(request[-3:])
    for _ in range(2):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    writer.close()
    await writer.wait_closed()


async def test_httpx_is_served_too(provider: LeadsProvider) -> None:
    async with httpx.AsyncClient(base_url=provider.url) as client:
        assert (await client.post("/score", json=[{"domain": "a"}])).json() == [crm_score("a")]


def test_the_process_of_its_own_starts_counts_and_stops() -> None:
    with ProviderProcess("--fail-rate", "1") as provider:
        with pytest.raises(HTTPError, match="500"):
            provider._ask("/match", b'{"domain":"a"}')
        assert provider.stats()["replies"] == {"500": 1}
        provider.control(fail_rate=0)
        assert provider._ask("/match", b'{"domain":"a"}') == apollo_answer("a")
        provider.reset()
        assert provider.stats(brief=True)["requests"] == {}


def test_the_committed_leads_are_what_the_generator_writes(tmp_path: Path) -> None:
    again = tmp_path / "leads.csv"
    with again.open("w", encoding="utf-8", newline="") as file:
        write_leads(file, 1000)
    assert again.read_bytes() == (EXAMPLE / "leads.csv").read_bytes()
    with again.open(encoding="utf-8", newline="") as file:
        leads = list(csv.DictReader(file))
    assert len({lead["domain"] for lead in leads}) == len(leads) == 1000
    assert any(not lead["name"].isascii() for lead in leads)
