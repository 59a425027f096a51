"""Whose turn it is: items of several keys, taken one key after the other, so that a huge run never starves a small one."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ItemT = TypeVar("ItemT")


class RoundRobin(Generic[KeyT, ItemT]):
    """Queues by key, served in turn. Within a key items keep their order.

    A key that is held (it has as much under way as it may) is passed over until it is released; its items stay.
    """

    def __init__(self) -> None:
        self._queues: dict[KeyT, deque[ItemT]] = {}
        self._turns: deque[KeyT] = deque()
        self._in_turn: set[KeyT] = set()
        self._held: set[KeyT] = set()

    def __bool__(self) -> bool:
        """Whether `take` would give an item."""
        return bool(self._turns)

    def waiting(self, key: KeyT) -> int:
        """Items of that key that were not taken."""
        queue = self._queues.get(key)
        return 0 if queue is None else len(queue)

    def add(self, key: KeyT, items: Iterable[ItemT]) -> None:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
        queue.extend(items)
        self._enter(key)

    def take(self) -> tuple[KeyT, ItemT]:
        """The next item of the key whose turn it is. Raises `IndexError` where there is none."""
        key = self._turns.popleft()
        queue = self._queues[key]
        item = queue.popleft()
        if queue:
            self._turns.append(key)
        else:
            self._in_turn.discard(key)
            del self._queues[key]
        return key, item

    def hold(self, key: KeyT) -> None:
        """Pass over this key until it is released."""
        self._held.add(key)
        if key in self._in_turn:
            self._in_turn.discard(key)
            self._turns.remove(key)

    def release(self, key: KeyT) -> None:
        """Serve this key again."""
        self._held.discard(key)
        self._enter(key)

    def _enter(self, key: KeyT) -> None:
        if key not in self._in_turn and key not in self._held and self._queues.get(key):
            self._in_turn.add(key)
            self._turns.append(key)
