"""Questions by SQL: which are refused, and answers as JSON. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from rowmill_contracts.counts import Problem
from rowmill_contracts.envelope import PAGE_BYTES
from rowmill_contracts.rows import SheetsQueried

ANSWER_BYTES: Final = 8 * PAGE_BYTES
"""One answer at most, so that it stays under the largest message."""

_ESCAPES: Final = re.compile(r"set_config|_to_xml|ts_stat|ts_rewrite|u&", re.IGNORECASE)
"""Ways out of a role that was taken on: changing settings within a statement, statements within strings, names in escapes."""

_JSON_TYPES: Final = frozenset({"json", "jsonb"})

_encode = msgspec.json.Encoder(decimal_format="string", enc_hook=str).encode


def sheets_queried(columns: Sequence[str], types: Sequence[str], records: Iterable[Sequence[Any]]) -> SheetsQueried:
    """Rows as JSON arrays, aligned with ``columns``. JSON columns are JSON; numerics, and types that JSON lacks, are text."""
    is_json = [type_name in _JSON_TYPES for type_name in types]
    rows = []
    room = ANSWER_BYTES
    for record in records:
        values = [msgspec.Raw(value) if json and value is not None else value for json, value in zip(is_json, record, strict=True)]
        row = _encode(values)
        room -= len(row) + 1
        if room < 0:
            return refused(f"the answer's rows are over {ANSWER_BYTES} bytes; ask with a smaller limit, or for fewer columns")
        rows.append(msgspec.Raw(row))
    return SheetsQueried(columns=list(columns), rows=rows)


def refusal(sql: str) -> SheetsQueried | None:
    """Why this statement is not even tried. The role that runs it may only read the views; this keeps it from taking on another."""
    found = _ESCAPES.search(sql)
    return refused(f"{found[0]!r} may not be used in a statement; pass texts as parameters") if found is not None else None


def refused(reason: str) -> SheetsQueried:
    return SheetsQueried(error=Problem(code="query_refused", message=reason))
