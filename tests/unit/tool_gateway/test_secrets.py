"""Secrets: where they may stand, how they are cut out, and how they are resolved when that is difficult (SPEC 4.8)."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from urllib.error import HTTPError, URLError
from urllib.parse import quote

import pytest
from tests.unit.tool_gateway.conftest import FindIn, FindOut, Rig, answering

from rowmill import Bearer, HttpTool, Provider, ToolCall, secret
from rowmill.errors import DefinitionError, SecretMissing
from rowmill.secret import Basic
from rowmill_tool_gateway.credentials import Credentials, Redactor, SecretMisplaced
from rowmill_tool_gateway.settings import ToolGatewaySettings

VALUE = "s3cret/va+lue="


def failing(*errors: Exception) -> tuple[Callable[[], str], list[int]]:
    """A secret's function that raises these one after the other, then gives the value; and how often it was called."""
    left, calls = list(errors), [0]

    def function() -> str:
        calls[0] += 1
        if left:
            raise left.pop(0)
        return VALUE

    return function, calls


def resolving(function: Callable[[], str], *, outage: float = 5.0) -> tuple[Credentials, Provider]:
    credentials = Credentials({}, Redactor(), outage=outage, pause=0.001)
    return credentials, Provider("hunter", base_url="https://api.example", auth=Bearer(secret("KEY", function=function)))


# ---- where they may go --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["https://api.example", "http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1", "http://x.localhost"])
def test_a_secret_may_go_over_https_or_to_this_machine(url: str) -> None:
    Provider("hunter", base_url=url, auth=Bearer(secret("KEY")))


@pytest.mark.parametrize("url", ["http://api.example", "http://10.0.0.1", "http://localhost.example", "http://127.0.0.1.example"])
def test_a_secret_may_go_nowhere_else_also_not_by_an_override(url: str) -> None:
    with pytest.raises(DefinitionError, match="https"):
        Provider("hunter", base_url=url, auth=Bearer(secret("KEY")))
    with pytest.raises(DefinitionError, match="https"):
        Provider("hunter", base_url=url, secrets=[secret("KEY")])
    safe = Provider("apollo", base_url="https://api.example", auth=Bearer(secret("KEY")))
    with pytest.raises(DefinitionError, match="https"):
        safe.configure(base_url=url)


@pytest.mark.parametrize("url", ["https://user:pass@api.example", "https://api.example/?key=1", "https://api.example/#key"])
def test_a_base_url_carries_no_credential(url: str) -> None:
    with pytest.raises(DefinitionError):
        Provider("hunter", base_url=url)


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer x"}, {"cookie": "x"}, {"X-Key": secret("KEY")}])
def test_declared_headers_carry_no_credential(headers: dict[str, str]) -> None:
    with pytest.raises(DefinitionError, match="auth="):
        Provider("hunter", base_url="https://api.example", headers=headers)


@pytest.mark.parametrize(("proxy", "fine"), [("http://proxy.example:3128", True), ("http://user:pass@proxy.example", False), ("socks5://x", False)])
def test_a_proxy_is_an_http_one_without_a_credential_in_its_url(proxy: str, fine: bool) -> None:
    if fine:
        Provider("hunter", base_url="https://api.example", auth=Bearer(secret("KEY")), proxy=proxy)
        return
    with pytest.raises(DefinitionError, match="proxy") as caught:
        Provider("hunter", base_url="https://api.example", proxy=proxy)
    assert "pass" not in str(caught.value)


def test_a_secret_is_not_shown_to_a_proxy() -> None:
    with pytest.raises(DefinitionError, match="readable for the proxy"):
        Provider("hunter", base_url="http://localhost:1", auth=Bearer(secret("KEY")), proxy="http://proxy.example:3128")


@pytest.mark.parametrize("place", ["header", "base_url"])
async def test_the_value_of_a_secret_that_an_author_wrote_down_is_refused(place: str) -> None:
    where = {"headers": {"X-Key": VALUE}} if place == "header" else {}
    base = "https://api.example" if place == "header" else f"https://api.example/{quote(VALUE, safe='')}"
    provider = Provider("hunter", base_url=base, auth=Bearer(secret("KEY")), **where)  # type: ignore[arg-type]
    with pytest.raises(SecretMisplaced, match=place) as caught:
        await Credentials({"KEY": VALUE}, Redactor()).headers(provider)
    assert VALUE not in str(caught.value)


@pytest.mark.parametrize("spelling", [VALUE, base64.b64encode(VALUE.encode()).decode(), quote(VALUE, safe="")])
async def test_an_input_that_holds_a_secret_is_not_sent(spelling: str) -> None:
    rig = Rig(ToolGatewaySettings(time_scale=0.05), environ={"KEY": VALUE})
    provider = Provider("hunter", base_url="http://127.0.0.1:1", auth=Bearer(secret("KEY")))

    @provider.get("/find", effect="read")
    class Find(HttpTool[FindIn, FindOut]): ...

    @provider.tool("look", effect="read")
    async def look(given: FindIn, call: ToolCall) -> str:
        raise AssertionError("it is not called")

    for tool in (Find, look):
        [refused] = await rig.ask([rig.item(tool, {"domain": f"a.example?key={spelling}"})])
        assert refused.failure is not None
        assert (refused.outcome, refused.failure.code, refused.failure.category) == ("failed", "secret_misplaced", "auth")
        assert VALUE not in refused.failure.message
    assert not rig.port.requests
    assert rig.store.runs["run-1"].charged() == 0
    [fine] = await rig.ask([rig.item(Find, {"domain": "a.example"})])
    assert fine.outcome == "completed"
    await rig.stop()


