"""What is on the wire: schemas that are current, strict decoding, and a topology that fits the messages."""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import jsonschema
import msgspec
import pytest

from rowmill_contracts import topology
from rowmill_contracts.asks import RequestDied
from rowmill_contracts.counts import Problem
from rowmill_contracts.digests import SHARDS, input_digest, page_digest, shard_of
from rowmill_contracts.envelope import MAX_MESSAGE_BYTES, MESSAGES, Message, UndecodableMessage, decode, encode
from rowmill_contracts.events import RowEvent, RowsCompleted
from rowmill_contracts.halving import halves
from rowmill_contracts.rows import joined
from rowmill_contracts.runs import InputPage, RunOptions, RunStart
from rowmill_contracts.schemas import FOLDER, render, schemas
from rowmill_contracts.tools import CallItem, ToolCalls, ToolFailure

DESIGNED = {
    *(["RunStart", "RunStop", "EventArrived", "InputPage", "InputSealed", "RowsCompleted", "RowsFailed", "RunEvent", "DatasetEvent"]),
    *(["AdvanceRun", "TakeRun", "RenewRun", "RecordCalls", "ReleaseRun", "OpenDataset", "KeyPage", "LookupRows", "ReadRows", "QuerySheets"]),
    *(["RowTasks", "RowsSettled", "RowsParked", "ToolCalls", "ToolResults", "ClaimReceipts", "Confirm", "Renew", "Complete", "Fail", "Release"]),
    *(["LeaseShard", "HaltRun", "RowsCommitted"]),
}


def test_every_message_of_the_design_has_a_first_version() -> None:
    assert {f"{name}.v1" for name in DESIGNED} <= set(MESSAGES)


@pytest.mark.parametrize("name", sorted(schemas()))
def test_committed_schemas_are_current(name: str) -> None:
    committed = FOLDER / f"{name}.json"
    assert committed.exists(), "run `make schemas`"
    assert committed.read_text("utf-8") == render(schemas()[name]), "run `make schemas`"
    jsonschema.Draft202012Validator.check_schema(json.loads(committed.read_text("utf-8")))


def test_no_schema_is_left_of_a_message_that_is_gone() -> None:
    assert {Path(path).name.removesuffix(".json") for path in FOLDER.glob("*.v[0-9]*.json")} == set(MESSAGES)


def test_what_is_encoded_fits_its_schema_and_decodes_to_the_same() -> None:
    messages = [
        RunStart(play="leads", rows=[msgspec.Raw(b'{"domain":"a.com"}')], options=RunOptions(budget=Decimal("5.00"))),
        RowsCompleted(
            event_id="e",
            run_id="r",
            play="p",
            dataset="d",
            rows=[RowEvent(key="k", index=0, attempt=1, status="completed", data=msgspec.Raw(b'{"a":1}'))],
        ),
    ]
    for message in messages:
        body = encode(message)
        jsonschema.validate(json.loads(body), schemas()[message.message_type])
        assert encode(decode(message.message_type, body)) == body


@pytest.mark.parametrize(
    ("message_type", "body", "says"),
    [
        (None, b"{}", "None"),
        ("RunStart.v2", b"{}", "RunStart.v2"),
        ("RunStart.v1", b"{}", "play"),
        ("RunStart.v1", b'{"play": "Leads!"}', r"\$\.play"),
        ("RunStart.v1", b'{"play": "leads", "options": {"limit": "3"}}', r"\$\.options\.limit"),
        ("RunStart.v1", b'{"play": "leads"', "truncated"),
        ("RunStart.v1", b'{"play": "\xff"}', "RunStart.v1"),
        ("RunStart.v1", b"[" * 100_000, "RunStart.v1"),
        ("InputPage.v1", b'{"input_id": "i", "page": -1, "rows": []}', r"\$\.page"),
    ],
)
def test_what_does_not_fit_is_refused_saying_where(message_type: str | None, body: bytes, says: str) -> None:
    with pytest.raises(UndecodableMessage, match=says):
        decode(message_type, body)


