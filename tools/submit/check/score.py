"""C1, C6, C8, C9: the byte denominator, data provenance, seeds and spread, plausibility."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from tools.runs import source
from tools.runs.folder import Folder, SeedRun
from tools.runs.logs import EXACT, Final, Point, decimals
from tools.runs.rules import (
    BYTE_ERROR_TOLERANCE,
    KNOWN_BYTE_ERRORS,
    LEGAL_TTT_GAIN_BPB,
    PLAUSIBLE_BPB_MIN,
    RECORD_SEEDS_MIN,
    TOKENIZER_TOLERANCE,
    TOKENIZERS,
    VALIDATION_BYTES,
    VALIDATION_BYTES_TOLERANCE,
    Tokenizer,
    bits_per_byte,
    bytes_per_token,
)
from tools.runs.stats import deviation, mean
from tools.submit.check.budget import is_record
from tools.submit.check.findings import Finding, contested, fail, info, warn

DECIMALS_MIN = 4  # printed decimals of val_bpb below which nothing is decided
DATASET_SETTINGS = ("train_dataset", "datasets_dir", "data_path")
DIGITS_MIN = 6  # printed decimals below which the implied bytes scatter too far
RATIO_TOLERANCE = 5e-5  # public evaluations drop up to a window of the text at its end: 6.5e-5 at most
Report = Callable[[str, str, str, str], Finding]
OVERLAP_SHARDS = 1499  # shard count of the export whose training text overlaps validation (#2127)


def check_denominator(folder: Folder) -> Iterator[Finding]:
    """C1: tokens x loss / ln 2 / bpb is the number of bytes of the validation text.

    Without a count of tokens, and beside it, loss / ln 2 / bpb is what the tokenizer has of bytes per token.
    """
    for run in folder.seed_runs:
        score = folder.score(run.log)
        if score is None:
            continue
        if not math.isfinite(score.loss) or not score.bpb > 0:
            yield _undecided(run, score)
            continue
        if score.scored_tokens and score.val_bytes:
            yield from _check_own_line(run, score)
        if folder.ours and not is_record(folder):
            continue  # another text than the challenge's is scored there, and the line above covers it
        yield from _check_implied(folder, run, score)


def _check_own_line(run: SeedRun, score: Final) -> Iterator[Finding]:
    """A line that prints tokens and bytes must be arithmetically true to its last digit."""
    assert score.scored_tokens and score.val_bytes
    expected = bits_per_byte(score.loss, score.scored_tokens, score.val_bytes)
    unit = 10.0 ** -decimals(score.bpb_text) + 10.0 ** -decimals(score.loss_text)
    if abs(expected - score.bpb) > unit:
        yield fail(
            "C1",
            f"val_bpb {score.bpb_text} is not val_loss {score.loss_text} over"
            f" {score.scored_tokens:,} tokens and {score.val_bytes:,} bytes: that is {expected:.8f}",
            run.log.where(score.line),
            "ship the log as the script wrote it",
        )


def _check_implied(folder: Folder, run: SeedRun, score: Final) -> Iterator[Finding]:
    if decimals(score.bpb_text) < DECIMALS_MIN:
        yield _undecided(run, score)
        return
    tokens = score.scored_tokens or _integer(run)
    ratio = bytes_per_token(score.loss, score.bpb)
    named = _named_tokenizer(run)
    if tokens is not None:
        off = ratio * tokens / VALIDATION_BYTES - 1
        slack = (
            VALIDATION_BYTES_TOLERANCE
            if decimals(score.bpb_text) >= DIGITS_MIN
            else 2 * VALIDATION_BYTES_TOLERANCE
        )
        if abs(off) > slack:
            yield _wrong_bytes(folder, run, score, ratio * tokens)
            return
    if named is not None:
        if abs(ratio / named.bytes_per_token - 1) > TOKENIZER_TOLERANCE:
            yield _wrong_bytes(folder, run, score, ratio / named.bytes_per_token * VALIDATION_BYTES)
    elif tokens is None and not any(
        abs(ratio / known.bytes_per_token - 1) < TOKENIZER_TOLERANCE for known in TOKENIZERS
    ):
        yield warn(
            "C1",
            f"no count of tokens, and {ratio:.4f} bytes per token are no known tokenizer's: not decidable",
            run.log.where(score.line),
            "print the number of validation tokens",
        )


def _undecided(run: SeedRun, score: Final) -> Finding:
    text = f"val_loss {score.loss_text} and val_bpb {score.bpb_text} imply no number of bytes: not decidable"
    return warn("C1", text, run.log.where(score.line), "print all digits")


def _named_tokenizer(run: SeedRun) -> Tokenizer | None:
    """The tokenizer of the data set that a log names, where it is a known one."""
    for key in DATASET_SETTINGS:
        located = run.log.settings.get(key)
        name = PurePosixPath(located.value).name if located else ""
        for tokenizer in TOKENIZERS:
            if name and name == tokenizer.dataset:
                return tokenizer
    return None


def _wrong_bytes(folder: Folder, run: SeedRun, score: Final, implied: float) -> Finding:
    off = implied / VALIDATION_BYTES - 1
    known = [
        e for e in KNOWN_BYTE_ERRORS if abs(implied / VALIDATION_BYTES / e.ratio - 1) < BYTE_ERROR_TOLERANCE
    ]
    cause = f": {known[0].cause}" if known else ""
    report = contested if known and "export" in known[0].cause else fail if is_record(folder) else warn
    return report(
        "C1",
        f"implied validation bytes {implied:,.0f} ({off:+.2%}), the challenge's text has {VALIDATION_BYTES:,}"
        f"{cause}",
        run.log.where(score.line),
        "check the byte table and that every validation token is scored",
    )


def _integer(run: SeedRun) -> int | None:
    located = run.log.validation_tokens
    return located.integer if located else None


def check_training_files(folder: Folder) -> Iterator[Finding]:
    """C6: training reads no validation file, by the script's patterns and by those that a log prints."""
    for script in folder.run_scripts:
        for call in source.training_files(script):
            yield from _check_training_files(call.name, call.detail.split(), script.where(call.line))
    for run in folder.seed_runs:
        for name, located in run.log.settings.items():
            if "train" in name and not source.OTHER_THAN_TRAINING.search(name):
                files = source.DATA_FILE.findall(located.value)
                yield from _check_training_files(name, files, run.log.where(located.line))


