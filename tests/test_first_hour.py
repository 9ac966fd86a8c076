"""The first hour of a newcomer, from a fresh clone: each command of the README as written, in its order.

Every command must succeed and print no warning, no stack trace and nothing on stderr but progress; what it
leaves behind must be where the README says. It fails on the first surprise.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub_server import HubServer
from tests.support.waiting import DEADLINE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
# What a run says where other programs take most of the machine, and what it is right to say there.
SLOW_MACHINE = r"^warning: (GPTQ_RESERVE_SECONDS=1 is too short|out of time|.* continues without training).*"
STEPS = {"MAX_WALLCLOCK_SECONDS": "0", "ITERATIONS": "30", "EVAL_STRIDE": "0", "TTT_ENABLED": "0"}


class Newcomer:
    """A clone, and a shell in it."""

    def __init__(self, repo: Path, folder: Path) -> None:
        self.clone = folder / "my clone"
        self.home = folder  # where programs put what is theirs
        subprocess.run(["git", "clone", "--quiet", str(repo), str(self.clone)], check=True)
        # The environment that `make` would fill from the network, in minutes: this one, under its name.
        (self.clone / ".venv/bin").mkdir(parents=True)
        python = self.clone / ".venv/bin/python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
        torchrun = self.clone / ".venv/bin/torchrun"
        torchrun.write_text('#!/bin/sh\nexec python -m torch.distributed.run "$@"\n')
        torchrun.chmod(0o755)
        (self.clone / ".venv/.ready").touch()

    def environment(self, settings: dict[str, str]) -> dict[str, str]:
        """A shell's environment in which `python` is that of the clone."""
        path = f"{self.clone / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.home), "LANG": "C.UTF-8", **settings}

    def start(self, command: str, **settings: str) -> subprocess.Popen[str]:
        """Start a line of the README."""
        words = shlex.split(command)
        if re.search(r"[*|#]|^[A-Z_]+=", command):
            words = ["sh", "-c", command]
        return subprocess.Popen(
            words, cwd=self.clone, env=self.environment(settings), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )

    def do(self, command: str, expected: str = "", **settings: str) -> str:
        """Run a line of the README, which must succeed and surprise nobody. Returns what it prints.

        expected: a part of the one warning that it must print, if any.
        """
        process = self.start(command, **settings)
        out, err = process.communicate(timeout=5 * DEADLINE_SECONDS)
        assert process.returncode == 0, f"{command}\n{out}\n{err}"
        printed = re.sub(SLOW_MACHINE, "", out + err, flags=re.M)
        if expected:
            printed, times = re.subn(rf"^warning: .*{expected}.*", "", printed, flags=re.M)
            assert times == 1, f"{command}\n{out}\n{err}"
        surprises = re.findall(r"Traceback|[Ww]arning|^error:.*", printed, re.M)
        assert not surprises, f"{command}\n{out}\n{err}"
        return out

    def summary(self, run: str) -> dict[str, Any]:
        """What a run recorded of itself."""
        return json.loads((self.clone / "runs" / run / "summary.json").read_text("utf-8"))

    def runs(self) -> set[str]:
        """Names of all run directories."""
        return {path.name for path in (self.clone / "runs").iterdir()}


