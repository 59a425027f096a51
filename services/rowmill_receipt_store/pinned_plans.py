"""How the database plans this service's statements: settings of each of its sessions."""

from __future__ import annotations

SERVER_SETTINGS = {
    "enable_seqscan": "off",
    "enable_indexscan": "off",
    "enable_indexonlyscan": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}
"""Pins the plans: every table is reached by its key, whatever its size and statistics (FACTS.md).

A scan of a whole table or index that looks free on a table of no rows stays in the plan while the table grows. Postgres has only one way left that
is not priced out: a bitmap scan, which needs a condition on the key; joins then follow by themselves. It costs a tenth more than probing by
index scans, which on an empty, analysed table would read the whole index. One generic plan saves planning these long statements at each
execution. The price of a disabled scan would start the just-in-time compiler, at a hundred milliseconds a statement."""
