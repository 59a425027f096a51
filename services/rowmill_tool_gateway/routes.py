"""How each provider is connected to: what was declared of its TLS, proxy and connections, as the clients need it."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from rowmill import registry
from rowmill.errors import DefinitionError
from rowmill.providers import ProviderSettings
from rowmill.tls import Tls

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


def declared(provider: str) -> ProviderSettings | None:
    """The settings of a provider of the project; None for a name that has none."""
    return registry.provider_named(provider).settings if provider in registry.known_providers() else None


class Routes:
    """``settings``: by a provider's name. What they say is looked up once per provider."""

    def __init__(self, settings: Callable[[str], ProviderSettings | None] = declared) -> None:
        self._settings = settings
        self._known: dict[str, ProviderSettings] = {}
        self._contexts: dict[tuple[Tls | None, bool], ssl.SSLContext] = {}

    def of(self, provider: str) -> ProviderSettings | None:
        found = self._known.get(provider)
        if found is None and (found := self._settings(provider)) is not None:
            self._known[provider] = found
        return found

    def connections(self, provider: str) -> int | None:
        """Connections at once at most; None: not limited."""
        found = self.of(provider)
        return None if found is None else found.connections

    def needs_library(self, provider: str) -> bool:
        """Whether it takes more than HTTP/1.1 straight to the provider."""
        found = self.of(provider)
        return found is not None and (found.http2 or found.proxy is not None)

    def tls(self, provider: str, *, http2: bool = False) -> ssl.SSLContext:
        """What its connections are secured with. Contexts are not shared between protocols: they carry what is offered in the handshake.

        Raises `DefinitionError` for a file that cannot be used.
        """
        found = self.of(provider)
        tls = None if found is None else found.tls
        context = self._contexts.get((tls, http2))
        if context is None:
            try:
                context = self._contexts[tls, http2] = _context(tls)
            except (OSError, ssl.SSLError) as error:
                raise DefinitionError(f"provider {provider!r}: a file of its tls cannot be used: {error} ({tls})") from error
        return context


def _context(tls: Tls | None) -> ssl.SSLContext:
    if tls is None:
        return ssl.create_default_context()
    context = ssl.create_default_context(cafile=tls.ca)
    context.minimum_version = _VERSIONS[tls.minimum]
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key, password="")
    return context
