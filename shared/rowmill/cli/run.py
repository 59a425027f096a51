"""`rowmill run`: stage a file, run a play over it, write the enriched rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rowmill.budgets import budget_typed
from rowmill.errors import OutputError, UsageError

if TYPE_CHECKING:
    from rowmill.plays import Play

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def run(
    play: Annotated[str, typer.Argument(help="module:attribute, or a registered name.")],
    csv: Annotated[Path | None, typer.Option("--csv", help="File that fills the play's only staged input: CSV, TSV, JSONL or Parquet.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where the rows go: .csv, .tsv, .jsonl or .parquet.")] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", help="name=value, or name=@FILE for a staged input; may be repeated.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Work the first N rows only.")] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="What the run may spend at most; then it waits: 5.00, calls=1000, retries=50, wall-time=1h; may be repeated."),
    ] = None,
    force: Annotated[str | None, typer.Option(help="Do again what is on record: tools, failed, steps or all.")] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Name the run; the same name again is the same run.")] = None,
    delimiter: Annotated[str | None, typer.Option(help="The CSV's delimiter, if detection is wrong.")] = None,
    quote: Annotated[str | None, typer.Option(help="The CSV's quote character.")] = None,
    encoding: Annotated[str | None, typer.Option(help="The file's encoding.")] = None,
    require: Annotated[
        list[str] | None,
        typer.Option("--require", help="A column in which every record has something, such as the key; others are bad rows. May be repeated."),
    ] = None,
    bad_rows: Annotated[
        Path | None,
        typer.Option("--bad-rows", help="Set records of wrong width, or with nothing in a required column, aside in this file and go on."),
    ] = None,
    flatten: Annotated[bool, typer.Option("--flatten", help="Write members of objects as columns of their own.")] = False,
    allow_failed: Annotated[bool, typer.Option("--allow-failed", help="Exit with 0 although rows failed.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Start the run and leave; needs running services.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run a play over a file and write the enriched rows.

    Uses the services that run; starts a private set for this command when none do. Exits with 1 if the run or rows failed.
    """
    from rowmill.cli.running import RunRequest, carry_out  # noqa: PLC0415 - loads the client
    from rowmill.cli.same_files import refuse_same_files  # noqa: PLC0415
    from rowmill.inputs import open_source  # noqa: PLC0415
    from rowmill.outputs import check_output  # noqa: PLC0415
    from rowmill.project import Project  # noqa: PLC0415

    if out is not None:
        try:
            check_output(out)
        except OutputError as error:  # before anything was begun, it is a wrong usage
            raise UsageError(f"--out: {error}") from None
    project = Project.find(Path.cwd())
    project.load()
    found = project.play(play)
    refuse_same_files(
        reads=[*([("--csv", csv)] if csv is not None else []), *_files(found, inputs or [])],
        writes=[(option, path) for option, path in (("--out", out), ("--bad-rows", bad_rows)) if path is not None],
    )
    given = _inputs(found, inputs or [])
    if csv is not None:
        given[found.rows_field()] = open_source(csv, delimiter=delimiter, quote=quote, encoding=encoding, bad_rows=bad_rows, require=require or [])
    _refuse_without_rows(found, given)
    request = RunRequest(
        project=project,
        play=found,
        given=given,
        options={"run_id": run_id, "limit": limit, "budget": budget_typed(budget or []), "force": _force(force)},
        out=out,
        flatten=flatten,
        detach=detach,
        as_json=as_json,
    )
    status = carry_out(request)
    if status.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not status.completed or (status.failed_rows and not allow_failed):
        raise typer.Exit(1)


def _inputs(play: Play[Any, Any], assignments: list[str]) -> dict[str, Any]:
    """``name=value`` pairs: JSON where it parses (numbers, true, objects), else text; ``name=@FILE`` opens a staged input."""
    from rowmill.inputs import open_source  # noqa: PLC0415

    given: dict[str, Any] = {}
    for assignment in assignments:
        name, found, value = assignment.partition("=")
        if not found or not name:
            raise UsageError(f"--input {assignment!r}: write name=value, or name=@FILE")
        if name in play.rows_fields:
            if not value.startswith("@"):
                raise UsageError(f"--input {name}: it is a staged input, so name a file: {name}=@FILE")
            given[name] = open_source(Path(value[1:]))
        else:
            given[name] = _value(value)
    return given


def _refuse_without_rows(play: Play[Any, Any], given: dict[str, Any]) -> None:
    """Raise `UsageError`, with the options that are to be given, unless every staged input has its rows that the play requires."""
    missing = [name for name in play.rows_fields if name not in given and play.input_model.model_fields[name].is_required()]
    if missing:
        options = " and ".join(f"--input {name}=@FILE" for name in missing)
        only = "--csv FILE, or " if len(play.rows_fields) == 1 else ""
        raise UsageError(f"play {play.name!r} has no rows for {' and '.join(map(repr, missing))}: give {only}{options}")


def _files(play: Play[Any, Any], assignments: list[str]) -> list[tuple[str, Path]]:
    """Each file that an ``--input`` names, after what is typed before it."""
    parts = [assignment.partition("=@") for assignment in assignments]
    return [(f"--input {name}=@FILE", Path(path)) for name, found, path in parts if found and name in play.rows_fields]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _force(word: str | None) -> str | None:
    if word not in {None, "tools", "failed", "steps", "all"}:
        raise UsageError(f"--force {word!r}: say tools, failed, steps or all")
    return word
