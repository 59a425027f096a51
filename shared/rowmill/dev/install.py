"""Installing Debian's packages of the two servers, when and only when a person asked for it (`rowmill dev up --install`, `make`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

from rowmill.dev import postgres, rabbitmq
from rowmill.errors import PackagesMissing, ServersUnavailable

Report = Callable[[str], None]

_SUDO_SECONDS = 10.0


def missing_packages(*, broker: bool = True, database: bool = True) -> list[str]:
    """Names of the Debian packages that must be there for the private nodes that are wanted, and are not."""
    missing = []
    if broker and rabbitmq.scripts_folder() is None:
        missing.append("rabbitmq-server")
    if database and postgres.programs_folder() is None:
        missing.append("postgresql")
    return missing


def install_command(packages: list[str]) -> str:
    """The one command that a person with the rights can run."""
    prefix = "" if os.geteuid() == 0 else "sudo "
    return f"{prefix}apt-get install -y {' '.join(packages)}"


def install_packages(packages: list[str], *, report: Report) -> None:
    """Install them with apt-get as root or by sudo without a password; its output goes to ours.

    Raises PackagesMissing with the command to run when we may not, ServersUnavailable when apt-get fails. The packages may start the system's own
    servers; those are left alone.
    """
    if shutil.which("apt-get") is None:
        raise PackagesMissing(f"this system has no apt-get; install RabbitMQ and Postgres by its own means ({' and '.join(packages)} on Debian)")
    rights = _rights()
    if rights is None:
        raise PackagesMissing(f"{' and '.join(packages)} must be installed, and we may not; run: {install_command(packages)}")
    report(f"installing {' and '.join(packages)} from Debian")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run([*rights, "apt-get", "-q", *arguments], env=environment, check=False, stdin=subprocess.DEVNULL, stdout=2)
        if done.returncode != 0 and arguments[0] == "install":
            raise ServersUnavailable(f"`apt-get {' '.join(arguments)}` failed with status {done.returncode}; its own messages are above")


def _rights() -> list[str] | None:
    """What to put before a command that needs root; None if we cannot become root without asking."""
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is None:
        return None
    try:
        asked = subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False, timeout=_SUDO_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return ["sudo", "-n", "env", "DEBIAN_FRONTEND=noninteractive"] if asked.returncode == 0 else None
