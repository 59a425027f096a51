"""Column versions: a digest of what a resolver does, so that a cell is computed anew when its code changed (SPEC 2.5).

Digested: the resolver's own syntax tree (found by position; comments, layout, annotations, decorators, docstrings and its name do not count),
the values that it closes over and its defaults, and, one level deep, the project's functions, tools and upper-case constants that it
names. Without source: code bytes and constants.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from rowmill.encoding.values import encode_value
from rowmill.errors import ValueNotStorable
from rowmill.resolvers import Column, Program, Resolver
from rowmill.source import is_project_file, node_of
from rowmill.tools import FunctionTool, HttpTool, Tool

_DIGITS = 24
_CONSTANT_NAME = re.compile(r"_*[A-Z][A-Z0-9_]*")
_ABSENT = object()


def column_version(resolver: Any, *, run_if: Any = None, else_value: Any = None) -> str:
    """The version of a resolver in any form: function, lambda, partial, method, callable object, `Column`, program of steps.

    A column's ``run_if`` and ``else_value`` are part of what it does. The same code gives the same version in every process that has it.
    """
    facts = ["column.v1", _facts(resolver, deep=True)]
    if run_if is not None:
        facts += ["run_if", _facts(run_if, deep=True), "else", _facts(else_value, deep=False)]
    return _digest(facts)


def code_version(function: Any) -> str:
    """The version of what a function's code does, with the project's functions, tools and constants that it names, and the code of functions that it
    closes over; not of the values that it closes over or is bound to, which differ from row to row. The same in every process that has the code.
    """
    while not isinstance(function, FunctionType):
        inner = _code_of(function)
        if inner is None:
            return _digest(["step.v1", getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)])
        function = inner
    own = _own_version(function)
    closed = [[name, version] for name, value in sorted(_closure(function).items()) if (version := _closed_version(value))]
    return _digest(["step.v1", own, closed]) if closed else own


def _own_version(function: FunctionType) -> str:
    """Without what it closes over, so that it is the same whichever row has the function first."""
    code = function.__code__
    known_of_file = _OWN_VERSIONS.setdefault(code.co_filename, WeakKeyDictionary())
    known = known_of_file.get(code)
    if known is None:
        node = node_of(code)
        own = ["code", code_facts(code)] if node is None else ["tree", *tree_facts(node)]
        named = [[name, _facts(value, deep=False)] for name, value in sorted(_named(function, node, closed=False).items())]
        known = known_of_file[code] = _digest(["step.v1", own, named])
    return known


_OWN_VERSIONS: dict[str, WeakKeyDictionary[CodeType, str]] = {}
"""By file, since code objects of two files are equal where their text, line and names are, whatever their names stand for."""


def _closed_version(value: Any) -> str:
    """The version of the project's code that a function closes over; empty for everything else, which is data."""
    value = value.function if isinstance(value, Column) else value
    if isinstance(value, FunctionType):
        return _own_version(value) if is_project_file(value.__code__.co_filename) else ""
    is_tool = isinstance(value, FunctionTool) or (isinstance(value, type) and issubclass(value, HttpTool))
    return _digest(_facts(value, deep=False)) if is_tool else ""


def _code_of(value: Any) -> Any:
    """The function within a partial, a method or a callable object; None: there is none."""
    if isinstance(value, functools.partial):
        return value.func
    if isinstance(value, MethodType):
        return value.__func__
    if isinstance(value, Column):
        return value.function
    called = type(value).__call__ if callable(value) and not isinstance(value, type) else None
    return called if isinstance(called, FunctionType) else None


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(repr(facts).encode("utf-8", "backslashreplace")).hexdigest()[:_DIGITS]


def _facts(value: Any, *, deep: bool) -> Any:
    """What a value is, as nested lists of text. ``deep``: with what its code names."""
    if isinstance(value, Column):
        return ["declared", value.options.version] if value.options.version is not None else _facts(value.function, deep=deep)
    if isinstance(value, Resolver):
        if value.options.version is not None:
            return ["declared", value.options.version]
        return _facts(value.program or value.function, deep=deep)
    if isinstance(value, Program):
        return _program_facts(value)
    if isinstance(value, FunctionTool):
        return ["tool", value.tool.id, value.tool.version]
    if isinstance(value, FunctionType):
        return _function_facts(value, deep=deep)
    if isinstance(value, functools.partial):
        named = sorted((name, _facts(given, deep=False)) for name, given in value.keywords.items())
        return ["partial", _facts(value.func, deep=deep), [_facts(given, deep=False) for given in value.args], named]
    if isinstance(value, MethodType):
        return ["method", _facts(value.__func__, deep=deep), _state_facts(value.__self__)]
    return _object_facts(value, deep=deep)


def _program_facts(program: Program) -> Any:
    told = []
    for step in program.steps:
        condition = None if step.run_if is None else _facts(step.run_if, deep=True)
        told.append([step.name, _facts(step.resolver, deep=True), condition, _facts(step.else_value, deep=False)])
    return ["program", program.waterfall, told, _facts(program.returns, deep=True)]


def _object_facts(value: Any, *, deep: bool) -> Any:
    if isinstance(value, type):
        tool = value.__dict__.get("__rowmill_tool__") if issubclass(value, HttpTool) else None
        return ["tool", tool.id, tool.version] if isinstance(tool, Tool) else ["class", value.__module__, value.__qualname__]
    if isinstance(value, ModuleType):
        return ["module", value.__name__]
    if isinstance(value, BuiltinFunctionType):
        return ["builtin", value.__module__, value.__qualname__]
    if isinstance(value, re.Pattern):
        return ["pattern", value.pattern, value.flags]
    called = type(value).__call__ if callable(value) else None
    if isinstance(called, FunctionType):
        return ["callable", _facts(called, deep=deep), _state_facts(value)]
    return _state_facts(value)


