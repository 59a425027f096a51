"""Reading one HTTP/1.1 response from the bytes as they come (RFC 9112). Pure: no sockets, no clocks.

Strict where leniency could mix up two answers (lengths, chunks, header lines), and bounded: the headers, the body, and what a compressed body
unfolds to.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Final

from rowmill.errors import RowmillError

HEAD_LIMIT: Final = 64 * 1024
"""Bytes of a status line with its headers, and of a chunk's size line, at most."""
INTERIM_LIMIT: Final = 100
"""Interim (1xx) responses before the answer at most."""
ZIP_MEMBERS: Final = 1000
"""Members of a gzip body at most: each costs a copy, and an empty one takes 20 bytes."""
_UNZIPPED_AT_ONCE = 64 * 1024
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n]*)?\Z")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}\Z")
_ZIPPED = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class BadResponse(RowmillError):
    """The bytes are no HTTP response, or one that broke off."""

    code = "bad_response"


class ResponseTooLarge(RowmillError):
    """The body is over the limit."""

    code = "too_large"


class Headers(Mapping[str, str]):
    """Header values by name in any case; of a repeated header the values, with commas between them."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class ResponseParser:
    """Feed it until it is `complete`; then ``status``, ``headers`` and ``body()`` are the response.

    ``reusable``: the connection may carry another request. ``in_body``: the headers were read. ``size``: bytes of the body so far, as they came.
    """

    __slots__ = (
        "_body",
        "_buffer",
        "_chunked",
        "_interim",
        "_left",
        "_limit",
        "_until_close",
        "_without_body",
        "complete",
        "headers",
        "in_body",
        "reusable",
        "size",
        "status",
    )

    def __init__(self, method: str, limit: int) -> None:
        self.complete = False
        self.in_body = False
        self.reusable = False
        self.status = 0
        self.headers = Headers({})
        self._limit = limit
        self._without_body = method == "HEAD"
        self._buffer = b""
        self._body: list[bytes] = []
        self.size = 0
        self._interim = 0
        self._left = 0
        """Bytes that the body, or the chunk with its line end, still lacks."""
        self._chunked = False
        self._until_close = False

    @property
    def started(self) -> bool:
        """Whether anything came."""
        return bool(self.status or self._buffer)

    @property
    def announced(self) -> int | None:
        """Bytes of the whole body as it comes, where they were said; else None."""
        return None if self._chunked or self._until_close else self.size + self._left

    def feed(self, data: bytes) -> None:
        """Take what came. Raises `BadResponse`, `ResponseTooLarge`."""
        self._buffer = self._buffer + data if self._buffer else data
        while not self.in_body:
            if not self._read_head():
                return
        if self._chunked:
            self._read_chunks()
        elif not self.complete:
            self._read_plain()
        if self.complete and self._buffer:
            self.reusable = False  # it said more than it was asked

    def end(self) -> None:
        """The connection ended. Raises `BadResponse` where the response was not whole."""
        if self.complete:
            return
        if not self._until_close:
            raise BadResponse("the answer broke off")
        self.complete = True

    def body(self) -> bytes:
        """The body, unfolded where it came compressed. Raises `BadResponse`, `ResponseTooLarge`."""
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        return unfolded_body(body, self.headers.get("content-encoding", ""), self._limit)

    def _read_head(self) -> bool:
        """Read the status line and headers, if they are there; an interim response is passed over."""
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if len(head) > HEAD_LIMIT:
            raise BadResponse(f"the answer's headers have more than {HEAD_LIMIT} bytes")
        if not found:
            if not b"HTTP/1.".startswith(head[:7]):
                raise BadResponse("the answer is not HTTP/1")
            return False
        self._buffer = rest
        lines = head.split(b"\r\n")
        status = _STATUS.match(lines[0])
        if status is None:
            raise BadResponse("the answer is not HTTP/1")
        self.status = int(status[2])
        if self.status < 200:
            if self.status == 101:
                raise BadResponse("the answer switches protocols, which was not asked for")
            self._interim += 1
            if self._interim > INTERIM_LIMIT:
                raise BadResponse(f"more than {INTERIM_LIMIT} interim answers came, and none that ends")
            return True
        values = _header_values(lines[1:])
        self.headers = Headers(values)
        self.in_body = True
        self._frame(values, keeps=status[1] == b"1")
        return True

    def _frame(self, values: Mapping[str, str], *, keeps: bool) -> None:
        """How the body ends (RFC 9112, 6.3)."""
        connection = values.get("connection", "").lower()
        self.reusable = (keeps or "keep-alive" in connection) and "close" not in connection
        encoding, length = values.get("transfer-encoding"), values.get("content-length")
        if self._without_body or self.status in {204, 304}:
            self.complete = True
        elif encoding is not None:
            self._chunked = encoding.strip().lower() == "chunked"
            if not self._chunked:
                raise BadResponse(f"the answer's transfer encoding is {encoding!r}")
            if length is not None:
                self.reusable = False  # two lengths: believe the chunks, and trust the connection no further
        elif length is not None:
            lengths = {part.strip() for part in length.split(",")}
            text = lengths.pop()
            if lengths or not text.isascii() or not text.isdigit():
                raise BadResponse(f"the answer's length is {length!r}")
            self._left = int(text)
            if self._left > self._limit:
                raise ResponseTooLarge(f"the answer has {self._left} bytes; at most {self._limit} are read")
            self.complete = self._left == 0
        else:
            self._until_close = True
            self.reusable = False

    def _read_plain(self) -> None:
        part = self._buffer
        if self._until_close:
            self._buffer = b""
        else:
            part, self._buffer = part[: self._left], part[self._left :]
            self._left -= len(part)
            self.complete = self._left == 0
        self._add(part)

    def _read_chunks(self) -> None:
        """Take whole chunks and parts of one. Works with places in the buffer, which is cut once: small chunks come by the thousand."""
        at = 0
        while not self.complete:
            if self._left > 2:
                part = self._buffer[at : at + self._left - 2]
                at += len(part)
                self._left -= len(part)
                self._add(part)
                if self._left > 2:
                    break
            if self._left:
                if len(self._buffer) - at < 2:
                    break
                if not self._buffer.startswith(b"\r\n", at):
                    raise BadResponse("a chunk of the answer is longer than it says")
                at += 2
                self._left = 0
            after = self._read_chunk_size(at)
            if after is None:
                break
            at = after
        self._buffer = self._buffer[at:]

    def _read_chunk_size(self, at: int) -> int | None:
        """Read the line at this place; the place behind it, None where it is not whole yet."""
        end = self._buffer.find(b"\r\n", at)
        if (len(self._buffer) if end < 0 else end) - at > HEAD_LIMIT:
            raise BadResponse("a chunk's size line is too long")
        if end < 0:
            return None
        size = self._buffer[at:end].partition(b";")[0].strip()
        if _CHUNK_SIZE.match(size) is None:
            raise BadResponse("a chunk of the answer has no size")
        if int(size, 16):
            self._left = int(size, 16) + 2
            return end + 2
        # The last chunk; after it, trailers, which say nothing that is used here, and an empty line.
        if not self._buffer.startswith(b"\r\n", end + 2):
            end = self._buffer.find(b"\r\n\r\n", end + 2)
            if (len(self._buffer) if end < 0 else end) - at > HEAD_LIMIT:
                raise BadResponse("the answer's trailers are too long")
            if end < 0:
                return None
        self.complete = True
        return end + 4

    def _add(self, part: bytes) -> None:
        if part:
            self.size += len(part)
            if self.size > self._limit:
                raise ResponseTooLarge(f"the answer has more than {self._limit} bytes")
            self._body.append(part)


def _header_values(lines: list[bytes]) -> dict[str, str]:
    values: dict[str, str] = {}
    for line in lines:
        name, found, value = line.partition(b":")
        if not found or _NAME.match(name) is None or b"\n" in value or b"\r" in value or b"\0" in value:
            raise BadResponse("the answer has a header line that is none")
        lowered = name.decode("ascii").lower()
        text = value.strip(b" \t").decode("latin-1")
        values[lowered] = f"{values[lowered]}, {text}" if lowered in values else text
    return values


def unfolded_body(body: bytes, encoding: str, limit: int) -> bytes:
    """A body that came with this content encoding. Raises `BadResponse`, `ResponseTooLarge`."""
    name = encoding.strip().lower()
    if not body or name in {"", "identity"}:
        return body
    if name not in _ZIPPED:
        raise BadResponse(f"the answer's content encoding is {name!r}, which was not asked for")
    return _unfolded(body, _ZIPPED[name], limit)


def _unfolded(body: bytes, window_bits: int, limit: int) -> bytes:
    """Unfold gzip (of one or more members) or deflate (with its zlib header, or, as some servers have it, without)."""
    if window_bits == 15 and body[0] & 0x0F != 8:
        window_bits = -15
    parts: list[bytes] = []
    size = at = 0
    members = 1
    unfolding = zlib.decompressobj(window_bits)
    rest = b""
    while rest or at < len(body):
        if not rest:
            rest = body[at : at + _UNZIPPED_AT_ONCE]
            at += len(rest)
        if unfolding.eof:
            members += 1
            if members > ZIP_MEMBERS:
                raise BadResponse(f"the compressed answer has more than {ZIP_MEMBERS} members")
            unfolding = zlib.decompressobj(window_bits)
        try:
            part = unfolding.decompress(rest, limit + 1 - size)
        except zlib.error as error:
            raise BadResponse(f"the answer cannot be unfolded: {error}") from error
        size += len(part)
        if size > limit:
            raise ResponseTooLarge(f"the answer unfolds to more than {limit} bytes")
        parts.append(part)
        rest = unfolding.unused_data
    if not unfolding.eof:
        raise BadResponse("the compressed answer broke off")
    return b"".join(parts)
