"""`diff BASE NEW`: compare the scores, settings, code, metrics and losses of two runs or record folders.

A difference is new − base: negative is better. Its p is two-sided, from a paired t-test if both sides have
the same seeds, or else from Welch's t-test. The challenge's one-sided rule for records has lines of its own.

It also names what else makes the two hard to compare: dtype, device, threads, torch, number of ranks.
`plot BASE NEW` draws the curves of both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.compare import curves
from tools.runs.derive import mapping
from tools.runs.errors import RecordError
from tools.runs.folder import number
from tools.runs.logs import EXACT, STAGES
from tools.runs.rules import (
    FRONTIER_P,
    MARGIN_NATS,
    MARGIN_P,
    OFFICIAL,
    VALIDATION_BYTES,
    VALIDATION_BYTES_TOLERANCE,
)
from tools.runs.runs import Group, Run, load_group, scores, seeds_of
from tools.runs.script import Config
from tools.runs.settings import UNSET, changed_settings
from tools.runs.source import changed_lines, unified
from tools.runs.stats import Comparison, Difference, RecordTest, compare, mean, mean_and_deviation, p_text
from tools.runs.texts import different_texts, scored_bytes, validation_sets
from tools.runs.writing import columns, print_json

CURVE_ROWS = 12  # steps at which the text compares losses
SIGNIFICANT_P = 0.05  # two-sided


@dataclass(frozen=True)
class Sides:
    """Two groups and all in which they differ; `reruns` compares further sets of logs in a folder.

    `comparison` is None where a side has no score, or the sides scored different texts.
    """

    base: Group
    new: Group
    comparison: Comparison | None
    reruns: dict[str, Comparison]
    settings: list[tuple[str, str, str]]
    code: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "base", type=Path, metavar="BASE", help="run directory, records folder or log to compare with"
    )
    parser.add_argument(
        "new", type=Path, metavar="NEW", help="run directory, records folder or log that should be better"
    )
    parser.add_argument("--no-code", action="store_true", help="count changed lines instead of showing them")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run(args: argparse.Namespace) -> int:
    found = difference(load_group(args.base), load_group(args.new))
    if args.json:
        print_json(as_json(found))
    else:
        print(text(found, show_code=not args.no_code))
    return 0


def difference(base: Group, new: Group) -> Sides:
    """Compare two groups; raises RecordError when neither has anything to compare."""
    if not base.runs or not new.runs:
        raise RecordError("nothing to compare: one side holds no run")
    reruns = {f"{base.name}/{name}": _compare(new.runs, runs) for name, runs in base.other_sets.items()}
    reruns |= {f"{new.name}/{name}": _compare(runs, base.runs) for name, runs in new.other_sets.items()}
    code = unified(base.script, new.script, base.name, new.name) if base.script and new.script else ""
    return Sides(
        base=base,
        new=new,
        comparison=_compare(new.runs, base.runs),
        reruns={name: comparison for name, comparison in reruns.items() if comparison},
        settings=changed_settings(base.config, new.config, Config().as_env()),
        code=code,
    )


# Another dtype rounds otherwise. Another of the others makes other steps of the same seconds.
CONDITIONS = ("dtype", "device", "threads", "compile", "PyTorch", "world_size")


def unlike_conditions(base: Group, new: Group) -> str:
    """What else than settings and code makes the sides hard to compare, in words; empty if nothing does."""
    told = []
    for name in CONDITIONS:
        of_base = _conditions(base, name)
        of_new = _conditions(new, name)
        if of_base and of_new and of_base != of_new:
            told.append(f"{name} {', '.join(sorted(of_base))} against {', '.join(sorted(of_new))}")
    seeds = [seeds_of(group.runs) for group in (base, new)]
    if [len(of_side) for of_side in seeds] == [1, 1] and seeds[0] != seeds[1]:
        told.append(f"seed {seeds[0][0]} against {seeds[1][0]}")  # no test shows what of it is noise
    if not told:
        return ""
    return f"They ran under different conditions, which may explain part of the change: {'; '.join(told)}."


def about_learning(base: Group, new: Group) -> str:
    """The runs whose test-time training the clock ended early, in words; empty without any."""
    stopped = [run.name for run in (*base.runs, *new.runs) if run.log.unlearned]
    if not stopped:
        return ""
    names = ", ".join(stopped)
    return f"The clock ended test-time training early in {names}: the score depends on the machine's speed."


def about_validation(base: Group, new: Group) -> str:
    """The validation set of both sides, or that theirs are different; empty where a side names none."""
    of_base = validation_sets(base.runs)
    of_new = validation_sets(new.runs)
    if not of_base or not of_new:
        return ""
    if of_base == of_new:
        return f"Validation set of both: {', '.join(sorted(of_base))}."
    sides = f"{', '.join(sorted(of_base))} against {', '.join(sorted(of_new))}"
    told = "their scores cannot be compared"
    return f"Warning: they were scored on different validation sets, {sides}: {told}."


def _conditions(group: Group, name: str) -> set[str]:
    """What the logs of a group say about one condition."""
    printed = {run.log.conditions.get(name, "") for run in group.runs}
    printed |= {run.log.settings[name].value for run in group.runs if name in run.log.settings}
    return printed - {""}


def labels(group: Group) -> str:
    """The names of a group's scores in its logs."""
    names = sorted({run.score.label.removesuffix(EXACT) for run in group.runs if run.score})
    return " / ".join(names)