def example(annotation: Any, text: str) -> Any:
    """A value of that type as it is in JSON, with this text wherever any may stand; JSON of any form holds a NUL."""
    if annotation is Any or annotation is msgspec.Raw:
        return {"a": "\x00"}
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return example(parts[0], text)
    if kind is Literal:
        return parts[0]
    if kind in {Union, UnionType}:
        return example(next(part for part in parts if part is not type(None)), text)
    if kind is list:
        return [example(parts[0], text)]
    if kind is dict:
        return {"a" if parts[1] is Any else text: example(parts[1], text)}
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        fields = {field.encode_name: example(field.type, text) for field in msgspec.structs.fields(annotation)}
        return list(fields.values()) if annotation.__struct_config__.array_like else fields
    plain: dict[Any, Any] = {str: text, int: 2, float: 1.0, bool: True, Decimal: "1"}
    return plain[annotation]


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_no_message_names_anything_by_what_cannot_be_stored(name: str) -> None:
    """Postgres takes no NUL in a text. JSON that is passed on, and the words of an error, are kept as JSON, where it is a character like others."""
    struct = MESSAGES[name]
    fields = msgspec.structs.fields(struct)
    for field in fields:
        fine, odd = (
            json.dumps({each.encode_name: example(each.type, text if each.name == field.name else "abcd") for each in fields}).encode()
            for text in ("abcd", "a\x00b")
        )
        decode(name, fine)
        if (
            b"a\\u0000b" in odd
            and field.type not in (Problem, Problem | None, ToolFailure | None)
            and (name, field.name) != ("SettleReceipt.v1", "message")
        ):
            with pytest.raises(UndecodableMessage, match=rf"\$\.{field.name}"):
                decode(name, odd)
    if name == "RequestDied.v1":
        decode(name, encode(RequestDied(error=Problem(code="c\x00", message="m\x00"))))


@pytest.mark.parametrize("message_type", ["RunStart.v1", "InputPage.v1"])
def test_what_is_nested_too_deep_is_refused_where_nothing_looks_at_it(message_type: str) -> None:
    """In a field that is not known, or in a row, which travels as it is."""
    deep = b"[" * 100_000 + b"]" * 100_000
    body = b'{"play":"leads","invented_later":%s}' if message_type == "RunStart.v1" else b'{"input_id":"i","page":0,"rows":[%s]}'
    with pytest.raises(UndecodableMessage, match=message_type):
        decode(message_type, body % deep)


@pytest.mark.parametrize(
    ("before", "number", "after"),
    [(b"", b"NaN", b""), (b"", b"-Infinity", b""), (b"", b"1e999", b""), (b"\xef\xbb\xbf", b"1", b""), (b"", b"1", b"{}"), (b"", b'"1"', b"")],
    ids=["NaN", "infinity", "out of range", "byte order mark", "two messages", "number as text"],
)
def test_what_only_some_would_take_for_json_is_refused(before: bytes, number: bytes, after: bytes) -> None:
    claim = b'{"holder":"h","claims":[{"key":"k","lease_id":"l","run_id":"r","tool":"t","effect":"read","started_at":%s}]}'
    with pytest.raises(UndecodableMessage):
        decode("ClaimReceipts.v1", before + claim % number + after)


def test_the_size_limit_is_exact() -> None:
    frame = b'{"input_id":"i","page":0,"rows":["%s"]}'
    fits = frame % (b"x" * (MAX_MESSAGE_BYTES - len(frame) + 2))
    assert len(fits) == MAX_MESSAGE_BYTES
    assert isinstance(decode("InputPage.v1", fits), InputPage)
    with pytest.raises(UndecodableMessage, match="over the limit"):
        decode("InputPage.v1", fits + b" ")


def test_unknown_fields_are_ignored() -> None:
    assert decode("RunStart.v1", b'{"play": "leads", "invented_later": 1}') == RunStart(play="leads")


@pytest.mark.parametrize(
    ("left", "right", "shadows", "together"),
    [
        (b"{}", b"{}", False, {}),
        (b'{"a":1}', b"{}", False, {"a": 1}),
        (b"{}", b'{"b":2}', False, {"b": 2}),
        (b' {"a":1} ', b'{"b":2}', False, {"a": 1, "b": 2}),
        (b'{"a":1,"b":1}', b'{"b":2}', True, {"a": 1, "b": 2}),
    ],
)
def test_joining_input_and_output_columns(left: bytes, right: bytes, shadows: bool, together: dict[str, int]) -> None:
    assert json.loads(bytes(joined(msgspec.Raw(left), msgspec.Raw(right), shadows=shadows))) == together


def test_digests_are_what_a_stranger_would_compute() -> None:
    page = hashlib.sha256(b'{"a":1}\n{"a":2}\n').digest()
    assert page_digest([b'{"a":1}', b'{"a":2}']) == page
    assert input_digest([page, page]) == hashlib.sha256(page + page).hexdigest()


def test_lanes_spread_over_the_shards_and_stay_where_they_are() -> None:
    assert {shard_of("default", f"provider{i}") for i in range(500)} == set(range(SHARDS))
    assert shard_of("default", "hunter") == shard_of("default", "hunter")