def _check_training_files(name: str, files: list[str], where: str) -> Iterator[Finding]:
    validation = [file for file in files if source.takes_split(file, "val")]
    if not validation:
        return
    only_training = [file for file in files if file not in validation and source.takes_split(file, "train")]
    report = warn if only_training else fail  # one value for both splits may be told apart later
    yield report(
        "C6",
        f"`{name}` takes {', '.join(validation)}: training on validation text",
        where,
        "train on fineweb_train_* alone",
    )


def check_provenance(folder: Folder) -> Iterator[Finding]:
    """C6: signs of training shards that hold validation documents."""
    for run in folder.seed_runs:
        shards = run.log.settings.get("train_shards")
        if shards and (shards.integer or 0) >= OVERLAP_SHARDS:
            yield warn(
                "C6",
                f"train_shards {shards.value}: the count of the export that overlaps validation (#2127)",
                run.log.where(shards.line),
                "state repository, revision and hashes of the shards",
            )
        paths = [v for k, v in run.log.settings.items() if k in ("datasets_dir", "data_path", "train_files")]
        for located in paths:
            if "datasets/datasets" in located.value:
                yield warn(
                    "C6",
                    "path with datasets/datasets: seen with the export that overlaps validation (#2127)",
                    run.log.where(located.line),
                    "state repository, revision and hashes of the shards",
                )
                break


def check_seeds(folder: Folder) -> Iterator[Finding]:
    """C8: enough seeds for a claim, and their spread."""
    scores = [score.bpb for run in folder.seed_runs if (score := folder.score(run.log))]
    if not scores:
        return
    spread = deviation(scores)
    shown = f" ± {spread:.6f}" if spread is not None else ""
    yield info("C8", f"{len(scores)} seeds, val_bpb {mean(scores):.8f}{shown}", folder.headline_label or "")
    if is_record(folder) and len(scores) < RECORD_SEEDS_MIN:
        yield warn(
            "C8",
            f"{len(scores)} seed(s) with a log: no significance can be shown",
            folder.name,
            f"run {RECORD_SEEDS_MIN} seeds; compare with `python -m tools diff`",
        )


