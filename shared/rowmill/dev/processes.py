"""Processes that outlive the command that started them: starting, recognising, signalling.

A pid alone does not name a process for long, and these are signalled by commands that run hours later, so a mark carries when the process
was born as well. Nothing here signals a process whose mark does not fit. Linux only: it reads /proc.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rowmill.errors import ServersUnavailable

_PROC = Path("/proc")
_POLL_SECONDS = 0.02
_FREEZE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """One process for ever: its pid, and the boot and clock tick at which it was born."""

    pid: int
    born: str


@dataclass(frozen=True, slots=True)
class Account:
    """The operating-system user that a server runs as; `switch` when that is not who we are."""

    name: str
    uid: int
    gid: int
    switch: bool


def account_for(package_user: str) -> Account:
    """Who runs a server: the package's user when we are root (the servers refuse root), else ourselves."""
    if os.geteuid() != 0:
        return Account(pwd.getpwuid(os.geteuid()).pw_name, os.geteuid(), os.getegid(), switch=False)
    try:
        entry = pwd.getpwnam(package_user)
    except KeyError:
        raise ServersUnavailable(
            f"we are root, which the server refuses to run as, and there is no user {package_user!r} on this machine; "
            "install Debian's package with `rowmill dev up --install`"
        ) from None
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, switch=True)


