"""What the process of a script under audit may see: as little of the user's as the system allows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools import REPO
from tools.prove import network

# Of the environment; the locale decides how the system's bytes become the names of files.
KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "PYTHONUTF8", "PYTHONCOERCECLOCALE")
# A user, mounts and processes of its own; its end is the end of all in it.
OWN = ["unshare", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]


def environment() -> dict[str, str]:
    """Of a script's process: one thread, no GPU, and nothing of the user's but PATH and the locale."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    ours = {
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if os.environ.get("ATEN_CPU_CAPABILITY"):  # how numbers are rounded
        ours["ATEN_CPU_CAPABILITY"] = os.environ["ATEN_CPU_CAPABILITY"]
    if sys.platform.startswith("linux"):
        ours["GLOO_SOCKET_IFNAME"] = network.LOOPBACK
    return kept | ours


def command(folder: Path, keep: list[Path]) -> tuple[list[str], str]:
    """What starts a process behind walls, and what these are, in words; empty where the system has none.

    folder: where the process may write. keep: files of the user that it needs.
    """
    bare = "environment, home and working folder are its own; it may read all that you may read"
    hide = [sys.executable, "-S", "-m", "tools.prove.walls"]
    home = Path.home().resolve()
    python = [Path(path) for path in (*sys.path, sys.prefix, sys.base_prefix) if path]
    needed = [*python, REPO, folder, *keep]
    inside = needed_below(home, needed)
    if inside is None:
        return (OWN, f"{bare}; it sees no other process") if works(OWN) else ([], bare)
    arguments = [str(folder / "kept"), str(home), *map(str, inside), "--"]
    # The inner namespace cannot take away what the outer one has mounted.
    prefix = ["unshare", "--map-root-user", "--mount", "--", *hide, *arguments, *OWN]
    if works(prefix):
        # A proof is published with a record: it names no folder above the home.
        shown = ", ".join(str(path.relative_to(home)) for path in inside) or "nothing"
        return prefix, f"environment, home, processes and /dev/shm are its own; of your home it sees {shown}"
    return (OWN, f"{bare}; it sees no other process") if works(OWN) else ([], bare)


def needed_below(home: Path, needed: list[Path]) -> list[Path] | None:
    """Of the files that are needed those below `home`, none inside another; None if it is needed whole."""
    below = sorted({path.absolute() for path in needed if path.exists() and home in path.absolute().parents})
    if any(path.absolute() == home or path.absolute() in home.parents for path in needed if path.is_dir()) \
            or home == Path("/"):  # fmt: skip
        return None
    return [path for path in below if not any(other in path.parents for other in below)]


def works(prefix: list[str]) -> bool:
    """Whether the system starts a process in this way."""
    if shutil.which(prefix[0]) is None:
        return False
    try:
        # `env` looks for modules where the auditor's are.
        done = subprocess.run(
            [*prefix, "true"], capture_output=True, timeout=20, check=False, env=environment()
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def hide(stage: Path, home: Path, kept: list[Path]) -> None:
    """In a mount namespace of our own: an empty `home` but for some files, and an empty /dev/shm."""
    stage.mkdir(parents=True, exist_ok=True)
    places = []
    for number, path in enumerate(kept):
        place = stage / str(number)
        _same_kind(path, place)
        _mount("--rbind", str(path), str(place))
        places.append(place)
    _mount("-t", "tmpfs", "none", str(home))
    for path, place in zip(kept, places, strict=True):
        _same_kind(place, path)
        _mount("--rbind", str(place), str(path))
    if Path("/dev/shm").is_dir():
        _mount("-t", "tmpfs", "none", "/dev/shm")


def _same_kind(path: Path, place: Path) -> None:
    """A folder or file at `place`, as at `path`, to mount upon."""
    if path.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def main(arguments: list[str]) -> None:
    """STAGE HOME KEPT … -- COMMAND …: hide, then become the command."""
    end = arguments.index("--")
    stage, home, *kept = map(Path, arguments[:end])
    hide(stage, home, kept)
    os.execvp(arguments[end + 1], arguments[end + 1 :])


if __name__ == "__main__":
    main(sys.argv[1:])
