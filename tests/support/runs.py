"""Run directories as train_gpt.py leaves them, generated for the tests of the tools."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

import train_gpt
from tools.__main__ import main
from tools.runs.rules import bits_per_byte

SOURCE = '"""A stand-in for the training script."""\n\nLEARNING_RATE = 0.02\n' + "".join(
    f"LAYER_{i} = {i * 37 % 101}\n" for i in range(200)
)
TOKENS, TEXT_BYTES = 40_000, 97_512
MODEL_BYTES = 300_000
DOCUMENTS = 50  # of the validation text
BASE_NATS = {"roundtrip": 2.95, "sliding_window": 2.93, "legal_ttt": 2.92}
CONFIG = {
    "DATA_PATH": "data/datasets/sample", "ITERATIONS": "400", "MATRIX_LR": "0.02",
    "ARTIFACT_BYTES_MAX": "1150000", "TRAIN_BATCH_TOKENS": "2048",
}
STEPS = 400
STEP_MS = 50.0
LOG_EVERY = 20


def wrap(source: str) -> bytes:
    """A script in the form that runs of 0.5 shipped, which had no settings in it."""
    return train_gpt.shipped_code(source.encode()).replace(b"SHIPPED_SETTINGS={}\n", b"")


def make_run(
    path: Path, seed: int, *, source: str = SOURCE, gain: float = 0.0, config: dict[str, str] | None = None,
    slow_step: int | None = None, summary_changes: dict[str, Any] | None = None,
) -> Path:
    """Write a finished run. `gain` lowers every loss; `slow_step` makes the loader stall before that step."""
    path.mkdir(parents=True)
    settings = {**CONFIG, **(config or {}), "SEED": str(seed), "RUN_ID": path.name}
    nats = {name: value - gain + 0.001 * (seed % 7) + seed * 1e-7 for name, value in BASE_NATS.items()}
    losses = {name: _loss(value) for name, value in nats.items()}
    (path / "train_gpt.py").write_text(source, encoding="utf-8")
    (path / "config.env").write_text("".join(f"{k}={v}\n" for k, v in settings.items()), encoding="utf-8")
    events = _train_events(seed, gain, slow_step)
    (path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events), encoding="utf-8")
    (path / "log.txt").write_text(_log(settings, losses, events, len(source.encode())), encoding="utf-8")
    for name, loss in losses.items():
        shares = np.random.default_rng(seed).dirichlet(np.ones(DOCUMENTS))
        (shares * loss["nats"] * TOKENS).tofile(path / f"nats_{name}.bin")
    model = bytes([seed % 256]) * MODEL_BYTES
    (path / "model.bin").write_bytes(model)
    summary = {
        "run_id": path.name,
        "seed": seed,
        "config": settings,
        "overrides": {"MATRIX_LR": "0.02", "SEED": str(seed)},
        "code": {"sha256": hashlib.sha256(source.encode()).hexdigest(), "bytes": len(source.encode())},
        "stream_hash": f"{seed:016x}",
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "numpy": "2.4.6", "cuda": None},
        "hardware": {"gpus": [], "cores": 2, "world_size": 1},
        "phases": {"preflight": 1.25, "train": STEPS * STEP_MS / 1e3, "eval_sliding_window": 4.0,
                   "eval_legal_ttt": 9.5},
        "steps": STEPS,
        "losses": losses,
        "artifact": {"bytes": len(model), "sha256": hashlib.sha256(model).hexdigest()},
        "limits": {"train_seconds": {"value": 20.0, "limit": 60.0, "ok": True}},
        "comparable": True,
        "exit": "finished",
        **(summary_changes or {}),
    }
    (path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return path


def _loss(nats: float) -> dict[str, Any]:
    bpb = bits_per_byte(nats, TOKENS, TEXT_BYTES)
    return {"nats": nats, "bits_per_byte": bpb, "scored_tokens": TOKENS, "bytes": TEXT_BYTES}


def _train_events(seed: int, gain: float, slow_step: int | None) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    clock = 0.0
    noise = random.Random(seed)
    validated = {200: 3.0, 400: 2.96}
    for step in range(LOG_EVERY, STEPS + 1, LOG_EVERY):
        stall = 2000.0 if step == slow_step else 0.0
        clock += LOG_EVERY * STEP_MS + stall + noise.uniform(0.0, 10.0)
        loss = 3.0 + 4.0 / step - gain
        if step > LOG_EVERY:  # the first line is the same for every seed
            loss += noise.uniform(-0.005, 0.005)
        event = {
            "event": "train", "step": step, "train_loss": loss, "train_time_ms": clock,
            "tokens": step * 2048, "progress": step / STEPS,
        }
        events.append({**event, "data_wait_max_ms": stall or 0.02})
        if step in validated:
            nats = validated[step]
            score = {"val_loss": nats, "val_bpb": bits_per_byte(nats, TOKENS, TEXT_BYTES)}
            events.append({"event": "val", "step": step, **score, "train_time_ms": clock})
    return events


def _log(
    settings: dict[str, str], losses: dict[str, Any], events: list[dict[str, Any]], code_bytes: int
) -> str:
    lines = [f"  {name}={value}" for name, value in settings.items()]
    lines += [
        "Running Python 3.11.7 PyTorch 2.13.0+cpu on x86_64 CPU dtype:torch.float32 compile:0 threads:2",
        "train_loader:dataset:sample train_shards:4",
        f"val_loader:shards pattern=data/sample/fineweb_val_*.bin tokens:{TOKENS} bytes:{TEXT_BYTES}",
        "world_size:1 grad_accum_steps:1",
        "train_batch_tokens:2048 train_seq_len:128 iterations:400 max_wallclock_seconds:60.000",
        f"seed:{settings['SEED']}",
    ]
    for event in events:
        head = f"step:{event['step']}/400"
        time_ms = event["train_time_ms"]
        clock = f"train_time:{time_ms:.0f}ms step_avg:{time_ms / event['step']:.2f}ms"
        if event["event"] == "train":
            lines.append(f"{head} train_loss:{event['train_loss']:.4f} {clock} data_wait_ms:0.02/0.02/0.02")
        else:
            lines.append(f"{head} val_loss:{event['val_loss']:.4f} val_bpb:{event['val_bpb']:.4f} {clock}")
    labels = {
        "roundtrip": "final_int6_roundtrip",
        "sliding_window": "final_int6_sliding_window",
        "legal_ttt": "legal_ttt",
    }
    for name, label in labels.items():
        nats, bpb = losses[name]["nats"], losses[name]["bits_per_byte"]
        lines.append(f"{label} val_loss:{nats:.4f} val_bpb:{bpb:.4f} eval_time:4321ms")
        counts = f"scored_tokens:{TOKENS} val_bytes:{TEXT_BYTES}"
        lines.append(f"{label}_exact val_loss:{nats:.8f} val_bpb:{bpb:.8f} {counts}")
    lines += [
        f"Code size: {code_bytes} bytes (raw)",
        f"Serialized model int6+rans: {MODEL_BYTES} bytes",
        f"Total submission size int6+rans: {MODEL_BYTES + code_bytes} bytes",
    ]
    return "\n".join(lines) + "\n"


def make_runs(folder: Path, *seeds: int, **options: Any) -> list[Path]:
    return [make_run(folder / f"run_{seed}", seed, **options) for seed in seeds]


def pack(records: Path, runs: list[Path], *options: str, name: str = "Test") -> Path:
    """Pack `runs` into the demo track of `records`; returns the folder."""
    identity = ["--author", "A", "--github-id", "a", "--blurb", "B."]
    place = ["--records", str(records), "--track", "track_demo", "--date", "2026-05-01", "--name", name]
    assert main(["pack", *map(str, runs), *identity, *place, *options]) == 0
    return records / "track_demo" / f"2026-05-01_{name}"
