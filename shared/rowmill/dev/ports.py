"""Choosing loopback ports and asking what listens on one."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from pathlib import Path

from rowmill.dev.processes import wait_until

LOOPBACK = "127.0.0.1"

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000


def free_ports(count: int) -> list[int]:
    """`count` different ports that nothing listens on now.

    They lie under the range that the kernel hands to outgoing connections where that leaves room, so that a server which is down for a
    moment (a restart, a test that kills it) finds its port free when it returns. Random rather than counted up: several sets start at once.
    """
    first_ephemeral = int(_RANGE_FILE.read_text().split()[0]) if _RANGE_FILE.exists() else 32_768
    highest = first_ephemeral - 1 if first_ephemeral > _LOWEST + 1_000 else 60_000
    candidates = random.SystemRandom().sample(range(_LOWEST, highest + 1), k=min(500, highest - _LOWEST))
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            break
        if is_free(port):
            found.append(port)
    if len(found) < count:
        raise OSError(f"no {count} free ports on {LOOPBACK} between {_LOWEST} and {highest}")
    return found


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now; connections of a former server that linger do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def come_free(ports: Iterable[int], *, timeout: float = 5.0) -> bool:
    """Whether a server could listen on each of these, at once or within `timeout` seconds: who knows our URL should find us there again."""
    ports = list(ports)
    return wait_until(lambda: all(is_free(port) for port in ports), timeout=timeout)


def speaks_amqp(host: str, port: int, *, timeout: float = 2.0) -> bool:
    """Whether an AMQP 0.9.1 broker answers there; RabbitMQ opens its listener only when it has finished starting."""
    try:
        with socket.create_connection((host, port), timeout) as connection:
            connection.settimeout(timeout)
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return connection.recv(1) == b"\x01"  # a method frame: connection.start
    except OSError:
        return False


def speaks_postgres(host: str, port: int, *, timeout: float = 2.0) -> bool:
    """Whether a Postgres server answers there: it replies to an SSLRequest with one byte, S or N, before any login."""
    try:
        with socket.create_connection((host, port), timeout) as connection:
            connection.settimeout(timeout)
            connection.sendall(b"\x00\x00\x00\x08\x04\xd2\x16\x2f")
            return connection.recv(1) in {b"S", b"N"}
    except OSError:
        return False
