"""Every transition of a receipt, and every request repeated."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest

from rowmill_receipt_store.store import Store

from .conftest import FAILURE, OUTPUT_LIMIT, QUEUED, RUNNING, Books, Caller, new_key, new_keys

pytestmark = pytest.mark.servers


async def test_claimed_confirmed_completed_then_served(ann: Caller, bob: Caller, key: bytes, books: Books) -> None:
    granted = await ann.claim(key)
    assert (granted.state, granted.lease_id, granted.dispatch, granted.took_over) == ("granted", ann.lease, 0, False)
    assert await books.state(key) == "queued"

    confirmed = await ann.confirm(key)
    assert (confirmed.state, confirmed.dispatch) == ("confirmed", 1)
    assert await books.state(key) == "running"

    stored = await ann.complete(key, output=b'{"raw":{"a":"\xc3\xa9"}}', cost="0.02")
    assert stored.state == "stored"

    served = await bob.claim(key)
    assert (served.state, bytes(served.output), served.run_id, served.caller) == (
        "completed",
        b'{"raw":{"a":"\xc3\xa9"}}',
        ann.run,
        f"leads/{ann.lease}",
    )
    assert served.completed_at == stored.completed_at
    assert str(served.cost) == "0.02"


async def test_claimed_and_confirmed_in_one_request(ann: Caller, key: bytes) -> None:
    granted = await ann.claim(key, confirm=True)

    assert (granted.state, granted.dispatch) == ("granted", 1)
    assert (await ann.complete(key)).state == "stored"


async def test_every_request_may_come_twice(ann: Caller, key: bytes) -> None:
    assert await ann.claim(key) == await ann.claim(key)
    assert await ann.confirm(key) == await ann.confirm(key)
    assert (await ann.claim(key, confirm=True)).dispatch == 1
    assert await ann.renew(key)
    assert await ann.renew(key)
    assert await ann.complete(key) == await ann.complete(key, output=b'"another"')
    assert bytes((await ann.claim(key)).output) == b'{"raw":1}'
    assert await ann.fail(key) == await ann.fail(key)
    assert (await ann.fail(key)).state == "superseded"
    assert not await ann.release(key)


async def test_a_claim_with_confirmation_repeated_keeps_its_dispatch(ann: Caller, key: bytes) -> None:
    first = await ann.claim(key, confirm=True)

    assert await ann.claim(key, confirm=True) == first


async def test_a_queued_claim_repeated_with_confirmation_runs(ann: Caller, key: bytes) -> None:
    await ann.claim(key)

    assert (await ann.claim(key, confirm=True)).dispatch == 1
    assert (await ann.confirm(key)).dispatch == 1


async def test_a_live_lease_is_held_even_against_force(ann: Caller, bob: Caller, key: bytes) -> None:
    await ann.claim(key)
    assert (await bob.claim(key, force=True)).state == "held"
    await ann.confirm(key)
    assert (await bob.claim(key, force=True, confirm=True)).state == "held"
    assert (await bob.confirm(key)).state == "lost"
    assert not await bob.renew(key)
    assert not await bob.release(key)


async def test_a_released_claim_is_free_and_its_late_copy_gets_nothing(ann: Caller, bob: Caller, key: bytes) -> None:
    await ann.claim(key)
    assert await ann.release(key)

    assert (await ann.confirm(key)).state == "lost"
    assert (await ann.claim(key)).state == "held"
    assert (await ann.but(lease="again").claim(key)).state == "granted"
    assert await ann.but(lease="again").release(key)
    assert (await bob.claim(key)).state == "granted"


async def test_a_confirmed_claim_is_released_under_its_dispatch_and_no_other(ann: Caller, bob: Caller, key: bytes) -> None:
    await ann.claim(key, confirm=True)

    assert not await ann.release(key, dispatch=2)
    assert not await bob.release(key)
    assert await ann.release(key, dispatch=1)
    taken = await bob.claim(key, confirm=True)
    assert (taken.state, taken.dispatch, taken.took_over) == ("granted", 2, False)


async def test_an_expired_queued_lease_is_free(ann: Caller, bob: Caller, key: bytes, store: Store) -> None:
    await ann.but(effect="non_idempotent").claim(key)
    store.clock_offset = QUEUED + 1

    taken = await bob.claim(key)
    assert (taken.state, taken.took_over) == ("granted", False)
    assert (await ann.confirm(key)).state == "lost"


async def test_an_expired_lease_that_nobody_took_is_still_its_holders(ann: Caller, key: bytes, store: Store) -> None:
    await ann.claim(key)
    store.clock_offset = QUEUED + 1

    assert (await ann.confirm(key)).state == "confirmed"


async def test_a_renewed_lease_lives_on(ann: Caller, bob: Caller, key: bytes, store: Store) -> None:
    await ann.claim(key)
    store.clock_offset = QUEUED - 1
    assert await ann.renew(key)
    store.clock_offset = QUEUED + 1
    assert (await bob.claim(key)).state == "held"
    await ann.confirm(key)
    store.clock_offset += RUNNING - 1
    assert await ann.renew(key)
    store.clock_offset += RUNNING - 1
    assert (await bob.claim(key)).state == "held"


@pytest.mark.parametrize("effect", ["read", "idempotent"])
async def test_an_expired_running_lease_is_taken_over_where_the_effect_allows(
    effect: str, ann: Caller, bob: Caller, key: bytes, store: Store
) -> None:
    await ann.claim(key, confirm=True, effect=effect)
    store.clock_offset = RUNNING + 1

    taken = await bob.claim(key, effect=effect)
    assert (taken.state, taken.took_over) == ("granted", True)
    assert (await bob.claim(key)).took_over
    assert not await ann.renew(key)
    assert (await bob.confirm(key)).dispatch == 2
    store.clock_offset += RUNNING + 1
    assert (await ann.but(lease="later").claim(key, effect=effect, confirm=True)).dispatch == 3


async def test_that_an_effect_may_have_happened_is_not_forgotten_by_a_release(ann: Caller, bob: Caller, key: bytes, store: Store) -> None:
    await ann.claim(key, confirm=True)
    store.clock_offset = RUNNING + 1
    await bob.claim(key)
    await bob.release(key)

    assert (await bob.but(lease="next").claim(key)).took_over


async def test_completion_is_fenced_by_lease_and_dispatch_not_by_time(ann: Caller, key: bytes, store: Store) -> None:
    await ann.claim(key, confirm=True)
    store.clock_offset = 10 * RUNNING

    assert (await ann.complete(key, dispatch=2)).state == "superseded"
    assert (await ann.but(lease="other").complete(key)).state == "superseded"
    assert (await ann.complete(key)).state == "stored"


async def test_a_result_after_its_lease_moved_never_overwrites(ann: Caller, bob: Caller, key: bytes, store: Store) -> None:
    await ann.claim(key, confirm=True)
    store.clock_offset = RUNNING + 1
    await bob.claim(key, confirm=True)

    assert (await ann.complete(key, output=b'"old"')).state == "superseded"
    assert (await bob.complete(key, dispatch=2, output=b'"new"')).state == "stored"
    assert (await ann.complete(key, output=b'"old"')).state == "superseded"
    assert bytes((await bob.claim(key)).output) == b'"new"'


async def test_an_expired_running_lease_of_no_idempotent_tool_is_unknown_until_its_own_completion(
    ann: Caller, bob: Caller, key: bytes, store: Store, books: Books
) -> None:
    await ann.claim(key, confirm=True, effect="non_idempotent")
    store.clock_offset = RUNNING + 1

    for _ in range(2):
        assert (await bob.claim(key, effect="non_idempotent", force=True)).state == "unknown"
    assert (await bob.claim(key, effect="read")).state == "unknown"
    assert await books.state(key) == "outcome_unknown"
    assert (await ann.confirm(key)).state == "lost"
    assert not await ann.renew(key)
    assert not await ann.release(key, dispatch=2)
    assert not await bob.release(key)

    assert (await bob.complete(key)).state == "superseded"
    assert (await ann.complete(key)).state == "stored"
    assert (await bob.claim(key, effect="non_idempotent")).state == "completed"


async def test_an_outcome_said_to_be_unknown_blocks_and_says_why(ann: Caller, bob: Caller, key: bytes) -> None:
    await ann.claim(key, confirm=True, effect="non_idempotent")
    for _ in range(2):
        assert (await ann.fail(key, becomes="outcome_unknown")).state == "stored"

    blocked = await bob.claim(key, force=True)
    assert (blocked.state, blocked.failure) == ("unknown", FAILURE)
    assert (await ann.but(lease="again").claim(key)).state == "unknown"
    assert (await ann.complete(key)).state == "stored"
    assert (await bob.claim(key, started_at=0.0)).state == "completed"


async def test_a_failure_holds_for_its_run_and_no_other(ann: Caller, bob: Caller, key: bytes) -> None:
    await ann.claim(key, confirm=True)
    for _ in range(2):
        assert (await ann.fail(key)).state == "stored"

    again = await ann.but(lease="redelivered").claim(key, confirm=True)
    assert (again.state, again.failure) == ("failed", FAILURE)
    assert (await bob.claim(key, confirm=True)).dispatch == 2
    assert (await ann.but(lease="redelivered").claim(key)).state == "failed"
    assert (await ann.fail(key)).state == "stored"
    assert (await bob.complete(key, dispatch=2)).state == "stored"
    assert (await ann.but(lease="redelivered").claim(key)).state == "completed"
    assert (await ann.complete(key)).state == "superseded"


async def test_a_failure_that_is_not_final_gives_the_lease_back(ann: Caller, key: bytes) -> None:
    await ann.claim(key, confirm=True)
    for _ in range(2):
        assert (await ann.fail(key, becomes="released")).state == "stored"

    retry = ann.but(lease="retry")
    assert (await retry.claim(key, confirm=True)).dispatch == 2
    assert (await ann.fail(key)).state == "superseded"
    assert (await retry.complete(key, dispatch=2)).state == "stored"


async def test_a_claim_can_fail_before_any_dispatch(ann: Caller, key: bytes) -> None:
    await ann.claim(key)

    assert (await ann.fail(key, dispatch=1)).state == "superseded"
    assert (await ann.fail(key, dispatch=0)).state == "stored"
    assert (await ann.fail(key, dispatch=0)).state == "stored"
    assert (await ann.but(lease="redelivered").claim(key)).state == "failed"


async def test_force_and_staleness_are_judged_at_the_runs_start(ann: Caller, bob: Caller, key: bytes, store: Store) -> None:
    await ann.claim(key, confirm=True)
    await ann.complete(key)
    store.clock_offset = 100.0
    later = bob.but(started_at=time.time() + 100)

    assert (await later.claim(key)).state == "completed"
    assert (await later.claim(key, fresh_for=1000)).state == "completed"
    assert (await later.claim(key, only_cached=True, fresh_for=10)).state == "absent"
    assert (await later.claim(key, only_cached=True, reusable=False)).state == "absent"
    assert (await later.claim(key, force=True, confirm=True)).dispatch == 2
    assert (await later.complete(key, dispatch=2, output=b'"fresh"')).state == "stored"
    redelivered = await later.but(lease="redelivered").claim(key, force=True, fresh_for=0)
    assert (redelivered.state, bytes(redelivered.output)) == ("completed", b'"fresh"')
    assert (await ann.but(lease="redelivered").claim(key, force=True)).state == "completed"


async def test_a_refresh_keeps_the_former_output_beside_it(ann: Caller, bob: Caller, key: bytes, store: Store) -> None:
    await ann.claim(key, confirm=True)
    await ann.complete(key, output=b'"former"')
    store.clock_offset = 100.0
    refresh = bob.but(started_at=time.time() + 100)
    await refresh.claim(key, force=True, confirm=True)

    assert bytes((await ann.claim(key)).output) == b'"former"'
    assert (await ann.complete(key, output=b'"former"')).state == "stored"
    assert (await refresh.fail(key, dispatch=2)).state == "stored"
    assert bytes((await ann.claim(key)).output) == b'"former"'
    assert (await refresh.but(lease="redelivered").claim(key, force=True)).state == "failed"


async def test_looking_answers_what_is_stored_and_claims_nothing(ann: Caller, bob: Caller, key: bytes, books: Books) -> None:
    assert (await ann.claim(key, only_cached=True)).state == "absent"
    assert await books.state(key) == ""
    await ann.claim(key)
    assert (await bob.claim(key, only_cached=True)).state == "held"
    await ann.confirm(key)
    await ann.complete(key)
    assert (await bob.claim(key, only_cached=True)).state == "completed"


async def test_equal_keys_in_one_request_are_claimed_in_order(ann: Caller, bob: Caller, key: bytes) -> None:
    other = new_key()
    asked = [ann.wanted(key), bob.wanted(other), bob.wanted(key), ann.wanted(key), bob.wanted(key, lease_id="third")]

    answers = await ann.receipts.claim(asked)

    assert [answer.state for answer in answers] == ["granted", "granted", "held", "granted", "held"]
    assert answers[3].lease_id == ann.lease


async def test_equal_keys_in_other_requests_see_what_came_before(ann: Caller, bob: Caller, key: bytes) -> None:
    assert [answer.state for answer in await ann.receipts.confirm([ann.held(key)])] == ["lost"]
    await ann.claim(key)
    assert [answer.dispatch for answer in await ann.receipts.confirm([ann.held(key), bob.held(key), ann.held(key)])] == [1, 0, 1]
    answers = await ann.receipts.complete([ann.result(key), bob.result(key), ann.result(key, output=b"2")])
    assert [answer.state for answer in answers] == ["stored", "superseded", "stored"]


async def test_answers_come_in_the_order_asked(ann: Caller) -> None:
    keys = new_keys(50)
    await ann.claims(keys[::2], confirm=True)
    await ann.receipts.complete([ann.result(key, output=key.hex().encode().join([b'"', b'"'])) for key in keys[::2]])

    answers = await ann.but(lease="second").claims(keys)

    assert [answer.state for answer in answers] == ["completed", "granted"] * 25
    assert [bytes(answer.output) for answer in answers[::2]] == [f'"{key.hex()}"'.encode() for key in keys[::2]]


async def test_no_result_is_a_completed_output(ann: Caller, key: bytes) -> None:
    await ann.claim(key, confirm=True)
    await ann.receipts.complete([ann.result(key, no_result=True)])

    answer = await ann.claim(key)
    assert (answer.state, answer.no_result) == ("completed", True)


@pytest.mark.parametrize("size", [OUTPUT_LIMIT - 1, OUTPUT_LIMIT])
async def test_outputs_up_to_the_limit_are_stored(size: int, ann: Caller, key: bytes) -> None:
    await ann.claim(key, confirm=True)
    assert (await ann.complete(key, output=b"x" * size)).state == "stored"

    assert len((await ann.claim(key)).output) == size


@pytest.mark.parametrize(("output", "code"), [(b"x" * (OUTPUT_LIMIT + 1), "too_large"), (b'"\xff"', "not_decodable")])
async def test_what_cannot_be_stored_is_a_charged_failure_of_that_call(
    output: bytes, code: str, ann: Caller, bob: Caller, key: bytes, books: Books
) -> None:
    good = new_key()
    await ann.halt("resume", budget="1")
    await ann.claims([good, key], confirm=True, cost=Decimal("0.03"))

    for _ in range(2):
        answers = await ann.receipts.complete([ann.result(good), ann.result(key, output=output, cost="0.02")])
        assert [answer.state for answer in answers] == ["stored", "rejected"]

    failed = await ann.but(lease="redelivered").claim(key)
    assert failed.state == "failed"
    assert failed.failure is not None
    assert (failed.failure.tool, failed.failure.code) == ("hunter.find", code)
    assert str(await books.charged(ann.run)) == "0.02"
    assert await books.balanced(ann.run)
    assert (await bob.claim(key, confirm=True)).dispatch == 2
    assert (await ann.complete(key, output=output)).state == "rejected"


async def test_what_cannot_be_stored_and_has_lost_its_lease_is_superseded(ann: Caller, bob: Caller, key: bytes, store: Store) -> None:
    await ann.claim(key, confirm=True)
    store.clock_offset = RUNNING + 1
    await bob.claim(key, confirm=True)

    assert (await ann.complete(key, output=b"x" * (OUTPUT_LIMIT + 1))).state == "superseded"
    assert (await bob.complete(key, dispatch=2)).state == "stored"


async def test_outputs_beyond_an_answers_room_are_there_for_the_asking(ann: Caller) -> None:
    keys = sorted(new_keys(5))
    await ann.claims(keys, confirm=True)
    await ann.receipts.complete([ann.result(key, output=b"x" * OUTPUT_LIMIT) for key in keys])

    missing = keys
    rounds = 0
    while missing:
        answers = dict(zip(missing, await ann.claims(missing), strict=True))
        assert {answer.state for answer in answers.values()} <= {"completed", "held"}
        assert all(answer.wait_ms == 0 for answer in answers.values())
        missing = [key for key, answer in answers.items() if answer.state == "held"]
        rounds += 1
    assert rounds == 3


async def test_a_dispatch_taken_for_unknown_that_was_never_sent_can_be_given_back(ann: Caller, bob: Caller, key: bytes, store: Store) -> None:
    await ann.claim(key, confirm=True, effect="non_idempotent")
    store.clock_offset = RUNNING + 1
    assert (await bob.claim(key, effect="non_idempotent")).state == "unknown"

    assert await ann.release(key, dispatch=1)

    assert (await bob.claim(key, effect="non_idempotent")).state == "granted"


async def test_asking_again_for_a_lease_that_is_over_renews_it(ann: Caller, bob: Caller, key: bytes, store: Store) -> None:
    await ann.claim(key, confirm=True)
    store.clock_offset = RUNNING + 1

    assert (await ann.claim(key, confirm=True)).dispatch == 1

    assert (await bob.claim(key, confirm=True)).state == "held"
