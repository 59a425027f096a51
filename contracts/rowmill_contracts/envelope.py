"""How a message is named, encoded and decoded; the size limits of a page and a message.

The AMQP property ``type`` carries ``<Name>.v<version>``. Adding an optional field is compatible; any other change is a new version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from rowmill_contracts.storable import unstorable_text

PAGE_ROWS: Final = 500
"""Rows in a page at most. A hop costs about as much for one row as for all of them (docs/adr/0012-pages-of-500-rows.md)."""

PAGE_BYTES: Final = 1024 * 1024
"""Bytes in a page at most; a larger single item travels alone."""

MAX_MESSAGE_BYTES: Final = 9 * 1024 * 1024
"""Nothing on the wire is larger; a larger message is dead at once."""

EMPTY_OBJECT: Final = msgspec.Raw(b"{}")
NULL: Final = msgspec.Raw(b"null")


class UndecodableMessage(ValueError):
    """The body is not a valid message of the type it claims, or the type is not known. The text says where and why."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Anything that travels. Subclasses are registered with `message`."""

    message_type: ClassVar[str] = ""


MessageT = TypeVar("MessageT", bound=Message)

MESSAGES: Final[dict[str, type[Message]]] = {}
"""Every known message by its wire type, such as ``RunStart.v1``."""

_decoders: dict[str, msgspec.json.Decoder[Any]] = {}
_encoder = msgspec.json.Encoder(decimal_format="string")


def message(version: int = 1) -> Callable[[type[MessageT]], type[MessageT]]:
    """Register a struct under ``<ClassName>.v<version>``."""

    def register(struct: type[MessageT]) -> type[MessageT]:
        name = f"{struct.__name__}.v{version}"
        struct.message_type = name
        MESSAGES[name] = struct
        return struct

    return register


def encode(body: Message) -> bytes:
    """The JSON bytes of a message. Decimals travel as strings, so that money never becomes a float."""
    return _encoder.encode(body)


def decode(message_type: str | None, body: bytes) -> Message:
    """The message of that wire type.

    Raises:
        UndecodableMessage: the type is unknown or missing, the body is over 9 MiB, not JSON, does not fit the type, or names something by what
            nobody could store.

    """
    if len(body) > MAX_MESSAGE_BYTES:
        raise UndecodableMessage(f"message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    struct = MESSAGES.get(message_type or "")
    if struct is None:
        raise UndecodableMessage(f"unknown message type or version {message_type!r}")
    name = struct.message_type
    decoder = _decoders.get(name)
    if decoder is None:
        decoder = _decoders[name] = msgspec.json.Decoder(struct)
    try:
        decoded: Message = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableMessage(f"not a valid {name}: {error}") from error
    unstorable = unstorable_text(decoded, body)
    if unstorable is not None:
        raise UndecodableMessage(f"not a valid {name}: a NUL character, which cannot be stored - at `{unstorable}`")
    return decoded
