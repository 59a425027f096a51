"""Which stored cells may be reused, and how the rows of a page go on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest

from rowmill.errors import MalformedMessage
from rowmill_contracts.envelope import EMPTY_OBJECT, PAGE_ROWS
from rowmill_contracts.rows import LookupRow, LookupRows
from rowmill_contracts.runs import ColumnInfo
from rowmill_sheet_writer.deciding import KNOWN_BYTES, Decision, Lookup, answer_rows, decide, send_instead
from rowmill_sheet_writer.events import in_pages, reused_events
from rowmill_sheet_writer.reuse import Reuse, StoredRow, changed_columns

EMAIL, SCORE = ColumnInfo(name="email", version="1"), ColumnInfo(name="score", version="2")
NOW = 1_000.0


def key_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def cell(**changes: Any) -> dict[str, Any]:
    return {"status": "completed", "version": "1", "reads": ["domain"], **changes}


def stored(row: str = '{"domain":"a.com","size":1}', *, status: str = "completed", number: int = 3, **meta: Any) -> StoredRow:
    cells = meta or {"email": cell(), "score": cell(version="2", reads=["email"])}
    values = json.dumps({name: f"{name}!" for name in cells})
    return StoredRow(number, 1, status, False, row, values, json.dumps(cells))


def reusable(known: StoredRow, row: str | None = None, *, columns: list[ColumnInfo] | None = None, **options: Any) -> set[str]:
    reuse = Reuse(columns or [EMAIL, SCORE], **{"started_at": NOW, "force": None, **options})
    return set(reuse.reusable(known, row or known.input or ""))


def test_unchanged_cells_are_reusable() -> None:
    assert reusable(stored()) == {"email", "score"}


def test_an_input_column_that_was_not_read_may_change() -> None:
    assert reusable(stored(), '{"domain":"a.com","size":2,"new":0}') == {"email", "score"}


def test_a_cell_that_read_a_changed_input_column_is_not_reusable() -> None:
    assert reusable(stored(), '{"domain":"b.com","size":1}') == {"score"}
    assert reusable(stored(), '{"size":1}') == {"score"}


def test_a_cell_that_read_everything_is_reusable_only_for_the_same_columns() -> None:
    known = stored(email=cell(reads="*"))
    assert reusable(known, '{ "size": 1, "domain": "a.com" }', columns=[EMAIL]) == {"email"}
    assert reusable(known, '{"domain":"a.com","size":1.0}', columns=[EMAIL]) == set()


def test_numbers_differ_if_their_text_does() -> None:
    assert changed_columns('{"a":1,"b":1e2,"c":123456789012345678901}', '{"a":1.0,"b":1e2,"c":123456789012345678902}') == {"a", "c"}


def test_an_output_column_hides_an_input_column_of_its_name_from_later_columns() -> None:
    known = stored('{"email":"x","domain":"a.com"}', email=cell(reads=["email"]), score=cell(version="2", reads=["email"]))
    assert reusable(known, '{"email":"y","domain":"a.com"}') == {"score"}


@pytest.mark.parametrize(
    "change",
    [{"status": "failed"}, {"status": "missed"}, {"version": "0"}, {"stale_at": NOW}, {"stale_at": NOW - 1}, {"status": "suspended"}],
)
def test_what_rules_a_cell_out(change: dict[str, Any]) -> None:
    assert reusable(stored(email=cell(**change)), columns=[EMAIL]) == set()


@pytest.mark.parametrize("change", [{"status": "cached"}, {"status": "skipped"}, {"stale_at": NOW + 0.1}, {"reads": []}])
def test_what_does_not_rule_a_cell_out(change: dict[str, Any]) -> None:
    assert reusable(stored(email=cell(**change)), columns=[EMAIL]) == {"email"}


@pytest.mark.parametrize("force", ["all", "tools", "steps"])
def test_force_rules_every_cell_out(force: str) -> None:
    assert reusable(stored(), force=force) == set()


def test_recompute_rules_a_column_out_and_recompute_on_error_a_completed_cell_not() -> None:
    columns = [
        ColumnInfo(name="email", version="1", recompute_on_error=True),
        ColumnInfo(name="score", version="2", recompute=True),
    ]
    assert reusable(stored(), columns=columns) == {"email"}


def test_a_cell_that_read_a_column_that_is_not_persisted_is_computed_anew() -> None:
    columns = [ColumnInfo(name="_site", version="1", persisted=False), EMAIL]
    assert reusable(stored(email=cell(reads=["_site"])), columns=columns) == set()
    assert reusable(stored(email=cell(reads="*")), columns=columns) == set()
    assert reusable(stored(email=cell()), columns=columns) == {"email"}


def test_meta_that_is_not_understood_rules_everything_out() -> None:
    assert reusable(stored(email={"status": 5})) == set()


def lookup(*rows: tuple[str, str], duplicates: tuple[int, ...] = (), **options: Any) -> Lookup:
    looked = [LookupRow(key=key_of(name), index=10 + at, duplicate=at in duplicates, data=msgspec.Raw(text)) for at, (name, text) in enumerate(rows)]
    request = LookupRows(
        run_id="run",
        number=5,
        org="acme",
        play="leads",
        dataset="leads",
        page=1,
        rows=looked,
        **{"columns": [EMAIL, SCORE], "started_at": NOW, **options},
    )
    return Lookup.of(request, 7)


A = '{"domain":"a.com","size":1}'
A2 = '{"domain":"a.com","size":2}'


def decided(asked: Lookup, **known: StoredRow) -> tuple[str, Decision]:
    decision = decide(asked, {bytes.fromhex(key_of(name)): row for name, row in known.items()})
    return "".join(decision.record.letters), decision


def test_a_row_with_every_cell_reusable_is_reused_and_any_other_sent() -> None:
    letters, decision = decided(lookup(("a", A), ("b", A), ("c", A)), a=stored(), b=stored(email=cell()))
    assert letters == "rss"
    assert decision.renewals == []
    assert decision.record.first_index == 10


def test_a_row_that_did_not_complete_is_sent_though_its_cells_are_reusable() -> None:
    asked = lookup(("a", A))
    known = stored(status="cancelled")
    letters, decision = decided(asked, a=known)
    assert letters == "s"
    [answer] = answer_rows(asked, decision.record, {bytes.fromhex(key_of("a")): known})
    assert {name: entry["reusable"] for name, entry in msgspec.json.decode(answer.known).items()} == {"email": True, "score": True}


def test_a_reused_row_with_other_input_is_renewed() -> None:
    letters, decision = decided(lookup(("a", A2)), a=stored())
    assert letters == "r"
    [renewal] = decision.renewals
    assert (renewal.input, renewal.seen, renewal.shadows) == (A2, (3, 1), False)


def test_a_newer_runs_input_is_not_overwritten() -> None:
    letters, decision = decided(lookup(("a", A2)), a=stored(number=6))
    assert letters == "r"
    assert decision.renewals == []
    assert decision.record.inputs == {0: msgspec.Raw(A2)}


def test_a_row_that_changed_before_its_input_was_renewed_is_sent() -> None:
    _, decision = decided(lookup(("a", A2), ("b", A2)), a=stored(), b=stored())
    send_instead(decision, {bytes.fromhex(key_of("b"))})
    assert decision.record.letters == ["s", "r"]
    assert decision.record.changed


def test_duplicates_keep_their_input_where_it_is_not_their_twins() -> None:
    letters, decision = decided(lookup(("a", A), ("a", A), ("a", A2), ("z", A), duplicates=(1, 2, 3)))
    assert letters == "sddd"
    assert decision.record.inputs == {2: msgspec.Raw(A2), 3: msgspec.Raw(A)}


def test_net_new_skips_what_the_sheet_completed_before_the_run() -> None:
    asked = lookup(("a", A), ("b", A), ("a", A), ("c", A), duplicates=(2, 3), mode="net_new")
    letters, _ = decided(asked, a=stored(), b=stored(status="failed"), c=stored(number=5))
    assert letters == "kskd"


def test_retrying_failed_rows_reuses_completed_ones_whatever_changed() -> None:
    asked = lookup(("a", '{"domain":"new"}'), ("b", A), force="failed")
    letters, decision = decided(asked, a=stored(), b=stored(status="failed"))
    assert letters == "rs"
    assert decision.renewals == []
    assert decision.record.inputs == {0: msgspec.Raw('{"domain":"new"}')}


def test_rows_beyond_the_answers_room_are_sent_without_their_cells() -> None:
    big = StoredRow(3, 1, "failed", False, A, json.dumps({"email": "x" * (KNOWN_BYTES // 2)}), json.dumps({"email": cell()}))
    asked = lookup(*((name, A) for name in "abc"))
    known = {bytes.fromhex(key_of(name)): big for name in "abc"}
    answers = answer_rows(asked, decide(asked, known).record, known)
    assert [answer.known != EMPTY_OBJECT for answer in answers] == [True, False, False]


def test_indexes_with_a_gap_and_broken_text_are_refused() -> None:
    request = lookup(("a", A), ("b", A)).request
    gap = msgspec.structs.replace(request, rows=[request.rows[1], request.rows[0]])
    with pytest.raises(MalformedMessage, match="row 1 of the page has index 10, not 12"):
        Lookup.of(gap, 7)
    broken = msgspec.structs.replace(request, rows=[msgspec.structs.replace(request.rows[0], data=msgspec.Raw(b'{"a":"\xff"}'))])
    with pytest.raises(MalformedMessage, match="UTF-8"):
        Lookup.of(broken, 7)


def test_events_of_reused_rows_have_the_same_id_each_time_and_are_cut_at_a_page() -> None:
    names = [f"row{number}" for number in range(2 * PAGE_ROWS + 50)]
    asked = lookup(*((name, A) for name in names))
    known = {bytes.fromhex(key_of(name)): stored() for name in names}
    record = decide(asked, known).record
    events = reused_events(asked, record, known)
    assert [len(event.message.rows) for event in events] == [PAGE_ROWS, PAGE_ROWS, 50]
    assert len({event.message.event_id for event in events}) == 3
    assert events == reused_events(asked, record, known)
    assert events[0].routing_key == "rows.completed.leads.leads"
    assert list(in_pages([])) == []
