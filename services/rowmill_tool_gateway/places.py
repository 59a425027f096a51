"""The lanes and groups of this gateway: made when a call first needs them, and looked at when something may have changed for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from rowmill.providers import Provider
from rowmill_contracts.digests import shard_of
from rowmill_tool_gateway.flights import Flight
from rowmill_tool_gateway.groups import Group
from rowmill_tool_gateway.lanes import Lane, ProbePolicy
from rowmill_tool_gateway.pacing import Pace
from rowmill_tool_gateway.permits import Permits, Window
from rowmill_tool_gateway.settings import ToolGatewaySettings
from rowmill_tool_gateway.shards import ShardLeases
from rowmill_tool_gateway.toolbox import PreparedTool


@dataclass(slots=True, eq=False)
class Traffic:
    """A lane at work: its groups in turn, and when it is looked at next; ``again`` looks soon. ``resolving``: its provider's secrets are being
    resolved, and nothing is claimed yet. ``windows``: its rates.
    """

    lane: Lane
    resolving: bool = False
    windows: list[Window] = field(default_factory=list)
    again: Callable[[], None] = field(default=lambda: None)
    groups: deque[Group[Flight]] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None
    dirty: bool = False


class Places:
    """``opened_up``: told of each lane that is made. ``pump``: does all that a lane may do now."""

    def __init__(
        self,
        shards: ShardLeases,
        permits: Permits,
        settings: ToolGatewaySettings,
        opened_up: Callable[[Traffic, Provider], None],
        pump: Callable[[Traffic], None],
    ) -> None:
        self._shards = shards
        self._permits = permits
        self._settings = settings
        self._opened_up = opened_up
        self._pump = pump
        self._probes = ProbePolicy(settings.unreachable_after, settings.probe_first, settings.probe_limit)
        self._traffic: dict[tuple[str, str], Traffic] = {}
        self._groups: dict[tuple[str, str], Group[Flight]] = {}

    @property
    def lanes(self) -> list[Lane]:
        """Every lane that had a call."""
        return [traffic.lane for traffic in self._traffic.values()]

    def traffic(self, lane: Lane) -> Traffic:
        return self._traffic[lane.org, lane.provider]

    def look_again(self, shard: int | None = None) -> None:
        """Look soon at the lanes of a shard, or at all."""
        for traffic in self._traffic.values():
            if shard is None or traffic.lane.shard == shard:
                traffic.again()

    def of(self, org: str, tool: PreparedTool) -> tuple[Lane, Group[Flight]]:
        """The lane and group of a tool's calls."""
        traffic = self._traffic.get((org, tool.provider))
        if traffic is None:
            traffic = self._open_up(org, tool.tool.provider)
        group = self._groups.get((org, tool.id))
        if group is None:
            group = self._groups[org, tool.id] = self._new_group(traffic, tool)
        return traffic.lane, group

    def _open_up(self, org: str, provider: Provider) -> Traffic:
        pace = None if provider.rate is None else Pace(provider.rate, provider.burst, shared=True)
        lane = Lane(
            org,
            provider.name,
            shard_of(org, provider.name),
            concurrency=provider.concurrency,
            pace=pace,
            probes=self._probes,
            recovery=self._settings.recovery,
        )
        self._shards.opened_up(lane)
        traffic = self._traffic[org, provider.name] = Traffic(lane)
        traffic.again = partial(self._soon, traffic)
        if pace is not None:
            self._share(traffic, lane.name, pace, traffic.groups)
        self._opened_up(traffic, provider)
        return traffic

    def _new_group(self, traffic: Traffic, tool: PreparedTool) -> Group[Flight]:
        lane = traffic.lane
        pace = None if tool.tool.rate is None else Pace(tool.tool.rate, tool.tool.provider.burst, shared=True)
        group: Group[Flight] = Group(size=tool.size, gather=self._settings.page_gather, pace=pace, lane_pace=lane.pace)
        traffic.groups.append(group)
        if pace is not None:
            self._share(traffic, f"{lane.org}/{tool.id}", pace, [group])
        return group

    def _share(self, traffic: Traffic, name: str, pace: Pace, groups: Collection[Group[Flight]]) -> None:
        """Draw the permits of a rate that the requests of these groups count in: for as many of those in hand as can begin while permits are good."""
        lane, life = traffic.lane, self._settings.permit_life
        window = Window(name, lane.shard, pace, lambda: min(sum(group.requests for group in groups), lane.requests_within(life)))
        traffic.windows.append(window)
        self._permits.add(window)

    def _soon(self, traffic: Traffic) -> None:
        if not traffic.dirty:
            traffic.dirty = True
            asyncio.get_running_loop().call_soon(self._pump, traffic)
