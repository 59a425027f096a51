"""Deciding, at the first lookup of a page, how each of its rows goes on: reused, sent, skipped or a duplicate; and what the answer holds.

Pure. Later lookups of the page decide nothing: they are answered from its record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from rowmill.errors import MalformedMessage
from rowmill_contracts.envelope import PAGE_BYTES
from rowmill_contracts.rows import LookedRow, LookupRows
from rowmill_sheet_writer.marks import DUPLICATE, MARKS, REUSED, SENT, SKIPPED
from rowmill_sheet_writer.pages import KEY_BYTES, PageId, PageRecord, page_keys
from rowmill_sheet_writer.reuse import Reuse, StoredRow, known_cells

KNOWN_BYTES: Final = 8 * PAGE_BYTES
"""Stored cells in one answer at most, so that it stays under the largest message. Rows beyond it are sent without theirs and computed anew."""

_WITHOUT_CELLS: Final = {letter: LookedRow(mark=mark) for letter, mark in MARKS.items()}

_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(slots=True)
class Lookup:
    """A request with what was derived from it. ``texts``: the rows' inputs."""

    request: LookupRows
    sheet_id: int
    page_id: PageId
    keys: bytes
    texts: list[str]

    @classmethod
    def of(cls, request: LookupRows, sheet_id: int) -> Lookup:
        """Raises `MalformedMessage` for keys that are none, indexes that do not follow each other, and text that is not UTF-8."""
        keys = page_keys(request.rows)
        try:
            texts = [str(row.data, "utf-8") for row in request.rows]
        except UnicodeDecodeError as error:
            raise MalformedMessage(f"page {request.page}: an input row is not UTF-8: {error}") from error
        return cls(request, sheet_id, PageId(request.run_id, request.dataset, request.page), keys, texts)

    def reuse(self) -> Reuse:
        return Reuse(self.request.columns, started_at=self.request.started_at, force=self.request.force)

    def wanted(self) -> list[bytes]:
        """The keys whose stored rows the decision or the answer needs."""
        every = self.request.mode == "net_new"
        return [self.keys[KEY_BYTES * at : KEY_BYTES * (at + 1)] for at, row in enumerate(self.request.rows) if every or not row.duplicate]


@dataclass(frozen=True, slots=True)
class Renewal:
    """A reused row whose input columns are to be stored anew, provided that its row still is what was ``seen`` (run number, attempt)."""

    position: int
    key: bytes
    seen: tuple[int, int]
    input: str
    shadows: bool


@dataclass(slots=True)
class Decision:
    record: PageRecord
    renewals: list[Renewal] = field(default_factory=list)


def decide(lookup: Lookup, stored: Mapping[bytes, StoredRow]) -> Decision:
    """The record of a page that has none yet.

    A reused row whose input is stored byte for byte is not written: a reuse is no attempt, so it need not hold off an older run's attempt.
    """
    request = lookup.request
    record = PageRecord(lookup.page_id, lookup.sheet_id, request.rows[0].index, lookup.keys, [])
    decision = Decision(record)
    reuse = lookup.reuse()
    first_inputs: dict[bytes, str] = {}
    for position, row in enumerate(request.rows):
        key, text = record.key_at(position), lookup.texts[position]
        known = stored.get(key)
        if request.mode == "net_new" and known is not None and known.completed and not (row.duplicate and known.number == request.number):
            letter = SKIPPED
        elif row.duplicate:
            letter = DUPLICATE
            if first_inputs.get(key) != text:
                record.inputs[position] = msgspec.Raw(text)
        elif known is None or not known.completed:
            letter = SENT
        else:
            letter = _decide_completed(decision, reuse, lookup, position, key, known)
        first_inputs.setdefault(key, text)
        record.letters.append(letter)
    return decision


def _decide_completed(decision: Decision, reuse: Reuse, lookup: Lookup, position: int, key: bytes, known: StoredRow) -> str:
    text = lookup.texts[position]
    whole = reuse.reuses_row(known, text)
    if not whole and lookup.request.force != "failed":
        return SENT
    if text != known.input:
        if whole and known.number <= lookup.request.number:
            renewal = Renewal(position, key, (known.number, known.attempt), text, has_shadows(text, known.values or "{}"))
            decision.renewals.append(renewal)
        else:  # the stored input must stay: a newer run's, or the one that these cells were computed from
            decision.record.inputs[position] = msgspec.Raw(text)
    return REUSED


def send_instead(decision: Decision, renewed: set[bytes]) -> None:
    """Send the rows whose stored row had changed before their input could be renewed."""
    for renewal in decision.renewals:
        if renewal.key not in renewed:
            decision.record.letters[renewal.position] = SENT
            decision.record.changed = True


def answer_rows(lookup: Lookup, record: PageRecord, stored: Mapping[bytes, StoredRow]) -> list[LookedRow]:
    """The rows of the answer, index-aligned with the request: marks as they are now, and for sent rows what the sheet has."""
    reuse = lookup.reuse()
    room = KNOWN_BYTES
    answer = []
    for position, letter in enumerate(record.letters):
        looked = _WITHOUT_CELLS[letter]
        if letter == SENT:
            row = stored.get(record.key_at(position))
            if row is not None:
                known = known_cells(row, lookup.request.columns, reuse.reusable(row, lookup.texts[position]))
                room -= len(memoryview(known))
                if room >= 0:
                    looked = LookedRow(mark="sent", known=known)
        answer.append(looked)
    return answer


def has_shadows(input_row: str, values: str) -> bool:
    """Whether a name stands in both JSON objects."""
    names: dict[str, msgspec.Raw] = _decode_names(input_row)
    return not names.keys().isdisjoint(_decode_names(values))