def run_as(account: Account, argv: Sequence[str], *, env: Mapping[str, str], folder: Path, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end as that user, in that folder; output is captured, the exit status is the caller's to judge."""
    return subprocess.run(
        list(argv),
        env=dict(env),
        cwd=folder,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=timeout,
        user=account.uid if account.switch else None,
        group=account.gid if account.switch else None,
        extra_groups=[] if account.switch else None,
    )


def start_detached(argv: Sequence[str], *, account: Account, env: Mapping[str, str], folder: Path, log: Path) -> ProcessMark:
    """Start a server that can outlive us, in a session of its own, so that no signal of our terminal reaches it.

    A shell starts it and leaves: it is nobody's child but init's, which reaps it. `log` gets what it prints.
    """
    script = 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 & echo $!'
    started = subprocess.run(
        ["/bin/sh", "-c", script, "sh", str(log), *argv],
        env=dict(env),
        cwd=folder,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        check=True,
        start_new_session=True,
        umask=0o077,
        user=account.uid if account.switch else None,
        group=account.gid if account.switch else None,
        extra_groups=[] if account.switch else None,
    )
    pid = int(started.stdout)
    mark = mark_of(pid)
    if mark is None:
        raise ServersUnavailable(f"{argv[0]} ended at once; its last words: {last_words(log)}")
    return mark


def mark_of(pid: int) -> ProcessMark | None:
    """The mark of the process that has this pid now; None if there is none or all of it has ended."""
    stat = _stat(pid)
    return None if stat is None else ProcessMark(pid, stat[1])


def alive(mark: ProcessMark | None) -> bool:
    return mark is not None and mark_of(mark.pid) == mark


def send(mark: ProcessMark, number: signal.Signals) -> None:
    """Signal exactly that process; when it has ended, whoever has its pid now is left alone."""
    if alive(mark):
        with contextlib.suppress(ProcessLookupError):  # it ended between the look and the signal
            os.kill(mark.pid, number)


def tree(root: ProcessMark) -> list[ProcessMark]:
    """The process and everything descended from it, parents first; empty if it has ended.

    Process groups do not serve: every Postgres backend and Erlang's port starter lead groups of their own.
    """
    if not alive(root):
        return []
    children: dict[int, list[ProcessMark]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
            children.setdefault(stat[0], []).append(ProcessMark(int(entry.name), stat[1]))
    found = [root]
    for member in found:
        found.extend(children.get(member.pid, []))
    return found


def kill_tree(root: ProcessMark) -> None:
    """End a server and all of its children at once, as a power cut would: the root is stopped first so that it cannot start more."""
    send(root, signal.SIGSTOP)
    members = tree(root)
    for member in members:
        send(member, signal.SIGKILL)
    if not wait_until(lambda: not any(alive(member) for member in members), timeout=10.0):
        raise ServersUnavailable(f"process {root.pid} or a child of it is still there 10 s after SIGKILL")


def stop_tree(root: ProcessMark, number: signal.Signals, *, timeout: float) -> None:
    """Ask a server to end by its own clean signal; what is still there after `timeout` seconds is killed."""
    members = tree(root)
    for member in members:
        send(member, signal.SIGCONT)  # a frozen process would not hear the request
    send(root, number)
    if not wait_until(lambda: not alive(root), timeout=timeout):
        kill_tree(root)
    for member in members:  # a child that outlived its parent's clean end
        send(member, signal.SIGKILL)
    wait_until(lambda: not any(alive(member) for member in members), timeout=10.0)


def signal_tree(root: ProcessMark, number: signal.Signals) -> None:
    for member in tree(root):
        send(member, number)


def freeze_tree(root: ProcessMark) -> None:
    """Make a server and its children stand still; returns once each of their threads does (one at work stops a moment after the signal)."""
    members = tree(root)
    for member in members:
        send(member, signal.SIGSTOP)
    wait_until(lambda: all(_stands_still(member.pid) for member in members), timeout=_FREEZE_SECONDS)


def wait_until(condition: Callable[[], bool], *, timeout: float) -> bool:
    """Whether the condition came true within `timeout` seconds; looked at every 20 ms."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def command_line(pid: int) -> str:
    """The command line of a process, arguments separated by spaces; empty if it has ended."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def last_words(*logs: Path, lines: int = 5) -> str:
    """The last lines of a server's logs, for an error message."""
    words: list[str] = []
    for log in logs:
        if log.exists():
            words += [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-lines:]
    return " | ".join(words) or "(nothing was logged)"


def make_private_folder(path: Path, account: Account) -> None:
    """A folder that only `account` can enter (0700); one that is there already must be ours or that account's, and no link."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if path.is_symlink() or found.st_uid not in {os.geteuid(), account.uid}:
        raise ServersUnavailable(f"{path} belongs to another user; remove it or choose another folder")
    path.chmod(0o700)
    if account.switch:
        os.chown(path, account.uid, account.gid)


def write_private_file(path: Path, text: str, account: Account) -> None:
    """Write a file that only `account` can read (0600); it never exists with wider rights."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
        if account.switch:
            os.fchown(descriptor, account.uid, account.gid)


def plain_environment(extra: Mapping[str, str], *, path: Iterable[Path] = ()) -> dict[str, str]:
    """An environment for a server: nothing of the caller's own settings (PG…, RABBITMQ_…, LANG) leaks in."""
    folders = [str(folder) for folder in path] + ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    return {"PATH": ":".join(folders), "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", **extra}


def _stands_still(pid: int) -> bool:
    """Whether every thread of a process is stopped, or it has ended (proc(5): the state is field 3)."""
    try:
        stats = [(task / "stat").read_text() for task in (_PROC / str(pid) / "task").iterdir()]
    except OSError:
        return True
    return all(text[text.rindex(")") + 2] in "TtZX" for text in stats)


def _stat(pid: int) -> tuple[int, str] | None:
    """Parent pid and birth mark of a living process (proc(5): state, ppid and starttime are fields 3, 4 and 22)."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name in parentheses may itself hold spaces and parentheses
    if fields[0] in {"Z", "X"} and not _threads_left(pid):
        return None
    return int(fields[1]), f"{boot}.{fields[19]}"


def _threads_left(pid: int) -> bool:
    """Whether threads besides the first are left: until they have ended, too, what the process had open is open, its listening sockets among it."""
    try:
        return len(list((_PROC / str(pid) / "task").iterdir())) > 1
    except OSError:
        return False
