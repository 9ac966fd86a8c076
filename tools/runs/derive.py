"""The claims of a packed folder, derived from logs and summaries, by pack and again by check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tools.runs.errors import RecordError
from tools.runs.folder import FORMAT, number, read_object
from tools.runs.logs import STAGES, RunLog
from tools.runs.rules import OFFICIAL, OWN, RECORD_SEEDS_MIN
from tools.runs.stats import Comparison, compare, deviation, mean
from tools.runs.techniques import technique_summary

IDENTITY = ("author", "github_id", "name", "blurb", "date", "track")
OTHER_CODE = " after "  # in the hash of the code, between the scripts of a run that RESUME_OTHER_CODE went on
PROVED_UNTIL_0_6_2 = {"B5": "score_first", "B15": "no_network"}  # by the names of its checks
SCORE_FIRST = {"endings", "sums"}  # the laws that a score keeps which learns from nothing before it is scored


@dataclass(frozen=True)
class Evidence:
    """One seed's log and summary."""

    seed: int
    log: RunLog
    summary: Mapping[str, Any]


def nested(value: Mapping[str, Any], *keys: str) -> Any:
    """`value[k1][k2]…`, or None where a level is missing."""
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def audited_bytes(manifest: Path) -> Any:
    """Bytes of the validation text, as whoever made the data audited them; None where nobody did.

    Those of the sidecar where there is one, else those of the text that the tokens decode to.
    """
    audit = mapping(read_object(manifest) or {}, "splits", "val", "audit")
    return audit.get("sidecar_bytes", audit.get("decoded_bytes"))


def is_of_mixed_code(summary: Mapping[str, Any]) -> bool:
    """Whether a run went on with another script than it began with (RESUME_OTHER_CODE)."""
    # `former` was written until 0.5.4, both hashes in one text since then.
    return OTHER_CODE in str(nested(summary, "code", "sha256")) or bool(nested(summary, "code", "former"))


def is_limited(summary: Mapping[str, Any]) -> bool:
    """Whether a run scored only the first tokens of its text (VAL_TOKENS_LIMIT)."""
    return nested(summary, "config", "VAL_TOKENS_LIMIT") not in (None, "", "0")


def validation_set(summary: Mapping[str, Any], log: RunLog) -> str:
    """What a run was scored on, in the words of its log; empty for older runs, which do not say."""
    kind = nested(summary, "data", "validation")
    name = nested(summary, "data", "validation_name")
    if kind == OFFICIAL:
        return f"{OFFICIAL} ({name})"
    if kind == OWN:
        return OWN
    return log.validation_set.value if log.validation_set else ""


