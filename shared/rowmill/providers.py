"""Providers: where paid work is done, with which credential and how fast; and the decorators that hang tools off them."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, Unpack, overload
from urllib.parse import urlsplit

from rowmill import registry
from rowmill.durations import Duration, Rate, seconds
from rowmill.errors import DefinitionError, ToolError
from rowmill.names import routing_word
from rowmill.secret import Auth, Basic, Bearer, Header, SecretRef, credential_scope
from rowmill.tls import Tls
from rowmill.tool_definitions import FunctionToolOptions, ToolOptions, function_tool, http_tool
from rowmill.tools import Batch, FunctionTool, HttpTool, In, Out, ToolCall

ToolClass = TypeVar("ToolClass", bound=type[HttpTool[Any, Any]])

BatchFunction = Callable[[list[In], ToolCall], Awaitable[Sequence[Out | ToolError]] | Sequence[Out | ToolError]]


class SingleDecorator(Protocol):
    """Makes a function of one input a tool, whether it is sync or async."""

    @overload
    def __call__(self, function: Callable[[In, ToolCall], Awaitable[Out | ToolError]]) -> FunctionTool[In, Out]: ...

    @overload
    def __call__(self, function: Callable[[In, ToolCall], Out | ToolError]) -> FunctionTool[In, Out]: ...


DEFAULT_TIMEOUT = 900.0
"""Seconds from dispatch."""
_CREDENTIAL_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderSettings:
    """What a project may override per provider. ``concurrency``: requests open at once; ``burst``: requests beyond an even pace, 1 is none.
    ``connections``, ``http2``, ``proxy``, ``tls``: how it is connected to.
    """

    base_url: str
    rate: Rate | None = None
    concurrency: int = 100
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = DEFAULT_TIMEOUT
    burst: int = 1
    connections: int | None = None
    http2: bool = False
    proxy: str | None = None
    tls: Tls | None = None


class Provider:
    """A paid, rate-limited service. Tools hang off it; a tool's id is ``<provider>.<name>``.

    ``rate``: requests per window, such as ``"10/s"``, held exactly over any number of gateways (None: not limited). ``concurrency``: requests
    open at once. ``headers``: sent with every request. ``timeout``: default of its tools, from dispatch. ``idempotency_header``: carries the
    idempotency key of a single call. ``secrets``: further secrets that its tool functions may read.

    ``connections``: open to it at once from one gateway, over all organisations (None: one for each request). ``http2``: speak HTTP/2 where the
    provider does, many requests on one connection. ``proxy``: URL of an HTTP proxy to go through. ``tls``: `rowmill.tls.Tls`.

    Raises `DefinitionError` for a name or URL that cannot be used: a credential is sent only over https or to this machine.
    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        auth: Auth | None = None,
        rate: str | Rate | None = None,
        concurrency: int = 100,
        headers: Mapping[str, str] | None = None,
        timeout: Duration = DEFAULT_TIMEOUT,
        burst: int = 1,
        idempotency_header: str = "Idempotency-Key",
        secrets: Sequence[SecretRef] = (),
        connections: int | None = None,
        http2: bool = False,
        proxy: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.name = routing_word("provider", name)
        if auth is not None and not isinstance(auth, Bearer | Header | Basic):
            raise DefinitionError(
                f"provider {name!r}: auth is Bearer(secret(...)), Header(name, secret(...)) or Basic(user, secret(...)), not {auth!r}"
            )
        self.auth = auth
        self.idempotency_header = idempotency_header
        self.secrets: tuple[SecretRef, ...] = (*(auth.secrets if auth else ()), *secrets)
        self.credential_scope = credential_scope(auth)
        self.settings = self._checked(
            ProviderSettings(
                base_url=base_url,
                rate=None if rate is None else Rate.parse(rate),
                concurrency=concurrency,
                headers=dict(headers or {}),
                timeout=seconds(timeout),
                burst=burst,
                connections=connections,
                http2=http2,
                proxy=proxy,
                tls=tls,
            )
        )
        registry.add_provider(self, registry.place_of_frame(sys._getframe(1)))  # noqa: SLF001 - the caller's line is the provider's place

    @property
    def base_url(self) -> str:
        return self.settings.base_url

    @property
    def rate(self) -> Rate | None:
        return self.settings.rate

    @property
    def concurrency(self) -> int:
        """Requests open at once; over HTTP/1.1 each has a connection to itself."""
        connections = self.settings.connections
        return self.settings.concurrency if connections is None or self.settings.http2 else min(self.settings.concurrency, connections)

    @property
    def headers(self) -> Mapping[str, str]:
        return self.settings.headers

    @property
    def timeout(self) -> float:
        return self.settings.timeout

    @property
    def burst(self) -> int:
        return self.settings.burst

    def __repr__(self) -> str:
        return f"<provider {self.name} at {self.base_url}>"

    def configure(
        self,
        *,
        base_url: str | None = None,
        rate: str | Rate | None = None,
        concurrency: int | None = None,
        timeout: Duration | None = None,
        burst: int | None = None,
        connections: int | None = None,
        http2: bool | None = None,
        proxy: str | None = None,
        tls: Tls | Mapping[str, Any] | None = None,
    ) -> None:
        """Override what the author declared, for this process (`rowmill.toml`). None leaves a setting as it is. Raises `DefinitionError`."""
        given: dict[str, Any] = {
            "base_url": base_url,
            "rate": None if rate is None else Rate.parse(rate),
            "concurrency": concurrency,
            "timeout": None if timeout is None else seconds(timeout),
            "burst": burst,
            "connections": connections,
            "http2": http2,
            "proxy": proxy,
            "tls": tls if tls is None or isinstance(tls, Tls) else Tls(**tls),
        }
        self.settings = self._checked(replace(self.settings, **{name: value for name, value in given.items() if value is not None}))

    def _checked(self, settings: ProviderSettings) -> ProviderSettings:
        check_base_url(self.name, settings.base_url, carries_secret=bool(self.secrets))
        if settings.proxy is not None:
            check_proxy(self.name, settings.proxy, settings.base_url, carries_secret=bool(self.secrets))
        if settings.tls is not None and not isinstance(settings.tls, Tls):
            raise DefinitionError(f"provider {self.name!r}: tls is Tls(ca=..., certificate=..., key=..., minimum=...), not {settings.tls!r}")
        if not isinstance(settings.http2, bool):
            raise DefinitionError(f"provider {self.name!r}: http2 is True or False, not {settings.http2!r}")
        bounds = {"concurrency": settings.concurrency, "burst": settings.burst, "connections": settings.connections}
        for name, amount in bounds.items():
            if name == "connections" and amount is None:
                continue
            if isinstance(amount, bool) or not isinstance(amount, int) or amount < 1:
                raise DefinitionError(f"provider {self.name!r}: {name} must be at least 1, not {amount!r}")
        for header, value in settings.headers.items():
            if not isinstance(value, str) or header.lower() in _CREDENTIAL_HEADERS:
                raise DefinitionError(
                    f"provider {self.name!r}: header {header!r} may not carry a credential; use auth=Header({header!r}, secret(...))"
                )
        return replace(settings, base_url=settings.base_url.rstrip("/"))

    def get(self, path: str, **options: Unpack[ToolOptions]) -> Callable[[ToolClass], ToolClass]:
        """Make an `HttpTool` class a tool that is sent with GET; its input goes into the query."""
        return self._http_tool("GET", path, options)

    def post(self, path: str, **options: Unpack[ToolOptions]) -> Callable[[ToolClass], ToolClass]:
        """Make an `HttpTool` class a tool that is sent with POST; its input is the JSON body."""
        return self._http_tool("POST", path, options)

    def put(self, path: str, **options: Unpack[ToolOptions]) -> Callable[[ToolClass], ToolClass]:
        """Make an `HttpTool` class a tool that is sent with PUT; its input is the JSON body."""
        return self._http_tool("PUT", path, options)

    def patch(self, path: str, **options: Unpack[ToolOptions]) -> Callable[[ToolClass], ToolClass]:
        """Make an `HttpTool` class a tool that is sent with PATCH; its input is the JSON body."""
        return self._http_tool("PATCH", path, options)

    def delete(self, path: str, **options: Unpack[ToolOptions]) -> Callable[[ToolClass], ToolClass]:
        """Make an `HttpTool` class a tool that is sent with DELETE; its input goes into the query."""
        return self._http_tool("DELETE", path, options)

    def _http_tool(self, method: str, path: str, options: ToolOptions) -> Callable[[ToolClass], ToolClass]:
        if not isinstance(path, str) or not path.startswith("/"):
            raise DefinitionError(f"provider {self.name!r}: a tool's path starts with '/', not {path!r}")

        def attach(tool_class: ToolClass) -> ToolClass:
            tool = http_tool(self, method, path, options, tool_class)
            tool_class.__rowmill_tool__ = tool
            registry.add_tool(tool, registry.place_of(tool_class))
            return tool_class

        return attach

    @overload
    def tool(
        self, name: str, *, batch: Batch, blocking: bool = False, **options: Unpack[FunctionToolOptions]
    ) -> Callable[[BatchFunction[In, Out]], FunctionTool[In, Out]]: ...

    @overload
    def tool(self, name: str, *, batch: None = None, blocking: bool = False, **options: Unpack[FunctionToolOptions]) -> SingleDecorator: ...

    def tool(
        self, name: str, *, batch: Batch | None = None, blocking: bool = False, **options: Unpack[FunctionToolOptions]
    ) -> Callable[[Callable[..., Any]], FunctionTool[Any, Any]]:
        """Make a function a tool; it runs in the gateway.

        With ``batch`` it is given a list of inputs and returns one output, or `ToolError`, per input; without, one input and one output.
        ``blocking``: a sync function that waits, run in one of a bounded number of threads with the context variables of its call. A thread cannot
        be ended: when the tool's ``timeout`` is over the call ends as one without an answer (repeated if the effect allows, else of unknown
        outcome), while the function runs on, so give its own requests a limit (``call.deadline``). Types come from its annotations.
        """

        def attach(function: Callable[..., Any]) -> FunctionTool[Any, Any]:
            defined = function_tool(self, name, function, batch, blocking, options)
            registry.add_tool(defined.tool, registry.place_of(function))
            return defined

        return attach


