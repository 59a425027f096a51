"""Row models: turning a row's values into an instance of the author's model, and the model's view that records what is read.

The view is an instance of a subclass of the author's model that holds no values of its own. Its fields are descriptors, and its ``__dict__``
is a property: pydantic, ``vars()`` and ``model_dump`` fetch values through it, so no way of reading a field goes unrecorded.
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import inspect
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from pydantic import AliasChoices, AliasPath, BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rowmill.errors import DefinitionError, RowInvalid
from rowmill.validation import explain

if TYPE_CHECKING:
    from rowmill.row_views import OpenRow, ReadSet

_BLANKABLE = frozenset({int, float, bool, decimal.Decimal, dt.date, dt.datetime, dt.time, dt.timedelta, uuid.UUID})
"""Types that no empty text is a value of, so that an empty CSV field means that there is none."""


class RowShape:
    """What is known of a row model. ``fields``: its field names; ``field_of_column``: input column name to the field that it fills."""

    def __init__(self, model: type[BaseModel]) -> None:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise DefinitionError(f"row= takes a pydantic model class, not {model!r}")
        self.model = model
        self.fields = tuple(model.model_fields)
        self.columns_of_field = {name: _columns_of(name, info, model) for name, info in model.model_fields.items()}
        self.field_of_column = {column: name for name, columns in self.columns_of_field.items() for column in columns}
        self.field_of_column.update({name: name for name in self.fields})
        self._blanks = {
            column: _blank(info) for name, info in model.model_fields.items() for column in self.columns_of_field[name] if _blank(info) is not None
        }
        self._view = _view_class(model, self._reads_of_field())

    def _reads_of_field(self) -> dict[str, frozenset[str] | None]:
        """Which columns a field's value depends on; None: all of them."""
        model = self.model
        decorators = model.__pydantic_decorators__
        if decorators.model_validators or decorators.root_validators or model.model_post_init is not BaseModel.model_post_init:
            return dict.fromkeys(self.fields)
        own = {name: frozenset(columns) for name, columns in self.columns_of_field.items()}
        validators: list[Any] = [*decorators.field_validators.values(), *decorators.validators.values()]
        defaults = model.model_fields.values()
        if any(_sees_other_fields(v.func) for v in validators) or any(info.default_factory_takes_validated_data for info in defaults):
            return dict.fromkeys(self.fields, frozenset().union(*own.values()))
        return dict(own)

    def instance(self, values: Mapping[str, Any]) -> BaseModel:
        """The values as the model. An empty text for a number or date is null, or the field's default. Raises `RowInvalid`."""
        given = values
        if self._blanks and any(values.get(column) == "" for column in self._blanks):
            given = {
                name: None if value == "" and self._blanks.get(name) == "null" else value
                for name, value in values.items()
                if not (value == "" and self._blanks.get(name) == "default")
            }
        try:
            return self.model.model_validate(given)
        except ValidationError as error:
            raise RowInvalid(f"the row is no {self.model.__name__}: {explain(error)}") from error

    def view(self, open_row: OpenRow, reads: ReadSet, overlay: Mapping[str, Any]) -> BaseModel:
        """The row as an instance of the model, for one resolver."""
        view: BaseModel = object.__new__(self._view)
        object.__setattr__(view, _PARTS, (open_row, reads, overlay))
        return view


@functools.lru_cache(maxsize=256)
def shape_of(model: type[BaseModel]) -> RowShape:
    """The shape of a row model, made once: a play's body is replayed often. Raises `DefinitionError` for what is no model."""
    return RowShape(model)


def _columns_of(name: str, info: FieldInfo, model: type[BaseModel]) -> list[str]:
    alias = info.validation_alias if info.validation_alias is not None else info.alias
    if alias is None:
        return [name]
    choices: Iterable[Any] = alias.choices if isinstance(alias, AliasChoices) else (alias,)
    columns = [str(choice.path[0]) if isinstance(choice, AliasPath) else choice for choice in choices]
    if model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name"):
        columns.append(name)
    return columns


def _blank(info: FieldInfo) -> str | None:
    """What an empty text stands for in this field: ``"default"``, ``"null"``, or itself (None)."""
    annotation = info.annotation
    kinds = set(get_args(annotation)) if get_origin(annotation) in {Union, types.UnionType} else {annotation}
    nullable = type(None) in kinds
    if not kinds - {type(None)} <= _BLANKABLE:
        return None
    return "default" if not info.is_required() else "null" if nullable else None


def _sees_other_fields(validator: Callable[..., Any]) -> bool:
    """Whether a field validator takes ``info``, through which it sees the fields before it."""
    return "info" in inspect.signature(validator).parameters or len(inspect.signature(validator).parameters) > 1


_READ_ONLY = "a row is read-only; return the value from a column instead"
_PARTS = "__rowmill_parts__"
"""The one slot of a view: (open row, read set, outputs of steps)."""


