"""No network for a script under audit: refused in its own process, out of reach for its children."""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import sys
from typing import Any

LOOPBACK = "lo"
SET_FLAGS = 0x8914  # SIOCSIFFLAGS of Linux
UP_AND_RUNNING = 0x1 | 0x40
TRIED = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")


def namespace_command() -> list[str]:
    """What starts a command in a network namespace of its own; empty where the system has none for us."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return []
    command = [unshare, "--map-root-user", "--net", "--"]
    try:
        done = subprocess.run([*command, "true"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return command if done.returncode == 0 else []


def is_out_of_reach() -> bool:
    """Whether this process, and with it all its children, has no interface but the loopback."""
    if not sys.platform.startswith("linux"):
        return False
    return all(name == LOOPBACK for _, name in socket.if_nameindex())


def start_loopback() -> None:
    """In a new namespace the loopback is down, and ranks could not talk to each other."""
    import fcntl  # not on every system

    request = struct.pack("16sh14x", LOOPBACK.encode(), UP_AND_RUNNING)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, request)


def refuse(attempts: list[str]) -> None:
    """From now on every socket call in this process is noted and refused."""

    def watch(event: str, details: Any) -> None:
        if event in TRIED:
            attempts.append(f"{event} {details}")
            raise PermissionError(f"the proof blocks the network: {event}")

    sys.addaudithook(watch)
