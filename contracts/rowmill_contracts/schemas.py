"""JSON Schemas of every message, one file each: ``python -m rowmill_contracts.schemas [FOLDER]`` writes them to ``contracts/schemas``.

They are committed, and a test fails when they are stale.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from rowmill_contracts.catalogue import MESSAGES

FOLDER = Path(__file__).resolve().parent.parent / "schemas"


def schemas() -> dict[str, dict[str, Any]]:
    """Schema by wire type, such as ``RunStart.v1``."""
    mirrors: dict[type, type] = {}
    return {
        name: {"$schema": "https://json-schema.org/draft/2020-12/schema", **_schema(struct, mirrors)} for name, struct in sorted(MESSAGES.items())
    }


def _schema(struct: type, mirrors: dict[type, type]) -> dict[str, Any]:
    return msgspec.json.schema(_mirrored(struct, mirrors))


def _mirrored(annotation: Any, mirrors: dict[type, type]) -> Any:
    """The same type with ``Raw`` (any JSON value, passed on undecoded) as ``Any``, which a schema can say, at every depth."""
    if annotation is msgspec.Raw:
        return Any
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        if annotation not in mirrors:
            hints = typing.get_type_hints(annotation, include_extras=True)
            mirrors[annotation] = msgspec.defstruct(
                annotation.__name__,
                [_field(field, _mirrored(hints[field.name], mirrors)) for field in msgspec.structs.fields(annotation)],
                kw_only=True,
                namespace={"__doc__": annotation.__doc__},
            )
        return mirrors[annotation]
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *extras = typing.get_args(annotation)
        return typing.Annotated[(_mirrored(inner, mirrors), *extras)]
    if origin in {list, dict}:
        return origin[tuple(_mirrored(argument, mirrors) for argument in typing.get_args(annotation))]
    if origin in {typing.Union, types.UnionType}:
        return typing.Union[tuple(_mirrored(argument, mirrors) for argument in typing.get_args(annotation))]  # noqa: UP007 - built at run time
    return annotation


def _field(field: msgspec.structs.FieldInfo, annotation: Any) -> Any:
    if field.required:
        return (field.name, annotation)
    if isinstance(field.default, msgspec.Raw):
        return (field.name, annotation, msgspec.field(default=None) if bytes(field.default) == b"null" else msgspec.field(default_factory=dict))
    if field.default is not msgspec.NODEFAULT:
        return (field.name, annotation, msgspec.field(default=field.default))
    return (field.name, annotation, msgspec.field(default_factory=field.default_factory))


def render(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def write(folder: Path) -> list[Path]:
    """Write every schema, remove those of messages that are no more; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {folder / f"{name}.json": render(schema) for name, schema in schemas().items()}
    for path in folder.glob("*.v[0-9]*.json"):
        if path not in wanted:
            path.unlink()
    for path, text in wanted.items():
        path.write_text(text, "utf-8")
    return list(wanted)


if __name__ == "__main__":
    written = write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
    print(f"{len(written)} schemas written to {written[0].parent}")  # noqa: T201 - a command's output