def check_plausible(folder: Folder) -> Iterator[Finding]:
    """C9: scores below, or gains above, anything legal seen so far."""
    for run in folder.seed_runs:
        score = folder.score(run.log)
        if score is None:
            continue
        where = run.log.where(score.line)
        if score.bpb < PLAUSIBLE_BPB_MIN:
            yield warn("C9", f"val_bpb {score.bpb_text} < {PLAUSIBLE_BPB_MIN}", where, "prove the scorer")
        earlier = [final.bpb for final in run.log.finals if final.rank == 2]
        if score.rank == 3 and earlier and min(earlier) - score.bpb > LEGAL_TTT_GAIN_BPB:
            yield warn(
                "C9",
                f"test-time training gains {min(earlier) - score.bpb:.4f}; legal precedents gain 0.002-0.013"
                " at full size (a small model, trained for minutes, may gain far more)",
                where,
                "prove the scorer",
            )


def check_ratios(folder: Folder) -> Iterator[Finding]:
    """C1: losses and bits per byte of one log have one ratio, bytes per token, to their printed digits."""
    for run in folder.seed_runs:
        scored = [
            _ratio(final.label, final.line, final.loss_text, final.bpb_text) for final in run.log.finals
        ]
        finals = [ratio for ratio in scored if ratio is not None]
        yield from _check_exact_lines(run)
        yield from _disagreement(run, finals, fail)
        during = [_ratio_of_point(point) for point in run.log.validation if point.bpb is not None]
        validated = [ratio for ratio in during if ratio is not None]
        # Validations during training may read a part of the text only, and not always the same.
        yield from _disagreement(run, validated, warn)
        if finals and validated:
            yield from _disagreement(run, [validated[-1], finals[-1]], warn)


def _check_exact_lines(run: SeedRun) -> Iterator[Finding]:
    """A line `x_exact` repeats the line `x` before it with all digits."""
    rounded: dict[str, Final] = {}
    for final in run.log.finals:
        before = rounded.get(final.label.removesuffix(EXACT)) if final.label.endswith(EXACT) else None
        rounded[final.label] = final
        if before is None:
            continue
        for name, exact, text in (
            ("val_loss", final.loss, before.loss_text),
            ("val_bpb", final.bpb, before.bpb_text),
        ):
            if abs(exact - float(text)) > 10.0 ** -decimals(text):
                yield fail(
                    "C1",
                    f"`{final.label}` {name} is {exact}, the line `{before.label}` before it says {text}",
                    run.log.where(final.line),
                    "ship the log as the script wrote it",
                )


class Ratio(NamedTuple):
    """Bounds of val_loss / val_bpb that the printed digits leave, widened by RATIO_TOLERANCE."""

    low: float
    high: float
    label: str
    line: int


def _ratio(label: str, line: int, loss_text: str, bpb_text: str) -> Ratio | None:
    loss, bpb = float(loss_text), float(bpb_text)
    loss_unit = 0.5 * 10.0 ** -decimals(loss_text)
    bpb_unit = 0.5 * 10.0 ** -decimals(bpb_text)
    if not (math.isfinite(loss) and math.isfinite(bpb)) or loss <= loss_unit or bpb <= bpb_unit:
        return None
    low = (loss - loss_unit) / (bpb + bpb_unit) * (1 - RATIO_TOLERANCE)
    high = (loss + loss_unit) / (bpb - bpb_unit) * (1 + RATIO_TOLERANCE)
    return Ratio(low, high, label, line)


def _ratio_of_point(point: Point) -> Ratio | None:
    return _ratio(f"step {point.step}", point.line, f"{point.loss:.4f}", f"{point.bpb:.4f}")


def _disagree(ratios: list[Ratio]) -> tuple[Ratio, Ratio] | None:
    """The two ratios that are furthest apart, the later line last; None where all agree."""
    if not ratios:
        return None
    highest = max(ratios, key=lambda ratio: ratio.low)
    lowest = min(ratios, key=lambda ratio: ratio.high)
    if highest.low <= lowest.high:
        return None
    return (highest, lowest) if highest.line < lowest.line else (lowest, highest)


def _disagreement(run: SeedRun, ratios: list[Ratio], report: Report) -> Iterator[Finding]:
    pair = _disagree(ratios)
    if pair is None:
        return
    first, second = pair
    yield report(
        "C1",
        f"val_loss / val_bpb is {(first.low + first.high) / 2:.5f} for `{first.label}` and"
        f" {(second.low + second.high) / 2:.5f} for `{second.label}`: one text has one ratio",
        f"{run.log.where(first.line)}, {second.line}",
        "ship the log as the script wrote it; score one text with one byte count",
    )


CHECKS = (
    check_denominator,
    check_ratios,
    check_training_files,
    check_provenance,
    check_seeds,
    check_plausible,
)