def mapping(value: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """`value[k1][k2]…` where it is a mapping, else an empty one."""
    found = nested(value, *keys)
    return found if isinstance(found, Mapping) else {}


def stage_scores(log: RunLog) -> dict[str, float]:
    """Bits per byte after each stage of a run that the log has a score of, in order."""
    scores = {}
    for stage in STAGES:
        score = log.score_after(stage)
        if score is not None:
            scores[stage] = score.bpb
    return scores


def stage_means(results: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The means over seeds that reviewers of the challenge want to see; None where a seed lacks a stage."""

    def mean_of(stage: str) -> float | None:
        values = [result["stages"].get(stage) for result in results]
        return _rounded(mean(values), 8) if None not in values else None

    before, after, windows, ttt = map(mean_of, STAGES)
    pre_ttt = after if windows is None else windows
    gain = pre_ttt - ttt if pre_ttt is not None and ttt is not None else None
    return {"pre_quant_val_bpb": before, "post_quant_val_bpb": after, "pre_ttt_val_bpb": pre_ttt,
            "ttt_gain_bpb": _rounded(gain, 8)}


def seed_result(evidence: Evidence, code_bytes: int) -> dict[str, Any]:
    """One seed's numbers, each from its log; hashes and phases from its summary."""
    log = evidence.log
    summary = evidence.summary
    score = log.headline
    model = log.model_bytes
    if score is None or model is None or log.steps_done is None:
        raise RecordError(f"{log.path} has no final metric, model bytes or steps: the run did not finish")
    phases = mapping(summary, "phases")
    return {
        "metric": score.label,
        "val_loss": score.loss,
        "val_bpb": score.bpb,
        "scored_tokens": score.scored_tokens,
        "val_bytes": score.val_bytes,
        "model_bytes": model.bytes,
        "artifact_bytes": model.bytes + code_bytes,
        "steps": log.steps_done,
        "step_avg_ms": _rounded(log.step_ms, 3),
        "train_time_s": _rounded(log.train_seconds, 3),
        "eval_time_s": _rounded(score.eval_seconds if score.eval_seconds else _phase(phases, "eval"), 3),
        "run_id": nested(summary, "run_id"),
        "stream_hash": nested(summary, "stream_hash"),
        "artifact_sha256": nested(summary, "artifact", "sha256"),
        "stages": stage_scores(log),
    }


def _phase(phases: Mapping[str, Any], name: str) -> float | None:
    """Seconds of the phases whose name begins with `name`."""
    seconds = [number(value) or 0.0 for key, value in phases.items() if str(key).startswith(name)]
    return sum(seconds) if seconds else None


def _rounded(value: float | None, places: int) -> float | None:
    return round(value, places) if value is not None else None


def submission(
    identity: Mapping[str, Any],
    evidences: Sequence[Evidence],
    code_bytes: int,
    files: Mapping[str, str],
    comparison: Mapping[str, Any] | None,
    data: Mapping[str, Any] | None,
    proof: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole of submission.json; `files` maps names to SHA-256.

    `comparison` comes from `compare_with`, `data` from `data_facts`, `proof` from `proof_facts`. The identity
    has what only packing knew: the attribution, too.
    """
    ordered = sorted(evidences, key=lambda evidence: evidence.seed)
    results = {str(evidence.seed): seed_result(evidence, code_bytes) for evidence in ordered}
    losses = [result["val_loss"] for result in results.values()]
    bpbs = [result["val_bpb"] for result in results.values()]
    first = ordered[0].summary
    largest = max(result["artifact_bytes"] for result in results.values())
    return {
        "format": FORMAT,
        **{key: identity.get(key, "") for key in IDENTITY},
        "technique_summary": technique_summary(mapping(first, "config")),
        "attribution": dict(mapping(identity, "attribution")),
        "proof": dict(proof) if proof else None,
        "metric": next(iter(results.values()))["metric"],
        "val_loss": _rounded(mean(losses), 8),
        "val_loss_std": _rounded(deviation(losses), 8),
        "val_bpb": _rounded(mean(bpbs), 8),
        "val_bpb_std": _rounded(deviation(bpbs), 8),
        **stage_means(list(results.values())),
        "seeds": [evidence.seed for evidence in ordered],
        "seed_results": results,
        "bytes_total": largest,
        "bytes_code": code_bytes,
        "artifact_bytes_max": largest,
        "hardware": hardware(first, ordered[0].log),
        "pytorch_version": nested(first, "versions", "torch"),
        "cuda_version": nested(first, "versions", "cuda"),
        "compliance": compliance([evidence.summary for evidence in ordered]),
        "comparison": dict(comparison) if comparison else None,
        "all_runs": [
            {"run_id": r["run_id"], "seed": int(seed), "val_bpb": r["val_bpb"]} for seed, r in results.items()
        ],
        "files": dict(sorted(files.items())),
        "data": dict(data) if data else None,
    }


def data_facts(
    summary: Mapping[str, Any], manifest: Mapping[str, Any] | None, case_marks: bool
) -> dict[str, Any]:
    """What a run scored and where it comes from: the `data` object.

    manifest: the one next to the run's shards, None where there was none. case_marks: whether the tokenizer
    has those of CaseOps, which count no bytes.
    """
    said = manifest or {}
    settings = mapping(summary, "config")
    # Older runs record neither, and their folders stay as they are.
    recorded = mapping(summary, "data")
    newer = {key: recorded[key] for key in ("validation", "validation_name") if key in recorded}
    files = [file for file in mapping(said, "files").values() if isinstance(file, Mapping)]
    return {
        "dataset": PurePosixPath(str(settings.get("DATA_PATH", ""))).name,
        "source": nested(said, "source"),
        "revision": nested(said, "revision"),
        "train_shards": sum(file.get("split") == "train" for file in files),
        "tokenizer": PurePosixPath(str(settings.get("TOKENIZER_PATH", ""))).name,
        "tokenizer_sha256": nested(summary, "data", "hashes", "tokenizer"),
        "case_marks": case_marks,
        "val_tokens": nested(summary, "data", "val_tokens"),
        "val_bytes": nested(summary, "data", "val_bytes"),
        "sidecar_bytes": nested(said, "splits", "val", "audit", "sidecar_bytes"),
        **newer,
    }


def proof_facts(report: Mapping[str, Any] | None, sha256: str) -> dict[str, Any] | None:
    """The verdict of `prove` on the source with this hash: the `proof` object; None without a report.

    RecordError where the report is of another script.
    """
    if report is None:
        return None
    if report.get("sha256") != sha256:
        raise RecordError(f"the proof is for a script with sha256 {report.get('sha256')}, not of {sha256}")
    if "findings" in report:
        return older_proof_facts(report)
    entries = report.get("passed")
    passed = {str(entry.get("law")) for entry in entries if isinstance(entry, Mapping)} \
        if isinstance(entries, list) else set()
    asked = report.get("status") is not None
    proven = report.get("status") == 0
    has_walls = str(report.get("walls")).startswith("no network")
    replays = report.get("replays")
    return {
        "verdict": str(report.get("verdict", "not asked")),
        "score_first": _word(asked, proven and passed >= SCORE_FIRST),
        "no_network": _word(asked, proven and has_walls),
        "replayed_runs": len(replays) if isinstance(replays, list) else 0,
    }


def _word(asked: bool, proven: bool) -> str:
    return "not asked" if not asked else "proven" if proven else "not proven"


def older_proof_facts(report: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a report that version 0.6.2 or an older one has written."""
    listed = report.get("findings")
    findings = [f for f in listed if isinstance(f, Mapping)] if isinstance(listed, list) else []
    facts: dict[str, Any] = {"verdict": str(report.get("verdict"))}
    for check, name in PROVED_UNTIL_0_6_2.items():
        levels = {str(finding.get("level")) for finding in findings if finding.get("check") == check}
        facts[name] = "not proven" if levels - {"INFO"} else "proven" if levels else "not asked"
    return facts


def hardware(summary: Mapping[str, Any], log: RunLog) -> str:
    """Devices in words, such as `8 x NVIDIA H100 80GB HBM3` or `x86_64 CPU, 2 cores`.

    The summary counts the cores of a CPU; its name is in the log.
    """
    world = nested(summary, "hardware", "world_size") or 1
    gpus = nested(summary, "hardware", "gpus")
    if isinstance(gpus, list) and gpus:
        return f"{world} x {' / '.join(sorted(set(map(str, gpus))))}"
    cores = nested(summary, "hardware", "cores")
    device = f"{nested(summary, 'hardware', 'cpu') or 'unknown'} CPU"
    device = log.conditions.get("device", device)
    return device + (f", {cores} cores" if cores else "")


def compliance(summaries: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Each limit that the runs checked holds in all of them; never self-attested."""
    limits: dict[str, bool] = {}
    for summary in summaries:
        for name, limit in mapping(summary, "limits").items():
            if isinstance(limit, Mapping) and "ok" in limit:
                key = f"{name}_ok"
                limits[key] = limits.get(key, True) and bool(limit["ok"])
    limits["comparable"] = all(bool(nested(summary, "comparable")) for summary in summaries)
    limits["three_seeds"] = len(summaries) >= RECORD_SEEDS_MIN
    return limits


def compare_with(
    baseline: str,
    results: Mapping[str, Mapping[str, Any]],
    base_bpb: Sequence[float],
    base_nats: Sequence[float],
    base_seeds: Sequence[int],
) -> dict[str, Any]:
    """The `comparison` object, with the baseline's own numbers so that it can be derived again.

    base_seeds: of the baseline's scores, in their order; empty where one is not known.
    """
    verdict: Comparison = compare(
        [result["val_bpb"] for result in results.values()],
        base_bpb,
        [result["val_loss"] for result in results.values()],
        base_nats,
        [int(seed) for seed in results],
        base_seeds,
    )
    return {
        "baseline": baseline,
        "baseline_val_bpb": list(base_bpb),
        "baseline_val_loss": list(base_nats),
        "baseline_seeds": list(base_seeds),
        **verdict.as_json(),
    }
