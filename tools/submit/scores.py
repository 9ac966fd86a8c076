"""C1, C6-C9: what the lines of scores say of each other, of their text and bytes, and of training data."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from data.official import official_table
from tools.runs.derive import audited_bytes, is_limited, nested, validation_set
from tools.runs.folder import MANIFEST, SUMMARY_NAME, Folder, SeedRun
from tools.runs.logs import EXACT, STAGES, Final, Point, Told, decimals
from tools.runs.reading import name_of
from tools.runs.rules import (
    BYTE_ERROR_TOLERANCE,
    KNOWN_BYTE_ERRORS,
    LEGAL_TTT_GAIN_BPB,
    OFFICIAL,
    OWN,
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
from tools.submit.findings import Finding, contested, fail, info, warn
from tools.submit.limits import is_record

DECIMALS_MIN = 4  # printed decimals of val_bpb below which nothing is decided
DATASET_SETTINGS = ("train_dataset", "datasets_dir", "data_path")
DIGITS_MIN = 6  # printed decimals below which the implied bytes scatter too far
RATIO_TOLERANCE = 7e-5  # on either side: evaluations drop a window at the end of the text, 1.2e-4 in #2109
Report = Callable[[str, str, str, str], Finding]
# FineWeb files, without what follows a point.
DATA_FILE = re.compile(r"fineweb_[\w*?!\[\]-]{0,64}")
OTHER_THAN_TRAINING = re.compile(r"val|eval|test|ttt", re.IGNORECASE)  # in a name that also says `train`
LOG_REMEDY = "ship the log as the script wrote it"
PROVE_REMEDY = "run `python -m tools prove` on the script"
DATA_REMEDY = "get the data again, check it with data/fineweb.py --verify, and run again"
QUANTIZED_GAIN = 0.005  # relative: no quantized model of the public logs beats its own weights by this much
BYTES_SLACK = 2e-5  # relative, between lines whose bytes per token are one number to RATIO_DIGITS
RATIO_DIGITS = 6  # printed decimals of lines that are compared so closely
RATIO_AGREES = 2e-6
OVERLAP_SHARDS = 1499  # shard count of the export whose training text overlaps validation (#2127)


def check_denominator(folder: Folder) -> Iterator[Finding]:
    """C1: tokens x loss / ln 2 / bpb is the number of bytes of the validation text.

    Without a count of tokens, and besides it, loss / ln 2 / bpb is what the tokenizer has of bytes per token.
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
            LOG_REMEDY,
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
            f"no token count, and {ratio:.4f} bytes per token match no known tokenizer: cannot decide",
            run.log.where(score.line),
            "print the number of validation tokens",
        )


def _undecided(run: SeedRun, score: Final) -> Finding:
    text = f"val_loss {score.loss_text} and val_bpb {score.bpb_text} imply no number of bytes: cannot decide"
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
        f"implied validation bytes {implied:,.0f} ({off:+.2%}), but the challenge's text has"
        f" {VALIDATION_BYTES:,}{cause}",
        run.log.where(score.line),
        "check the byte table and that every validation token is scored",
    )


def _integer(run: SeedRun) -> int | None:
    located = run.log.validation_tokens
    return located.integer if located else None


def check_training_files(folder: Folder) -> Iterator[Finding]:
    """C6: the files for training that a log prints are not validation files."""
    for run in folder.seed_runs:
        for name, located in run.log.settings.items():
            if "train" not in name or OTHER_THAN_TRAINING.search(name):
                continue
            files = [file for file in DATA_FILE.findall(located.value) if _takes_split(file, "val")]
            if files:
                yield fail(
                    "C6",
                    f"`{name}` reads {', '.join(files)}: training on validation text",
                    run.log.where(located.line),
                    "train on fineweb_train_* alone",
                )


def _takes_split(pattern: str, split: str) -> bool:
    """Whether a name or pattern of FineWeb files takes those of a split."""
    return pattern.startswith(f"fineweb_{split}") or fnmatch.fnmatchcase(f"fineweb_{split}_000000", pattern)


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
            yield warn("C9", f"val_bpb {score.bpb_text} < {PLAUSIBLE_BPB_MIN}", where, PROVE_REMEDY)
        earlier = [final.bpb for final in run.log.finals if final.rank == 2]
        if score.rank == 3 and earlier and min(earlier) - score.bpb > LEGAL_TTT_GAIN_BPB:
            yield warn(
                "C9",
                f"test-time training gains {min(earlier) - score.bpb:.4f}; legal precedents gain 0.002-0.013"
                " at full size (a small model, trained for minutes, may gain far more)",
                where,
                PROVE_REMEDY,
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


def check_ratios_of_seeds(folder: Folder) -> Iterator[Finding]:
    """C1: one text has one ratio in all seeds: scores under one label count the same tokens and bytes."""
    first_of: dict[str, tuple[SeedRun, Ratio]] = {}
    for run in folder.seed_runs:
        for label, final in {final.label: final for final in run.log.finals}.items():
            ratio = _ratio(label, final.line, final.loss_text, final.bpb_text)
            if ratio is None:
                continue
            other, reference = first_of.setdefault(label, (run, ratio))
            if ratio.low > reference.high or ratio.high < reference.low:
                yield fail(
                    "C1",
                    f"val_loss / val_bpb of `{label}` is {ratio.middle:.6f} in {name_of(run.log.path)} and"
                    f" {reference.middle:.6f} in {name_of(other.log.path)}: the same text has one ratio",
                    run.log.where(ratio.line),
                    "ship the logs as the script wrote them; score one text with one byte count",
                )


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
                    LOG_REMEDY,
                )


