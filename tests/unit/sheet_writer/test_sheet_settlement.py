"""Whatever order settled messages come in, and however often, the same marks and counts come out."""

from __future__ import annotations

import hashlib
from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.errors import MalformedMessage
from rowmill_contracts.counts import Problem
from rowmill_contracts.rows import RowsSettled, SettledRow
from rowmill_sheet_writer.counts import DatasetId, Tally
from rowmill_sheet_writer.marks import MARKS, Standing, replaces
from rowmill_sheet_writer.pages import PageId, PageRecord, key_bytes
from rowmill_sheet_writer.settlement import Settlement, settle

DATASET = DatasetId("run", "leads")
PAGES = {0: "ssdrs", 1: "sdsks"}
INDEXES = [index for page, letters in PAGES.items() for index, letter in enumerate("".join(PAGES.values())) if index // 5 == page and letter == "s"]


def key_of(index: int) -> str:
    return hashlib.sha256(str(index).encode()).hexdigest()


def new_pages() -> dict[PageId, PageRecord]:
    return {
        PageId(*DATASET, page): PageRecord(
            PageId(*DATASET, page), 7, 5 * page, b"".join(key_bytes(key_of(5 * page + at)) for at in range(5)), list(letters)
        )
        for page, letters in PAGES.items()
    }


def ended(index: int, attempt: int, kind: str, calls: int = 0) -> SettledRow:
    status = "failed" if kind == "dead_lettered" else kind
    error = None if status == "completed" else Problem(code=kind, message=kind)
    return SettledRow(
        key=key_of(index),
        index=index,
        page=index // 5,
        attempt=attempt,
        status=status,  # type: ignore[arg-type]
        error=error,
        calls=calls,
        cost=Decimal(calls) / 100,
    )


def message(*rows: SettledRow, number: int = 1) -> RowsSettled:
    return RowsSettled(run_id="run", number=number, org="acme", play="leads", dataset="leads", rows=list(rows))


def total(*settlements: Settlement) -> Tally:
    whole = Tally()
    for letters in PAGES.values():
        whole.admit(letters)
    for settlement in settlements:
        tally = settlement.tallies.get(DATASET, Tally())
        for letter, rows in tally.by_letter.items():
            whole.by_letter[letter] += rows
        whole.calls += tally.calls
        whole.cost += tally.cost
    return whole


@st.composite
def histories(draw: st.DrawFn) -> list[SettledRow]:
    """What may happen to rows: an attempt ends once, and may be dead-lettered besides."""
    rows = []
    for index in INDEXES:
        for attempt in range(1, draw(st.integers(0, 3)) + 1):
            end = draw(st.sampled_from(["completed", "failed", "cancelled", "dead_lettered"]))
            kinds = {end, *draw(st.sampled_from([[], ["dead_lettered"]]))}
            calls = draw(st.integers(0, 3))
            rows += [ended(index, attempt, kind, calls if kind != "dead_lettered" else 0) for kind in sorted(kinds)]
    return rows


@given(st.data())
def test_any_order_and_repetition_of_messages_ends_in_the_same_marks_and_counts(data: st.DataObject) -> None:
    history = data.draw(histories())
    in_order, shuffled = new_pages(), new_pages()
    expected = total(settle(in_order, [message(*history)]))
    deliveries = data.draw(st.permutations(history + data.draw(st.lists(st.sampled_from(history), max_size=10) if history else st.just([]))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(deliveries)), max_size=4)))
    parts = [deliveries[start:end] for start, end in zip([0, *cuts], [*cuts, len(deliveries)], strict=True)]
    grouped = data.draw(st.booleans())
    batches = [[message(*part) for part in parts]] if grouped else [[message(*part)] for part in parts]
    found = total(*(settle(shuffled, batch) for batch in batches))
    assert [(page.letters, page.ends) for page in shuffled.values()] == [(page.letters, page.ends) for page in in_order.values()]
    expected.first_error = found.first_error = None
    assert found == expected


@given(histories())
def test_counts_say_what_the_marks_say(history: list[SettledRow]) -> None:
    pages = new_pages()
    found = total(settle(pages, [message(*history)]))
    marks = [MARKS[letter] for page in pages.values() for letter in page.letters]
    assert found.admitted == len(marks) - marks.count("skipped")
    counted = (found.completed, found.failed, found.cancelled, found.reused, found.duplicates)
    assert counted == tuple(Counter(marks)[mark] for mark in ("completed", "failed", "cancelled", "reused", "duplicate"))
    assert found.calls == sum(end.calls for page in pages.values() for end in page.ends.values())
    assert found.cost == Decimal(found.calls) / 100


