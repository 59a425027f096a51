"""One dataset's books: its page records read in order, each row once, marks counted. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

import msgspec

from rowmill.doctor.findings import Finding
from rowmill_contracts.counts import Counts

KEY_BYTES: Final = 32
EXAMPLES: Final = 5
"""Rows that a finding names at most."""

_STATUS: Final = {"r": "completed", "c": "completed", "f": "failed", "l": "failed", "x": "cancelled"}
"""What the sheet says of a row that the run wrote last, by its mark (sheets.pages)."""

_MARKS: Final = {*_STATUS, "s", "d", "k"}
_REPORT: Final = "This should never happen: keep the database as it is and report it with this output."

_decode_ends = msgspec.json.Decoder(dict[int, tuple[int, int, Decimal]]).decode


@dataclass
class Books:
    """Take each page in the order of its number, then ask for ``findings``."""

    dataset: str
    next_page: int = 0
    next_index: int = 0
    by_mark: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    cost: Decimal = Decimal(0)
    _met: set[bytes] = field(default_factory=set)
    _wrong: dict[str, list[str]] = field(default_factory=dict)

    def take(self, page: Mapping[str, Any], stored: Mapping[bytes, str | None]) -> None:
        """``page``: a row of ``sheets.pages``; ``stored``: by key, the status of what the run wrote last to the sheet (None: written by another)."""
        number, marks, keys = page["page"], page["marks"], page["row_keys"]
        if number != self.next_page:
            self._note("pages are missing from the record", f"pages {self.next_page} to {number - 1}")
        elif page["first_index"] != self.next_index:
            self._note("rows are missing from the record", f"page {number} begins with row {page['first_index']}, not {self.next_index}")
        if not len(marks) == page["row_count"] == len(keys) / KEY_BYTES:
            self._note("a page's marks, keys and count of rows differ", f"page {number}: {len(marks)} marks, {len(keys) / KEY_BYTES:g} keys")
        for place, mark in enumerate(marks):
            self._row(page["first_index"] + place, mark, keys[place * KEY_BYTES : (place + 1) * KEY_BYTES], stored)
        for _, calls, cost in (_decode_ends(page["ends"]) if page["ends"] is not None else {}).values():
            self.calls += calls
            self.cost += cost
        self.next_page, self.next_index = number + 1, page["first_index"] + len(marks)

    def _row(self, index: int, mark: str, key: bytes, stored: Mapping[bytes, str | None]) -> None:
        self.by_mark[mark] += 1
        row = f"row {index}"
        if mark not in _MARKS:
            self._note("rows have marks that are none", f"{row}: {mark!r}")
        elif mark == "d":
            if key not in self._met:
                self._note("rows are duplicates of nothing", row)
        elif mark != "k":
            if key in self._met:
                self._note("rows are there twice", row)
            self._met.add(key)
        if mark in _STATUS:
            if key not in stored:
                self._note("rows have ended and are not in the sheet", row)
            elif stored[key] not in {None, _STATUS[mark]}:
                self._note("rows ended otherwise than the sheet says", f"{row}: marked {mark!r}, in the sheet {stored[key]!r}")

    def _note(self, what: str, where: str) -> None:
        self._wrong.setdefault(what, []).append(where)

    @property
    def open(self) -> int:
        """Rows that were sent and have not ended."""
        return self.by_mark["s"]

    @property
    def counts(self) -> Counts:
        """What the marks add up to."""
        marks = self.by_mark
        return Counts(
            admitted=marks.total() - marks["k"],
            completed=marks["c"],
            failed=marks["f"] + marks["l"],
            cancelled=marks["x"],
            reused=marks["r"],
            duplicates=marks["d"],
            calls=self.calls,
            cost=self.cost,
        )

    def findings(self, counted: Counts | None) -> list[Finding]:
        """``counted``: the dataset's counts at the sheet-writer, from the same moment; None: it has none."""
        found = [
            Finding(
                "rows",
                f"Dataset {self.dataset!r}: {what} ({len(places)}: {', '.join(places[:EXAMPLES])}{', …' if len(places) > EXAMPLES else ''}).",
                _REPORT,
            )
            for what, places in self._wrong.items()
        ]
        if self.next_page and counted != self.counts:
            said = "nothing" if counted is None else differing(counted, self.counts)
            found.append(Finding("counts", f"Dataset {self.dataset!r}: the rows' marks do not add up to its counts: {said}.", _REPORT))
        return found


def differing(one: Counts, other: Counts) -> str:
    """Where two counts differ, in words."""
    pairs = ((name, getattr(one, name), getattr(other, name)) for name in Counts.__struct_fields__)
    return ", ".join(f"{name} {left}, not {right}" for name, left, right in pairs if left != right)
