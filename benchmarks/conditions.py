"""Where and when something is measured: machine, versions, commit and the script's hash, in one line."""

import hashlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

REPO = Path(__file__).resolve().parents[1]


def processor() -> str:
    """The name of the processor, as far as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit of the repository, with `-dirty` behind it if a program differs from that commit."""
    revision = ["git", "rev-parse", "--short", "HEAD"]
    ended = subprocess.run(revision, cwd=REPO, capture_output=True, encoding="utf-8", check=False)
    name = ended.stdout.strip() or "unknown"
    difference = ["git", "diff", "--quiet", "HEAD", "--", "*.py"]
    is_changed = subprocess.run(difference, cwd=REPO, check=False).returncode != 0
    return f"{name}-dirty" if is_changed else name


def script_hash() -> str:
    """The first digits of the SHA-256 of train_gpt.py."""
    return hashlib.sha256((REPO / "train_gpt.py").read_bytes()).hexdigest()[:12]


def conditions() -> dict[str, Any]:
    """Take them before a measurement, which is what loads the machine."""
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "processor": processor(), "cores": os.cpu_count(),
        "threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
        "commit": commit(), "script": script_hash(),
    }


def described(at: dict[str, Any]) -> str:
    """The conditions in one line."""
    device = f"{at['gpu']}, " if at["gpu"] else ""
    return (
        f"{at['date']}, {device}{at['processor']}, {at['cores']} cores, {at['threads']} threads, load "
        f"average {at['load']} before, Python {at['python']}, torch {at['torch']}, numpy {at['numpy']}, "
        f"commit {at['commit']}, train_gpt.py {at['script']}"
    )
