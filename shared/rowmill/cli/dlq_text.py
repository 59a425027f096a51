"""Dead letters in words: lines for a person, documents for `--json`, progress while letters are replayed."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rowmill.client.dead_letter_queues import Replay
    from rowmill.client.dead_letters import DeadLetter, Group

SECONDS_BETWEEN_LINES = 1.0


def letter_line(letter: DeadLetter) -> str:
    about = " ".join(part for part in (letter.run_id, letter.dataset, f"{len(letter.row_keys)} rows" if letter.row_keys else "") if part)
    return (
        f"{letter.message_id:34} {letter.queue:22} {letter.message_type or '?':16} {moment(letter.last_failure)}  "
        f"{letter.error_type}: {letter.error}  {about}"
    ).rstrip()


def group_line(group: Group) -> str:
    runs = f"{len(group.runs)} run{'' if len(group.runs) == 1 else 's'}"
    when = f"{moment(group.first_failure)} to {moment(group.last_failure)}"
    return f"{group.letters:6} {group.queue:22} {group.message_type or '?':16} {runs:9} {when}  {group.error_type}: {group.example}"


def whole(letter: DeadLetter) -> list[str]:
    lines = [
        f"{name.replace('_', ' '):17} {_value(name, value)}"
        for name, value in vars(letter).items()
        if name not in {"body", "headers"} and value not in ("", [], None)
    ]
    return [*lines, "headers", *(f"  {name}: {value}" for name, value in sorted(letter.headers.items())), "body", letter.pretty_body()]


def _value(name: str, value: Any) -> str:
    if name in {"first_failure", "last_failure"}:
        return moment(value)
    return ", ".join(value) if isinstance(value, list) else str(value)


def document(found: Group | Replay) -> dict[str, Any]:
    return {name: sorted(value) if isinstance(value, set) else value for name, value in vars(found).items()}


def replay_lines(replay: Replay, *, dry_run: bool) -> list[str]:
    done = "would be replayed" if dry_run else "replayed"
    lines = [f"{replay.replayed} of {replay.found} dead letters {done}"]
    return lines + [f"{count} cannot be replayed: {reason}" for reason, count in sorted(replay.refused.items())]


def moment(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


class ReplayProgress:
    """A line on stderr each second while letters are replayed, rewritten in place on a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown_at = time.monotonic()
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._terminal:
            print(file=sys.stderr)

    def report(self, replay: Replay) -> None:
        now = time.monotonic()
        if now - self._shown_at < SECONDS_BETWEEN_LINES:
            return
        self._shown_at, self._shown = now, True
        line = f"rowmill: looked at {replay.looked_at} of {replay.found} dead letters, replayed {replay.replayed}"
        print(f"\r{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr, flush=True)
