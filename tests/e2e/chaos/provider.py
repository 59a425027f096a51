"""The three providers of the play beside this, in a thread of the test: all that arrives is written down, some answers get lost after the effect."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from tests.e2e import stage as _stage  # noqa: F401 - it makes the example's modules importable

from provider_http import HttpServer, Reply, Request, respond  # isort: skip

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

TOOLS = {"/look": "looking.look", "/grade": "grading.grade", "/order": "ordering.order"}


def answer(path: str, name: str) -> dict[str, str]:
    """What an item is answered: always the same."""
    return {"/look": {"seen": f"saw {name}"}, "/grade": {"grade": f"grade of {name}"}, "/order": {"order": f"ordered {name}"}}[path]


@dataclass(frozen=True)
class Arrival:
    """One item of one request. ``at``: seconds since the epoch. ``dropped``: its effect happened, and its answer was lost."""

    at: float
    path: str
    name: str
    key: str
    dropped: bool


class ChaosProvider:
    """`/grade` recognises its items' keys; `/order` does not, so that each arrival is an effect. ``drops``: the share of answers that are lost."""

    def __init__(self, *, seed: int, latency: float, drops: float) -> None:
        self.trace: list[Arrival] = []
        self.effects: Counter[str] = Counter()
        """By idempotency key; what is only looked at has none."""
        self.url = ""
        self.drops = drops
        self._seed = seed
        self._latency = latency
        self._arrivals: Counter[tuple[str, str]] = Counter()
        self._loop = asyncio.new_event_loop()
        self._server = HttpServer(self._handle)
        self._thread = threading.Thread(target=self._loop.run_forever, name="provider", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._there(self._server.start(0))}"
        return self

    def __exit__(self, *_: object) -> None:
        self._there(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _there(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ---- requests ---------------------------------------------------------------------------------------------------------------------

    async def _handle(self, request: Request) -> Reply:
        if request.path == "/_stats":
            return respond(_encode({"effects": dict(self.effects)}))
        at = time.time()
        body = _decode(request.body)
        if request.path == "/grade":
            items = [(item["name"], item["key"]) for item in body["items"]]
        else:
            items = [(body["name"], request.header(b"idempotency-key") or "")]
        dropped = self._drops(request.path, items[0][0])
        for name, key in items:
            self._book(Arrival(at, request.path, name, key, dropped))
        await asyncio.sleep(self._latency)
        if dropped:
            return None
        answers = [answer(request.path, name) for name, _ in items]
        return respond(_encode({"results": answers} if request.path == "/grade" else answers[0]))

    def _drops(self, path: str, name: str) -> bool:
        """The same for the same arrival of the same item, whatever order they come in."""
        self._arrivals[path, name] += 1
        return random.Random(f"{self._seed} {path} {name} {self._arrivals[path, name]}").random() < self.drops

    def _book(self, arrival: Arrival) -> None:
        self.trace.append(arrival)
        if arrival.path == "/order" or (arrival.path == "/grade" and not self.effects[arrival.key]):
            self.effects[arrival.key] += 1

    # ---- books ------------------------------------------------------------------------------------------------------------------------

    def arrivals(self, path: str) -> Counter[str]:
        """How often each item came there."""
        return Counter(arrival.name for arrival in self.trace if arrival.path == path)

    def keys(self, path: str) -> dict[str, set[str]]:
        """The idempotency keys of each item."""
        found: dict[str, set[str]] = {}
        for arrival in self.trace:
            if arrival.path == path:
                found.setdefault(arrival.name, set()).add(arrival.key)
        return found

    def arrived(self, path: str, keys: Iterable[str]) -> dict[str, str]:
        """The items of those keys that came there, by key."""
        wanted = set(keys)
        return {arrival.key: arrival.name for arrival in self.trace if arrival.path == path and arrival.key in wanted}
