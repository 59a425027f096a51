"""`rowmill receipts`: what was asked of providers, how it ended, and what an operator decides where nobody knows.

Receipts are named by what their digest begins with, at least four characters, as commits are in git.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rowmill.budgets import money
from rowmill.cli.typed import seconds_typed, text_typed
from rowmill.cli.wording import numbered
from rowmill.errors import UsageError

if TYPE_CHECKING:
    from rowmill_contracts.receipts import ReceiptSettled, ReceiptView

app = typer.Typer(help="Receipts: what was asked of providers, and how it ended.", no_args_is_help=True)

_STATES = ("queued", "running", "completed", "failed", "released", "unknown")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ReceiptArgument = Annotated[str, typer.Argument(help="What the receipt's digest begins with, 4 characters at least.")]


@app.command("list")
def list_receipts(
    state: Annotated[str, typer.Option(help="queued, running, completed, failed, released, unknown, or any.")] = "unknown",
    run: Annotated[str | None, typer.Option(help="Only those whose newest lease is this run's.")] = None,
    tool: Annotated[str | None, typer.Option(help="Only those of this tool.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List receipts by their digest; those whose outcome nobody knows unless `--state` says otherwise."""
    from rowmill.client.receipts import ReceiptDesk  # noqa: PLC0415 - commands load what they need

    if state not in {*_STATES, "any"}:
        raise UsageError(f"--state {state!r}: say {', '.join(_STATES)} or any")
    wanted: Any = {"any": None, "unknown": "outcome_unknown"}.get(state, state)
    found = _asked(lambda bus: ReceiptDesk(bus).listed(state=wanted, run_id=run, tool=tool, limit=limit))
    if as_json:
        print(json.dumps([_document(view) for view in found]))
        return
    if not found:
        print(_none_found(state, narrowed=run is not None or tool is not None))
    for view in found:
        print(f"{view.receipt}  {_state(view):12} {view.tool:24} run {view.run_id}  {_ending(view)}")


def _none_found(state: str, *, narrowed: bool) -> str:
    """What is not there; that others are not listed is said, too."""
    of = " of that run or tool" if narrowed else ""
    if state == "any":
        return f"no receipts{of}"
    what = f"no receipts{of} whose outcome nobody knows: nothing waits for your decision" if state == "unknown" else f"no {state} receipts{of}"
    return f"{what} (`--state any` lists all)"


@app.command("show")
def show(receipt: ReceiptArgument, as_json: JsonOption = False) -> None:
    """Show one receipt and its output."""
    from rowmill.client.receipts import ReceiptDesk  # noqa: PLC0415 - commands load what they need

    name = _name(receipt)
    view = _asked(lambda bus: ReceiptDesk(bus).shown(name))
    document = _document(view)
    if as_json:
        print(json.dumps(document))
        return
    for member, value in document.items():
        print(f"{member:14} {json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value}")
    if view.state == "outcome_unknown":
        print(f"\nWhether the request had its effect is not known. Look it up at the provider, then\n{_advice(view.receipt)}")