def own_data(me: Newcomer) -> None:
    """Shards from a hub, and shards of one's own text; a run on each."""
    sample = me.clone / "data/datasets/sample_sp1024"
    published = {"datasets/tokenizers/fineweb_1024_bpe.model":
                 (me.clone / "data/tokenizers/sample_1024_bpe.model").read_bytes()}
    for path in sample.glob("fineweb_*.bin"):
        published[f"datasets/datasets/fineweb10B_sp1024/{path.name}"] = path.read_bytes()
    hub = HubServer("willdepueoai/parameter-golf", published)
    try:
        # This hub has the sample under the challenge's name.
        me.do("python data/fineweb.py --variant sp1024 --train-shards 2",
              "not the challenge's validation set", HF_ENDPOINT=hub.endpoint)
    finally:
        hub.close()
    short = {**STEPS, "ITERATIONS": "2", "CONFIG": "configs/cpu_demo.env"}
    downloaded = {"DATA_PATH": "data/datasets/fineweb10B_sp1024", "RUN_ID": "downloaded",
                  "TOKENIZER_PATH": "data/tokenizers/fineweb_1024_bpe.model"}
    me.do("python train_gpt.py", **short, **downloaded)

    texts = [{"text": path.read_text("utf-8")} for path in sorted((me.clone / "data").glob("*.py"))]
    (me.home / "docs.jsonl").write_text("\n".join(map(json.dumps, texts)), "utf-8")
    options = f"--docs {me.home / 'docs.jsonl'} --name my_sp512 --train-tokenizer 512 --val-docs 2"
    out = me.do(f"python data/export.py {options}")
    assert "my_sp512" in out
    exported = {"DATA_PATH": "data/datasets/my_sp512", "VOCAB_SIZE": "512", "RUN_ID": "exported",
                "TOKENIZER_PATH": "data/tokenizers/my_sp512.model"}
    me.do("python train_gpt.py", **short, **exported)