def check_base_url(provider: str, base_url: str, *, carries_secret: bool) -> None:
    """Refuse what SPEC 4.8 forbids: other schemes than http and https, credentials in the URL, secrets sent in the clear to another machine."""
    parts = urlsplit(base_url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise DefinitionError(f"provider {provider!r}: base_url must be an http or https URL, not {base_url!r}")
    if parts.username is not None or parts.password is not None:
        raise DefinitionError(f"provider {provider!r}: base_url holds a credential; use auth=Basic(user, secret(...)) instead")
    if parts.query or parts.fragment:
        raise DefinitionError(f"provider {provider!r}: base_url may not have a query or fragment: {parts.scheme}://{parts.netloc}{parts.path}?…")
    if carries_secret and parts.scheme != "https" and not is_loopback(parts.hostname):
        raise DefinitionError(f"provider {provider!r}: a secret is sent only over https or to this machine; {base_url!r} is neither")


def check_proxy(provider: str, proxy: str, base_url: str, *, carries_secret: bool) -> None:
    """Refuse a proxy that cannot be used, and one that would see a secret: what goes to an ``http`` provider is not hidden from its proxy."""
    parts = urlsplit(proxy)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise DefinitionError(f"provider {provider!r}: proxy must be an http or https URL, not {parts.scheme}://{parts.hostname or ''}…")
    if parts.username is not None or parts.password is not None:
        raise DefinitionError(f"provider {provider!r}: proxy holds a credential, and URLs may not; use a proxy that knows this machine")
    if carries_secret and urlsplit(base_url).scheme != "https" and not is_loopback(parts.hostname):
        raise DefinitionError(f"provider {provider!r}: its secret would be readable for the proxy {parts.hostname}; use an https base_url")


def is_loopback(host: str) -> bool:
    """Whether the host name can mean nothing but this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