def _compare(new: Sequence[Run], base: Sequence[Run]) -> Comparison | None:
    new_bpb, base_bpb = scores(new, "bpb"), scores(base, "bpb")
    if not new_bpb or not base_bpb or different_texts(base, new):
        return None
    losses = (scores(new, "loss"), scores(base, "loss"))
    return compare(new_bpb, base_bpb, *losses, seeds_of(new), seeds_of(base))


def _after(stage: str) -> Callable[[Run], float | None]:
    """The bits per byte of a run's score of one stage."""

    def value(run: Run) -> float | None:
        score = run.log.score_after(stage)
        return score.bpb if score else None

    return value


Metric = tuple[str, Callable[[Run], float | None], str]
METRICS: tuple[Metric, ...] = (
    ("val_bpb, headline", lambda run: run.score.bpb if run.score else None, ".6f"),
    ("val_loss (nats/token)", lambda run: run.score.loss if run.score else None, ".6f"),
    ("steps", lambda run: run.log.steps_done, ",.1f"),
    ("ms per step", lambda run: run.log.step_ms, ".3f"),
    ("train seconds", lambda run: run.log.train_seconds, ".2f"),
    ("eval seconds", lambda run: run.score.eval_seconds if run.score else None, ".1f"),
    ("eval seconds from artifact",
     lambda run: run.log.eval_clocks.from_artifact_seconds if run.log.eval_clocks else None, ".1f"),
    ("model bytes", lambda run: run.log.model_bytes.bytes if run.log.model_bytes else None, ",.0f"),
)


def metric_rows(found: Sides) -> list[list[str]]:
    """Name, base, new, change; mean ± deviation over the seeds that have the metric."""
    rows = []
    texts_differ = bool(different_texts(found.base.runs, found.new.runs))
    for name, value_of, form in METRICS:
        base = _values(found.base, value_of)
        new = _values(found.new, value_of)
        if not base and not new:
            continue
        change = UNSET
        if base and new and not (texts_differ and name.startswith("val_")):
            change = f"{mean(new) - mean(base):+{form}}"
        rows.append([name, _spread(base, form), _spread(new, form), change])
    return rows


def stage_changes(found: Sides) -> dict[str, float]:
    """New less base, in bits per byte, of each stage that all runs have, or all with a final score.

    Where one of them lacks it, its mean is of other seeds than those of the stages around it.
    """
    if different_texts(found.base.runs, found.new.runs):
        return {}
    whole = []  # how many runs of each side may have a stage
    for group in (found.base, found.new):
        whole.append({len(group.runs), sum(run.score is not None for run in group.runs)})
    changes = {}
    for stage in STAGES:
        base = _values(found.base, _after(stage))
        new = _values(found.new, _after(stage))
        if base and new and len(base) in whole[0] and len(new) in whole[1]:
            changes[stage] = mean(new) - mean(base)
    return changes


def stage_rows(found: Sides) -> list[list[str]]:
    """Stage, base, new, change, and the part of the change that is this stage's own."""
    changes = stage_changes(found)
    rows = []
    before: float | None = None
    for stage in STAGES:
        base = _values(found.base, _after(stage))
        new = _values(found.new, _after(stage))
        if not base and not new:
            continue
        change = own = UNSET
        if stage in changes:
            change = f"{changes[stage]:+.6f}"
            own = UNSET if before is None else f"{changes[stage] - before:+.6f}"
            before = changes[stage]
        rows.append([f"val_bpb, {stage}", _spread(base, ".6f"), _spread(new, ".6f"), change, own])
    return rows