@given(histories())
def test_a_repeated_message_writes_nothing_and_tells_what_is_on_record(history: list[SettledRow]) -> None:
    pages = new_pages()
    settle(pages, [message(*history)])
    before = [(list(page.letters), dict(page.ends)) for page in pages.values()]
    again = settle(pages, [message(*history)])
    assert again.writes == []
    assert again.tallies == {}
    assert [(page.letters, page.ends) for page in pages.values()] == before
    on_record = {(5 * page.page_id.page + at, MARKS[letter]) for page in pages.values() for at, letter in enumerate(page.letters)}
    assert {(row.index, row.status) for row in again.outcomes[0].told} <= on_record


RANKS = range(4)


@given(st.tuples(*[st.builds(Standing, st.integers(1, 2), st.integers(1, 2), st.sampled_from(RANKS))] * 2))
def test_of_two_writes_at_most_one_replaces_the_other(standings: tuple[Standing, Standing]) -> None:
    one, other = standings
    assert not (replaces(one, other) and replaces(other, one))
    assert not replaces(one, one)
    if one[:2] != other[:2]:
        assert replaces(one, other) or replaces(other, one)


@pytest.mark.parametrize(
    ("first", "second", "mark"),
    [
        ("failed", "completed", "failed"),
        ("completed", "failed", "completed"),
        ("cancelled", "completed", "cancelled"),
        ("dead_lettered", "completed", "completed"),
        ("dead_lettered", "failed", "failed"),
        ("dead_lettered", "cancelled", "cancelled"),
        ("completed", "dead_lettered", "completed"),
    ],
)
def test_at_the_same_attempt_the_first_end_stays_unless_it_was_a_dead_letter(first: str, second: str, mark: str) -> None:
    pages = new_pages()
    settle(pages, [message(ended(0, 1, first)), message(ended(0, 1, second))])
    assert MARKS[pages[PageId(*DATASET, 0)].letters[0]] == mark


def test_calls_of_a_later_attempt_take_the_place_of_the_earlier_ones() -> None:
    pages = new_pages()
    found = total(settle(pages, [message(ended(0, 1, "failed", calls=2)), message(ended(0, 2, "completed", calls=3))]))
    assert (found.failed, found.completed, found.calls, found.cost) == (0, 1, 3, Decimal("0.03"))


@pytest.mark.parametrize("index", [2, 8, 99])
def test_rows_that_were_never_sent_are_unknown(index: int) -> None:
    outcome = settle(new_pages(), [message(ended(index, 1, "completed"))]).outcomes[0]
    assert [row.index for row in outcome.unknown] == [row.index for row in outcome.lost] == [index]


def test_an_unknown_row_with_another_key_is_not_settled() -> None:
    pages = new_pages()
    row = SettledRow(key=key_of(1), index=0, page=0, attempt=1, status="completed")
    assert settle(pages, [message(row)]).outcomes[0].unknown == [row]


def test_an_unknown_row_that_was_dead_lettered_is_not_lost() -> None:
    outcome = settle({}, [message(ended(0, 1, "dead_lettered"))]).outcomes[0]
    assert len(outcome.unknown) == 1
    assert outcome.lost == []


@pytest.mark.parametrize("key", ["", "ab", "zz" * 32, "ab " * 21 + "a", "ab" * 33])
def test_a_key_that_is_no_digest_is_refused(key: str) -> None:
    with pytest.raises(MalformedMessage, match="row key"):
        key_bytes(key)


def test_a_row_written_twice_in_one_batch_is_written_one_after_the_other() -> None:
    pages = new_pages()
    settlement = settle(pages, [message(ended(0, 1, "failed"), ended(1, 1, "completed")), message(ended(0, 2, "completed"))])
    assert [len(wave) for wave in settlement.writes] == [2, 1]


def test_a_row_that_is_worked_again_ends_by_its_new_attempt_alone_and_pays_for_all() -> None:
    pages = new_pages()
    ends = [ended(0, 1, "failed", calls=2), ended(1, 1, "completed"), ended(4, 1, "dead_lettered")]
    first = settle(pages, [message(*ends)])
    page, tally = pages[PageId(*DATASET, 0)], Tally()
    assert page.reopen(2, "fl", tally) == [0, 4]
    assert page.reopen(2, "fl", tally) == [0, 4], "asked again, it is the same"
    late = settle(pages, [message(ended(0, 1, "completed", calls=9), ended(4, 1, "failed"))])
    assert (page.letters, page.open) == (list("scdrs"), 2), "what is told of the former attempt changes nothing"
    again = settle(pages, [message(ended(0, 2, "completed", calls=3), ended(4, 2, "failed", calls=1))])
    assert (page.letters, page.open) == (list("ccdrf"), 0)
    tallies = [first.tallies[DATASET], tally, *(each.tallies[DATASET] for each in (late, again) if DATASET in each.tallies)]
    assert (sum(each.completed for each in tallies), sum(each.failed for each in tallies)) == (2, 1)
    assert sum(each.calls for each in tallies) == 4
    assert page.reopen(2, "fl", Tally()) == []
    assert page.reopen(3, "flx", Tally()) == [4]
