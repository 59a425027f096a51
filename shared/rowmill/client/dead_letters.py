"""Dead letters as a person sees them: what died where and why, which of them are meant, and which of them are alike.

Knows no connection: letters are read from messages here, and got, acknowledged and republished by `dead_letter_queues`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aio_pika

from rowmill.errors import UnknownName
from rowmill.runtime.deliveries import subject_headers
from rowmill_contracts.catalogue import decode
from rowmill_contracts.envelope import Message, UndecodableMessage
from rowmill_contracts.public import decode_untyped
from rowmill_contracts.receipts import ClaimReceipts
from rowmill_contracts.rows import RowTasks
from rowmill_contracts.tools import ToolCalls
from rowmill_contracts.topology import EXCHANGE, WORK_QUEUES, Queue

HEADER: Final = "x-rowmill-"

BROKER_HEADERS: Final = ("x-death", "x-first-death-queue", "x-first-death-exchange", "x-first-death-reason", "x-last-death-queue",
                         "x-last-death-exchange", "x-last-death-reason", "x-delivery-count", "x-acquired-count")  # fmt: skip
"""What a broker notes on a message on its way."""

_KNOWN: Final[Mapping[str, Queue]] = {queue.name: queue for queue in WORK_QUEUES}
_VARYING: Final = re.compile(r"[0-9a-f]{8,}(?:-[0-9a-f]{4,})*|\d+", re.IGNORECASE)


@dataclass(frozen=True)
class DeadLetter:
    """A message that could not be handled: where it was going, why and when it died, and whom it concerns.

    ``first_failure`` and ``last_failure``: seconds since the epoch. ``body`` is untouched. ``exchange`` and ``key``: where it had been published.
    ``tools``: of the calls in it, if it holds calls. ``headers``: all that it carries. ``identity``: what its copies have in common.
    """

    queue: str
    message_id: str
    message_type: str
    error_type: str
    error: str
    service: str = ""
    attempts: int = 0
    first_failure: float | None = None
    last_failure: float | None = None
    traceback_digest: str = ""
    exchange: str = ""
    key: str = ""
    run_id: str = ""
    play: str = ""
    dataset: str = ""
    row_keys: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    headers: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    identity: str = ""

    def document(self, *, body: bool = True) -> dict[str, Any]:
        """As JSON can say it. The body is text; bytes that are none are escaped, and ``body_hex`` holds them all."""
        fields = {name: value for name, value in vars(self).items() if name not in {"body", "headers", "identity"}}
        fields["headers"] = {name: value if isinstance(value, str | int | float | bool) else str(value) for name, value in self.headers.items()}
        if body:
            try:
                fields["body"] = self.body.decode()
            except UnicodeDecodeError:
                fields["body"] = self.body.decode("utf-8", "backslashreplace")
                fields["body_hex"] = self.body.hex()
        return fields

    def pretty_body(self) -> str:
        """The body indented if it is JSON, else as it is."""
        try:
            return json.dumps(json.loads(self.body), indent=2, ensure_ascii=False)
        except (ValueError, RecursionError):
            return self.body.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which letters are meant: those that fit all that is given.

    ``error``: the error's type, or a part of its text in any case. ``older_than``: seconds since the last failure; a letter that does not say when
    it died is older than anything. ``message_ids``: any of these, or what they begin with.
    """

    queue: str | None = None
    run_id: str | None = None
    play: str | None = None
    tool: str | None = None
    error: str | None = None
    older_than: float | None = None
    message_ids: tuple[str, ...] = ()

    def queues(self) -> list[str]:
        """The work queues whose letters may fit.

        Raises:
            UnknownName: there is no such queue.

        """
        if self.queue is None:
            return list(_KNOWN)
        name = self.queue.removesuffix(".dead")
        if name not in _KNOWN:
            raise UnknownName("queue", self.queue, list(_KNOWN))
        return [name]

    def fits(self, letter: DeadLetter, now: float) -> bool:
        """``now``: seconds since the epoch."""
        return (
            (self.run_id is None or letter.run_id == self.run_id)
            and (self.play is None or letter.play == self.play)
            and (self.tool is None or self.tool in letter.tools)
            and (self.error is None or letter.error_type == self.error or self.error.lower() in letter.error.lower())
            and (self.older_than is None or letter.last_failure is None or now - letter.last_failure >= self.older_than)
            and (not self.message_ids or letter.message_id.startswith(self.message_ids))
        )


@dataclass
class Group:
    """Letters of one queue and type that died alike: of the same error, but for ids and numbers in its text (``example`` is one of them)."""

    queue: str
    message_type: str
    error_type: str
    example: str
    letters: int = 0
    first_failure: float | None = None
    last_failure: float | None = None
    runs: set[str] = field(default_factory=set)

    def add(self, letter: DeadLetter) -> None:
        self.letters += 1
        if letter.run_id:
            self.runs.add(letter.run_id)
        if letter.first_failure is not None:
            self.first_failure = min(self.first_failure or letter.first_failure, letter.first_failure)
        if letter.last_failure is not None:
            self.last_failure = max(self.last_failure or letter.last_failure, letter.last_failure)


