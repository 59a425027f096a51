"""Gaps between what a service stores and what it says, and a service process that dies in one. See `dying_service` for how."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from rowmill.dev.services import ServiceProcess

ENTRY = Path(__file__).with_name("dying_service.py")


class Gap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``service`` dies right ``before`` it publishes its ``number``-th ``message``, or right ``after`` that was confirmed.

    ``lost``: it lives, and that message and the ``lost - 1`` following ones are taken for confirmed though nobody gets them. ``key``: the begin of
    the routing keys that count (answers have none). ``returning``: only `RowTasks` of rows that come back from waiting count. ``repaired_by``: what
    is to mend it.
    """

    service: str
    message: str
    when: Literal["before", "after", "lost"]
    repaired_by: str
    number: int = 1
    lost: int = 1
    key: str = ""
    returning: bool = False

    @property
    def name(self) -> str:
        number = f" {self.number}" if self.number > 1 else ""
        return f"{self.service} {self.when} {self.message}{number}{' again' if self.returning else ''}"

    @property
    def deadly(self) -> bool:
        return self.when != "lost"


class DyingProcess(ServiceProcess):
    """A service that starts with a gap to die in; started again, it is a service like any other."""

    def __init__(self, gap: Gap, environment: Mapping[str, str], log_file: Path) -> None:
        super().__init__(gap.service, environment, log_file)
        self._gap: Gap | None = gap

    def start(self) -> None:
        if self._gap is None:
            super().start()
            return
        plan, self._gap = msgspec.json.encode(self._gap).decode(), None
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ENTRY), plan], env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