class Ratio(NamedTuple):
    """Bounds of val_loss / val_bpb that the printed digits leave, widened by RATIO_TOLERANCE."""

    low: float
    high: float
    label: str
    line: int

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


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
        f"val_loss / val_bpb is {first.middle:.5f} for `{first.label}` and"
        f" {second.middle:.5f} for `{second.label}`: the same text has one ratio",
        f"{run.log.where(first.line)}, {second.line}",
        "ship the log as the script wrote it; score one text with one byte count",
    )


def _summary_of(folder: Folder, run: SeedRun) -> Mapping[str, Any]:
    """The summary of a log's run; empty where there is none."""
    return folder.summaries.get(run.seed, {}) if run.seed is not None else {}


def counted_bytes(run: SeedRun, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Every number of bytes of the text that a run states, by the place where it is."""
    counted: dict[str, Any] = {}
    if run.log.validation_bytes is not None:
        counted[run.log.where(run.log.validation_bytes.line)] = run.log.validation_bytes.integer
    recorded = nested(summary, "data", "val_bytes")
    if recorded is not None:
        counted[SUMMARY_NAME.format(seed=run.seed)] = recorded
    for final in run.log.finals:
        if final.val_bytes is not None:
            counted[run.log.where(final.line)] = final.val_bytes
    return counted


def check_counted_bytes(folder: Folder) -> Iterator[Finding]:
    """C1: a run counts one number of bytes, and it is the one that the data's maker audited, to the byte."""
    noted = audited_bytes(folder.file(MANIFEST)) if folder.has(MANIFEST) else None
    for run in folder.seed_runs:
        summary = _summary_of(folder, run)
        counted = counted_bytes(run, summary)
        if not counted:
            continue
        (first, value), *others = counted.items()
        for place, other in others:
            if other != value:
                text = f"{value!r} bytes of text at {first}, {other!r} at {place}: one run counts one number"
                yield fail("C1", text, place, LOG_REMEDY)
                break
        if run.log.is_limited or is_limited(summary):
            continue
        audits = {MANIFEST: noted, "the run's own audit": nested(summary, "data", "audited_bytes")}
        for name, audited in audits.items():
            wrong = [place for place, found in counted.items() if audited is not None and found != audited]
            if wrong:
                text = f"{counted[wrong[0]]!r} bytes of text are counted, {name} has {audited!r}"
                yield fail("C1", text, wrong[0], DATA_REMEDY)
                break


def check_set(folder: Folder) -> Iterator[Finding]:
    """A4, C1: what a run says of its validation set holds, and a record is scored on the challenge's."""
    for run in folder.seed_runs:
        summary = _summary_of(folder, run)
        line = run.log.validation_set
        where = run.log.where(line.line) if line else SUMMARY_NAME.format(seed=run.seed)
        said = validation_set(summary, run.log)
        if line is not None and said != line.value:
            text = f"validation: {line.value} in the log, {said} in its summary"
            yield fail("A4", text, where, LOG_REMEDY)
        if said == OWN and is_record(folder):
            text = "it was scored on your own validation set, not on the challenge's"
            yield fail("C1", text, where, "score the challenge's text (data/fineweb.py gets it)")
        if said.startswith(OFFICIAL) and not (run.log.is_limited or is_limited(summary)):
            yield from _check_official(run, summary, said, where)


def official_set(said: str) -> Mapping[str, Any] | None:
    """The facts of the set that `official (sp8192)` names, None where one is not known; None without it."""
    sets, _ = official_table()
    return sets.get(said.removeprefix(f"{OFFICIAL} (").removesuffix(")"))


def _check_official(run: SeedRun, summary: Mapping[str, Any], said: str, where: str) -> Iterator[Finding]:
    """C1: a run that names an official set has its counts."""
    known = official_set(said)
    if known is None:
        text = f"{said}: these tools do not know a validation set of that name: its counts cannot be checked"
        yield warn("C1", text, where, "check it with the tools of the commit that ran")
        return
    tokens = nested(summary, "data", "val_tokens")
    if tokens is None and run.log.validation_tokens is not None:
        tokens = run.log.validation_tokens.integer
    found = {}
    for place, count in counted_bytes(run, summary).items():
        found[f"bytes at {place}"] = (count, known.get("bytes"))
    targets = known.get("targets")
    # data/fuse.py makes one token of two in CaseOps data.
    are_fused = "caseops" in said and isinstance(tokens, int) and tokens < (targets or 0)
    if not are_fused:
        found["targets"] = (tokens, targets)
    for what, (got, expected) in found.items():
        if expected and got not in (None, expected):
            yield fail("C1", f"{said}: {got!r} {what}, that set has {expected:,}", where, DATA_REMEDY)
            return


def check_repeated(folder: Folder) -> Iterator[Finding]:
    """C7: one score under each label."""
    for run in folder.seed_runs:
        lines: dict[str, list[Final]] = {}
        for final in run.log.finals:
            lines.setdefault(final.label.removesuffix(EXACT), []).append(final)
        for label, finals in lines.items():
            scores = list(dict.fromkeys(f"{final.bpb:.4f}" for final in finals))
            if len(scores) > 1:
                told = ", ".join(scores[:4])
                text = f"{len(scores)} scores under `{label}` ({told}): the last one counts"
                where = f"{run.log.where(finals[0].line)}, {finals[-1].line}"
                yield warn("C7", text, where, "one run, one score: ship a log for each run")


def check_switched_off(folder: Folder) -> Iterator[Finding]:
    """C7: a run whose log says that it has no test-time training has no score of one."""
    for run in folder.seed_runs:
        switch = run.log.settings.get("ttt_enabled")
        score = run.log.score_of(3)
        if switch is not None and switch.value in ("0", "False") and score is not None:
            text = f"`{score.label}` is scored, and ttt_enabled is {switch.value}"
            yield fail("C7", text, run.log.where(score.line), LOG_REMEDY)


def check_told(folder: Folder) -> Iterator[Finding]:
    """C7: what a log says of a score while it is computed is what its last line says; not of validations."""
    for run in folder.seed_runs:
        for told in run.log.told:
            if told.name != "training" and not any(_same_score(told, final) for final in run.log.finals):
                score = told.bpb_text or f"a loss of {told.loss_text}"
                about = [final for final in run.log.finals if final.scored_tokens == told.tokens]
                if told.bpb_text is None and not about:
                    continue  # a score of another text, or of a part of it
                text = f"`{told.name}` ended with {score}, and no score of the log says so"
                yield fail("C7", text, run.log.where(told.line), LOG_REMEDY)


def _same_score(told: Told, final: Final) -> bool:
    """Whether a final score is the one told, to the digits that both print."""
    pairs = [(told.loss_text, final.loss_text)]
    if told.bpb_text is not None:
        pairs.append((told.bpb_text, final.bpb_text))
    return all(abs(float(a) - float(b)) <= 10.0 ** -min(decimals(a), decimals(b)) for a, b in pairs)


def check_quantized(folder: Folder) -> Iterator[Finding]:
    """C9: a quantized model is not better than the weights it was made from."""
    for run in folder.seed_runs:
        before = run.log.score_after(STAGES[0])
        windows = {final.bpb_text for final in run.log.finals if final.rank > 1}
        after = [final for final in run.log.finals if final.stage == STAGES[1]]
        after = [final for final in after if final.bpb_text not in windows]  # a label may promise less
        if before is None or not after:
            continue
        best = min(after, key=lambda final: final.bpb)
        if best.bpb < before.bpb * (1 - QUANTIZED_GAIN):
            text = f"`{best.label}` {best.bpb_text} is better than `{before.label}` {before.bpb_text}"
            yield warn("C9", text, run.log.where(best.line), "say how quantization can gain")


def check_last_ratio(folder: Folder) -> Iterator[Finding]:
    """C1: the headline counts no more bytes for its tokens than the other lines agree on.

    Fewer it may count: public evaluations with test-time training drop up to a window of the text.
    """
    for run in folder.seed_runs:
        score = folder.score(run.log)
        if score is None or score.bpb <= 0 or decimals(score.bpb_text) < RATIO_DIGITS:
            continue
        fine = [final for final in run.log.finals if decimals(final.bpb_text) >= RATIO_DIGITS]
        others = [final for final in fine if final != score and final.loss > 0 and final.bpb > 0]
        ratios = sorted(final.loss / final.bpb for final in others)
        if len(ratios) < 2 or not ratios[-1] / ratios[0] - 1 < RATIO_AGREES:
            continue
        more = score.loss / score.bpb / ratios[-1] - 1
        if more > BYTES_SLACK:
            text = f"`{score.label}` has {more:.1e} more bytes for its tokens than all other scores have"
            yield warn("C1", text, run.log.where(score.line), LOG_REMEDY)


RULES = (
    check_denominator,
    check_ratios,
    check_ratios_of_seeds,
    check_last_ratio,
    check_counted_bytes,
    check_set,
    check_training_files,
    check_provenance,
    check_repeated,
    check_switched_off,
    check_told,
    check_seeds,
    check_plausible,
    check_quantized,
)
