"""Datasets: building one column by column, and the frozen program that an executor runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from rowmill.columns import ColumnSpec, column_spec
from rowmill.durations import Duration
from rowmill.errors import DefinitionError
from rowmill.handles import Handle
from rowmill.names import routing_word
from rowmill.resolvers import RunIf
from rowmill.row_shapes import RowShape, shape_of
from rowmill.rows import Rows

KeySpec = tuple[str, ...] | Callable[[Any], Any] | None
"""Key columns, a function of the raw input row, or None for the whole row."""

DatasetMode = Literal["all", "net_new"]
OnError = Literal["isolate", "fail"]
RowIdentity = Literal["content", "source_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetProgram:
    """Everything an executor needs to run a dataset's rows.

    ``source``: a staged input, a handle, or rows in memory. ``mode`` and ``concurrency``: None where the run's options decide.
    ``row_identity``: ``source_row`` makes each record of an input a row of its own (SPEC 2.2).
    """

    key: str
    source: Rows[Any] | Handle | Sequence[Any]
    shape: RowShape | None
    columns: tuple[ColumnSpec, ...]
    key_spec: KeySpec = None
    mode: DatasetMode | None = None
    on_error: OnError = "isolate"
    concurrency: int | None = None
    row_identity: RowIdentity = "content"

    @property
    def row_model(self) -> type[BaseModel] | None:
        return None if self.shape is None else self.shape.model

    @property
    def column_versions(self) -> dict[str, str]:
        return {column.name: column.version for column in self.columns}

    @property
    def persisted(self) -> tuple[str, ...]:
        """Names of the columns whose cells are kept."""
        return tuple(column.name for column in self.columns if column.persisted)


class DatasetDriver(Protocol):
    """Runs datasets; given to the builder by the context that it came from."""

    async def run_dataset(self, program: DatasetProgram) -> Handle:
        """Run the program to its end. Raises `RunFailed`, or suspends the body until the dataset is closed."""


class DatasetBuilder:
    """A dataset so far. Each call gives a new builder, so a common beginning can be shared."""

    def __init__(
        self,
        key: str,
        source: Rows[Any] | Handle | Iterable[Any],
        driver: DatasetDriver,
        *,
        row: type[BaseModel] | RowShape | None = None,
        columns: tuple[ColumnSpec, ...] = (),
    ) -> None:
        self._key = routing_word("dataset", key)
        self._source = _checked_source(key, source)
        self._driver = driver
        self._shape = row if row is None or isinstance(row, RowShape) else shape_of(row)
        self._columns = columns

    def with_column(
        self,
        name: str,
        resolver: Any,
        *,
        run_if: RunIf | None = None,
        else_value: Any = None,
        version: str | None = None,
        stale_after: Duration | Callable[[Any], float | None] | None = None,
        recompute: bool | None = None,
        recompute_on_error: bool | None = None,
    ) -> DatasetBuilder:
        """Add a column: its resolver is given the row with every earlier column's output, and (if it takes two arguments) ``ctx``.

        ``run_if`` false: the cell is ``else_value`` and counts as skipped. The other options win over those of ``@column``. A name that
        starts with ``_`` is not kept. Raises `DefinitionError` for a name that is taken or reserved.
        """
        if any(column.name == name for column in self._columns):
            raise DefinitionError(f"dataset {self._key!r} has two columns {name!r}; give each its own name")
        added = column_spec(
            name,
            resolver,
            run_if=run_if,
            else_value=else_value,
            version=version,
            stale_after=stale_after,
            recompute=recompute,
            recompute_on_error=recompute_on_error,
        )
        return DatasetBuilder(self._key, self._source, self._driver, row=self._shape, columns=(*self._columns, added))

    async def run(
        self,
        *,
        key: str | Sequence[str] | Callable[[Any], Any] | None = None,
        mode: DatasetMode | None = None,
        on_error: OnError = "isolate",
        concurrency: int | None = None,
        row_identity: RowIdentity = "content",
    ) -> Handle:
        """Run the dataset and wait for its end.

        ``key``: what makes two rows the same, as columns of the raw input row or a function of it, which gets a dict of its cells (default: the
        whole row); a part that is null or empty fails the run. ``mode``:
        ``net_new`` runs only rows that the sheet has not completed. ``on_error``: ``isolate`` fails rows one by one, ``fail`` the run with the
        first. ``concurrency``: rows at once. ``row_identity="source_row"``: equal rows of a file are different rows.
        """
        return await self._driver.run_dataset(self.program(key=key, mode=mode, on_error=on_error, concurrency=concurrency, row_identity=row_identity))

    def program(
        self,
        *,
        key: str | Sequence[str] | Callable[[Any], Any] | None = None,
        mode: DatasetMode | None = None,
        on_error: OnError = "isolate",
        concurrency: int | None = None,
        row_identity: RowIdentity = "content",
    ) -> DatasetProgram:
        """What ``run`` hands to the driver. Raises `DefinitionError` naming the option that cannot be."""
        where = f"dataset {self._key!r}"
        _one_of(where, "mode", mode, ("all", "net_new", None))
        _one_of(where, "on_error", on_error, ("isolate", "fail"))
        _one_of(where, "row_identity", row_identity, ("content", "source_row"))
        if concurrency is not None and (isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1):
            raise DefinitionError(f"{where}: concurrency must be at least 1, not {concurrency!r}")
        if key is not None and row_identity == "source_row":
            raise DefinitionError(f"{where}: give key= or row_identity='source_row', not both")
        return DatasetProgram(
            key=self._key,
            source=self._source,
            shape=self._shape,
            columns=self._columns,
            key_spec=_key_spec(where, key),
            mode=mode,
            on_error=on_error,
            concurrency=concurrency,
            row_identity=row_identity,
        )


def _checked_source(key: str, source: Any) -> Rows[Any] | Handle | Sequence[Any]:
    if isinstance(source, Rows | Handle):
        return source
    if isinstance(source, str | bytes | Mapping) or not isinstance(source, Iterable):
        raise DefinitionError(
            f"dataset {key!r}: its rows come from a Rows field of the input, a handle or a list of rows, not {type(source).__name__}"
        )
    return source if isinstance(source, list | tuple) else list(source)


def source_rows(source: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Rows in memory as dicts. Raises `DefinitionError` naming the index of what is no row."""
    for index, row in enumerate(source):
        if isinstance(row, BaseModel):
            yield row.model_dump(by_alias=True)
        elif isinstance(row, Mapping):
            yield dict(row)
        else:
            raise DefinitionError(f"row {index} is a {type(row).__name__}; a row is a mapping or a model")


def _key_spec(where: str, key: Any) -> KeySpec:
    if key is None:
        return None
    if isinstance(key, str):
        return (key,)
    if callable(key):
        function: Callable[[Any], Any] = key
        return function
    names = tuple(key) if isinstance(key, Sequence) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise DefinitionError(f"{where}: key is a column, a list of columns or a function of the row, not {key!r}")
    if len(set(names)) != len(names):
        raise DefinitionError(f"{where}: key names a column twice: {', '.join(names)}")
    return names


def _one_of(where: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise DefinitionError(f"{where}: {name} must be one of {', '.join(str(choice) for choice in allowed if choice)}, not {value!r}")
