"""Writes a run's rows to the file that `--out` names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rowmill.encoding.exports import export_value
from rowmill.errors import OutputError
from rowmill.outputs.cells import flattened
from rowmill.outputs.files import check_writable, is_special, refusals, replacing
from rowmill.outputs.formats import CSV_ENDINGS, ENDINGS, JSON_LINES_ENDINGS, PARQUET_ENDINGS, CsvFormat, JsonLinesFormat, RowFormat
from rowmill.outputs.spool import ColumnKinds, Spool

STATUS = "_status"
ERROR = "_error"
_OWN = (STATUS, ERROR)
"""Columns that every output has; those of a former output that is used as input make way for them."""


def check_output(path: Path) -> None:
    """Raise `OutputError` if `path` has no known ending or could not be written: to be called before a run spends anything."""
    if path.suffix.lower() not in ENDINGS and not is_special(path):
        raise OutputError(f"cannot tell from its ending how to write {path}; known: {', '.join(ENDINGS)}")
    check_writable(path)


class RowWriter:
    """One line per row, in the order they are written; columns are those of the input, then those of the output, then status and error.

    The file takes its name when the block ends without an error, and the former one stays until then. `input_columns=None`: not known ahead.
    `flatten`: members of objects become columns (`contact.email`); else they are JSON text in CSV and Parquet. CSV with all columns known is
    streamed; where columns or types depend on every row (`flatten`, unknown columns, Parquet), rows go through a temporary file. Either way
    memory holds a row (Parquet: a row group).

        with RowWriter(Path("enriched.csv"), input_columns=["domain"], output_columns=["score"]) as writer:
            writer.write({"domain": "a.com", "score": 80}, "completed", None)
    """

    def __init__(self, path: Path, *, input_columns: Sequence[str] | None, output_columns: Sequence[str], flatten: bool = False) -> None:
        check_output(path)
        self._path = path
        self._open_ended = input_columns is None
        self._inputs = [name for name in input_columns or () if name not in _OWN]
        self._outputs = [name for name in output_columns if name not in self._inputs]
        self._announced = dict.fromkeys([*self._inputs, *self._outputs])
        self._flatten = flatten
        self._stack = ExitStack()
        self._part = path
        self._format: RowFormat | None = None
        self._spool: Spool | None = None
        self.rows = 0
        """Rows written so far."""

    def __enter__(self) -> Self:
        self._part = self._stack.enter_context(replacing(self._path))
        ending = self._path.suffix.lower()
        if ending in JSON_LINES_ENDINGS:
            self._format = self._opened(JsonLinesFormat(self._part))
        elif ending in PARQUET_ENDINGS or self._flatten or self._open_ended:
            self._spool = Spool()
            self._stack.callback(self._spool.close)
        else:
            columns = [*self._announced, STATUS, ERROR]
            self._format = self._opened(CsvFormat(self._part, columns, CSV_ENDINGS.get(ending, ",")))
        return self

    def write(self, row: dict[str, Any], status: str, error: str | None = None) -> None:
        """Add one row: input columns and cells by name, as they are stored (JSON values in the encoding of `rowmill.encoding.values`).

        Nothing is left out silently: a column that was not announced raises `OutputError`.
        """
        values = {name: export_value(value) for name, value in self._ordered(row).items()}
        if self._flatten:
            values = flattened(values)
        values[STATUS] = status
        values[ERROR] = error
        with refusals(self._path):
            if self._spool is not None:
                self._spool.append(values)
            elif self._format is not None:
                self._format.write(values)
        self.rows += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._stack.__exit__(kind, error, trace)  # drops the part
            return
        with self._stack:
            if self._spool is not None:
                with refusals(self._path):
                    self._write_spooled(self._spool)

    def _opened(self, row_format: RowFormat) -> RowFormat:
        self._stack.callback(self._close, row_format)
        return row_format

    def _close(self, row_format: RowFormat) -> None:
        with refusals(self._path):
            row_format.close()

    def _ordered(self, row: dict[str, Any]) -> dict[str, Any]:
        """`row` in the order of the columns, without what an earlier run said about it."""
        others = [name for name in row if name not in self._announced and name not in _OWN]
        if others and not self._open_ended:
            raise OutputError(f"{self._path}: a row has columns that were not announced: {', '.join(map(repr, others))}")
        return {name: row[name] for name in [*self._inputs, *others, *self._outputs] if name in row}

    def _write_spooled(self, spool: Spool) -> None:
        columns = self._final_columns(spool)
        if self._path.suffix.lower() in PARQUET_ENDINGS:
            from rowmill.outputs.parquet import write_parquet  # noqa: PLC0415 - Arrow is large and only this format needs it

            write_parquet(self._part, columns, spool.rows())
            return
        writer = self._opened(CsvFormat(self._part, list(columns), CSV_ENDINGS.get(self._path.suffix.lower(), ",")))
        for row in spool.rows():
            writer.write(row)

    def _final_columns(self, spool: Spool) -> dict[str, ColumnKinds]:
        """Announced columns in their order, members at their object's place, columns that were not announced between inputs and outputs.

        An object that is null in some rows leaves no column of its own beside its members'.
        """
        inputs = {name: rank for rank, name in enumerate(self._inputs)}
        outputs = {name: rank for rank, name in enumerate(self._outputs)}
        names = {**self._announced, **dict.fromkeys(spool.kinds)}

        def place(name: str) -> tuple[int, int]:
            owner = name if name in self._announced else next((own for own in self._announced if name.startswith(f"{own}.")), name)
            return (0, inputs[owner]) if owner in inputs else (2, outputs[owner]) if owner in outputs else (1, 0)

        def has_members(name: str) -> bool:
            return self._flatten and any(other.startswith(f"{name}.") for other in names)

        ordered = sorted((name for name in names if name not in _OWN), key=place)
        kinds = {name: spool.kinds.get(name, ColumnKinds()) for name in [*ordered, STATUS, ERROR]}
        return {name: kind for name, kind in kinds.items() if not (kind.empty and has_members(name))}
