"""`rowmill dlq`: messages that could not be handled."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rowmill.cli.typed import rate_typed, seconds_typed
from rowmill.errors import OutputError, UsageError

if TYPE_CHECKING:
    from rowmill.client.dead_letter_queues import Replay
    from rowmill.client.dead_letters import DeadLetter, Filter

app = typer.Typer(help="Dead letters: messages that could not be handled.", no_args_is_help=True)

QueueOption = Annotated[str | None, typer.Option(help="Only those of this work queue.")]
RunOption = Annotated[str | None, typer.Option("--run", help="Only those of this run.")]
PlayOption = Annotated[str | None, typer.Option(help="Only those of this play.")]
ToolOption = Annotated[str | None, typer.Option(help="Only those that hold calls of this tool.")]
ErrorOption = Annotated[str | None, typer.Option(help="Only those that died of this error: its type, or a part of its text.")]
OlderOption = Annotated[str | None, typer.Option("--older-than", help="Only those that died longer ago, such as 30m, 1h, 7d.")]
IdsArgument = Annotated[list[str] | None, typer.Argument(help="Message ids, or what they begin with; none: all that the options name.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


@app.callback()
def _group() -> None:
    """Dead letters: messages that could not be handled. Each lies in the `.dead` queue of its work queue until somebody replays or purges it."""


@app.command("list")
def list_dead_letters(
    queue: QueueOption = None,
    run: RunOption = None,
    play: PlayOption = None,
    tool: ToolOption = None,
    error: ErrorOption = None,
    older_than: OlderOption = None,
    group: Annotated[bool, typer.Option("--group", help="One line per error instead of one per letter.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="How many letters at most.")] = 1000,
    as_json: JsonOption = False,
) -> None:
    """List dead letters with the reason why each died. They stay where they are."""
    from rowmill.cli import dlq_text  # noqa: PLC0415 - commands load what they need
    from rowmill.cli.connecting import asked  # noqa: PLC0415
    from rowmill.client.dead_letter_queues import dead_letters  # noqa: PLC0415
    from rowmill.client.dead_letters import grouped  # noqa: PLC0415

    chosen = _chosen(queue, run, play, tool, error, older_than)
    found = asked(lambda url: dead_letters(url, chosen, limit=None if group else limit))
    if group:
        groups = grouped(found)[:limit]
        _print(as_json, [dlq_text.document(each) for each in groups], [dlq_text.group_line(each) for each in groups] or ["no dead letters"])
    else:
        _print(as_json, [letter.document() for letter in found], [dlq_text.letter_line(letter) for letter in found] or ["no dead letters"])


@app.command("show")
def show(message_id: Annotated[str, typer.Argument(help="A message id, or what it begins with.")], as_json: JsonOption = False) -> None:
    """Show one dead letter whole: why it died, its headers, its body."""
    from rowmill.cli import dlq_text  # noqa: PLC0415 - commands load what they need
    from rowmill.cli.connecting import asked  # noqa: PLC0415
    from rowmill.client.dead_letter_queues import dead_letters  # noqa: PLC0415

    chosen = _chosen(ids=[message_id])
    found: list[DeadLetter] = asked(lambda url: dead_letters(url, chosen))
    if not found:
        raise UsageError(f"there is no dead letter whose id begins with {message_id!r}; `rowmill dlq list` shows those there are")
    if len({letter.message_id for letter in found}) > 1:
        listed = ", ".join(sorted({letter.message_id for letter in found})[:5])
        raise UsageError(f"{len(found)} dead letters have ids that begin with {message_id!r} ({listed}); write more of it")
    _print(as_json, found[0].document(), dlq_text.whole(found[0]))


@app.command("replay")
def replay(
    ids: IdsArgument = None,
    queue: QueueOption = None,
    run: RunOption = None,
    play: PlayOption = None,
    tool: ToolOption = None,
    error: ErrorOption = None,
    older_than: OlderOption = None,
    rate: Annotated[str | None, typer.Option(help="How many at most, such as 50/s or 100/min.")] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Publish dead letters again to where they were going; each leaves its queue once the broker has confirmed it.

    Rows in them are worked again; they and the counts of their run are corrected, also after its end. Ended half-way, nothing is lost; start
    it again. Letters that somebody waited for (calls, bodies, inputs) are left where they lie, with the reason.
    """
    from rowmill.cli import dlq_text  # noqa: PLC0415 - commands load what they need
    from rowmill.cli.connecting import asked  # noqa: PLC0415
    from rowmill.client.dead_letter_queues import letter_box  # noqa: PLC0415

    chosen = _chosen(queue, run, play, tool, error, older_than, ids)
    per_second = None if rate is None else rate_typed("--rate", rate)

    async def work(url: str) -> Replay:
        async with letter_box(url) as box:
            with dlq_text.ReplayProgress() as progress:
                return await box.replay(chosen, per_second=per_second, dry_run=dry_run, report=progress.report)

    done = asked(work)
    _print(as_json, {"dry_run": dry_run, **dlq_text.document(done)}, dlq_text.replay_lines(done, dry_run=dry_run))


