"""Whether a run that waits for its budget could go on with another one, or would stop at once again. Pure."""

from __future__ import annotations

from decimal import Decimal
from math import ceil

from rowmill_contracts.budgets import Limits, unpaid_call
from rowmill_contracts.charges import RunCharges


def too_little(run_id: str, reason: str, limits: Limits, charges: RunCharges, worked: float) -> str:
    """Why a run that waits for ``reason`` would do so again at once under these limits, and how much it needs, to a person; empty: it would not.

    ``worked``: how many seconds of its wall time are used. What the calls under way cost may turn out to be less; then the same limits may do later.
    """
    word, _, what = reason.partition(": ")
    kind = what.partition(",")[0] if word == "budget" else ""
    unpaid = unpaid_call(reason)
    if kind == "money" and limits.money is not None and unpaid is not None:
        receipt, cost = unpaid
        needed = charges.cost + cost
        why = f"{_amount(charges.cost)} is charged and receipt {receipt} may cost {_amount(cost)}, so {_amount(limits.money)} is not enough"
        return "" if limits.money >= needed else _refused(run_id, kind, why, _amount(needed))
    if kind == "calls" and limits.calls is not None and limits.calls <= charges.counted_calls:
        return _refused(run_id, kind, f"{charges.counted_calls} are made", f"calls={charges.counted_calls + 1}")
    if kind == "retries" and limits.retries is not None and limits.retries <= charges.counted_retries:
        return _refused(run_id, kind, f"{charges.counted_retries} are made", f"retries={charges.counted_retries + 1}")
    if kind == "wall time" and limits.wall_time is not None and limits.wall_time <= worked:
        return _refused(run_id, kind, f"it has worked for {worked:.0f} s", f"wall-time={ceil(worked) + 1}s")
    return ""


def _refused(run_id: str, kind: str, why: str, needed: str) -> str:
    return f"run {run_id} would wait for its budget of {kind} again at once: {why}; to go on it needs at least --budget {needed}"


def _amount(money: Decimal) -> str:
    return f"{money.normalize():f}"