STAGE_HEADER = ("stage", "base", "new", "change", "of this stage")


def _values(group: Group, value_of: Callable[[Run], float | None]) -> list[float]:
    """A metric of every run that has it."""
    values = [value_of(run) for run in group.runs]
    return [value for value in values if value is not None]


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return UNSET
    return f"{mean_and_deviation(values, form)} (n={len(values)})"


def sentence(found: Sides) -> str:
    """The comparison in a few sentences: which is better, by how much and how surely, and what differs."""
    comparison = found.comparison
    plus, minus = changed_lines(found.code)
    settings = len(found.settings)
    changes = []
    if settings:
        changes.append(f"{settings} setting{'s' if settings > 1 else ''}")
    if plus or minus:
        changes.append(f"the code (+{plus} -{minus} lines)")
    differ = f"They differ in {' and '.join(changes)}." if changes else "Settings and code are equal."
    new, base = found.new.name, found.base.name
    if comparison is None:
        why = "one has no score"
        if texts := different_texts(found.base.runs, found.new.runs):
            why = f"they scored different texts ({texts})"
        return f"{new} cannot be compared with {base}: {why}. {_last_common_loss(found)}{differ}"
    change = comparison.difference.difference
    if change == 0:
        return f"{new} and {base} have the same score. {differ}"
    verdict = f"{new} is {_better_by(change, base)}{_without_test_time(found)}."
    return f"{verdict} {_significance(comparison.difference)} {_scores_compared(found)} {differ}"


def _better_by(change_bpb: float, base: str = "") -> str:
    """`better than BASE by 0.001 bits per byte`, or worse."""
    direction = "better" if change_bpb < 0 else "worse"
    than = f" than {base}" if base else ""
    return f"{direction}{than} by {abs(change_bpb):.6f} bits per byte"


def _last_common_loss(found: Sides) -> str:
    """The training losses at the last step that all runs have logged, for a run under way; empty without."""
    rows = loss_rows(found)
    if not rows:
        return ""
    step, base, new, change = rows[-1]
    return f"At step {step} its training loss is {new}, the base's {base} ({change}). "


def _without_test_time(found: Sides) -> str:
    """The gain before test-time training, where both sides have it in different settings; else empty."""
    changes = stage_changes(found)
    ttt = [name for name, _, _ in found.settings if "TTT" in name]
    if STAGES[-1] not in changes or not ttt:
        return ""
    before = [stage for stage in STAGES[:-1] if stage in changes]
    if not before:
        return f" with different test-time training ({', '.join(ttt)}); no log has a score before it"
    without = _better_by(changes[before[-1]])
    return f" with different test-time training ({', '.join(ttt)}), and {without} before it ({before[-1]})"


def _scores_compared(found: Sides) -> str:
    """Which scores are compared; where their stages differ, the changes of those that both sides have."""
    of_base = {run.score.rank for run in found.base.runs if run.score}
    of_new = {run.score.rank for run in found.new.runs if run.score}
    if of_base == of_new:
        return f"Score: {labels(found.new)}."
    kinds = f"But that compares {labels(found.new)} with {labels(found.base)}, two kinds of score"
    alike = [f"{stage} {change:+.6f}" for stage, change in stage_changes(found).items()]
    return f"{kinds} (of the same kind: {', '.join(alike)})." if alike else f"{kinds}."


def _significance(change: Difference) -> str:
    """Whether a two-sided test shows the difference."""
    if change.p is None:
        alike = "All seeds differ by the same amount, so there is no p."
        return f"That {change.in_words()}." if change.interval is None else alike
    verdict = "That is significant" if change.p < SIGNIFICANT_P else "That is not significant"
    return f"{verdict} ({p_text(change.p)}, {change.test_in_words})."


def verdict_lines(found: Sides) -> list[str]:
    """The difference in three units; then the challenge's rule, where it may apply, with reruns, if any."""
    comparison = found.comparison
    if comparison is None:
        return ["scores cannot be compared: one side has none, or the texts differ"]
    per_token = comparison.nats_per_token
    token = (
        f"{per_token:+.6f} nats/token"
        if per_token is not None
        else "nats/token not comparable (tokenizers differ)"
    )
    change = comparison.difference
    lines = [
        f"difference {change.difference:+.6f} bits/byte (new − base, negative is better)"
        f" = {comparison.nats_per_byte:+.6f} nats/byte; {token}",
        f"  {change.in_words()}",
    ]
    if not may_be_records(found):
        return lines
    standards = [
        _standard("no margin", comparison.frontier, FRONTIER_P, comparison.meets_frontier),
        _standard(f"beyond {MARGIN_NATS} nats/token", comparison.margin, MARGIN_P, comparison.meets_margin),
        *(
            _standard(f"no margin with the reruns {name}", rerun.frontier, FRONTIER_P, rerun.meets_frontier)
            for name, rerun in found.reruns.items()
        ),
    ]
    return [*lines, "the challenge's rule for records, a one-sided Welch test:", *standards]


