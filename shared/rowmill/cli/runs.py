"""`rowmill runs`: what ran, what runs, how it ended; stopping, pausing, resuming, retrying."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rowmill.cli.wording import charged_told, numbered, problem_told, retry_code_told, rows_told
from rowmill.errors import UsageError

if TYPE_CHECKING:
    from rowmill.client.jobs import Job
    from rowmill.client.outages import Outage
    from rowmill_contracts.events import CodeShown
    from rowmill_contracts.run_questions import RunSummary

app = typer.Typer(help="Runs: what ran, what runs, how it ended.", no_args_is_help=True)

_OVER = frozenset({"completed", "failed", "cancelled"})

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_runs(
    play: Annotated[str | None, typer.Option(help="Only runs of this play.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first."""
    import msgspec  # noqa: PLC0415 - commands load what they need

    from rowmill.cli.connecting import asked  # noqa: PLC0415
    from rowmill.client.client import Client  # noqa: PLC0415

    async def question(url: str) -> list[RunSummary]:
        async with Client(url, row_events=False) as client:
            return await client.runs(play=play, limit=limit)

    runs = asked(question, of="admission")
    if as_json:
        print(msgspec.json.encode([_document(run) for run in runs]).decode())
        return
    if not runs:
        print("no runs yet")
    for run in runs:
        counts = run.counts
        print(
            f"{run.run_id}  {run.play:16} {run.state:10} {_time(run.created_at)}  "
            f"{counts.terminal}/{counts.admitted} rows, {counts.failed} failed, cost {counts.cost}{'' if run.charges_known else ' (as last heard)'}"
        )


@app.command("get")
def get(run_id: str, as_json: JsonOption = False) -> None:
    """Show one run: state, counts, which providers its rows wait for, datasets, output, error."""
    import msgspec  # noqa: PLC0415 - commands load what they need

    from rowmill.cli.connecting import asked  # noqa: PLC0415
    from rowmill.client.client import Client  # noqa: PLC0415

    async def question(url: str) -> tuple[RunSummary | None, list[Outage]]:
        async with Client(url, row_events=False) as client:
            job = await client.job(run_id)
            run = await job.status()
            return run, [] if run is None else await job.outages_of(run)

    run, outages = asked(question, of="admission")
    if run is None:
        raise UsageError(f"there is no run {run_id!r}; `rowmill runs list` shows those there are")
    if as_json:
        print(msgspec.json.encode(_document(run) | {"outages": outages}).decode())
        return
    for line in _told(run, outages):
        print(line)


@app.command("stop")
def stop(
    run_id: str,
    reason: Annotated[str, typer.Option(help="Kept with the run.")] = "stopped by hand",
    as_json: Annotated[bool, typer.Option("--json", help="Print the run as JSON, as it stood before: it ends soon, not at once.")] = False,
) -> None:
    """Stop a run for good: nothing new is sent, what is in flight is recorded, rows that have not ended are cancelled."""
    import msgspec  # noqa: PLC0415 - commands load what they need

    run = _acted(run_id, lambda job: job.stop(reason), stands_before=True)
    if as_json:
        print(msgspec.json.encode(_document(run) | {"stopping": not _is_over(run)}).decode())
        return
    print(f"run {run_id} was over already: {run.state}" if _is_over(run) else f"run {run_id} is being stopped")


@app.command("pause")
def pause(run_id: str, as_json: JsonOption = False) -> None:
    """Let a run wait until it is resumed: what is in flight is recorded, nothing new is sent."""
    import msgspec  # noqa: PLC0415 - commands load what they need

    run = _acted(run_id, lambda job: job.pause())
    if _is_over(run):
        raise UsageError(f"run {run_id} is over: {run.state}")
    if as_json:
        print(msgspec.json.encode(_document(run)).decode())
        return
    print(f"run {run_id} is paused; `rowmill runs resume {run_id}` lets it go on")