@pytest.mark.parametrize(("url", "headers"), [(f"http://127.0.0.1:1/?key={quote(VALUE, safe='')}", {}), ("http://api.example/", {"X-Key": VALUE})])
async def test_a_function_cannot_send_a_secret_in_a_url_or_in_the_clear(url: str, headers: dict[str, str]) -> None:
    rig = Rig(ToolGatewaySettings(time_scale=0.05), environ={"KEY": VALUE})
    provider = Provider("hunter", base_url="http://127.0.0.1:1", secrets=[secret("KEY")])

    @provider.tool("look", effect="non_idempotent")
    async def look(given: FindIn, call: ToolCall) -> str:
        assert call.secrets["KEY"] == VALUE
        return (await call.http.get(url, headers=headers)).text

    [refused] = await rig.ask([rig.item(look, {"domain": "a.example"})])
    assert refused.failure is not None
    assert (refused.outcome, refused.failure.code) == ("failed", "secret_misplaced")
    assert VALUE not in refused.failure.message
    await rig.stop()


# ---- cutting them out ---------------------------------------------------------------------------------------------------------------------


def test_percent_escapes_are_known_in_either_case() -> None:
    redactor = Redactor()
    redactor.learn(VALUE)
    quoted = quote(VALUE, safe="")
    for spelling in (quoted, quoted.replace("%2F", "%2f").replace("%2B", "%2b").replace("%3D", "%3d")):
        assert redactor.text(f"/find?key={spelling}&x=1") == "/find?key=***&x=1"
        assert redactor.holds(f"/find?key={spelling}".encode())


async def test_the_pair_of_a_basic_credential_is_cut_out_as_it_is_sent() -> None:
    credentials = Credentials({"PASSWORD": VALUE}, Redactor())
    await credentials.headers(Provider("hunter", base_url="https://api.example", auth=Basic("user", secret("PASSWORD"))))
    pair = base64.b64encode(f"user:{VALUE}".encode()).decode()
    assert credentials.redactor.text(f"Authorization: Basic {pair}") == "Authorization: Basic ***"


async def test_a_refusal_that_repeats_the_secret_far_into_its_body_leaves_no_part_of_it() -> None:
    """The body is cut for the message: what is left of a secret at the cut is a part of it, which nobody would know for one."""
    for before in range(270, 310, 3):
        rig = Rig(ToolGatewaySettings(time_scale=0.05), environ={"KEY": VALUE * 4})
        provider = Provider("hunter", base_url="http://127.0.0.1:1", auth=Bearer(secret("KEY")))

        @provider.post("/find", effect="read")
        class Find(HttpTool[FindIn, FindOut]): ...

        rig.port.script = answering("x" * before + VALUE * 4, status=400)
        [refused] = await rig.ask([rig.item(Find, {"domain": "a.example"})])
        assert refused.failure is not None
        assert "s3c" not in refused.failure.message
        await rig.stop()


# ---- resolving them -----------------------------------------------------------------------------------------------------------------------


async def test_a_function_that_fails_is_tried_three_times() -> None:
    function, calls = failing(RuntimeError("no"), RuntimeError("no"))
    credentials, provider = resolving(function)
    assert await credentials.headers(provider) == {"Authorization": f"Bearer {VALUE}"}
    assert calls == [3]
    function, calls = failing(*[RuntimeError("the vault says hunter2")] * 9)
    credentials, provider = resolving(function)
    with pytest.raises(SecretMissing, match="failed 3 times: RuntimeError") as caught:
        await credentials.headers(provider)
    assert "hunter2" not in str(caught.value)
    assert calls == [3]


@pytest.mark.parametrize("outage", [ConnectionRefusedError(), TimeoutError(), URLError("no route")])
async def test_an_outage_is_waited_out(outage: Exception) -> None:
    function, calls = failing(*[outage] * 7)
    credentials, provider = resolving(function)
    assert await credentials.headers(provider) == {"Authorization": f"Bearer {VALUE}"}
    assert calls == [8]


async def test_an_outage_that_lasts_fails_the_calls_and_says_so() -> None:
    function, calls = failing(*[ConnectionRefusedError()] * 10_000)
    credentials, provider = resolving(function, outage=0.5)
    with pytest.raises(SecretMissing, match="could not reach its place"):
        await credentials.headers(provider)
    assert calls[0] > 3


@pytest.mark.parametrize("error", [FileNotFoundError("x"), HTTPError("https://vault", 403, "no", None, None)])  # type: ignore[arg-type]
async def test_what_does_not_pass_by_itself_is_no_outage(error: Exception) -> None:
    function, calls = failing(*[error] * 9)
    credentials, provider = resolving(function)
    with pytest.raises(SecretMissing):
        await credentials.headers(provider)
    assert calls == [3]


async def test_many_calls_that_are_refused_at_once_learn_the_same_from_one_resolution() -> None:
    function, calls = failing()
    credentials, provider = resolving(function)
    await credentials.headers(provider)
    refused = credentials.version(provider)
    assert not any(await asyncio.gather(*(credentials.refresh(provider, refused) for _ in range(100))))
    assert calls == [3], "one that was under way, which may have looked before the secret changed, and one for all that asked meanwhile"
    assert not await credentials.refresh(provider, refused)
    assert calls == [4], "one that is refused later is looked at again"