def grouped(letters: Iterable[DeadLetter]) -> list[Group]:
    """The largest group first."""
    groups: dict[tuple[str, str, str, str], Group] = {}
    for letter in letters:
        alike = (letter.queue, letter.message_type, letter.error_type, _VARYING.sub("#", letter.error))
        groups.setdefault(alike, Group(letter.queue, letter.message_type, letter.error_type, letter.error)).add(letter)
    return sorted(groups.values(), key=lambda group: (-group.letters, group.queue, group.error_type))


def letter_of(queue: str, message: aio_pika.abc.AbstractIncomingMessage) -> DeadLetter:
    """What a message in a work queue's ``.dead`` queue says. What our headers leave open (a broker buried it) is taken from the message itself."""
    headers: dict[str, Any] = dict(message.headers or {})

    def text(name: str) -> str:
        value = headers.get(HEADER + name, "")
        return value if isinstance(value, str) else str(value)

    def number(name: str) -> float | None:
        value = headers.get(HEADER + name)
        return float(value) if isinstance(value, int | float) else None

    def seconds(name: str) -> float | None:
        milliseconds = number(name)
        return None if milliseconds is None else milliseconds / 1000

    decoded = _decoded(message)
    said = {} if decoded is None else subject_headers(decoded)
    reason = headers.get("x-first-death-reason")
    return DeadLetter(
        queue=queue,
        message_id=message.message_id or "",
        message_type=message.type or ("" if decoded is None else decoded.message_type),
        error_type=text("error-type") or (f"broker:{reason}" if reason else "unknown"),
        error=text("error") or (f"the broker buried it: {reason}" if reason else ""),
        service=text("service"),
        attempts=int(number("attempts") or 0),
        first_failure=seconds("first-failure-ms"),
        last_failure=seconds("last-failure-ms") or _buried_at(headers),
        traceback_digest=text("traceback-digest"),
        exchange=text("exchange") or EXCHANGE,
        key=_key(queue, text("key") or _key_at_death(headers)),
        run_id=text("run-id") or str(said.get(f"{HEADER}run-id", "")),
        play=text("play") or str(said.get(f"{HEADER}play", "")),
        dataset=text("dataset") or str(said.get(f"{HEADER}dataset", "")),
        row_keys=[key for key in (text("row-keys") or str(said.get(f"{HEADER}row-keys", ""))).split(",") if key],
        tools=_tools(decoded),
        headers=headers,
        body=message.body,
        identity=_identity(queue, message, decoded),
    )


def _identity(queue: str, message: aio_pika.abc.AbstractIncomingMessage, decoded: Message | None) -> str:
    """What two letters have in common that are one (docs/adr/0021-copies-of-dead-letters.md): a page the rows in it at their attempts, whatever
    message they came in; any other message its id.
    """
    told = hashlib.sha256(f"{queue}\n{message.type}\n".encode())
    if isinstance(decoded, RowTasks):
        told.update(f"{decoded.run_id}\n{decoded.play}\n{decoded.dataset}\n".encode())
        told.update(",".join(f"{row.index}.{row.attempt}" for row in decoded.rows).encode())
    elif message.message_id:
        told.update(message.message_id.encode())
    else:
        told.update(message.body)
    return told.hexdigest()


def _decoded(message: aio_pika.abc.AbstractIncomingMessage) -> Message | None:
    try:
        if message.type:
            return decode(message.type, message.body)
        return decode_untyped(str((message.headers or {}).get(f"{HEADER}key", "")), message.body)
    except UndecodableMessage:
        return None


def _tools(message: Message | None) -> list[str]:
    match message:
        case ToolCalls(calls=calls):
            return sorted({call.tool for call in calls})
        case ClaimReceipts(claims=claims):
            return sorted({claim.tool for claim in claims})
        case _:
            return []


def _key(queue: str, key: str) -> str:
    """The routing key under which the queue gets its messages: the one it came by, if that is one of its own (a suspect came by another)."""
    keys = [bound for _, bound in _KNOWN[queue].bindings]
    return key if key in keys else keys[0]


def _first_death(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    deaths = headers.get("x-death")
    first = deaths[-1] if isinstance(deaths, list) and deaths else None
    return first if isinstance(first, dict) else {}


def _key_at_death(headers: Mapping[str, Any]) -> str:
    keys = _first_death(headers).get("routing-keys")
    return str(keys[0]) if isinstance(keys, list) and keys else ""


def _buried_at(headers: Mapping[str, Any]) -> float | None:
    at = _first_death(headers).get("time")
    return float(at.timestamp()) if at is not None and hasattr(at, "timestamp") else None