def _state_facts(value: Any) -> Any:
    """A value that code works with. What cannot be stored counts by its type, and by the plain values that it holds."""
    try:
        return ["value", type(value).__qualname__, _sorted_repr(encode_value(value, ""))]
    except ValueNotStorable:
        held = getattr(value, "__dict__", {})
        return ["object", type(value).__module__, type(value).__qualname__, [[name, fact] for name, fact in _plain_members(held)]]


def _plain_members(held: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in sorted(held):
        try:
            yield name, _sorted_repr(encode_value(held[name], name))
        except ValueNotStorable:
            yield name, type(held[name]).__qualname__


def _sorted_repr(encoded: Any) -> str:
    if isinstance(encoded, dict):
        return "{" + ",".join(f"{name!r}:{_sorted_repr(encoded[name])}" for name in sorted(encoded)) + "}"
    if isinstance(encoded, list):
        return "[" + ",".join(_sorted_repr(item) for item in encoded) + "]"
    return repr(encoded)


def _function_facts(function: FunctionType, *, deep: bool) -> Any:
    node = node_of(function.__code__)
    own = ["code", code_facts(function.__code__)] if node is None else ["tree", *tree_facts(node)]
    closed = _closure(function)
    facts = [
        "function",
        own,
        [[name, _facts(closed[name], deep=False)] for name in sorted(closed) if closed[name] is not function],
        [_facts(default, deep=False) for default in function.__defaults__ or ()],
        [[name, _facts(default, deep=False)] for name, default in sorted((function.__kwdefaults__ or {}).items())],
    ]
    if deep:
        facts.append([[name, _facts(value, deep=False)] for name, value in sorted(_named(function, node).items())])
    return facts


def _closure(function: FunctionType) -> dict[str, Any]:
    """The values that a function closes over, by name; a name that is not bound yet is left out."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # an empty cell
            continue
    return found


def _named(function: FunctionType, node: ast.AST | None, *, closed: bool = True) -> dict[str, Any]:
    """What the code names outside itself and counts: project functions, tools, upper-case constants; also as ``module.name``. ``closed``: also what
    it closes over.
    """
    paths = _names_in_code(function.__code__) if node is None else _names_in_tree(node)
    scope = {**function.__globals__, **_closure(function)}
    found = {}
    for path in paths:
        if not closed and path[0] in function.__code__.co_freevars:
            continue
        value = _resolved(scope, path)
        if value is not _ABSENT and value is not function and _counts(path[-1], value):
            found[".".join(path)] = value
    return found


def _counts(name: str, value: Any) -> bool:
    if isinstance(value, Column):
        return True
    if isinstance(value, FunctionType):
        return is_project_file(value.__code__.co_filename)
    if isinstance(value, FunctionTool) or (isinstance(value, type) and issubclass(value, HttpTool)):
        return True
    return _CONSTANT_NAME.fullmatch(name) is not None and not callable(value) and not isinstance(value, ModuleType)


def _resolved(scope: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value = scope.get(path[0], _ABSENT)
    for name in path[1:]:
        if not isinstance(value, ModuleType):
            return _ABSENT
        value = value.__dict__.get(name, _ABSENT)
    return value


def _names_in_tree(node: ast.AST) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for part in ast.walk(node):
        path = _path(part) if isinstance(part, ast.Attribute | ast.Name) else None
        if path is not None and not (len(path) == 1 and hasattr(builtins, path[0])):
            found.add(path)
    return found


def _path(node: ast.AST) -> tuple[str, ...] | None:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        before = _path(node.value)
        return None if before is None else (*before, node.attr)
    return None


def _names_in_code(code: CodeType) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = {(name,) for name in code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names_in_code(constant)
    return found


def tree_facts(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[Any]:
    """Arguments and body of a definition, without what does not change what it does."""
    arguments = [(kind, [_argument(value) for value in values]) for kind, values in _arguments_of(node.args)]
    body = [node.body] if isinstance(node, ast.Lambda) else _without_docstring(node.body)
    return [type(node).__name__, arguments, [_tree(part) for part in body]]


def _arguments_of(arguments: ast.arguments) -> list[tuple[str, list[ast.arg | None]]]:
    return [
        ("positional", [*arguments.posonlyargs, *arguments.args]),
        ("rest", [arguments.vararg]),
        ("named", [*arguments.kwonlyargs]),
        ("rest named", [arguments.kwarg]),
    ]


def _argument(argument: ast.arg | None) -> str | None:
    return None if argument is None else argument.arg


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return body[1:] if is_text else body


def _tree(node: Any) -> Any:
    """A syntax tree without positions and empty fields, so that it is the same in every version of Python that parses it alike."""
    if isinstance(node, ast.AST):
        fields = [(name, _tree(value)) for name, value in ast.iter_fields(node) if name not in {"ctx", "type_comment", "kind"}]
        return [type(node).__name__, *([name, value] for name, value in fields if value not in (None, []))]
    if isinstance(node, list):
        return [_tree(item) for item in node]
    return None if node is None else f"{type(node).__name__}:{node!r}"


def code_facts(code: CodeType) -> list[Any]:
    """A code object without names of files and lines. It differs between versions of Python."""
    constants = [code_facts(constant) if isinstance(constant, CodeType) else _constant(constant) for constant in code.co_consts]
    return [code.co_code.hex(), constants, [*code.co_names], [*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]]


def _constant(constant: Any) -> str:
    if isinstance(constant, frozenset):
        return "frozenset:" + ",".join(sorted(_constant(item) for item in constant))
    if isinstance(constant, tuple):
        return "tuple:" + ",".join(_constant(item) for item in constant)
    return f"{type(constant).__name__}:{constant!r}"
