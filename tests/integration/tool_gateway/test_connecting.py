"""How providers are connected to, as they declare it: TLS, proxies, HTTP/2, connections; for declared tools and for functions."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.tool_gateway.h2_server import H2Server, Proxy
from tests.integration.tool_gateway.socket_server import Server, reset, saying

from rowmill import Bearer, Provider, registry, secret
from rowmill.tls import Tls
from rowmill_tool_gateway.body_budget import BodyBudget
from rowmill_tool_gateway.credentials import Credentials, Redactor
from rowmill_tool_gateway.function_clients import Clients
from rowmill_tool_gateway.http_direct import DirectPort
from rowmill_tool_gateway.http_library import LibraryPort
from rowmill_tool_gateway.http_parsing import BadResponse, ResponseTooLarge
from rowmill_tool_gateway.http_port import AiohttpPort, HttpPort, HttpRequest, HttpResponse, NoResponse
from rowmill_tool_gateway.routes import Routes

LIMIT = 2**20


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry.isolated():
        yield


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ca.pem`` and, vouched for by it, ``server.pem`` and ``client.pem``, each with its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("pki")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], check=True, capture_output=True, cwd=folder)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *new_key, "-days", "2", "-subj", "/CN=tests", "-keyout", "ca.key", "-out", "ca.pem")
    for name in ("server", "client"):
        run("req", *new_key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr", "-addext", "subjectAltName=DNS:localhost")
        signing = ("-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-copy_extensions", "copy")
        run("x509", *signing, "-out", f"{name}.crt")
        (folder / f"{name}.pem").write_bytes((folder / f"{name}.crt").read_bytes() + (folder / f"{name}.key").read_bytes())
    return folder


def served_with(pki: Path, *, asks_for_ours: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pki / "server.pem")
    if asks_for_ours:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(pki / "ca.pem")
    return context


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    yield made
    await made.stop()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    made = Proxy()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def h2(pki: Path) -> AsyncIterator[H2Server]:
    made = H2Server()
    await made.start(served_with(pki))
    yield made
    await made.stop()


class Ports:
    """Every port, over the same routes and budget."""

    def __init__(self) -> None:
        self.routes = Routes()
        self.budget = BodyBudget(2 * LIMIT, LIMIT)
        bounds: dict[str, Any] = {"connect_timeout": 5.0, "body_stall": 0.5, "body_limit": LIMIT, "budget": self.budget, "routes": self.routes}
        self.direct = DirectPort(**bounds)
        self.aiohttp = AiohttpPort(**bounds)
        self.library = LibraryPort(self.routes, self.aiohttp.bounds, connect_timeout=5.0)

    def __iter__(self) -> Iterator[HttpPort]:
        return iter((self.direct, self.aiohttp, self.library))


@pytest.fixture
async def ports() -> AsyncIterator[Ports]:
    made = Ports()
    yield made
    for port in made:
        await port.close()


async def send(port: HttpPort, url: str, *, fresh: bool = False, timeout: float = 5.0) -> HttpResponse:
    return await port.send(HttpRequest("hunter", "POST", url, {"X-Key": "k"}, b"{}", timeout, fresh))


async def ending(port: HttpPort, url: str) -> str:
    try:
        return str((await send(port, url)).status)
    except NoResponse as error:
        return error.kind


# ---- TLS ----------------------------------------------------------------------------------------------------------------------------------


async def test_the_providers_own_authority_is_trusted_and_no_other(ports: Ports, server: Server, pki: Path) -> None:
    await server.start(served_with(pki))
    Provider("hunter", base_url=server.url, tls=Tls(ca=str(pki / "ca.pem")))
    Provider("other", base_url=server.url)
    for port in ports:
        assert await ending(port, server.url) == "200"
        with pytest.raises(NoResponse) as caught:
            await port.send(HttpRequest("other", "POST", server.url, {}, b"{}", 5.0))
        assert caught.value.kind == "never_opened"


async def test_a_provider_that_asks_who_we_are_is_shown_our_certificate(ports: Ports, server: Server, pki: Path) -> None:
    await server.start(served_with(pki, asks_for_ours=True))
    Provider("hunter", base_url=server.url, tls=Tls(ca=str(pki / "ca.pem"), certificate=str(pki / "client.crt"), key=str(pki / "client.key")))
    for port in ports:
        assert await ending(port, server.url) == "200"
    without = Ports()
    Provider("nobody", base_url=server.url, tls=Tls(ca=str(pki / "ca.pem")))
    for port in without:
        with pytest.raises(NoResponse):  # the provider says no after the handshake, so the request may have been on its way
            await port.send(HttpRequest("nobody", "POST", server.url, {}, b"{}", 5.0))
        await port.close()
    assert len(server.requests) == 3


@pytest.mark.parametrize(("minimum", "ended"), [("1.2", "200"), ("1.3", "never_opened")])
async def test_older_versions_than_the_declared_one_are_not_spoken(ports: Ports, server: Server, pki: Path, minimum: Any, ended: str) -> None:
    old = served_with(pki)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    await server.start(old)
    Provider("hunter", base_url=server.url, tls=Tls(ca=str(pki / "ca.pem"), minimum=minimum))
    assert [await ending(port, server.url) for port in ports] == [ended] * 3


async def test_a_tls_file_that_is_not_there_fails_the_call_and_names_it(ports: Ports, tmp_path: Path) -> None:
    Provider("hunter", base_url="https://localhost:1", tls=Tls(ca=str(tmp_path / "gone.pem")))
    for port in ports:
        with pytest.raises(NoResponse, match=r"gone\.pem") as caught:
            await send(port, "https://localhost:1")
        assert caught.value.kind == "misdefined"


# ---- proxies ------------------------------------------------------------------------------------------------------------------------------


async def test_a_proxy_carries_what_it_cannot_read(ports: Ports, server: Server, proxy: Proxy, pki: Path) -> None:
    server.talk = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n", b'{"email":"a@b.com"}')
    await server.start(served_with(pki))
    Provider("hunter", base_url=server.url, proxy=proxy.url, tls=Tls(ca=str(pki / "ca.pem")))
    assert (await send(ports.library, server.url)).body == b'{"email":"a@b.com"}'
    assert (await send(ports.library, server.url)).status == 200
    assert proxy.asked == [f"CONNECT localhost:{server.port} HTTP/1.1"]
    assert b"a@b.com" not in proxy.seen
    assert proxy.seen


async def test_a_plain_provider_is_asked_through_its_proxy(ports: Ports, server: Server, proxy: Proxy) -> None:
    await server.start()
    Provider("hunter", base_url=server.url, proxy=proxy.url)
    assert await ending(ports.library, f"{server.url}/find") == "200"
    assert proxy.asked == [f"POST {server.url}/find HTTP/1.1"]


async def test_a_proxy_that_refuses_or_is_not_there_is_a_connection_that_never_opened(
    ports: Ports, server: Server, proxy: Proxy, pki: Path, unused_tcp_port: int
) -> None:
    await server.start(served_with(pki))
    proxy.refuses = True
    Provider("hunter", base_url=server.url, proxy=proxy.url, tls=Tls(ca=str(pki / "ca.pem")))
    assert await ending(ports.library, server.url) == "never_opened"
    Provider("away", base_url=server.url, proxy=f"http://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(NoResponse) as caught:
        await ports.library.send(HttpRequest("away", "POST", server.url, {}, b"{}", 5.0))
    assert caught.value.kind == "never_opened"
    assert not server.requests


# ---- HTTP/2 -------------------------------------------------------------------------------------------------------------------------------


async def test_many_requests_share_one_connection_over_http2(ports: Ports, h2: H2Server, pki: Path) -> None:
    url = f"https://localhost:{h2.port}"
    Provider("hunter", base_url=url, http2=True, tls=Tls(ca=str(pki / "ca.pem")))
    await send(ports.library, url)
    answers = await asyncio.gather(*(send(ports.library, f"{url}/find/{n}") for n in range(30)))
    assert {answer.body for answer in answers} == {h2.body}
    assert (h2.connections, len(h2.requests)) == (1, 31)
    assert h2.requests[-1]["x-key"] == "k"


async def test_a_stream_that_is_reset_is_no_answer_and_the_next_request_goes_on(ports: Ports, h2: H2Server, pki: Path) -> None:
    url = f"https://localhost:{h2.port}"
    Provider("hunter", base_url=url, http2=True, tls=Tls(ca=str(pki / "ca.pem")))
    assert await ending(ports.library, f"{url}/reset") == "no_answer"
    assert await ending(ports.library, url) == "200"
    assert len(h2.requests) == 2


@pytest.mark.parametrize(("size", "ended"), [(LIMIT, "200"), (LIMIT + 1, "too_large")])
async def test_bodies_over_http2_are_bounded(ports: Ports, h2: H2Server, pki: Path, size: int, ended: str) -> None:
    url = f"https://localhost:{h2.port}"
    h2.body = b" " * size
    Provider("hunter", base_url=url, http2=True, tls=Tls(ca=str(pki / "ca.pem")))
    assert await ending(ports.library, url) == ended
    assert ports.budget.held == 0


async def test_a_request_that_wants_its_own_connection_is_not_sent_on_a_shared_one(ports: Ports, server: Server, pki: Path) -> None:
    await server.start(served_with(pki))
    Provider("hunter", base_url=server.url, http2=True, tls=Tls(ca=str(pki / "ca.pem")))
    for _ in range(2):
        assert (await send(ports.library, server.url, fresh=True)).status == 200
    assert server.connections == 2


# ---- what holds for all ports -------------------------------------------------------------------------------------------------------------


async def test_no_more_connections_are_open_than_the_provider_declares(ports: Ports, server: Server) -> None:
    open_now = most = 0

    async def counting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.01)
        open_now -= 1
        await saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")(reader, writer, request)

    server.talk = counting
    await server.start()
    provider = Provider("hunter", base_url=server.url, connections=3, concurrency=50)
    assert provider.concurrency == 3, "a request that would wait for a connection is not claimed yet"
    for port in ports:
        before = server.connections
        await asyncio.gather(*(send(port, server.url) for _ in range(12)))
        assert server.connections - before == 3
    assert most == 3


async def test_nothing_is_written_once_the_right_to_send_is_gone(ports: Ports, server: Server) -> None:
    await server.start()
    for port in ports:
        with pytest.raises(NoResponse) as caught:
            await port.send(HttpRequest("hunter", "POST", server.url, {}, b"{}", 5.0), lambda: False)
        assert caught.value.kind == "not_sent"
        assert await ending(port, server.url) == "200"
    assert len(server.requests) == 3


# ---- the client of functions --------------------------------------------------------------------------------------------------------------


def client_of(ports: Ports, provider: Provider) -> httpx.AsyncClient:
    credentials = Credentials({"KEY": "the-credential"}, Redactor())
    return Clients(ports.aiohttp, credentials, ports.library, ports.routes).client(provider, fresh=False)


async def test_a_functions_client_has_base_url_credential_and_headers_and_gives_the_credential_to_nobody_else(ports: Ports, server: Server) -> None:
    await server.start()
    other = Server()
    await other.start()
    http = client_of(ports, Provider("hunter", base_url=f"{server.url}/api", auth=Bearer(secret("KEY")), headers={"X-App": "rowmill"}))
    assert (await http.post("/score", json={"a": 1})).json() == {}
    assert (await http.post(f"{other.url}/elsewhere")).status_code == 200
    assert server.requests[0].startswith(b"POST /api/score HTTP/1.1\r\n")
    assert b"Bearer the-credential" in server.requests[0]
    assert b"x-app: rowmill" in server.requests[0].lower()
    assert b"the-credential" not in other.requests[0]
    await other.stop()


async def test_a_connection_that_is_lost_after_the_request_is_not_one_that_never_opened(ports: Ports, server: Server) -> None:
    """Of a non_idempotent function the call would otherwise be made, and paid for, again."""

    async def hangs_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        reset(writer)

    server.talk = hangs_up
    await server.start()
    http = client_of(ports, Provider("hunter", base_url=server.url))
    with pytest.raises(httpx.TransportError) as caught:
        await http.post("/score")
    assert not isinstance(caught.value, httpx.ConnectError | httpx.ConnectTimeout)
    await server.stop()
    with pytest.raises(httpx.ConnectError):
        await http.post("/score")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (LIMIT + 1), ResponseTooLarge),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (LIMIT + 1) + b" " * (LIMIT + 1) + b"\r\n0\r\n\r\n", ResponseTooLarge),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", BadResponse),
    ],
    ids=["announced", "chunked", "stalled"],
)
async def test_what_a_function_reads_is_bounded_too(ports: Ports, server: Server, answer: bytes, error: type[Exception]) -> None:
    server.talk = saying(answer)
    await server.start()
    http = client_of(ports, Provider("hunter", base_url=server.url))
    with pytest.raises(error):
        await http.post("/score")
    assert ports.budget.held == 0


async def test_compressed_answers_are_unfolded_for_functions_within_the_limit(ports: Ports, server: Server) -> None:
    await server.start()
    http = client_of(ports, Provider("hunter", base_url=server.url))
    for size, whole in ((LIMIT, True), (LIMIT + 1, False)):
        body = gzip.compress(b" " * size, mtime=0)
        server.talk = saying(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        if whole:
            assert len((await http.post("/score")).content) == size
        else:
            with pytest.raises(ResponseTooLarge):
                await http.post("/score")


async def test_a_body_that_a_function_does_not_read_to_its_end_gives_its_room_back(ports: Ports, server: Server) -> None:
    server.talk = saying(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LIMIT, b" " * (LIMIT // 2))
    await server.start()
    http = client_of(ports, Provider("hunter", base_url=server.url))
    async with http.stream("POST", "/score") as response:
        async for _piece in response.aiter_bytes():
            if ports.budget.held:
                break
    assert ports.budget.held == 0


async def test_functions_go_through_the_providers_proxy_and_http2_too(ports: Ports, h2: H2Server, proxy: Proxy, pki: Path) -> None:
    url = f"https://localhost:{h2.port}"
    http = client_of(ports, Provider("hunter", base_url=url, http2=True, proxy=proxy.url, tls=Tls(ca=str(pki / "ca.pem"))))
    answer = await http.post("/score", json={})
    assert (answer.status_code, answer.http_version) == (200, "HTTP/2")
    assert proxy.asked == [f"CONNECT localhost:{h2.port} HTTP/1.1"]
