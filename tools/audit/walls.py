"""Walls around the process of a script: one folder to write to, no network, no home, no other process.

Everything else that the system has is read-only there. One namespace is inside another: what the
outer one mounts the inner one cannot take away, even as its root.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import REPO

OUTER = ["unshare", "--map-root-user", "--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child",
         "--mount-proc", "--"]
INNER = ["unshare", "--map-root-user", "--mount", "--"]
NONE = ("WITHOUT WALLS: this system has no user namespaces, so the script could read and write what you"
        " can, and reach the network; run it on Linux with user namespaces, or on a machine that holds"
        " nothing of yours")
# Places that are empty inside: those of sockets, of shared memory, and where everybody may write.
EMPTY = ("/tmp", "/var/tmp", "/run", "/var/run", "/dev/shm")
# Of /proc, where a process as root could change the system.
OF_THE_KERNEL = ("bus", "fs", "irq", "sys", "sysrq-trigger")
DEVICES = ("null", "zero", "full", "random", "urandom")
FROM_US = ("PATH", "LANG", "ATEN_CPU_CAPABILITY")  # of the environment; the last says how numbers are rounded


def environment(home: Path, threads: int = 1) -> dict[str, str]:
    """Of a script's process: no GPU, a home of its own, and nothing else of yours."""
    kept = {name: os.environ[name] for name in FROM_US if name in os.environ}
    if sys.platform.startswith("linux"):
        kept["GLOO_SOCKET_IFNAME"] = "lo"
    return kept | {
        "PYTHONPATH": str(REPO), "HOME": str(home), "TMPDIR": str(home), "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "0", "CUDA_VISIBLE_DEVICES": "",
    }


def around(writable: Path, readable: Sequence[Path], hidden: Sequence[Path] = ()) -> tuple[list[str], str]:
    """What starts a process behind walls, and what these are, in words. An empty list: there are none.

    readable: files and folders that it needs although they are where all is hidden. hidden: what else is.
    """
    python = [Path(path) for path in (*sys.path, sys.prefix, sys.base_prefix, sys.executable) if path]
    wanted = {form for path in (*python, REPO, *readable) for form in (path.absolute(), path.resolve())}
    kept = [str(path) for path in sorted(wanted) if path.exists()]
    home = Path.home().resolve()
    homes = [home] if home != Path("/") and not any(home.is_relative_to(path) for path in kept) else []
    plan = {"writable": str(writable), "kept": kept, "hidden": list(map(str, (*hidden, *homes)))}
    prefix = [*OUTER, sys.executable, "-S", "-m", "tools.audit.walls", json.dumps(plan), *INNER]
    if not starts(prefix, writable):
        return [], NONE
    empty = "an empty home and /tmp" if homes else "an empty /tmp"
    return prefix, f"no network, no other process, {empty}, everything read-only except the proof's folder"


def starts(prefix: Sequence[str], home: Path) -> bool:
    """Whether the system starts a process in this way."""
    if shutil.which(prefix[0]) is None:
        return False
    try:
        done = subprocess.run([*prefix, "true"], capture_output=True, timeout=60, check=False,
                              env=environment(home), cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


# --- inside ---

READ_ONLY = 1  # MOUNT_ATTR_RDONLY
WHOLE_TREE = 0x8000  # AT_RECURSIVE
BIND, RECURSIVE = 4096, 16384  # MS_BIND, MS_REC
MOUNT_SETATTR = 442  # the number of the system call, on every architecture that has it (Linux 5.12)


def build(writable: Path, kept: Sequence[Path], hidden: Sequence[Path]) -> None:
    """In a mount namespace of our own: hide, then make all read-only but the folder and what is empty."""
    # Once their place is hidden they have no path any more, but they stay open.
    opened = [(path, os.open(path, os.O_PATH)) for path in sorted({writable, *kept})]
    empty = [Path(place) for place in EMPTY if Path(place).is_dir() and not Path(place).is_symlink()]
    hidden = [*hidden, *empty]
    for place in hidden:
        place.mkdir(parents=True, exist_ok=True)  # it may be in one that is hidden by now
        mount("none", place, "tmpfs")
    for path, descriptor in opened:
        if path != writable and not any(path.is_relative_to(place) for place in hidden):
            continue
        if stat.S_ISDIR(os.stat(f"/proc/self/fd/{descriptor}").st_mode):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.touch()
        mount(f"/proc/self/fd/{descriptor}", path, "", BIND | RECURSIVE)
        os.close(descriptor)
    only_harmless_devices()
    of_the_kernel = [path for path in (Path("/proc", name) for name in OF_THE_KERNEL) if path.exists()]
    for path in of_the_kernel:
        mount(str(path), path, "", BIND)
    set_read_only(Path("/"), True, WHOLE_TREE)
    for path in (writable, *empty, Path("/proc")):  # the inner namespace writes its map of users to /proc
        set_read_only(path, False)


def only_harmless_devices() -> None:
    """A /dev that holds no disk. As root a script could write to one although its files are read-only."""
    devices = [(name, os.open(f"/dev/{name}", os.O_PATH)) for name in DEVICES]
    shared = os.open("/dev/shm", os.O_PATH) if Path("/dev/shm").is_dir() else None
    mount("none", Path("/dev"), "tmpfs")
    for name, descriptor in devices:
        Path("/dev", name).touch()
        mount(f"/proc/self/fd/{descriptor}", Path("/dev", name), "", BIND)
    if shared is not None:
        Path("/dev/shm").mkdir()
        mount(f"/proc/self/fd/{shared}", Path("/dev/shm"), "", BIND)


def mount(source: str, place: Path, kind: str, flags: int = 0) -> None:
    """mount(2). OSError."""
    done = ctypes.CDLL(None, use_errno=True).mount(source.encode(), bytes(place), kind.encode(), flags, None)
    if done != 0:
        raise OSError(ctypes.get_errno(), f"mount {source} on {place}")


def set_read_only(place: Path, read_only: bool, flags: int = 0) -> None:
    """mount_setattr(2), which C libraries have no function for. OSError."""
    attributes = struct.pack("4Q", READ_ONLY * read_only, READ_ONLY * (not read_only), 0, 0)
    here = ctypes.c_long(-100)  # AT_FDCWD
    done = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(MOUNT_SETATTR), here, bytes(place), ctypes.c_long(flags), attributes,
        ctypes.c_long(len(attributes)))
    if done != 0:
        raise OSError(ctypes.get_errno(), f"mount_setattr {place}")


def start_loopback() -> None:
    """Bring up the loopback of the new network namespace, over which ranks talk."""
    import fcntl

    set_flags, up_and_running = 0x8914, 0x41  # SIOCSIFFLAGS; IFF_UP | IFF_RUNNING
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", up_and_running))


def main(text: str, command: list[str]) -> None:
    """Build the walls of a plan, then become the command."""
    plan = json.loads(text)
    here = os.getcwd()
    start_loopback()
    kept, hidden = ([Path(path) for path in plan[name]] for name in ("kept", "hidden"))
    build(Path(plan["writable"]), kept, hidden)
    os.chdir(here)  # which was the same folder before the walls
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
