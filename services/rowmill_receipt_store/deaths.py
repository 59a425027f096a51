"""Calls that their gateways die of: how deaths are counted on a receipt, who is suspected, who is condemned. Pure.

A gateway that vanishes leaves the running leases of all calls that it had in hand, and one of them may have ended it. After a few such deaths a call
is suspected and goes alone from then on, with nothing beside it that could be the culprit. Of a suspect only deaths while it was alone count: who was
merely there when others ended their gateway, or somebody killed it, is sent again for as long as that happens.
"""

from __future__ import annotations

import msgspec

from rowmill_contracts.tools import ToolFailure


class DeathRule(msgspec.Struct, frozen=True):
    """``suspected_after``: deaths, whatever was beside it, from which on a call goes alone. ``deaths_alone``: those after which it goes no more."""

    suspected_after: int = 2
    deaths_alone: int = 3

    def counted(self, deaths: int, *, alone: bool) -> int:
        """The count after one more death, of a call that had ``deaths``."""
        return deaths + 1 if alone or deaths < self.suspected_after else deaths

    def suspects(self, deaths: int) -> bool:
        """Whether a call is to be sent alone."""
        return deaths >= self.suspected_after

    def condemns(self, deaths: int) -> bool:
        """Whether a call is not to be sent again. A later run, or a retry, sends it once more, alone: it may have been mended."""
        return deaths >= self.suspected_after + self.deaths_alone

    def failure(self, tool: str, deaths: int) -> ToolFailure:
        """Why a condemned call failed."""
        message = (
            f"tool {tool!r} ended its gateway {deaths} times with this input, {deaths - self.suspected_after} of them with nothing beside it, so it "
            "is not called again: see the gateway's log for how it ended (exit status, memory), mend the function, then retry the run's failed rows "
            "(rowmill runs retry)"
        )
        return ToolFailure(tool=tool, code="poison", message=message, origin="receipts", category="definition")


USUAL = DeathRule()
