"""The source text of author code, as it was when the code was loaded.

Digests of code must speak of the code that runs, not of a file that was edited since, so a file is read once per process, when the first
definition in it is made, and kept.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import sysconfig
from pathlib import Path
from types import CodeType

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Position = tuple[int, int]
"""Line, from 1, and column in bytes, from 0."""

_texts: dict[str, bytes | None] = {}
_PACKAGE_FOLDER = Path(__file__).resolve().parent


def remember(file: str) -> bytes | None:
    """The bytes of a source file as they were at the first request; None where there is no such file."""
    if file not in _texts:
        _texts[file] = _read(file)
    return _texts[file]


def _read(file: str) -> bytes | None:
    path = Path(file)
    if path.is_file():
        return path.read_bytes()
    lines = linecache.getlines(file)  # notebooks and interactive code keep theirs there
    return "".join(lines).encode() if lines else None


@functools.lru_cache(maxsize=256)
def tree_of(file: str) -> ast.Module | None:
    """The file's syntax tree; None where there is no source, or none that parses."""
    text = remember(file)
    if text is None:
        return None
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def node_of(code: CodeType) -> Definition | None:
    """The definition that this code was compiled from, found by its position; None where the source is not there or does not match."""
    here = _definitions(code.co_filename).get(code.co_firstlineno, [])
    if code.co_name == "<lambda>":
        return _lambda_among([node for node in here if isinstance(node, ast.Lambda)], code)
    return next((node for node in here if not isinstance(node, ast.Lambda) and node.name == code.co_name), None)


@functools.lru_cache(maxsize=256)
def _definitions(file: str) -> dict[int, list[Definition]]:
    """The file's definitions by the line that they begin on, decorators included."""
    found: dict[int, list[Definition]] = {}
    for node in ast.walk(tree_of(file) or ast.Module([], [])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found.setdefault(_first_line(node), []).append(node)
    return found


def _first_line(node: Definition) -> int:
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _lambda_among(lambdas: list[ast.Lambda], code: CodeType) -> ast.Lambda | None:
    """The innermost of the lambdas on the code's line that has its arguments and whose body holds every instruction."""
    start, end = _extent(code)
    found = [node for node in lambdas if _arguments(node.args) == _code_arguments(code)]
    if start is None or end is None:
        return found[0] if len(found) == 1 else None
    holding = [node for node in found if _begin(node.body) <= start and end <= _finish(node.body)]
    return max(holding, key=lambda node: _begin(node.body), default=None)  # of nested ones, the innermost begins last


def _extent(code: CodeType) -> tuple[Position | None, Position | None]:
    """Where the code's instructions begin and end, as (line, byte column)."""
    spans = [
        ((line, column), (end_line, end_column))
        for line, end_line, column, end_column in code.co_positions()
        if line is not None and end_line is not None and column is not None and end_column is not None and (line, column) != (end_line, end_column)
    ]
    return (min(begin for begin, _ in spans), max(end for _, end in spans)) if spans else (None, None)


def _begin(node: ast.expr) -> Position:
    return node.lineno, node.col_offset


def _finish(node: ast.expr) -> Position:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _arguments(arguments: ast.arguments) -> list[str]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in (*named, *filter(None, (arguments.vararg, arguments.kwarg)))]


def _code_arguments(code: CodeType) -> list[str]:
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args and **kwargs
    return [*code.co_varnames[:count]]


def is_project_file(file: str) -> bool:
    """Whether a file is the author's: neither Python's own, nor an installed package's, nor ours."""
    if file.startswith("<"):
        return file.startswith("<ipython-input")
    path = Path(file).resolve()
    return not any(path.is_relative_to(folder) for folder in _foreign_folders())


@functools.cache
def _foreign_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    named = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed = {entry for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages"}}
    return (_PACKAGE_FOLDER, *(Path(folder).resolve() for folder in named | installed))