def may_be_records(found: Sides) -> bool:
    """Whether both sides may belong to the record track: no side is known to be scored on another text."""
    for group in (found.base, found.new):
        counted = scored_bytes(group.runs)
        if validation_sets(group.runs) - {OFFICIAL}:
            return False
        if counted is not None and abs(counted / VALIDATION_BYTES - 1) > VALIDATION_BYTES_TOLERANCE:
            return False
    return True


def _standard(name: str, test: RecordTest | None, level: float, met: bool) -> str:
    if test is None:
        return f"  {name}: no test: it takes two seeds per side, and one tokenizer for the margin"
    outcome = "meets" if met else "misses"
    return f"  {name}: {p_text(test.p)} (t = {test.t:.3f}, df = {test.df:.2f}); {outcome} p < {level}"


def loss_rows(found: Sides) -> list[list[str]]:
    """Step, mean training loss of base and new, change, at steps that every run of both sides logged."""
    base_losses = [_losses_by_step(run) for run in found.base.runs]
    new_losses = [_losses_by_step(run) for run in found.new.runs]
    common = sorted(set.intersection(*(set(losses) for losses in (*base_losses, *new_losses))))
    # About CURVE_ROWS of them at equal distances, the last one included.
    stride = max(1, len(common) // CURVE_ROWS)
    first = (len(common) - 1) % stride
    rows = []
    for step in common[first::stride]:
        base = mean([losses[step] for losses in base_losses])
        new = mean([losses[step] for losses in new_losses])
        rows.append([f"{step:,}", f"{base:.4f}", f"{new:.4f}", f"{new - base:+.4f}"])
    return rows


def _losses_by_step(run: Run) -> dict[int, float]:
    return {sample.step: sample.value for sample in curves.train_loss(run)}


def text(found: Sides, show_code: bool) -> str:
    """The whole comparison for a terminal."""
    plus, minus = changed_lines(found.code)
    blocks = [
        sentence(found),
        about_validation(found.base, found.new),
        unlike_conditions(found.base, found.new),
        about_learning(found.base, found.new),
        "\n".join(verdict_lines(found)),
        columns(STAGE_HEADER, stage_rows(found)),
        columns(["metric", "base", "new", "change"], metric_rows(found)),
        columns(["phase", "base s", "new s"], phase_rows(found)),
        columns(["setting", "base", "new"], [list(row) for row in found.settings]) or "settings: equal",
        columns(["step", "loss base", "loss new", "change"], loss_rows(found)),
        f"code: +{plus} -{minus} lines" + ("\n" + found.code if show_code and found.code else ""),
    ]
    return "\n\n".join(block for block in blocks if block)


def as_json(found: Sides) -> dict[str, Any]:
    plus, minus = changed_lines(found.code)
    return {
        "base": found.base.name,
        "new": found.new.name,
        "sentence": sentence(found),
        "validation": about_validation(found.base, found.new),
        "unlike_conditions": unlike_conditions(found.base, found.new),
        "comparison": found.comparison.as_json() if found.comparison else None,
        "reruns": {name: rerun.as_json() for name, rerun in found.reruns.items()},
        "settings": [{"name": name, "base": base, "new": new} for name, base, new in found.settings],
        "code": {"lines_added": plus, "lines_removed": minus, "diff": found.code},
    }


def phase_rows(found: Sides) -> list[list[str]]:
    """Mean seconds of each phase that our summaries recorded."""
    base = [mapping(run.summary, "phases") for run in found.base.runs]
    new = [mapping(run.summary, "phases") for run in found.new.runs]
    names: list[str] = []
    for phases in (*base, *new):
        names += [name for name in phases if name not in names]
    rows = []
    for name in names:
        base_seconds = [seconds for phases in base if (seconds := number(phases.get(name))) is not None]
        new_seconds = [seconds for phases in new if (seconds := number(phases.get(name))) is not None]
        rows.append([name, _spread(base_seconds, ".2f"), _spread(new_seconds, ".2f")])
    return rows