@app.command("settle")
def settle(
    receipt: ReceiptArgument,
    output: Annotated[str | None, typer.Option(help="It completed with this answer: JSON, or @FILE.")] = None,
    no_result: Annotated[bool, typer.Option("--no-result", help="With --output: the provider had no result.")] = False,
    cost: Annotated[str | None, typer.Option(help="What it cost; else what was reserved.")] = None,
    failed: Annotated[str | None, typer.Option(help="It failed, for this reason; another run will try again.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how a request of unknown outcome ended."""
    import msgspec  # noqa: PLC0415

    from rowmill.client.receipts import ReceiptDesk  # noqa: PLC0415 - commands load what they need
    from rowmill_contracts.receipts import SettleReceipt  # noqa: PLC0415

    if (output is None) == (failed is None):
        raise UsageError("say --output JSON if it completed, or --failed REASON if it did not")
    if failed is not None:
        request = SettleReceipt(receipt=_name(receipt), outcome="failed", message=failed)
    else:
        body = msgspec.Raw(_json(output or ""))
        request = SettleReceipt(
            receipt=_name(receipt), outcome="completed", output=body, no_result=no_result, cost=None if cost is None else money("--cost", cost)
        )
    _say_settled(receipt, _asked(lambda bus: ReceiptDesk(bus).settle(request)), "settled", as_json=as_json)


@app.command("replay")
def replay(receipt: ReceiptArgument, as_json: JsonOption = False) -> None:
    """Let a request of unknown outcome be sent once more; what was charged for it stays charged."""
    from rowmill.client.receipts import ReceiptDesk  # noqa: PLC0415 - commands load what they need

    name = _name(receipt)
    _say_settled(receipt, _asked(lambda bus: ReceiptDesk(bus).replay(name)), "free: the next call of it is sent", as_json=as_json)


@app.command("prune")
def prune(
    older_than: Annotated[str, typer.Option("--older-than", help="Age from which receipts are forgotten, such as 90d.")] = "90d",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and forget nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Forget old outputs and failures. A call of a forgotten receipt is paid for again. Never a live lease, nor an unknown outcome. Asks first."""
    from rowmill.cli.consent import consents, need_consent  # noqa: PLC0415 - commands load what they need
    from rowmill.client.receipts import ReceiptDesk  # noqa: PLC0415 - commands load what they need

    age = seconds_typed("--older-than", older_than)
    need_consent("forget receipts", yes=yes or dry_run, as_json=as_json)
    if not (yes or dry_run):
        meant = _asked(lambda bus: ReceiptDesk(bus).prune(age, dry_run=True))
        if not consents(f"forget {_prunable(meant)}? Calls whose outputs are forgotten are paid for again.", yes=yes):
            print("nothing was forgotten")
            return
    total = _asked(lambda bus: ReceiptDesk(bus).prune(age, dry_run=dry_run))
    if as_json:
        print(json.dumps({**total, "dry_run": dry_run}))
        return
    print(f"{'would forget' if dry_run else 'forgot'} {_prunable(total)}")
    if total["retired"] > total["completed"]:
        print("outputs that runs could need which are not over, or can be retried, serve no new run, and are forgotten by a later prune")


def _prunable(total: dict[str, int]) -> str:
    outputs, failures = numbered(total["completed"], "output"), numbered(total["failures"], "failure")
    return f"{outputs} ({numbered(total['bytes'], 'byte')}), {total['ended']} ended without one, {failures} of runs"


def _asked(question: Any) -> Any:
    from rowmill.cli.connecting import asked  # noqa: PLC0415
    from rowmill.client.client import Client  # noqa: PLC0415

    async def ask(url: str) -> Any:
        async with Client(url, row_events=False) as client:
            return await question(client.bus)

    return asked(ask, of="receipt-store")


def _name(receipt: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{4,64}", receipt):
        raise UsageError(f"{receipt!r} names no receipt: write 4 or more of the characters that its digest begins with")
    return receipt.lower()


def _json(text: str) -> bytes:
    source = text_typed("--output", text)
    try:
        json.loads(source)
    except json.JSONDecodeError as error:
        raise UsageError(f"--output is not JSON: {error}") from None
    return source.strip().encode()


def _say_settled(name: str, settled: ReceiptSettled, done: str, *, as_json: bool) -> None:
    view = settled.receipt
    if as_json:
        print(json.dumps({"state": settled.state, "receipt": None if view is None else _document(view)}))
    elif settled.state == "decided":
        print(f"receipt {name if view is None else view.receipt} is {done}")
    elif settled.state == "rejected":
        typer.echo("rowmill: the output cannot be stored; the call is recorded as failed", err=True)
    elif view is not None:
        typer.echo(f"rowmill: receipt {view.receipt} is {_state(view)}: its outcome is known, so there is nothing to decide", err=True)
    if settled.state != "decided":
        raise typer.Exit(1)


def _document(view: ReceiptView) -> dict[str, Any]:
    import msgspec  # noqa: PLC0415

    document: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(view, output=msgspec.Raw(b"null")), enc_hook=lambda _raw: None)
    document["state"] = _state(view)
    document.pop("output", None)
    if view.completed_at is not None:
        document["completed_at"] = _time(view.completed_at)
    if bytes(view.output) != b"null":
        document["output"] = msgspec.json.decode(view.output)
    return document


def _state(view: ReceiptView) -> str:
    return "unknown" if view.state == "outcome_unknown" else view.state


def _ending(view: ReceiptView) -> str:
    if view.lease_seconds is not None:
        return f"lease {'over' if view.lease_seconds <= 0 else f'for {view.lease_seconds:.0f} s'}"
    if view.completed_at is not None and view.state == "completed":
        return f"{_time(view.completed_at)}, cost {view.cost}"
    if view.failure is not None:
        return view.failure.message
    return f"reserved {view.reserved}"


def _advice(receipt: str) -> str:
    return (
        f"  rowmill receipts settle {receipt} --output JSON    if it did, with its answer\n"
        f"  rowmill receipts settle {receipt} --failed REASON  if it did not, and this run shall not try again\n"
        f"  rowmill receipts replay {receipt}                  to let it be sent once more"
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
