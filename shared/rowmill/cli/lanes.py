"""`rowmill lanes`: what each provider is doing for us now, as the gateways see it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rowmill_contracts.events import LanesShown, LaneView


def lanes(
    provider: Annotated[str | None, typer.Option(help="Only lanes of this provider.")] = None,
    org: Annotated[str | None, typer.Option(help="Only lanes of this organisation.")] = None,
    wait: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds to wait for the gateways' answers.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show lanes: what is closed until when, what is open, what waits and since when."""
    from rowmill.cli.connecting import asked  # noqa: PLC0415 - commands load what they need
    from rowmill.client.client import Client  # noqa: PLC0415
    from rowmill.client.lanes import ask_lanes  # noqa: PLC0415

    async def question(url: str) -> list[LanesShown]:
        async with Client(url, row_events=False) as client:
            return await ask_lanes(client.bus, seconds=wait, org=org, provider=provider)

    answers = sorted(asked(question), key=lambda answer: answer.gateway)
    if as_json:
        print(json.dumps([_document(answer) for answer in answers]))
        return
    if not answers:
        print("no tool-gateway answered: none runs, or none heard it in time (--wait SECONDS)")
    for answer in answers:
        state = "" if answer.storing else "; it cannot store results, so it sends nothing"
        print(f"gateway {answer.gateway}: {len(answer.lanes) or 'no'} lane{'' if len(answer.lanes) == 1 else 's'}{state}")
        for lane in answer.lanes:
            print(_line(lane))


def _document(answer: LanesShown) -> dict[str, Any]:
    import msgspec  # noqa: PLC0415

    document: dict[str, Any] = msgspec.to_builtins(answer)
    document["storing"] = answer.storing
    return document


def _line(lane: LaneView) -> str:
    """What is longer than its column still has two spaces behind it."""
    return f"  {f'{lane.org}/{lane.provider}':27}  {_state(lane):39}  {_traffic(lane)}"


def _state(lane: LaneView) -> str:
    from rowmill.cli.wording import why_told  # noqa: PLC0415 - commands load what they need

    if not lane.held:
        return "another gateway's, or nobody's"
    return f"{_open(lane)}: {why_told(lane.why)}" if lane.why else _open(lane)


def _open(lane: LaneView) -> str:
    if lane.closed_seconds is not None:
        until = datetime.fromtimestamp(datetime.now(UTC).timestamp() + lane.closed_seconds, UTC).isoformat(timespec="seconds")
        return f"closed for {lane.closed_seconds:.0f} s, until {until}"
    if lane.probing:
        return "unreachable, one probe at a time"
    return "open" if lane.unavailable_seconds is None else f"not serving for {lane.unavailable_seconds:.0f} s"


def _traffic(lane: LaneView) -> str:
    parts = [f"{lane.in_flight}/{lane.concurrency} requests open"]
    if lane.rate is not None:
        parts.append(f"rate {lane.rate}, {lane.permits} in the next second")
    waiting = f"{lane.waiting} waiting"
    if lane.oldest_asked is not None:
        waiting += f" since {datetime.fromtimestamp(lane.oldest_asked, UTC).isoformat(timespec='seconds')}"
    return ", ".join([*parts, waiting])
