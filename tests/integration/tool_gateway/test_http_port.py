"""The HTTP port against servers that behave and misbehave on a real socket."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.tool_gateway.socket_server import Server, Talk, saying

from rowmill_tool_gateway.http_direct import DirectPort
from rowmill_tool_gateway.http_port import AiohttpPort, HttpPort, HttpRequest, HttpResponse, NoResponse

LIMIT = 100_000
ZIPPED = gzip.compress(b"abcde", mtime=0)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    running = Server()
    await running.start()
    yield running
    await running.stop()


@pytest.fixture(params=[DirectPort, AiohttpPort])
async def port(request: pytest.FixtureRequest) -> AsyncIterator[HttpPort]:
    made: HttpPort = request.param(connect_timeout=5.0, body_stall=0.2, body_limit=LIMIT)
    yield made
    await made.close()


async def send(
    port: HttpPort, url: str, *, method: str = "POST", body: bytes | None = b"{}", timeout: float = 5.0, fresh: bool = False
) -> HttpResponse:
    return await port.send(HttpRequest("hunter", method, url, {"X-Key": "k"}, body, timeout, fresh))


async def test_what_is_sent_and_what_comes_back(port: HttpPort, server: Server) -> None:
    server.talk = saying(b"HTTP/1.1 201 Created\r\nContent-Length: 7\r\nRetry-After: 3\r\n\r\n", b'{"a":1}')
    response = await send(port, f"{server.url}/v1/find%2Fx?a=b+c", body=b'{"domain":"a"}')
    assert (response.status, response.body, response.headers.get("retry-after")) == (201, b'{"a":1}', "3")
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/find%2Fx?a=b+c HTTP/1.1\r\n")
    assert b"X-Key: k" in head
    assert body == b'{"domain":"a"}'


async def test_what_may_not_be_sent_any_more_is_not_written_although_the_connection_stands(port: HttpPort, server: Server) -> None:
    """The right to send is asked for after the connection stands: a lease may have ended while it was opened."""
    stood: list[int] = []

    def refused() -> bool:
        stood.append(server.connections)
        return False

    request = HttpRequest("hunter", "POST", server.url, {}, b"{}", 5.0)
    for fresh in (True, False, False):
        with pytest.raises(NoResponse) as caught:
            await port.send(replace(request, fresh=fresh), refused)
        assert caught.value.kind == "not_sent"
    assert len(stood) == 3
    assert server.requests == []
    assert (await port.send(request)).status == 200
    assert server.connections <= 2, "a connection that was not written to serves the next request"


async def test_connections_are_kept_but_for_requests_that_want_a_fresh_one(port: HttpPort, server: Server) -> None:
    for _ in range(3):
        await send(port, server.url)
    assert server.connections == 1
    for _ in range(2):
        await send(port, server.url, fresh=True)
    assert server.connections == 3


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", b"cde"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(gzip.compress(b"abcde", mtime=0)),
            gzip.compress(b"abcde", mtime=0),
        ),
    ],
)
async def test_bodies_come_in_many_forms(port: HttpPort, server: Server, parts: tuple[bytes, ...]) -> None:
    server.talk = saying(*parts)
    assert (await send(port, server.url)).body == b"abcde"
    assert (await send(port, server.url)).body == b"abcde"


async def test_a_body_may_end_with_the_connection(port: HttpPort, server: Server) -> None:
    server.talk = saying(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nab", b"cde", close=True)
    assert (await send(port, server.url)).body == b"abcde"


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body(port: HttpPort, server: Server, status: int) -> None:
    server.talk = saying(b"HTTP/1.1 %d X\r\n\r\n" % status)
    assert (await send(port, server.url)).body == b""
    assert (await send(port, server.url)).status == status


async def test_redirects_are_not_followed(port: HttpPort, server: Server) -> None:
    server.talk = saying(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n")
    assert (await send(port, server.url)).status == 302
    assert len(server.requests) == 1


async def test_nobody_listens(port: HttpPort) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(NoResponse) as caught:
            await send(port, f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert caught.value.kind == "never_opened"


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_kept_connection_that_is_lost_is_no_answer_and_nothing_is_sent_twice(port: HttpPort, server: Server, method: str) -> None:
    await send(port, server.url)
    server.talk = saying(abort=True)
    with pytest.raises(NoResponse) as caught:
        await send(port, server.url, method=method, body=None if method == "GET" else b"{}")
    assert caught.value.kind == "no_answer"
    assert len(server.requests) == 2


async def test_an_answer_that_does_not_come_in_time(port: HttpPort, server: Server) -> None:
    server.talk = saying()
    with pytest.raises(NoResponse) as caught:
        await send(port, server.url, timeout=0.1)
    assert caught.value.kind == "no_answer"


@pytest.mark.parametrize(
    ("talk", "kind"),
    [
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", close=True), "bad_answer"),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"), "bad_answer"),
        (saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "bad_answer"),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"), "bad_answer"),
        (saying(b"SSH-2.0-server\r\n\r\n"), "bad_answer"),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (LIMIT + 1)), "too_large"),
        (saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"4000\r\n" + b"x" * 0x4000 + b"\r\n"] * 7), "too_large"),
    ],
    ids=["cut short", "stalled", "bad chunk", "bad gzip", "no http", "announced too large", "too large"],
)
async def test_answers_that_cannot_be_used(port: HttpPort, server: Server, talk: Talk, kind: str) -> None:
    server.talk = talk
    with pytest.raises(NoResponse) as caught:
        await send(port, server.url)
    assert caught.value.kind == kind
    server.talk = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
    assert (await send(port, server.url)).body == b"{}"


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT])
async def test_bodies_up_to_the_limit_are_read(port: HttpPort, server: Server, size: int) -> None:
    server.talk = saying(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, b"x" * size)
    assert len((await send(port, server.url)).body) == size


async def test_a_cancelled_request_leaves_no_connection_that_answers_another(port: HttpPort, server: Server) -> None:
    server.talk = saying()
    task = asyncio.ensure_future(send(port, server.url))
    while not server.requests:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    server.talk = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n2")
    assert (await send(port, server.url)).body == b"2"
    assert server.connections == 2


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for this machine that nobody vouches for, with its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    made = tmp_path_factory.mktemp("tls") / "both.pem"
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [openssl, *options.split(), "-addext", "subjectAltName=DNS:localhost", "-keyout", str(made), "-out", str(made.with_name("cert.pem"))],
        check=True,
        capture_output=True,
    )
    made.write_bytes(made.read_bytes() + made.with_name("cert.pem").read_bytes())
    return made


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_provider_is_spoken_to_only_if_its_certificate_is_trusted(
    server: Server, certificate: Path, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_name("cert.pem")))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    secure = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    number = secure.sockets[0].getsockname()[1]
    port = DirectPort(connect_timeout=5.0, body_stall=0.2, body_limit=LIMIT)
    if trusted:
        assert (await send(port, f"https://localhost:{number}")).body == b"{}"
        with pytest.raises(NoResponse) as caught:
            await send(port, f"https://127.0.0.1:{number}")  # not what the certificate names
    else:
        with pytest.raises(NoResponse) as caught:
            await send(port, f"https://localhost:{number}")
    assert caught.value.kind == "never_opened"
    assert len(server.requests) == int(trusted)
    await port.close()
    secure.close()


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("http://127.0.0.1:1/a b", {}),
        ("http://127.0.0.1:1/a\r\nX: y", {}),
        ("ftp://127.0.0.1:1/", {}),
        ("http://user:pass@127.0.0.1:1/", {}),
        ("http://127.0.0.1:1/", {"X-Key": "a\r\nX: y"}),
        ("http://127.0.0.1:1/", {"X-Key": "a\ny"}),
        ("http://127.0.0.1:1/", {"X Key": "a"}),
        ("http://127.0.0.1:1/", {"Content-Length": "9"}),
        ("http://127.0.0.1:1/", {"transfer-encoding": "chunked"}),
        ("http://127.0.0.1:1/", {"X-Key": "\u20ac"}),
    ],
)
async def test_what_would_change_how_a_request_is_read_is_not_sent(url: str, headers: dict[str, str]) -> None:
    port = DirectPort(connect_timeout=5.0, body_stall=0.2, body_limit=LIMIT)
    with pytest.raises(NoResponse) as caught:
        await port.send(HttpRequest("hunter", "POST", url, headers, b"{}", 5.0))
    assert caught.value.kind == "misdefined"
