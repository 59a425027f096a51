"""References to secrets, and how a provider's credential is sent.

A reference holds a name, never a value. Values are resolved in the gateway alone, with `resolve`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rowmill.errors import DefinitionError, SecretMissing


@dataclass(frozen=True, slots=True)
class SecretRef:
    """The name of a secret, the account that it belongs to, and where its value is found.

    ``account`` tells credentials of one name apart (a second account at the same provider); it is part of the credential scope, so
    results paid for by one account never serve another. ``file`` and ``function`` are alternatives to the environment.
    """

    name: str
    account: str | None = None
    file: str | None = None
    function: Callable[[], str] | None = field(default=None, repr=False)


def secret(name: str, account: str | None = None, *, file: str | None = None, function: Callable[[], str] | None = None) -> SecretRef:
    """Refer to a secret by name.

    Its value is what ``function()`` returns, else what ``file`` holds, else the environment variable ``name``, else what the file named
    by the environment variable ``<name>_FILE`` holds. ``function`` runs in the gateway and may block.
    """
    if not isinstance(name, str) or not name.strip():
        raise DefinitionError("a secret needs a name, such as secret('HUNTER_KEY')")
    if file is not None and function is not None:
        raise DefinitionError(f"secret {name!r}: give a file or a function, not both")
    return SecretRef(name, account, file, function)


def resolve(ref: SecretRef, environ: Mapping[str, str]) -> str:
    """The secret's value; surrounding line breaks are cut off. Reads files and calls the secret's function, so it may block.

    Raises `SecretMissing`, which names the places looked at; whatever the secret's function raises passes through.
    """
    if ref.function is not None:
        return _present(ref, ref.function(), "its function")
    if ref.file is not None:
        return _present(ref, _read(ref, ref.file), f"file {ref.file}")
    if ref.name in environ:
        return _present(ref, environ[ref.name], f"environment variable {ref.name}")
    path = environ.get(f"{ref.name}_FILE")
    if path is not None:
        return _present(ref, _read(ref, path), f"file {path}")
    raise SecretMissing(f"secret {ref.name!r} is not set: set the environment variable {ref.name}, or {ref.name}_FILE to a file that holds it")


def _read(ref: SecretRef, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SecretMissing(f"secret {ref.name!r}: file {path} cannot be read: {type(error).__name__}") from error


def _present(ref: SecretRef, value: str, place: str) -> str:
    stripped = value.strip("\r\n")
    if not stripped:
        raise SecretMissing(f"secret {ref.name!r} is empty in {place}")
    return stripped


def _named(ref: SecretRef) -> str:
    return f"secret {ref.name}" if ref.account is None else f"secret {ref.name} of account {ref.account}"


Resolver = Callable[[SecretRef], str]
"""Gives the value of a secret."""


@dataclass(frozen=True, slots=True)
class Bearer:
    """``Authorization: Bearer <secret>``."""

    secret: SecretRef

    @property
    def secrets(self) -> tuple[SecretRef, ...]:
        return (self.secret,)

    def headers(self, value_of: Resolver) -> dict[str, str]:
        return {"Authorization": f"Bearer {value_of(self.secret)}"}

    @property
    def told(self) -> str:
        """Which secret is sent and how, to a person; never its value. So of all kinds."""
        return f"{_named(self.secret)} as Authorization: Bearer"


@dataclass(frozen=True, slots=True)
class Header:
    """``<name>: <secret>``, such as ``X-Api-Key``."""

    name: str
    secret: SecretRef

    @property
    def secrets(self) -> tuple[SecretRef, ...]:
        return (self.secret,)

    def headers(self, value_of: Resolver) -> dict[str, str]:
        return {self.name: value_of(self.secret)}

    @property
    def told(self) -> str:
        return f"{_named(self.secret)} in the header {self.name}"


@dataclass(frozen=True, slots=True)
class Basic:
    """``Authorization: Basic``, with a plain or secret user name and a secret password."""

    username: str | SecretRef
    password: SecretRef

    @property
    def secrets(self) -> tuple[SecretRef, ...]:
        return (self.password,) if isinstance(self.username, str) else (self.username, self.password)

    def headers(self, value_of: Resolver) -> dict[str, str]:
        username = self.username if isinstance(self.username, str) else value_of(self.username)
        pair = f"{username}:{value_of(self.password)}".encode()
        return {"Authorization": f"Basic {base64.b64encode(pair).decode('ascii')}"}

    @property
    def told(self) -> str:
        return f"{' and '.join(_named(ref) for ref in self.secrets)} as Authorization: Basic"


Auth = Bearer | Header | Basic
"""How a provider's credential is sent."""


def credential_scope(auth: Auth | None) -> str:
    """A hexadecimal digest of the names and declared accounts of the credential's secrets, not of their values (SPEC 3.1).

    A rotated key keeps its receipts; another account does not see them. None (no credential) has a scope of its own.
    """
    named = [] if auth is None else [[ref.name, ref.account] for ref in auth.secrets]
    return hashlib.sha256(msgspec.json.encode(["credential_scope", named])).hexdigest()
