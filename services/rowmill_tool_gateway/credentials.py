"""Secrets, in the one service that sees them: resolved, sent as a provider's credential, and kept out of everything that leaves.

Values come from the environment, files or the author's functions (`rowmill.secret`). They are sent only over https or to this machine, which
`rowmill.providers` checks for every base URL.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, quote_plus

import msgspec

from rowmill.errors import SecretMissing
from rowmill.providers import Provider
from rowmill.secret import SecretRef, resolve

MASK: Final = "***"
SHORTEST_IN_RESULTS: Final = 8
"""Shorter values are not cut out of results: they would occur by chance, and results must not be changed by chance."""
FIRST_VERSION: Final = 1


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
        quote_plus(value),
        encoded,
        encoded.rstrip("="),
        base64.urlsafe_b64encode(value.encode()).decode(),
        msgspec.json.encode(value).decode()[1:-1],
    ]


@dataclass(slots=True)
class _Known:
    version: int
    headers: Mapping[str, str]
    values: Mapping[str, str]


class Credentials:
    """The credentials of all providers, resolved when first needed and again when a provider refuses them."""

    def __init__(self, environ: Mapping[str, str], redactor: Redactor, *, tries: int = 3) -> None:
        self.redactor = redactor
        self._environ = environ
        self._tries = tries
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
        async with self._locks.setdefault(provider.name, asyncio.Lock()):
            known = self._known.get(provider.name)
            if known is not None and known.version > refused:
                return known
            values = {ref: await self._value(ref) for ref in provider.secrets}
            headers = {} if provider.auth is None else provider.auth.headers(lambda ref: values[ref])
            for value in (*values.values(), *(text.partition(" ")[2] or text for text in headers.values())):
                self.redactor.learn(value)
            by_name = {ref.name: value for ref, value in values.items()}
            if known is None or known.headers != headers or known.values != by_name:
                known = self._known[provider.name] = _Known(refused + 1, headers, by_name)
            return known

    async def _value(self, ref: SecretRef) -> str:
        for attempt in range(1, self._tries + 1):
            try:
                return await asyncio.to_thread(resolve, ref, self._environ)
            except SecretMissing:
                raise
            except Exception as error:
                if attempt == self._tries:
                    raise SecretMissing(f"secret {ref.name!r}: its function failed: {type(error).__name__}") from None
        raise AssertionError("unreachable")
