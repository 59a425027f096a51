"""Plays: async functions registered by name and executed durably."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar, cast, get_type_hints, overload

from pydantic import BaseModel, ValidationError

from rowmill import registry
from rowmill.context import Context
from rowmill.errors import DefinitionError, InputInvalid
from rowmill.names import routing_word
from rowmill.rows import rows_fields, rows_json
from rowmill.source import remember
from rowmill.validation import explain

Input = TypeVar("Input", bound=BaseModel)
Output = TypeVar("Output")


class NoInput(BaseModel):
    """The input model of a play whose function takes nothing but ``ctx``."""


class Play(Generic[Input, Output]):
    """A play: its name, its function, and the model of its input. Calling it calls the function.

    ``rows_fields``: the input's fields that are staged inputs. ``module``: where the function was defined.
    """

    def __init__(self, name: str, function: Callable[..., Awaitable[Output]], description: str = "") -> None:
        self.name = routing_word("play", name)
        if not inspect.iscoroutinefunction(function):
            raise DefinitionError(f"play {name!r}: its body is an async function, written with async def")
        remember(function.__code__.co_filename)
        self.function = function
        self.description = description
        self.module: str = function.__module__
        self.takes_input, model = _input_model(name, function)
        self.input_model = cast("type[Input]", model)
        self.rows_fields = rows_fields(model)
        functools.update_wrapper(self, function)

    def __call__(self, ctx: Context, input: Input | None = None) -> Awaitable[Output]:  # noqa: A002 - plays name it so
        return self.function(ctx, input) if self.takes_input else self.function(ctx)

    def __repr__(self) -> str:
        return f"<play {self.name}>"

    def start(self, ctx: Context, input: BaseModel) -> Awaitable[Output]:  # noqa: A002 - plays name it so
        """Begin the body with an input that `read_input` made."""
        return self.function(ctx, input) if self.takes_input else self.function(ctx)

    def read_input(self, input: Mapping[str, Any], inputs: Mapping[str, str] | None = None) -> Input:  # noqa: A002
        """The play's input from a run's JSON and its staged inputs (field to input id; an empty field means the only one).

        Raises `InputInvalid` naming field and value, a field that is no staged input, or one that nothing fills.
        """
        document = dict(input)
        for field, input_id in (inputs or {}).items():
            document[self.rows_field(field)] = rows_json(input_id)
        try:
            return self.input_model.model_validate(document)
        except ValidationError as error:
            raise InputInvalid(f"input of play {self.name!r}: {explain(error)}") from error

    def rows_field(self, field: str = "") -> str:
        """The staged input field of that name; for an empty name the only one. Raises `InputInvalid`."""
        listed = ", ".join(self.rows_fields) or "none"
        if not field:
            if len(self.rows_fields) == 1:
                return self.rows_fields[0]
            raise InputInvalid(f"play {self.name!r}: say which staged input is meant; its Rows fields: {listed}")
        if field not in self.rows_fields:
            raise InputInvalid(f"play {self.name!r} has no staged input {field!r}; its Rows fields: {listed}")
        return field


class _Decorator:
    """What `play` returns: makes a function a play."""

    def __init__(self, name: str, description: str) -> None:
        self._name = name
        self._description = description

    @overload
    def __call__(self, function: Callable[[Context, Input], Awaitable[Output]]) -> Play[Input, Output]: ...

    @overload
    def __call__(self, function: Callable[[Context], Awaitable[Output]]) -> Play[NoInput, Output]: ...

    def __call__(self, function: Callable[..., Awaitable[Any]]) -> Play[Any, Any]:
        defined: Play[Any, Any] = Play(self._name, function, self._description)
        registry.add_play(defined, registry.place_of(function))
        return defined


def play(name: str, *, description: str = "") -> _Decorator:
    """Register an async function of (ctx, input) as a play.

    ``name`` (``a-z 0-9 _ -``) is what messages carry. The body is replayed after each wait, so everything in it but ``ctx`` calls must be
    deterministic. Its input is a pydantic model, taken from the annotation. Raises `DefinitionError`.
    """
    routing_word("play", name)
    return _Decorator(name, description)


def _input_model(name: str, function: Callable[..., Any]) -> tuple[bool, type[BaseModel]]:
    """Whether the function takes an input, and its model."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(parameters) == 1:
        return False, NoInput
    if len(parameters) != 2:
        raise DefinitionError(f"play {name!r}: its body takes (ctx) or (ctx, input), but this one takes {len(parameters)} arguments")
    try:
        annotation = get_type_hints(function).get(parameters[1].name)
    except NameError as error:
        raise DefinitionError(f"play {name!r}: an annotation cannot be resolved: {error}") from error
    if not isinstance(annotation, type) or not issubclass(annotation, BaseModel):
        raise DefinitionError(f"play {name!r}: annotate {parameters[1].name!r} with a pydantic model, not {annotation!r}")
    return True, annotation