@app.command("purge")
def purge(
    ids: IdsArgument = None,
    queue: QueueOption = None,
    run: RunOption = None,
    play: PlayOption = None,
    tool: ToolOption = None,
    error: ErrorOption = None,
    older_than: OlderOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete dead letters for good. Asks first; what is then deleted are the letters that it counted, and no later ones."""
    from rowmill.cli.connecting import asked  # noqa: PLC0415 - commands load what they need
    from rowmill.cli.consent import consents, need_consent  # noqa: PLC0415
    from rowmill.client.dead_letter_queues import letter_box  # noqa: PLC0415

    chosen = _chosen(queue, run, play, tool, error, older_than, ids)
    need_consent("delete dead letters", yes=yes or dry_run, as_json=as_json)

    async def work(url: str) -> tuple[int, bool]:
        async with letter_box(url) as box:
            meant = [got.letter.identity async for got in box.letters(chosen)]
            if not meant or dry_run:
                return len(meant), False
            if not await asyncio.to_thread(consents, f"delete {_letters(len(meant))} for good?", yes=yes):
                return len(meant), False
            await box.take(meant)
            return len(meant), True

    found, purged = asked(work)
    line = f"deleted {_letters(found)}" if purged else f"{_letters(found)} would be deleted" if dry_run else "nothing was deleted"
    _print(as_json, {"dry_run": dry_run, "found": found, "purged": found if purged else 0}, [line])


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="Where the letters go, one JSON object a line; must not be there yet.")],
    queue: QueueOption = None,
    run: RunOption = None,
    play: PlayOption = None,
    tool: ToolOption = None,
    error: ErrorOption = None,
    older_than: OlderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write dead letters to a file, with headers and bodies. They stay where they are."""
    from rowmill.cli.connecting import asked  # noqa: PLC0415 - commands load what they need
    from rowmill.client.dead_letter_queues import letter_box  # noqa: PLC0415

    chosen = _chosen(queue, run, play, tool, error, older_than)

    async def work(url: str) -> int:
        written = 0
        async with letter_box(url) as box:
            with file.open("x", encoding="utf-8") as out:
                async for got in box.letters(chosen):
                    out.write(json.dumps(got.letter.document(), ensure_ascii=False) + "\n")
                    written += 1
        return written

    try:
        written = asked(work)
    except FileExistsError as error_:
        raise OutputError(f"{file} is there already; name a new file") from error_
    except OSError as error_:
        raise OutputError(f"{file} cannot be written: {error_.strerror or error_}") from error_
    _print(as_json, {"file": str(file), "exported": written}, [f"wrote {_letters(written)} to {file}"])


def _chosen(
    queue: str | None = None,
    run: str | None = None,
    play: str | None = None,
    tool: str | None = None,
    error: str | None = None,
    older_than: str | None = None,
    ids: list[str] | None = None,
) -> Filter:
    from rowmill.client.dead_letters import Filter  # noqa: PLC0415 - commands load what they need

    age = None if older_than is None else seconds_typed("--older-than", older_than)
    chosen = Filter(queue=queue, run_id=run, play=play, tool=tool, error=error, older_than=age, message_ids=tuple(ids or ()))
    chosen.queues()  # a wrong name is said before anything is asked
    return chosen


def _letters(number: int) -> str:
    return f"{number} dead letter{'' if number == 1 else 's'}"


def _print(as_json: bool, document: Any, lines: list[str]) -> None:
    if as_json:
        json.dump(document, sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        print("\n".join(lines))
