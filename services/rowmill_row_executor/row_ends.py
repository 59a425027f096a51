"""What a row fails with whose own code cancelled its task."""

from __future__ import annotations

from rowmill.errors import RowmillError


class RowCancelled(RowmillError):
    """Author code cancelled the task that its row was worked in."""

    code = "row_cancelled"

    def __init__(self) -> None:
        super().__init__("the row's code cancelled the task that it runs in (asyncio.current_task().cancel()), or something that it left behind did")


class _CancelledByHand:
    """Of a row without a task of its own: nobody but its own code can have cancelled what stands in for one."""

    def cancelled(self) -> RowmillError:
        return RowCancelled()


CANCELLED_BY_HAND = _CancelledByHand()
