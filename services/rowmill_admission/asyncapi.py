"""The AsyncAPI document: channels and operations as FastStream sees its declarations, messages from the contracts' schemas."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange, RabbitMessage, RabbitQueue
from faststream.rabbit.schemas.queue import QueueType
from faststream.specification import AsyncAPI

from rowmill_contracts import topology
from rowmill_contracts.envelope import Message
from rowmill_contracts.schemas import schemas

if TYPE_CHECKING:
    from rowmill_admission.public import Public, Told

ANY_MESSAGE: Final = "DeadLetter"
"""Stands for any message, as it was when it died."""

DESCRIPTION: Final = (
    "Jobs over rows: stage inputs, start and stop runs, hear of every row. Bodies are JSON; the AMQP property `type` names the message, such as "
    "RunStart.v1. What is published may be published again: the same id is the same message."
)


def document(public: Iterable[Public], told: Iterable[Told]) -> dict[str, Any]:
    """AsyncAPI 3.0. Where the broker is, is each installation's own: the document names no servers."""
    broker = RabbitBroker("amqp://localhost/", logger=None)
    carried: dict[str, tuple[type[Message], ...]] = {}
    for queue in public:
        _subscribe(broker, queue)
        carried[queue.title] = queue.messages
    for event in told:
        exchange = RabbitExchange(topology.EVENTS, type=ExchangeType.TOPIC, declare=False)
        broker.publisher(exchange=exchange, routing_key=event.key, title=event.title, description=event.description, persist=True, mandatory=False)
        carried[event.title] = (event.message,)
    specification = AsyncAPI(broker, title="rowmill", version=version("rowmill"), description=DESCRIPTION).to_specification()
    made: dict[str, Any] = specification.to_jsonable()
    del made["servers"]
    for title, messages in carried.items():
        _carry(made, title, [message.message_type for message in messages] or [ANY_MESSAGE])
    made["components"] = _components({message for messages in carried.values() for message in messages})
    return made


def _subscribe(broker: RabbitBroker, public: Public) -> None:
    """Declare a queue of the topology."""
    queue = next(queue for queue in topology.topology()[1] if queue.name == public.queue)
    exchange, key = queue.bindings[0]
    broker.subscriber(
        RabbitQueue(queue.name, queue_type=QueueType.QUORUM, declare=False, routing_key=key),
        RabbitExchange(exchange, declare=False),
        title=public.title,
        description=public.description,
    )(_nothing)


async def _nothing(message: RabbitMessage) -> None:
    """Stands for the handler, where only the document is wanted."""


def _carry(made: dict[str, Any], title: str, names: list[str]) -> None:
    """Say which messages a channel carries, by our names."""
    channel, operation = made["channels"][title], made["operations"][title]
    del channel["servers"]
    channel["messages"] = {name: {"$ref": f"#/components/messages/{name}"} for name in names}
    parameters = {name: {"description": f"The {name}'s name: a word of [a-z0-9_-]."} for name in re.findall(r"{(\w+)}", channel["address"])}
    if parameters:
        channel["parameters"] = parameters
    operation["messages"] = [{"$ref": f"#/channels/{title}/messages/{name}"} for name in names]


def _components(messages: Iterable[type[Message]]) -> dict[str, Any]:
    all_schemas = schemas()
    shown: dict[str, Any] = {ANY_MESSAGE: {"name": ANY_MESSAGE, "title": "Any message that died", "contentType": "application/json", "payload": {}}}
    defined: dict[str, Any] = {}
    for name in sorted(message.message_type for message in messages):
        schema = _with_refs_to_components(all_schemas[name])
        defined |= schema.pop("$defs", {})
        schema.pop("$schema", None)
        shown[name] = {"name": name, "title": name, "contentType": "application/json", "payload": schema}
    return {"messages": shown, "schemas": defined}


def _with_refs_to_components(value: Any) -> Any:
    """The same schema, its definitions looked for where AsyncAPI keeps them."""
    if isinstance(value, dict):
        return {
            name: member.replace("#/$defs/", "#/components/schemas/") if name == "$ref" else _with_refs_to_components(member)
            for name, member in value.items()
        }
    if isinstance(value, list):
        return [_with_refs_to_components(item) for item in value]
    return value