@app.command("resume")
def resume(
    run_id: str,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="What the run may spend from its start at most: 5.00, calls=1000, retries=50, wall-time=1h; what is not named stays."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Let a run go on that was paused or waits for budget or payment."""
    import msgspec  # noqa: PLC0415 - commands load what they need

    from rowmill.budgets import budget_typed  # noqa: PLC0415

    limits = budget_typed(budget or [])
    run = _acted(run_id, lambda job: job.resume(budget=limits))
    if _is_over(run):
        raise UsageError(f"run {run_id} is over: {run.state}")
    if as_json:
        print(msgspec.json.encode(_document(run)).decode())
        return
    print(f"run {run_id} goes on; `rowmill runs get {run_id}` shows how it stands")


@app.command("retry")
def retry(run_id: str, as_json: JsonOption = False) -> None:
    """Work the failed rows of a run that is over again. All that completed stays; the run goes on, and ends anew with corrected counts."""
    import msgspec  # noqa: PLC0415 - commands load what they need

    from rowmill.cli.connecting import asked  # noqa: PLC0415
    from rowmill.client.client import Client  # noqa: PLC0415
    from rowmill.client.loaded_code import ask_code  # noqa: PLC0415

    async def question(url: str) -> tuple[RunSummary | None, RunSummary | None]:
        async with Client(url, row_events=False) as client:
            return await _retried(await client.job(run_id), lambda play: ask_code(client.bus, play))

    before, run = asked(question, of="admission")
    if before is None or run is None:
        raise UsageError(f"there is no run {run_id!r}; `rowmill runs list` shows those there are")
    if before.state not in _OVER:
        raise UsageError(f"run {run_id} is not over: {before.state}; what fails of it can be retried once it is")
    if as_json:
        print(msgspec.json.encode(_document(run)).decode())
        return
    if run.state == "waiting" and run.waiting_for == "pause":
        print(f"run {run_id} was paused while it was prepared; `rowmill runs resume {run_id}` lets its failed rows be worked again")
        return
    again = before.counts.failed
    rows = f"{numbered(again, 'failed row')} of run {run_id} {'is' if again == 1 else 'are'} worked again"
    print(f"{rows if again else f'run {run_id} goes on'}; `rowmill runs get {run_id}` shows how it stands")


async def _retried(job: Job, loaded: Callable[[str], Awaitable[Collection[CodeShown]]]) -> tuple[RunSummary | None, RunSummary | None]:
    """How the run stood before its retry and after; None: there is none. By which code it is retried is said before it is, as rows cost money."""
    before = await job.status()
    if before is None:
        return None, None
    if before.state in _OVER:
        typer.echo(f"rowmill: {retry_code_told(await loaded(before.play))}", err=True)
    return before, await job.retry()


def _acted(run_id: str, act: Callable[[Job], Awaitable[Any]], *, stands_before: bool = False) -> RunSummary:
    """Do something to a run; answers how it stood (``stands_before``: before it was done)."""
    from rowmill.cli.connecting import asked  # noqa: PLC0415
    from rowmill.client.client import Client  # noqa: PLC0415

    async def question(url: str) -> RunSummary | None:
        async with Client(url, row_events=False) as client:
            job = await client.job(run_id)
            before = await job.status()
            if before is None or _is_over(before):
                return before
            found = await act(job)
            return before if stands_before else found

    run = asked(question, of="admission")
    if run is None:
        raise UsageError(f"there is no run {run_id!r}; `rowmill runs list` shows those there are")
    return run


def _is_over(run: RunSummary) -> bool:
    """Whether nothing can be done to a run any more. One whose retry is being prepared can be stopped, paused and resumed."""
    return run.state in _OVER and not run.retrying


def _told(run: RunSummary, outages: list[Outage]) -> list[str]:
    from rowmill.budgets import as_typed  # noqa: PLC0415 - commands load what they need
    from rowmill.cli.outages import outage_told  # noqa: PLC0415

    counts = run.counts
    facts = {
        "run": run.run_id,
        "org": run.org,
        "play": run.play,
        "state": run.state,
        "waits for": run.waiting_for,
        "rows": rows_told(counts),
        "calls": charged_told(run),
        "budget": ", ".join(as_typed(run.budget)) or None,
        "created": _time(run.created_at),
        "started": None if run.started_at is None else _time(run.started_at),
        "finished": None if run.finished_at is None else _time(run.finished_at),
        "error": None if run.error is None else problem_told(run.error),
        "output": None if bytes(run.output) == b"null" else json.dumps(json.loads(bytes(run.output)), ensure_ascii=False),
    }
    away = [("provider", outage_told(outage)) for outage in outages]
    datasets = [("dataset", f"{found.dataset} ({found.state}): {rows_told(found.counts)}") for found in run.datasets]
    return [f"{name:12} {value}" for name, value in (*facts.items(), *away, *datasets) if value is not None]


def _document(run: Any) -> dict[str, Any]:
    import msgspec  # noqa: PLC0415

    document: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(run, output=msgspec.Raw(b"null")), enc_hook=lambda _raw: None)
    document["output"] = msgspec.json.decode(run.output)
    for name in ("created_at", "started_at", "finished_at"):
        if document.get(name):
            document[name] = _time(document[name])
    return document


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
