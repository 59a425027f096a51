"""Rows from objects in memory: a list, or an iterator that makes them as they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rowmill.errors import InputError
from rowmill.inputs.sources import Row, Source
from rowmill.inputs.storable import as_mapping, storable_row


class ListSource(Source):
    """A list or tuple of rows; `columns` holds every name that occurs, in order of appearance."""

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__("rows")
        self._items = items
        names: dict[str, None] = {}
        for record, item in enumerate(items, 1):
            row = as_mapping(item, name=self.name, record=record)
            if not names.keys() >= row.keys():
                names.update(dict.fromkeys(row))
        self._columns = list(names)
        self.stats.records = len(items)

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    def rows(self) -> Iterator[Row]:
        for record, item in enumerate(self._items, 1):
            yield storable_row(as_mapping(item, name=self.name, record=record), name=self.name, record=record)


class IteratorSource(Source):
    """An iterator or generator of rows, read once and only as far as pages are asked for. Its columns are not known ahead."""

    def __init__(self, items: Iterable[Any]) -> None:
        super().__init__("rows")
        self._items = iter(items)
        self._begun = False

    @property
    def columns(self) -> None:
        return None

    def rows(self) -> Iterator[Row]:
        if self._begun:
            raise InputError("rows: an iterator can be read only once; give a list to read it again")
        self._begun = True
        for record, item in enumerate(self._items, 1):
            row = storable_row(as_mapping(item, name=self.name, record=record), name=self.name, record=record)
            self.stats.records = record
            yield row
