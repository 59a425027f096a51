"""The tools of the project, each with what dispatch needs to know worked out once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

import msgspec

from rowmill import registry
from rowmill.errors import RowmillError
from rowmill.said import said_by
from rowmill.tools import Tool
from rowmill_contracts.tools import Effect
from rowmill_tool_gateway.http_tools import Carrier

_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTool:
    """``confirmed_by_claim``: an unknown outcome may be repeated, so a call that is sent at once is claimed and confirmed in one request.
    ``size``: calls in a request at most; ``weight``: the part of a request that a call is. ``runs_author_code``: so it may end this process.
    """

    tool: Tool
    id: str
    provider: str
    effect: Effect
    confirmed_by_claim: bool
    size: int
    weight: float
    carrier: Carrier
    runs_author_code: bool

    def cost_of(self, given: bytes) -> Decimal:
        """What a call with this input costs at most. Raises `RowmillError` where the tool's function fails."""
        tool = self.tool
        if not callable(tool.cost):
            return tool.cost
        try:
            return tool.cost_of(tool.decode_input(_decode(given)))
        except RowmillError:
            raise
        except BaseException as error:  # an author's cost function may raise anything
            raise RowmillError(f"cost of tool {tool.id!r} failed: {type(error).__name__}: {said_by(error)}") from error


class Toolbox:
    """Finds tools by id; ``carrier_for`` builds what carries their calls out. Tools that are defined later are found too."""

    def __init__(self, carrier_for: Callable[[Tool], Carrier], *, find: Callable[[str], Tool | None] = registry.find_tool) -> None:
        self._carrier_for = carrier_for
        self._find = find
        self._prepared: dict[str, PreparedTool] = {}

    def find(self, tool_id: str) -> PreparedTool | None:
        prepared = self._prepared.get(tool_id)
        if prepared is None:
            tool = self._find(tool_id)
            if tool is None:
                return None
            size = 1 if tool.batch is None else tool.batch.max
            prepared = self._prepared[tool_id] = PreparedTool(
                tool=tool,
                id=tool.id,
                provider=tool.provider.name,
                effect=tool.effect,
                confirmed_by_claim=tool.effect != "non_idempotent",
                size=size,
                weight=1 / size,
                carrier=self._carrier_for(tool),
                runs_author_code=tool.kind != "http" or callable(tool.actual_cost),
            )
        return prepared

    def known(self) -> list[str]:
        return registry.known_tools()
