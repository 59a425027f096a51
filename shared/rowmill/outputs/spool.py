"""Rows kept on disk until the last one is known, for formats whose columns or types depend on all of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import msgspec

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode

_LARGEST_INTEGER = 2**63
_LARGEST_EXACT_FLOAT = 2**53


@dataclass
class ColumnKinds:
    """Which kinds of value a column has held."""

    boolean: bool = False
    integer: bool = False
    inexact: bool = False
    """An integer that a float cannot hold."""
    number: bool = False
    other: bool = False
    """Text, lists, objects, integers over 64 bits."""

    @property
    def empty(self) -> bool:
        """Nothing but null."""
        return not (self.boolean or self.integer or self.number or self.other)

    def see(self, value: Any) -> None:
        if isinstance(value, bool):
            self.boolean = True
        elif isinstance(value, int) and -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
            self.integer = True
            self.inexact = self.inexact or abs(value) > _LARGEST_EXACT_FLOAT
        elif isinstance(value, float):
            self.number = True
        elif value is not None:
            self.other = True


class Spool:
    """A temporary file of rows, and what was seen in them."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="rowmill-out-")  # noqa: SIM115 - closed by close()
        self.kinds: dict[str, ColumnKinds] = {}
        """By column, in order of first appearance."""

    def append(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            kinds = self.kinds.get(name)
            if kinds is None:
                kinds = self.kinds[name] = ColumnKinds()
            kinds.see(value)
        self._file.write(_encode(row) + b"\n")

    def rows(self) -> Iterator[dict[str, Any]]:
        """What was appended, in order."""
        self._file.seek(0)
        for line in self._file:
            yield _decode(line)

    def close(self) -> None:
        self._file.close()
