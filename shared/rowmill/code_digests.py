"""The digest of a play's code: of its module and of every module of the project that it imports, directly or through others.

An executor whose digest differs from the one that a dataset was opened with has other code, and passes the dataset's rows on.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rowmill.plays import Play
from rowmill.source import remember, tree_of


def code_digest(play: Play[Any, Any], root: Path | None = None) -> str:
    """A hexadecimal digest of the source bytes, as they were loaded, of the play's module and of the project's modules that it imports.

    ``root``: the project's folder; None: the folder that the play's module was found in. Modules that are imported under names made at run
    time are not seen. A play without source files (a notebook) counts by its function's code.
    """
    module = sys.modules.get(play.module)
    file = getattr(module, "__file__", None)
    if file is None:
        return hashlib.sha256(repr((play.name, play.function.__code__.co_code.hex())).encode()).hexdigest()
    folder = (root or _root_of(play.module, Path(file))).resolve()
    digest = hashlib.sha256()
    for name, path in sorted(project_modules(play.module, Path(file).resolve(), folder).items()):
        text = remember(str(path)) or b""
        digest.update(f"{name}:{hashlib.sha256(text).hexdigest()}\n".encode())
    return digest.hexdigest()


def project_modules(module: str, file: Path, root: Path) -> dict[str, Path]:
    """Name and file of a module and of all modules below ``root`` that it imports, transitively; packages count with their ``__init__``."""
    found: dict[str, Path] = {}
    waiting = [(module, file)]
    while waiting:
        name, path = waiting.pop()
        if name in found:
            continue
        found[name] = path
        for imported in _imported(name, path):
            waiting.extend(_files_of(imported, root))
    return found


def _imported(module: str, file: Path) -> Iterator[str]:
    """Dotted names that may be modules: of ``from a import b`` both ``a`` and ``a.b``."""
    tree = tree_of(str(file))
    if tree is None:
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = _absolute(package, node.module, node.level)
            yield start
            yield from (f"{start}.{alias.name}" if start else alias.name for alias in node.names)


def _absolute(package: str, module: str | None, level: int) -> str:
    if level == 0:
        return module or ""
    parts = package.split(".") if package else []
    kept = parts[: len(parts) - level + 1]
    return ".".join([*kept, *([module] if module else [])])


def _files_of(module: str, root: Path) -> Iterator[tuple[str, Path]]:
    """The module and the packages that hold it, as far as they are files below ``root``."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        name, place = ".".join(parts[:length]), root.joinpath(*parts[:length])
        for candidate in (place / "__init__.py", place.with_suffix(".py")):
            if parts[0] and candidate.is_file():
                yield name, candidate
                break


def _root_of(module: str, file: Path) -> Path:
    """The folder on the import path that a module was found in."""
    levels = module.count(".") + (file.name == "__init__.py")
    return file.resolve().parents[levels]
