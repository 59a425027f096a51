"""The committed AsyncAPI document is current, complete and resolvable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rowmill_admission.public import EVENTS, PUBLIC, asyncapi_document
from rowmill_contracts.schemas import FOLDER
from rowmill_contracts.topology import topology


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, member in value.items():
            if name == "$ref":
                yield member
            else:
                yield from references(member)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_the_committed_document_is_current() -> None:
    assert json.loads((FOLDER / "asyncapi.json").read_text("utf-8")) == asyncapi_document(), "run `make schemas`"


def test_every_public_message_is_in_it() -> None:
    messages = asyncapi_document()["components"]["messages"]
    assert set(messages) == {
        "DeadLetter",
        *(message.message_type for public in PUBLIC for message in public.messages),
        *(told.message.message_type for told in EVENTS),
    }


def test_its_queues_stand_in_the_topology() -> None:
    document = asyncapi_document()
    queues = {queue.name for queue in topology()[1]}
    named = {channel["bindings"]["amqp"]["queue"]["name"] for channel in document["channels"].values() if "queue" in channel["bindings"]["amqp"]}
    assert named == {public.queue for public in PUBLIC}
    assert named <= queues


def test_every_reference_leads_somewhere() -> None:
    document = asyncapi_document()
    for reference in references(document):
        found: Any = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        assert found
