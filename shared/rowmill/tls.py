"""How a provider's identity is checked and a client's own is shown, as an author or a project declares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rowmill.errors import DefinitionError


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """``ca``: a PEM file of the authorities to trust instead of the system's. ``certificate`` and ``key``: PEM files with which we show who we are
    (``key`` None: it is in the certificate's file). ``minimum``: the oldest version of TLS that is spoken. Certificates and host names are always
    checked.

    Files are read by the gateway when it first connects. Raises `DefinitionError` for what cannot be meant.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    minimum: Literal["1.2", "1.3"] = "1.2"

    def __post_init__(self) -> None:
        if self.minimum not in {"1.2", "1.3"}:
            raise DefinitionError(f"Tls(minimum={self.minimum!r}): say '1.2' or '1.3'; older versions are not spoken")
        if self.key is not None and self.certificate is None:
            raise DefinitionError("Tls(key=...) without certificate=...: a key alone shows nobody who we are")
