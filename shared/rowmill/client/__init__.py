"""The SDK: `Client` for running loops, `run` for everything else."""

from rowmill.client.client import Client
from rowmill.client.jobs import Event, FailedRow, Job, RunResult
from rowmill.client.running import run

__all__ = ["Client", "Event", "FailedRow", "Job", "RunResult", "run"]
