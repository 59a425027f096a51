"""The only modules that know SQL, one per noun. Statements are named in ``queries.sql``; transactions are the callers'."""

from __future__ import annotations

from rowmill.runtime.db import Queries

SQL = Queries.of("rowmill_admission")
