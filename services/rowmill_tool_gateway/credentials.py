"""Secrets, in the one service that sees them: resolved, sent as a provider's credential, and kept out of everything that leaves.

Values come from the environment, files or the author's functions (`rowmill.secret`). They are sent only over https or to this machine, which
`rowmill.providers` checks for every base URL.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.error import HTTPError
from urllib.parse import quote, quote_plus

import httpx
import msgspec

from rowmill.errors import SecretMissing, UnavailableError
from rowmill.providers import Provider
from rowmill.secret import SecretRef, resolve

MASK: Final = "***"
SHORTEST_IN_RESULTS: Final = 8
"""Shorter values are not cut out of results: they would occur by chance, and results must not be changed by chance."""
FIRST_VERSION: Final = 1
OUTAGES: Final = (UnavailableError, OSError, httpx.TransportError)
"""What a secret's function raises when the place that it asks is away: no network, no answer in time."""
NO_OUTAGES: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, HTTPError)
"""And what does not pass by itself, though it is an `OSError`."""


class SecretMisplaced(SecretMissing):
    """The value of a secret stands where others read it: in a URL, a declared header, or a call's input."""

    code = "secret_misplaced"


class Redactor:
    """Cuts known secret values out of texts and bodies: as they are, URL-encoded, base64, and as JSON spells them."""

    def __init__(self) -> None:
        self._spellings: list[str] = []
        self._long: list[bytes] = []

    def learn(self, value: str) -> None:
        """From now on ``value`` is a secret."""
        for spelling in _spellings(value):
            if spelling and spelling not in self._spellings:
                self._spellings.append(spelling)
                if len(spelling) >= SHORTEST_IN_RESULTS:
                    self._long.append(spelling.encode())
        self._spellings.sort(key=len, reverse=True)  # the longest first, so that no part of one is left over
        self._long.sort(key=len, reverse=True)

    def text(self, text: str) -> str:
        """A message or log value without any secret."""
        for spelling in self._spellings:
            if spelling in text:
                text = text.replace(spelling, MASK)
        return text

    def holds(self, data: bytes) -> bool:
        """Whether a secret of 8 characters or more stands in this, in any spelling."""
        return any(spelling in data for spelling in self._long)

    def body(self, body: bytes) -> bytes:
        """A provider's answer without secrets of 8 characters or more (a provider that echoes its request would put them into results)."""
        for spelling in self._long:
            if spelling in body:
                body = body.replace(spelling, MASK.encode())
        return body


def _spellings(value: str) -> list[str]:
    encoded = base64.b64encode(value.encode()).decode()
    return [
        value,
        quote(value, safe=""),
        _lowered(quote(value, safe="")),
        quote_plus(value),
        _lowered(quote_plus(value)),
        encoded,
        encoded.rstrip("="),
        base64.urlsafe_b64encode(value.encode()).decode(),
        msgspec.json.encode(value).decode()[1:-1],
    ]


def _lowered(quoted: str) -> str:
    """With its percent escapes in lower case, as some servers write them."""
    return re.sub("%[0-9A-F]{2}", lambda escape: escape[0].lower(), quoted)


@dataclass(slots=True)
class _Known:
    version: int
    headers: Mapping[str, str]
    values: Mapping[str, str]


class Credentials:
    """The credentials of all providers, resolved when first needed and again when a provider refuses them.

    ``tries``: of a secret's function that fails. ``outage``: seconds for which one is tried that says that the place it asks is away; nothing is
    claimed or sent meanwhile, so that a run which is stopped has nothing under way. ``pause``: the first wait between tries, which doubles.
    """

    def __init__(self, environ: Mapping[str, str], redactor: Redactor, *, tries: int = 3, outage: float = 60.0, pause: float = 0.1) -> None:
        self.redactor = redactor
        self._environ = environ
        self._tries = tries
        self._outage = outage
        self._pause = pause
        self._begun: Counter[str] = Counter()
        """How often each provider's secrets were resolved."""
        self._known: dict[str, _Known] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def version(self, provider: Provider) -> int:
        """The version of the credential that a request made now goes with; it rises whenever another credential is resolved."""
        known = self._known.get(provider.name)
        return FIRST_VERSION if known is None else known.version

    def resolved(self, provider: Provider) -> bool:
        """Whether a request made now need not wait for its credential."""
        return not provider.secrets or provider.name in self._known

    async def headers(self, provider: Provider) -> Mapping[str, str]:
        """The headers that carry the credential. Raises `SecretMissing`, or what the author's function raised, as `SecretMissing`."""
        known = self._known.get(provider.name)
        return known.headers if known is not None else (await self._resolve(provider, FIRST_VERSION - 1)).headers

    async def values(self, provider: Provider) -> Mapping[str, str]:
        """The provider's secrets by name, for tool functions. Raises `SecretMissing`."""
        known = self._known.get(provider.name)
        return known.values if known is not None else (await self._resolve(provider, FIRST_VERSION - 1)).values

    async def refresh(self, provider: Provider, refused: int) -> bool:
        """Resolve anew after version ``refused`` was refused; whether there is another credential to try now. Raises `SecretMissing`."""
        return (await self._resolve(provider, refused)).version > refused

    async def _resolve(self, provider: Provider, refused: int) -> _Known:
        begun = self._begun[provider.name]
        async with self._locks.setdefault(provider.name, asyncio.Lock()):
            known = self._known.get(provider.name)
            # A hundred calls that are refused at once learn the same from the one resolution that began after they were.
            if known is not None and (known.version > refused or self._begun[provider.name] > begun):
                return known
            self._begun[provider.name] += 1
            values = {ref: await self._value(ref) for ref in provider.secrets}
            headers = {} if provider.auth is None else provider.auth.headers(lambda ref: values[ref])
            for value in (*values.values(), *(text.partition(" ")[2] or text for text in headers.values())):
                self.redactor.learn(value)
            self._refuse_misplaced(provider)
            by_name = {ref.name: value for ref, value in values.items()}
            if known is None or known.headers != headers or known.values != by_name:
                known = self._known[provider.name] = _Known(refused + 1, headers, by_name)
            return known

    def _refuse_misplaced(self, provider: Provider) -> None:
        places = {"base_url": provider.base_url, "proxy": provider.settings.proxy or ""}
        places |= {f"header {name!r}": value for name, value in provider.headers.items()}
        for place, text in places.items():
            if self.redactor.holds(text.encode()):
                raise SecretMisplaced(f"provider {provider.name!r}: its {place} holds the value of a secret; use auth=, which keeps it out of logs")

    async def _value(self, ref: SecretRef) -> str:
        loop = asyncio.get_running_loop()
        started, attempt = loop.time(), 0
        while True:
            attempt += 1
            try:
                return await asyncio.to_thread(resolve, ref, self._environ)
            except SecretMissing:
                raise
            except Exception as error:
                away = isinstance(error, OUTAGES) and not isinstance(error, NO_OUTAGES)
                if (loop.time() - started >= self._outage) if away else (attempt >= self._tries):
                    how = f"could not reach its place for {self._outage:g} s" if away else f"failed {attempt} times"
                    raise SecretMissing(f"secret {ref.name!r}: its function {how}: {type(error).__name__}") from None
            await asyncio.sleep(min(self._pause * 2.0 ** min(attempt - 1, 6), 5.0))
