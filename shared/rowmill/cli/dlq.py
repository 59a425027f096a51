"""`rowmill dlq`: messages that could not be handled."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated

import typer

from rowmill.errors import UnknownName

app = typer.Typer(help="Dead letters: messages that could not be handled.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Dead letters: messages that could not be handled."""


@app.command("list")
def list_dead_letters(
    queue: Annotated[str | None, typer.Option(help="Only those of this work queue.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List dead letters with the reason why each died. They stay where they are."""
    from rowmill.cli.connecting import asked  # noqa: PLC0415 - commands load what they need
    from rowmill.client.dead_letters import dead_letters  # noqa: PLC0415
    from rowmill_contracts.topology import WORK_QUEUES  # noqa: PLC0415

    known = [work.name for work in WORK_QUEUES]
    if queue is not None and queue not in known:
        raise UnknownName("queue", queue, known)
    found = asked(lambda url: dead_letters(url, queue=queue, limit=limit))
    if as_json:
        fields = [
            {name: value for name, value in vars(letter).items() if name != "body"} | {"body": letter.body.decode("utf-8", "replace")}
            for letter in found
        ]
        print(json.dumps(fields, indent=2))
        return
    if not found:
        print("no dead letters")
    for letter in found:
        died = "-" if letter.last_failure is None else datetime.fromtimestamp(letter.last_failure, UTC).isoformat(timespec="seconds")
        about = " ".join(part for part in (letter.run_id, letter.dataset, f"{len(letter.row_keys)} rows" if letter.row_keys else "") if part)
        print(f"{letter.queue:24} {letter.message_type or '?':16} {died}  {letter.error_type}: {letter.error}  {about}")
