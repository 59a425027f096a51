"""Names of columns: made unique, and compared with what a play's row model requires."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rowmill.errors import MissingColumns

if TYPE_CHECKING:
    from pydantic import BaseModel

    from rowmill.inputs.sources import Source


def unique_names(header: Sequence[str]) -> list[str]:
    """A name of its own for every column: an empty one becomes `column_3` (its position), a repeated one `name_2`.

    A name that the header itself spells out is never taken away from its column: `a, a, a_2` gives `a, a_3, a_2`.
    """
    spelt_out = {name for name in header if name.strip()}
    names: list[str] = []
    taken: set[str] = set()
    for position, spelt in enumerate(header, 1):
        wanted = spelt if spelt.strip() else f"column_{position}"
        name, copy = wanted, 2
        while name in taken or (name != spelt and name in spelt_out):
            name, copy = f"{wanted}_{copy}", copy + 1
        names.append(name)
        taken.add(name)
    return names


def check_columns(source: Source, model: type[BaseModel] | None) -> None:
    """Raise `MissingColumns`, naming what is missing and what was found, unless `source` has every column that `model` requires.

    A source whose columns are not known before it is read (an iterator) and one without rows or header pass; so does `model=None`.
    A JSON Lines file is read through for it (`Source.check`).
    """
    if model is None:
        return
    if source.columns is None:
        source.check()
    found = source.columns
    if found is None or (not found and source.stats.records == 0):
        return
    missing = [name for name, field in model.model_fields.items() if field.is_required() and not (_accepted_names(model, name, field) & set(found))]
    if missing:
        raise MissingColumns(source.name, missing, found, _other_spellings(model, missing, found))


def _other_spellings(model: type[BaseModel], missing: Sequence[str], found: Sequence[str]) -> dict[str, str]:
    """By missing field, a column that no field takes and that differs from what the field takes only by case, spaces, underscores or hyphens."""
    accepted = {name: _accepted_names(model, name, field) for name, field in model.model_fields.items()}
    taken = set().union(*accepted.values())
    free = {_bare(column): column for column in reversed(found) if isinstance(column, str) and column not in taken}
    near = ((name, free.get(bare)) for name in missing for bare in {_bare(name), *map(_bare, sorted(accepted[name]))})
    return {name: column for name, column in near if column is not None}


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()


def _accepted_names(model: type[BaseModel], name: str, field: Any) -> set[str]:
    """The input names that fill a field: its alias or aliases, and its own name where it has none or the model allows it."""
    from pydantic import AliasChoices, AliasPath  # noqa: PLC0415 - loaded already when a model exists

    alias = field.validation_alias or field.alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias] if alias is not None else []
    accepted = {str(choice.path[0]) if isinstance(choice, AliasPath) else choice for choice in choices}
    if not accepted or model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name"):
        accepted.add(name)
    return accepted
