"""A6, C2, C7, C9: what the lines of one log say of each other, and of the script that wrote them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from tools.runs.folder import Folder, SeedRun
from tools.runs.logs import EXACT, STAGES, Final, Told, decimals
from tools.submit.check.findings import Finding, fail, warn

REMEDY = "ship the log as the script wrote it"
QUANTIZED_GAIN = 0.005  # relative: by so much no quantized model of the public logs beats its own weights
PACE_MIN = 0.6  # of the mean step time: the last stretch of no public log is that fast
BITS_PER_PARAMETER_MIN = 1.0  # fewer hold no model: the public binary ones have more
BYTES_SLACK = 2e-5  # relative, between lines whose bytes per token are one number to RATIO_DIGITS
RATIO_DIGITS = 6  # printed decimals of lines that are compared so closely
RATIO_AGREES = 2e-6


def check_labels(folder: Folder) -> Iterator[Finding]:
    """A6: the words of a score's label stand in the script that is said to have written it."""
    scripts = folder.training_scripts
    if not scripts or any(not script.text or script.problem for script in scripts):
        return
    texts = [script.text for script in (*scripts, *folder.run_scripts)]
    known = set(re.findall(r"[a-z]+", " ".join(texts).lower()))
    for run in folder.seed_runs:
        for label in dict.fromkeys(final.label for final in run.log.finals if final.rank > 0):
            missing = [word for word in re.findall(r"[a-z]+", label.lower()) if word not in known]
            if missing:
                line = next(final.line for final in run.log.finals if final.label == label)
                text = f"a line `{label}`, but the script has no word `{missing[0]}`: what wrote it?"
                yield warn("A6", text, run.log.where(line), "ship the file that ran")
                break


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
            yield fail("C7", text, run.log.where(score.line), REMEDY)


def check_told(folder: Folder) -> Iterator[Finding]:
    """C7: what a log tells of a score while it is made is what its last line says; not of validations."""
    for run in folder.seed_runs:
        for told in run.log.told:
            if told.name != "training" and not any(_same_score(told, final) for final in run.log.finals):
                score = told.bpb_text or f"a loss of {told.loss_text}"
                about = [final for final in run.log.finals if final.scored_tokens == told.tokens]
                if told.bpb_text is None and not about:
                    continue  # a score of another text, or of a part of it
                text = f"`{told.name}` ended with {score}, and no score of the log says so"
                yield fail("C7", text, run.log.where(told.line), REMEDY)


def _same_score(told: Told, final: Final) -> bool:
    """Whether a final score is the one told, to the digits that both print."""
    pairs = [(told.loss_text, final.loss_text)]
    if told.bpb_text is not None:
        pairs.append((told.bpb_text, final.bpb_text))
    return all(abs(float(a) - float(b)) <= 10.0 ** -min(decimals(a), decimals(b)) for a, b in pairs)


def check_quantized(folder: Folder) -> Iterator[Finding]:
    """C9: a quantized model is no better than the weights it was made of."""
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


def check_parameters(folder: Folder) -> Iterator[Finding]:
    """C9: the parameters that a log counts fit into its model's bytes."""
    for run in folder.seed_runs:
        counted = run.log.settings.get("model_params")
        model = run.log.model_bytes
        if counted is None or not counted.integer or model is None:
            continue
        bits = 8 * model.bytes / counted.integer
        if bits < BITS_PER_PARAMETER_MIN:
            text = f"{counted.integer:,} parameters in {model.bytes:,} bytes are {bits:.2f} bits each"
            yield warn("C9", text, run.log.where(counted.line), REMEDY)


def check_last_ratio(folder: Folder) -> Iterator[Finding]:
    """C1: the headline counts no more bytes for its tokens than the other lines agree on.

    Fewer it may count: public evaluations with test-time training drop up to a window of the text.
    """
    for run in folder.seed_runs:
        score = folder.score(run.log)
        if score is None or score.bpb <= 0 or decimals(score.bpb_text) < RATIO_DIGITS:
            continue
        fine = [final for final in run.log.finals if decimals(final.bpb_text) >= RATIO_DIGITS]
        ratios = sorted(final.loss / final.bpb for final in fine if final != score and final.bpb > 0)
        if len(ratios) < 2 or not ratios[-1] / ratios[0] - 1 < RATIO_AGREES:
            continue
        more = score.loss / score.bpb / ratios[-1] - 1
        if more > BYTES_SLACK:
            text = f"`{score.label}` has {more:.1e} more bytes for its tokens than all other scores have"
            yield warn("C1", text, run.log.where(score.line), REMEDY)


def check_clock(folder: Folder) -> Iterator[Finding]:
    """C2: the training clock of a log runs forward, and its last steps are not much faster than all."""
    for run in folder.seed_runs:
        yield from _check_backwards(run)
        timed = [point for point in run.log.train if point.time_ms is not None and point.step > 0]
        stop = run.log.stop
        if stop is None or not timed or stop.step <= timed[-1].step:
            continue
        last = timed[-1]
        assert last.time_ms is not None
        mean_ms = last.time_ms / last.step
        pace_ms = (stop.train_seconds * 1e3 - last.time_ms) / (stop.step - last.step)
        if pace_ms < PACE_MIN * mean_ms:
            text = (f"{stop.step - last.step:,} steps after step {last.step:,} at {pace_ms:.1f} ms each, all"
                    f" before at {mean_ms:.1f} ms")  # fmt: skip
            yield warn("C2", text, run.log.where(stop.line), REMEDY)


def _check_backwards(run: SeedRun) -> Iterator[Finding]:
    """A clock that is set back, once a log."""
    points = sorted((*run.log.train, *run.log.validation), key=lambda point: point.line)
    times = [(point, point.time_ms) for point in points if point.time_ms is not None]
    for (before, earlier), (point, time) in itertools.pairwise(times):
        if time < earlier - 1.0:
            text = (f"the training clock runs backwards: {earlier:,.0f} ms at step {before.step:,}, then"
                    f" {time:,.0f} ms at step {point.step:,}")  # fmt: skip
            yield warn("C2", text, run.log.where(point.line), "one log for each run, from its start")
            return


CHECKS = (
    check_labels,
    check_repeated,
    check_switched_off,
    check_told,
    check_quantized,
    check_parameters,
    check_last_ratio,
    check_clock,
)