def test_the_first_hour(repo: Path, tmp_path: Path) -> None:
    me = Newcomer(repo, tmp_path)
    targets = me.do("make")
    assert {"demo", "seeds", "test", "bench"} <= set(re.findall(r"^  ([a-z-]+) ", targets, re.M))

    # The demo: a run, its artifact, some text and a drawing, all in one place.
    out = me.do("make demo NAME=first")
    assert re.search(r" dtype:torch\.(float32|bfloat16) ", out) and "legal_ttt_exact" in out
    assert "The function returns" in out
    # What to expect is said before, and what was reached at the end.
    assert out.index("expect") < out.index("step:1/") < out.index("tokens per second")
    assert re.search(r"^  xz -9 +\d\.\d{4}$", out, re.M) and re.search(r"^  pairs of tokens +\d\.", out, re.M)
    files = {path.name for path in (me.clone / "runs/first").iterdir()}
    assert {"log.txt", "summary.json", "model.bin", "config.env", "train_gpt.py"} <= files
    assert any(name.endswith((".svg", ".png")) for name in files), files
    demo = me.summary("first")
    # Whether its seconds suffice depends on what else the machine does; that they are judged does not.
    assert demo["limits"]["artifact_bytes"]["ok"], demo["limits"]
    for limit in demo["limits"].values():
        assert limit["ok"] == (limit["value"] <= limit["limit"]), demo["limits"]

    # The artifact again, in a fresh process, with nothing else said: the same scores to the last bit.
    before = me.runs()
    me.do("python train_gpt.py", EVAL_ONLY="runs/first/model.bin")
    (again,) = me.runs() - before
    scored = me.summary(again)["losses"]
    # Diagnostics run only in the time that is left, of which a busy machine may leave none.
    shared = scored.keys() & demo["losses"].keys()
    assert "legal_ttt" in shared
    for name in shared:
        assert scored[name] == demo["losses"][name]
    assert "The function" in me.do('python -m tools generate runs/first/model.bin "The function returns"')

    # What it reached, said again.
    assert me.do("python -m tools summary runs/first").strip() in out

    # Its configuration starts the run again, here for a few steps. Ctrl-C, and on, as if nothing happened.
    me.do("python train_gpt.py", CONFIG="runs/first/config.env", RUN_ID="straight", **STEPS)
    assert me.summary("straight")["config"]["MODEL_DIM"] == demo["config"]["MODEL_DIM"]
    process = me.start("python train_gpt.py", CONFIG="runs/first/config.env", RUN_ID="stopped", **STEPS)
    log = me.clone / "runs/stopped/log.txt"
    while process.poll() is None and not (log.exists() and "\nstep:1/" in log.read_text("utf-8")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=5 * DEADLINE_SECONDS)
    assert process.returncode == 128 + signal.SIGINT, out + err
    assert "signal 2" in err and "checkpoint" in err
    assert "stopped by signal 2; continue with RESUME=runs/stopped\n" in out
    me.do("python train_gpt.py", RESUME="runs/stopped")
    for key in ("losses", "stream_hash", "steps"):
        assert me.summary("stopped")[key] == me.summary("straight")[key], key
    assert me.summary("stopped")["artifact"]["sha256"] == me.summary("straight")["artifact"]["sha256"]

    # Seeds, a record, its audit, a comparison, drawings.
    me.do("make seeds SEEDS='1 2' NAME=mine CONFIG=runs/first/config.env", **STEPS)
    identity = "--author Me --github-id me --blurb 'A first try.'"
    me.do(f"python -m tools pack runs/mine-seed* --name MyIdea --track track_mine {identity}")
    (record,) = (me.clone / "records/track_mine").iterdir()
    checked = me.do(f"python -m tools check records/track_mine/{record.name}")
    assert re.search(r"\b0 FAIL", checked)
    me.do("python -m tools check records/track_cpu_demo/2026-11-27_Default")
    me.do("python -m tools diff runs/mine-seed1 runs/mine-seed2")
    me.do("python -m tools plot runs/mine-seed1 runs/mine-seed2 --out curves.png")
    assert (me.clone / "curves.png").read_bytes()[:4] == b"\x89PNG"

    # Many runs: a sweep and its table. A name with a space, and what is printed for it.
    rates = me.home / "rates.txt"
    rates.write_text("seeds: 1 2\nall: CONFIG=runs/first/config.env\nbase:\nlow: MATRIX_LR=0.02\n")
    assert re.search(r"^low +2 ", me.do(f"python -m tools sweep {rates}", **STEPS), re.M)
    low = me.do("python -m tools runs runs --sort val_bpb --where MATRIX_LR=0.02")
    assert "low-seed1" in low and "base-seed1" not in low
    me.do("python train_gpt.py", CONFIG="runs/first/config.env", RUN_ID="two words", **STEPS)
    (again,) = re.findall(r"^again: (.*)", me.do("python -m tools summary 'runs/two words'"), re.M)
    me.do(again)

    # A trace, and its drawing beside it.
    traced = {**STEPS, "ITERATIONS": "12", "RUN_ID": "traced", "CONFIG": "runs/first/config.env"}
    me.do("python train_gpt.py", TRACE_STEPS="5:8", **traced)
    assert json.loads((me.clone / "runs/traced/trace_rank0.json").read_text("utf-8"))
    me.do("python -m tools timeline runs/traced")
    assert (me.clone / "runs/traced/timeline.png").exists()

    # Two ranks on one CPU, as many as a node has GPUs.
    ranks = {**STEPS, "RUN_ID": "ranks", "CONFIG": "runs/first/config.env", "OMP_NUM_THREADS": "1"}
    me.do("torchrun --standalone --nproc_per_node=2 train_gpt.py", **ranks)
    assert me.summary("ranks")["hardware"]["world_size"] == 2
    assert me.summary("ranks")["stream_hash"] == me.summary("straight")["stream_hash"]

    # The proofs, and what a change must pass: here as far as `make test` collects it.
    assert "proven" in me.do("python -m tools prove train_gpt.py")
    me.do("python -m ruff check .")
    collected = me.do("python -m pytest -qq --collect-only -W ignore -p no:cacheprovider")
    assert re.search(r"^tests/script/test_run.py: \d+$", collected, re.M)
    assert "pytest -q" in me.do("make --dry-run test")

    own_data(me)

    # What git does not ignore is what was made on purpose.
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=me.clone, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    made = {line[3:].rstrip("/").split("/")[0] for line in changed}
    assert made <= {"records", "curves.png"}, changed


def test_a_technique_goes_in_with_every_fast_test_and_out_again(repo: Path, tmp_path: Path) -> None:
    me = Newcomer(repo, tmp_path)
    page = (me.clone / "docs/hacking.md").read_text("utf-8")
    for command in page.split("## A whole technique")[1].split("```\n")[1].splitlines():
        me.do(command)
    me.do("python -m mypy train_gpt.py")
    # Its packages print warnings of their own.
    suite = me.start("make test")
    out, err = suite.communicate(timeout=5 * DEADLINE_SECONDS)
    assert suite.returncode == 0 and " passed" in out, f"{out}\n{err}"
    me.do("git apply -R z.patch")
    assert me.do("git status --porcelain") == "?? z.patch\n"