def test_every_work_queue_dead_letters_to_a_queue_of_its_own_and_to_admission() -> None:
    _, queues = topology.topology()
    names = {queue.name for queue in queues}
    admission = next(queue for queue in queues if queue.name == topology.ADMISSION_DEAD)
    for queue in topology.WORK_QUEUES:
        assert queue.arguments["x-dead-letter-routing-key"] == topology.dead(queue.name)
        assert topology.dead(queue.name) in names
        assert (topology.EXCHANGE, topology.dead(queue.name)) in admission.bindings
        assert queue.arguments["x-overflow"] == "reject-publish"


def test_nothing_is_dropped_at_a_bound_or_between_two_queues() -> None:
    """Dead letters have no bound, since nobody could be told to wait; whatever has one refuses. The copies for admission refuse the letter's twin."""
    for queue in topology.topology()[1]:
        arguments = queue.arguments
        assert arguments["x-queue-type"] == "quorum", queue.name
        assert arguments.get("x-overflow") == (None if queue.name.endswith(".dead") else "reject-publish"), queue.name
        if "x-dead-letter-exchange" in arguments:
            assert arguments["x-dead-letter-strategy"] == "at-least-once", queue.name
        assert arguments.get("x-max-length", topology.WORK_QUEUE_LENGTH) == topology.WORK_QUEUE_LENGTH, queue.name
    assert {queue.arguments.get("x-max-length") for queue in topology.WORK_QUEUES} == {topology.WORK_QUEUE_LENGTH}
    bounded = {queue.name for queue in topology.topology()[1] if "x-max-length" in queue.arguments}
    assert bounded == {name for queue in topology.WORK_QUEUES for name in (queue.name, topology.suspect(queue.name))}


def test_what_is_delayed_comes_back_to_where_it_was_sent() -> None:
    delays = {queue.bindings[0][0]: queue for queue in topology.topology(0.5)[1] if "x-message-ttl" in queue.arguments}
    assert {name: queue.arguments["x-message-ttl"] for name, queue in delays.items()} == {name: ttl // 2 for name, ttl in topology.DELAYS.items()}
    for queue in delays.values():
        assert queue.arguments["x-dead-letter-exchange"] == topology.EXCHANGE
        assert "x-dead-letter-routing-key" not in queue.arguments, "it keeps the key that it was published under"


def test_calls_of_a_shard_and_nothing_else_have_one_consumer_at_a_time() -> None:
    single = {queue.name for queue in topology.topology()[1] if queue.arguments.get("x-single-active-consumer")}
    assert single == {topology.gateway_calls(shard) for shard in range(SHARDS)}


@pytest.mark.parametrize(("version", "limit"), [("3.10.8", None), ("3.13.7", None), ("4.0.5", -1), ("4.1.0-beta.4", -1), ("10.0", -1), ("", None)])
def test_no_queue_limits_deliveries_whatever_the_brokers_version(version: str, limit: int | None) -> None:
    """3.x refuses the word for it, 4.x means twenty without it."""
    for queue in topology.topology()[1]:
        arguments = topology.arguments_at(queue, version)
        assert arguments.get("x-delivery-limit") == limit, queue.name
        assert {name: value for name, value in arguments.items() if name != "x-delivery-limit"} == queue.arguments


def test_every_work_queue_has_a_suspect_queue_whose_dead_letters_are_the_work_queues() -> None:
    queues = {queue.name: queue for queue in topology.topology()[1]}
    for queue in topology.WORK_QUEUES:
        suspects = queues[topology.suspect(queue.name)]
        assert suspects.bindings == ((topology.EXCHANGE, topology.suspect(queue.name)),)
        assert suspects.arguments == {name: value for name, value in queue.arguments.items() if name != "x-single-active-consumer"}


def test_no_routing_key_reaches_two_queues_but_for_the_copies_of_dead_letters() -> None:
    keys = [binding for queue in topology.topology()[1] if queue.name != topology.ADMISSION_DEAD for binding in queue.bindings]
    assert len(keys) == len(set(keys))


def test_pages_are_halved_down_to_single_items_and_nothing_else_is() -> None:
    calls = [CallItem(call_id=str(number), tool="t", receipt_key="k", input=msgspec.Raw(b"{}")) for number in range(5)]
    left: list[Message] = [ToolCalls(run_id="r", org="o", play="p", started_at=1.0, calls=calls)]
    single: list[CallItem] = []
    while left:
        page = left.pop(0)
        parts = halves(page)
        if parts is None:
            assert isinstance(page, ToolCalls)
            single.extend(page.calls)
        else:
            left[:0] = parts
    assert single == calls
    assert halves(RunStart(play="leads", rows=[msgspec.Raw(b"{}"), msgspec.Raw(b"{}")])) is None
