"""A row as resolvers see it, and the record of what they read.

Owns the two views over one row: `Row`, a read-only mapping, and, with a row model, an instance of that model which also answers
``row["x"]``. Both record every column that is read, because a cell is reused as long as what its resolver read is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from rowmill.row_shapes import RowShape

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ReadSet:
    """The columns that were read. ``everything`` once the row was iterated, printed or dumped."""

    __slots__ = ("everything", "names")

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.everything = False

    @property
    def columns(self) -> list[str] | Literal["*"]:
        """Sorted names of the columns read, or ``"*"`` for all, as cell meta holds them."""
        return "*" if self.everything else sorted(self.names)


class OpenRow:
    """One row being worked: its input columns, its row model's instance, and the outputs of the columns that have run so far.

    Raises `RowInvalid`, when made, if the values do not fit the row model.
    """

    __slots__ = ("instance", "outputs", "shape", "values")

    def __init__(self, values: Mapping[str, Any], shape: RowShape | None = None) -> None:
        self.values = values
        self.shape = shape
        self.instance = None if shape is None else shape.instance(values)
        self.outputs: dict[str, Any] = {}

    def put(self, column: str, value: Any) -> None:
        """Set the output of a column, for the columns after it."""
        self.outputs[column] = value

    def view(self, reads: ReadSet) -> Any:
        """The row for one resolver; what it reads is recorded in ``reads``."""
        if self.shape is None:
            return Row(self, reads)
        return self.shape.view(self, reads, _NOTHING)

    def names(self) -> list[str]:
        """Every column there is so far: input columns, fields of the row model, outputs."""
        fields = () if self.shape is None else self.shape.fields
        return [*dict.fromkeys((*self.values, *fields, *self.outputs))]

    def lookup(self, name: str) -> Any:
        """The value of a column: an output over an input column of the same name, an input column as the row model's type. Raises `KeyError`."""
        if name in self.outputs:
            return self.outputs[name]
        if self.shape is not None and name in self.shape.field_of_column:
            return self.instance.__dict__[self.shape.field_of_column[name]]
        if name in self.values:
            return self.values[name]
        raise KeyError(f"the row has no column {name!r}; it has {', '.join(self.names())}")


class Row(Mapping[str, Any]):
    """A row without a row model: a read-only mapping of input columns and of the outputs of earlier columns and steps."""

    __slots__ = ("_open", "_overlay", "_reads")

    def __init__(self, open_row: OpenRow, reads: ReadSet, overlay: Mapping[str, Any] = _NOTHING) -> None:
        self._open = open_row
        self._reads = reads
        self._overlay = overlay

    def __getitem__(self, name: str) -> Any:
        if name in self._overlay:
            return self._overlay[name]
        self._reads.names.add(name)
        return self._open.lookup(name)

    def __getattr__(self, name: str) -> Any:
        """Always fails; says how to read the column of that name."""
        if not name.startswith("_") and (name in self._overlay or name in self._open.names()):
            raise AttributeError(f"a row without a row model has no attributes: write row[{name!r}], or give the dataset row=")
        raise AttributeError(f"a row has no attribute {name!r}")

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - this is the get

    def __contains__(self, name: object) -> bool:
        if name in self._overlay:
            return True
        self._reads.names.add(str(name))
        return name in self._open.outputs or name in self._open.values

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> dict[str, None]:
        self._reads.everything = True
        return dict.fromkeys((*self._open.names(), *self._overlay))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return f"Row({dict(self)!r})"

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self}

    def copy(self) -> dict[str, Any]:
        """A plain dict of the whole row."""
        return dict(self)

    def with_outputs(self, outputs: Mapping[str, Any]) -> Row:
        return Row(self._open, self._reads, {**self._overlay, **outputs})


def with_outputs(row: Any, outputs: Mapping[str, Any]) -> Any:
    """The same row with the outputs of steps, which are no columns: reading one is not recorded. A plain mapping gives a plain dict."""
    if not outputs:
        return row
    if isinstance(row, Row):
        return row.with_outputs(outputs)
    extended = getattr(row, "__rowmill_with_outputs__", None)
    if extended is not None:
        return extended(outputs)
    return {**row, **outputs}