class _FieldRead:
    """A field of a view: records the columns that it depends on, and gives an output of that name or the instance's value."""

    __slots__ = ("columns", "name")

    def __init__(self, name: str, columns: frozenset[str] | None) -> None:
        self.name = name
        self.columns = columns

    def __get__(self, view: Any, _: type | None = None) -> Any:
        if view is None:
            raise AttributeError(self.name)  # as pydantic's classes answer for a field
        open_row, reads, overlay = _parts(view)
        name = self.name
        if name in overlay:
            return overlay[name]
        if self.columns is None:
            reads.everything = True
        else:
            reads.names.update(self.columns)
        if name in open_row.outputs:
            return open_row.outputs[name]
        return open_row.instance.__dict__[name]

    def __set__(self, _: Any, value: Any) -> None:
        raise TypeError(_READ_ONLY)


def _parts(view: Any) -> tuple[OpenRow, ReadSet, Mapping[str, Any]]:
    parts: tuple[OpenRow, ReadSet, Mapping[str, Any]] = object.__getattribute__(view, _PARTS)
    return parts


def _view_class(model: type[BaseModel], reads_of_field: Mapping[str, frozenset[str] | None]) -> type[BaseModel]:
    """A subclass of the model made past pydantic's metaclass, so that it keeps the model's fields, validator and serializer."""
    namespace: dict[str, Any] = {
        "__slots__": (_PARTS,),
        "__module__": model.__module__,
        "__qualname__": model.__qualname__,
        "__doc__": model.__doc__,
        "__hash__": None if model.__hash__ is None else _hash,
        **_VIEW_MEMBERS,
    }
    if not hasattr(model, "get"):
        namespace["get"] = _get
    for name, columns in reads_of_field.items():
        namespace[name] = _FieldRead(name, columns)
    view: type[BaseModel] = type.__new__(type(model), model.__name__, (model,), namespace)
    return view


def _getitem(view: Any, name: str) -> Any:
    open_row, reads, overlay = _parts(view)
    if name in overlay:
        return overlay[name]
    field = open_row.shape.field_of_column.get(name) if open_row.shape is not None else None
    if field is not None and name not in open_row.outputs:
        return getattr(view, field)
    reads.names.add(name)
    return open_row.lookup(name)


def _contains(view: Any, name: object) -> bool:
    open_row, reads, overlay = _parts(view)
    if name in overlay:
        return True
    reads.names.add(str(name))
    return name in open_row.names()


def _get(view: Any, name: str, default: Any = None) -> Any:
    return _getitem(view, name) if _contains(view, name) else default


def _getattr(view: Any, name: str) -> Any:
    """A value that the model took beside its fields. Other columns are no attributes: which there are depends on the dataset, not on the model."""
    open_row, reads, overlay = _parts(view)
    extra = open_row.instance.__pydantic_extra__ if open_row.instance is not None else None
    if extra is not None and name in extra:
        reads.names.add(name)
        return extra[name]
    try:
        return BaseModel.__getattr__(view, name)  # type: ignore[attr-defined] # pydantic hides it from type checkers
    except AttributeError as error:
        if name in overlay or name in open_row.names():
            raise AttributeError(f"{type(view).__name__} has no field {name!r}, but the row has such a column: write row[{name!r}]") from error
        raise


def _read_only(*_: Any) -> None:
    raise TypeError(_READ_ONLY)


def _everything(view: Any) -> BaseModel:
    """The whole row as an instance of the author's own model."""
    open_row, reads, overlay = _parts(view)
    reads.everything = True
    instance = open_row.instance
    if instance is None:
        raise TypeError("a view of a row model has an instance")
    shadowing = {name: value for name, value in {**open_row.outputs, **overlay}.items() if name in type(instance).model_fields}
    return instance.model_copy(update=shadowing) if shadowing else instance


def _with_outputs(view: Any, outputs: Mapping[str, Any]) -> Any:
    open_row, reads, overlay = _parts(view)
    if open_row.shape is None:
        raise TypeError("a view of a row model has a shape")
    return open_row.shape.view(open_row, reads, {**overlay, **outputs})


def _equals(view: Any, other: Any) -> Any:
    return _everything(view).__eq__(_everything(other) if hasattr(type(other), _PARTS) else other)


def _hash(view: Any) -> int:
    return hash(_everything(view))


def _copy(view: Any, *_: Any, **options: Any) -> BaseModel:
    return _everything(view).model_copy(**options)


def _reduce(view: Any, _: Any) -> Any:
    return _itself, (_everything(view),)


def _itself(instance: BaseModel) -> BaseModel:
    return instance


_VIEW_MEMBERS: dict[str, Any] = {
    "__dict__": property(lambda view: _everything(view).__dict__),
    "__pydantic_fields_set__": property(lambda view: _everything(view).__pydantic_fields_set__),
    "__pydantic_extra__": property(lambda view: _everything(view).__pydantic_extra__),
    "__pydantic_private__": property(lambda view: _everything(view).__pydantic_private__),
    "__getitem__": _getitem,
    "__contains__": _contains,
    "__getattr__": _getattr,
    "__setattr__": _read_only,
    "__delattr__": _read_only,
    "__eq__": _equals,
    "__copy__": _copy,
    "__deepcopy__": lambda view, _: _copy(view, deep=True),
    "__reduce_ex__": _reduce,
    "model_copy": _copy,
    "__rowmill_with_outputs__": _with_outputs,
}
