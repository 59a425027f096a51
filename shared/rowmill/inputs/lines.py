"""Decodes a file to lines a chunk at a time, and knows where it stopped when it cannot.

The standard text reader tells neither the offset of bytes that do not decode nor which line they are on, and it never gives up on a line
that does not end. This one does both and keeps one chunk and one unfinished line in memory.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from typing import BinaryIO, Literal

CHUNK_BYTES = 256 * 1024
MAX_LINE_CHARACTERS = 16 * 1024 * 1024
"""Longest line (and CSV field) that is read. No message can carry a longer one, so reading on would only fill memory."""


class LineProblem(Exception):
    """The line after those already handed out cannot be read. The readers turn it into an error that names the record."""

    def __init__(self, what: str, offset: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.offset = offset
        """Bytes before the problem, where known."""


def line_batches(file: BinaryIO, encoding: str, *, newline: Literal["", "\n"], refuse_nul: bool) -> Iterator[list[str]]:
    r"""The lines of `file` from its current position, with their ends, some hundreds at a time.

    `newline=""` splits at `\n`, `\r` and `\r\n`, as the csv module wants it; `"\n"` splits there only. A byte order mark at the start is
    dropped. Raises `LineProblem` after every line before the problem was handed out.
    """
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    unfinished: list[str] = []
    pending = 0
    read = 0
    first = True
    while True:
        chunk = file.read(CHUNK_BYTES)
        read += len(chunk)
        problem: LineProblem | None = None
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            offset = read - len(error.object) + error.start
            problem = LineProblem(f"bytes that are not {encoding}: {error.object[error.start : error.end]!r}", offset)
            text = _decodable_start(error)
        if first and text:
            text = text.removeprefix("\ufeff")
            first = False
        if refuse_nul and (nul := text.find("\0")) >= 0:
            problem = LineProblem("a NUL character; is the file UTF-16, or damaged?")
            text = text[:nul]
        if problem is None and chunk and "\n" not in text and "\r" not in text:
            unfinished.append(text)
            pending += len(text)
            if pending > MAX_LINE_CHARACTERS:
                raise LineProblem(f"a line over {MAX_LINE_CHARACTERS:,} characters")
            continue
        lines = list(io.StringIO("".join([*unfinished, text]), newline=newline))
        if problem is not None:
            if lines and not _ended(lines[-1], newline):
                lines.pop()
            if lines:
                yield lines
            raise problem
        unfinished = []
        # A line is finished by its end only when more follows: a "\r" at the end of a chunk may be half of "\r\n".
        if chunk and lines and not (lines[-1].endswith("\n")):
            unfinished.append(lines.pop())
        pending = sum(map(len, unfinished))
        if lines:
            yield lines
        if not chunk:
            return


def _ended(line: str, newline: str) -> bool:
    return line.endswith(("\n", "\r") if newline == "" else "\n")


def _decodable_start(error: UnicodeDecodeError) -> str:
    """The text before the bytes that do not decode."""
    return error.object[: error.start].decode(error.encoding, errors="ignore")
