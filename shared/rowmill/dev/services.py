"""The five services as child processes: started, watched, started again when they fall over, stopped.

Owns processes, not what they do. Their output goes to a log file each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rowmill.errors import UnavailableError
from rowmill.runtime.hosting import SERVICES, in_stop_order

RESTART_PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Seconds before a service that fell over is started again; the last one repeats."""

STEADY_SECONDS = 60.0
"""A service that lived for so long fell over anew: it is started again at once, not after the pause of one that falls over again and again."""

STOP_TIMEOUT = 20.0
"""Seconds for a service to stop by itself before it is killed; what it had in hand is delivered again later."""


class ServiceProcess:
    """One ``rowmill serve NAME`` of our own."""

    def __init__(self, name: str, environment: Mapping[str, str], log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        self.restarts = 0
        """In a row, each soon after the other."""
        self.started_at = 0.0
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def exit_status(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "rowmill", "serve", self.name, "--stop-with-parent"]

    def start(self) -> None:
        self.started_at = time.monotonic()
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours to handle, not theirs
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout: float) -> None:
        if self._process is not None:
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def last_words(self, lines: int = 12) -> str:
        try:
            return "\n".join(self.log_file.read_text("utf-8", "replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""


class ServiceSet:
    """All five services for one project, as children of this process; they stop when it is gone.

    ``environment`` is what they see: at least ``ROWMILL_BROKER_URL``, ``ROWMILL_DATABASE_URL``, ``ROWMILL_PROJECT``. ``ended``: told, in another
    thread, of each process that fell over and is about to be started again.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        log_folder: Path,
        *,
        copies: Mapping[str, int] | None = None,
        ended: Callable[[ServiceProcess], None] = lambda _process: None,
    ) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        wanted = [(name, number) for name in SERVICES for number in range((copies or {}).get(name, 1))]
        self.processes = [
            ServiceProcess(name, {**os.environ, **environment}, log_folder / f"{name}{f'-{number}' if number else ''}.log") for name, number in wanted
        ]
        self._ended = ended
        self._stopping = threading.Event()
        self._keeper: threading.Thread | None = None

    def __getitem__(self, name: str) -> ServiceProcess:
        """The first process of that service."""
        return next(process for process in self.processes if process.name == name)

    def start(self, *, keep_alive: bool = True) -> None:
        """Start them all; with ``keep_alive`` a thread starts again what falls over."""
        for process in self.processes:
            process.start()
        if keep_alive:
            self._keeper = threading.Thread(target=self._keep_alive, name="service keeper", daemon=True)
            self._keeper.start()

    def stop(self) -> None:
        """Stop them gracefully, then surely: who begins work at once, and who stores it when these have ended. Takes two `STOP_TIMEOUT` at most."""
        self._stopping.set()
        if self._keeper is not None:
            self._keeper.join()
        for together in in_stop_order(self.processes):
            for process in together:
                process.signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT
            for process in together:
                process.wait(max(0.1, deadline - time.monotonic()))

    def raise_if_broken(self) -> None:
        """Raises UnavailableError with its last words if a service keeps falling over. For while they start: later on a play's own code may end a
        process many times before what does it is found out, and nothing but a start helps.
        """
        for process in self.processes:
            if process.restarts >= len(RESTART_PAUSES):
                raise UnavailableError(
                    f"the {process.name} service does not stay up (started {process.restarts + 1} times); "
                    f"its log is {process.log_file}, and ends:\n{process.last_words()}"
                )

    def _keep_alive(self) -> None:
        due: dict[ServiceProcess, float] = {}
        while not self._stopping.wait(0.1):
            for process in self.processes:
                if process.exit_status is None:
                    continue
                if process not in due:
                    if time.monotonic() - process.started_at >= STEADY_SECONDS:
                        process.restarts = 0
                    self._ended(process)
                    due[process] = time.monotonic() + RESTART_PAUSES[min(process.restarts, len(RESTART_PAUSES) - 1)]
                elif time.monotonic() >= due[process]:
                    del due[process]
                    process.restarts += 1
                    with contextlib.suppress(OSError):
                        process.start()
