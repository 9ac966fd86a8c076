"""`try [SETTING=VALUE …]`: is my change better? Trains it against the base in pairs, and gives a verdict.

    python -m tools try MATRIX_LR=0.02            # a setting
    python -m tools try                           # what you have edited in train_gpt.py, against main
    python -m tools try MY_TECHNIQUE=1 --base HEAD --seeds 12

A pair is one seed, trained by both sides, with the same initial weights, data order, dtype, threads and
number of steps. From the fourth pair on, it looks at the differences after every pair (new − base in bits per
byte, negative is better) and stops once they show something; the test is strict enough to look that often.
The last line begins with

    keep        it gains: the interval is below zero
    drop        it hurts, or a useful gain (--useful) is excluded
    undecided   about N more seeds would decide

and the exit status is 0, 1 or 3 to match. It is 2 if there is nothing to compare or a run failed. Scoring
code, data and budget must be the same on both sides. If you start a try again, it continues where it
stopped; a larger --seeds adds pairs. Its runs are in runs/try/NAME, with both scripts as they were when it
began. runs/try/log.jsonl has a line for each verdict.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from data import sample
from data.files import DataError, write_bytes
from data.shards import MANIFEST_NAME
from tools.compare import history, judge, overview
from tools.compare.driver import directory_of, is_finished, locked, run_once, scores_of
from tools.compare.rows import Row, config_class, settings_of_shell
from tools.compare.sequential import (
    DROP,
    FIRST_LOOK,
    KEEP,
    LOOK_P,
    MOST_PAIRS,
    UNDECIDED,
    Verdict,
    verdict,
)
from tools.compare.sides import (
    BASE,
    BUDGET,
    LAST_KEEP,
    NEW,
    SCRIPT,
    Side,
    base_side,
    budget_of,
    changes_of,
    folder_name,
    script_bytes,
)
from tools.runs.conditions import unlike_conditions
from tools.runs.errors import RecordError
from tools.runs.folder import required_object
from tools.runs.logs import STAGES
from tools.runs.runs import LOG, SUMMARY
from tools.runs.script import Config, find_path, similar_setting
from tools.runs.settings import UNSET
from tools.runs.stats import of_pairs, p_text
from tools.runs.writing import columns

EXIT = {KEEP: 0, DROP: 1, UNDECIDED: 3}


@dataclass(frozen=True)
class Pair:
    """What both runs of a seed came to."""

    seed: str
    base: overview.Row
    new: overview.Row
    stage: str  # of the score that counts: the last one that both have

    @property
    def difference(self) -> float:
        """In bits per byte, negative is better."""
        return self.new.scores[self.stage] - self.base.scores[self.stage]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("changes", nargs="*", metavar="SETTING=VALUE", help="settings of your side only")
    parser.add_argument("--base", metavar="REF|SCRIPT|FOLDER",
                        help="a commit, a script, the folder of a record or run, or "
                        f"`{LAST_KEEP}`: the last try that was kept (default: where the branch left "
                        "main)")
    parser.add_argument("--script", type=Path, default=SCRIPT, help="your script (default: train_gpt.py)")
    parser.add_argument("--config", type=Path, metavar="FILE",
                        help="the budget: settings of both sides (default: configs/cpu_try.env)")
    parser.add_argument("--seeds", type=int, default=8, metavar="N",
                        help=f"the most pairs to train, up to {MOST_PAIRS} (default: 8)")
    parser.add_argument("--equal", choices=("steps", "seconds"), default="steps",
                        help="what both sides get the same of: the budget's ITERATIONS, or its "
                        "MAX_WALLCLOCK_SECONDS (default: steps)")
    parser.add_argument("--useful", type=float, default=0.005, metavar="BPB",
                        help="smallest gain worth keeping, in bits per byte (default: 0.005)")
    parser.add_argument("--start", default=shlex.quote(sys.executable), metavar="COMMAND",
                        help="the command that starts a script, such as "
                        "'torchrun --standalone --nproc_per_node=8' (default: this Python)")
    runs = os.environ.get("RUNS_DIR") or "runs"
    parser.add_argument("--runs", type=Path, default=Path(runs) / "try",
                        help=f"folder for tries (default: {runs}/try)")


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.seeds <= MOST_PAIRS:
        raise RecordError(
            f"--seeds {args.seeds}: expected 1 to {MOST_PAIRS}, the most that the stopping rule allows"
        )
    if not args.useful >= 0:
        raise RecordError(f"--useful {args.useful:g}: expected a gain in bits per byte, 0 or more")
    changes = changes_of(args.changes)
    base = base_side(args.base, args.runs)
    new = Side(script_bytes(args.script), {**base.settings, **changes}, str(args.script))
    if (base.script, base.settings) == (new.script, new.settings):
        of_both = " ".join(f"{name}={value}" for name, value in settings_of_shell(os.environ).items())
        hint = f" ({of_both} of the shell is for both sides: write it after try)" if of_both else ""
        raise RecordError(f"both sides are the same: {args.script} is the script of {base.origin}, and no "
                          f"setting differs{hint}; edit it, add SETTING=VALUE, or name another --base")
    given = budget_of(args.config or Path(os.environ.get("CONFIG") or BUDGET), args.equal)
    budget = given.settings
    make_sample(budget)
    data = [data_of(budget, side) for side in (base, new)]
    folder = args.runs / folder_name(changes, base, new, budget, data)
    rows = make_rows(folder, {BASE: base, NEW: new}, budget, start_of(args.start))

    print(f"try {' '.join(args.changes) or args.script.name} against {base.origin}")
    print(f"budget: {budget_in_words(rows[BASE], args.equal)}; runs in {folder}")
    of_shell = settings_of_shell(os.environ)
    used = [f"{name}={value}" for name, value in of_shell.items() if budget.get(name) == value]
    if used:
        print(f"from the shell, for both sides: {' '.join(used)}")
    for remark in given.unused:
        print(f"note: {remark}")
    spread = history.Spread(args.runs, history.conditions(budget))
    print(spread.in_words(), flush=True)
    seeds = [str(config_class(None)().seed + number) for number in range(args.seeds)]
    with locked(folder, "try"):
        pairs = train_pairs(rows, seeds, folder, args.useful)
    differences = [pair.difference for pair in pairs]
    outcome = verdict(differences, args.useful)

    print(f"\n{table(pairs)}\n")
    for remark in remarks(pairs, folder, outcome, args.equal):
        print(remark)
    change = of_pairs(differences)
    try:
        spread.add(folder.name, differences)
        history.append(
            args.runs, name=folder.name, settings=new.settings, base=base.origin, pairs=len(pairs),
            difference=change.difference, p=change.p, verdict=outcome.word, why=outcome.why,
        )
    except (DataError, RecordError) as error:  # hours of runs are not to end without their verdict
        print(f"note: this verdict is not in the history of tries: {error}")
    print(f"tries with a verdict today: {history.tries_of_today(args.runs)}; of changes that do nothing, "
          "about one in 20 gets a wrong verdict")
    print(last_line(pairs, outcome))
    return EXIT[outcome.word]


def data_of(budget: Mapping[str, str], side: Side) -> dict[str, str]:
    """What identifies the data that a side reads."""
    settings = {**Config().as_env(), **budget, **side.settings}
    return judge.files_read(settings["DATA_PATH"], settings["TOKENIZER_PATH"])


def start_of(command: str) -> list[str]:
    """The words that start a script. RecordError where they name no program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise RecordError(f"--start {command}: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise RecordError(f"--start {shlex.quote(command)}: no such program; expected what starts a script, "
                          "such as 'torchrun --standalone --nproc_per_node=8'")
    return words


def make_sample(budget: Mapping[str, str]) -> None:
    """On a fresh clone, the sample that the default budget trains on; its manifest is written last."""
    path = budget.get("DATA_PATH", "")
    is_missing = Path(path).name == sample.NAME and not (find_path(path) / MANIFEST_NAME).exists()
    if is_missing and sample.main([]) != 0:
        raise RecordError(f"DATA_PATH={path}: the sample could not be made, for the reason above")


def make_rows(
    folder: Path, sides: Mapping[str, Side], budget: Mapping[str, str], start: Sequence[str]
) -> dict[str, Row]:
    """The sides as the driver runs them, from copies in the folder.

    RecordError where they would not be judged alike; the folder, if it is new, is removed again.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    scripts = {name: folder / f"{name}.py" for name in sides}
    try:
        rows = {}
        for name, side in sides.items():
            write_bytes(scripts[name], side.script)
            settings = {**budget, **side.settings}
            refuse_unknown(settings, scripts[name], side.origin)
            refuse_unshared(settings, scripts[name], side.origin)
            # The shell may name a CONFIG, whose settings are in the budget already.
            settings["CONFIG"] = "none"
            rows[name] = Row(name, settings, [*start, str(scripts[name])], scripts[name])
        refuse_unlike(rows[BASE], rows[NEW])
        return rows
    except RecordError:
        if is_new:
            for script in scripts.values():
                script.unlink(missing_ok=True)
            folder.rmdir()
        raise


def refuse_unknown(settings: Mapping[str, str], script: Path, origin: str) -> None:
    """RecordError for a setting that a side does not have."""
    known = config_class(script)().as_env()
    for name in settings:
        if name not in known:
            near = similar_setting(name.upper())
            if not near:
                hint = "its --help lists them"
            elif near == name:  # only the new side has it
                hint = f"the shell and --config set both sides, so write it after try: {name}=VALUE"
            else:
                hint = f"did you mean {near}?"
            raise RecordError(f"{name} is not a setting of {origin}; {hint}")


def refuse_unshared(settings: Mapping[str, str], script: Path, origin: str) -> None:
    """RecordError for a setting of the shell that only this side has: it would be a hidden change."""
    for name, value in settings_of_shell(os.environ, script).items():
        if name != "CONFIG" and name not in settings:
            raise RecordError(f"{name}={value} of the shell is a setting that only {origin} has; unset it, "
                              f"and for your own side write it after try: {name}={value}")


def refuse_unlike(base: Row, new: Row) -> None:
    """RecordError where the sides would not be judged alike, with what differs."""
    assert base.script is not None and new.script is not None
    changed = judge.scoring_changes(base.script, new.script)
    if changed:
        raise RecordError(
            f"the scoring code differs between the sides: {', '.join(changed)}. try only compares scores from"
            " the same code; undo that change, or compare the two with sweep"
        )
    try:
        configs = base.config("1"), new.config("1")
    except ValueError as error:  # a ConfigError, of whichever script
        raise RecordError(str(error)) from error
    changed = judge.setting_changes(*configs)
    if changed:
        tokens = any(change.startswith("TRAIN_BATCH_TOKENS") for change in changed)
        instead = "; or compare at equal time, with --equal seconds" if tokens else ""
        raise RecordError(f"{'; '.join(changed)}: budget and scoring must be the same on both sides; set it "
                          f"for both with --config, or in the shell{instead}")
    changed = judge.data_changes(*configs)
    if changed:
        raise RecordError(
            f"the sides would be scored on different data, because {', '.join(changed)} differ; give both the"
            " same DATA_PATH and TOKENIZER_PATH"
        )


def budget_in_words(row: Row, equal: str) -> str:
    """What each run gets."""
    settings = row.config("1").as_env()
    if equal == "steps":
        return f"{int(settings['ITERATIONS']):,} steps of {int(settings['TRAIN_BATCH_TOKENS']):,} tokens"
    seconds = float(settings["MAX_WALLCLOCK_SECONDS"])
    return f"{seconds:g} s of training (other programs on this machine cost steps)"


def train_pairs(rows: Mapping[str, Row], seeds: Sequence[str], folder: Path, useful: float) -> list[Pair]:
    """The pairs, up to the one after which the rule stops. RecordError for a run that failed."""
    pairs: list[Pair] = []
    says_how_long = True
    for number, seed in enumerate(seeds):
        had = [is_finished(directory_of(folder, name, seed)) for name in rows]
        begin = time.monotonic()
        # In turns, so that a machine that becomes slower or faster favors no side.
        for name in (BASE, NEW) if number % 2 == 0 else (NEW, BASE):
            failed = run_once(rows[name], seed, folder, quiet=True)
            if failed:
                raise RecordError(f"{failed}; {next_step(directory_of(folder, name, seed))}")
        pair = read_pair(folder, seed)
        pairs.append(pair)
        if pair.stage != pairs[0].stage:
            raise RecordError(f"{folder}: the last score of both sides is after {pairs[0].stage} with seed "
                              f"{pairs[0].seed}, and after {pair.stage} with seed {seed}: pairs of two kinds "
                              "are not one series; raise MAX_EVAL_SECONDS of the budget")
        runs = [directory_of(folder, name, pair.seed) for pair in pairs for name in rows]
        unlike = unlike_conditions(runs)
        if unlike:
            raise RecordError(f"{folder}: its runs were made under different conditions ({unlike}); move it "
                              "away and start again")
        base_bpb, new_bpb = pair.base.scores[pair.stage], pair.new.scores[pair.stage]
        print(f"seed {seed}: base {base_bpb:.5f}, new {new_bpb:.5f}, difference {pair.difference:+.5f}",
              file=sys.stderr, flush=True)
        differences = [pair.difference for pair in pairs]
        is_idle = len(pairs) >= FIRST_LOOK and not any(differences)
        if is_idle or verdict(differences, useful).word != UNDECIDED:
            break
        left = len(seeds) - len(pairs)
        if says_how_long and left and not any(had):
            seconds = time.monotonic() - begin
            print(f"this pair took {seconds:.0f} s; {left} more would take {left * seconds / 60:.1f} minutes",
                  file=sys.stderr, flush=True)
            says_how_long = False
    return pairs


def next_step(directory: Path) -> str:
    """What to do about a run that failed, or that finished over a limit."""
    if is_finished(directory):
        return ("raise that limit for both sides, in the budget (--config) or in the shell, or change what "
                "exceeds it: either is a new try")
    where = "its log.txt says more" if (directory / LOG).is_file() else "the lines above say why"
    return f"{where}. Start the try again to continue from there"


def read_pair(folder: Path, seed: str) -> Pair:
    """Both finished runs of a seed. RecordError where they have no kind of score in common."""
    base, new = (directory_of(folder, name, seed) for name in (BASE, NEW))
    shared = scores_of(base).keys() & scores_of(new).keys()
    stages = [stage for stage in STAGES if stage in shared]
    if not stages:
        raise RecordError(f"{base} and {new} have no kind of score in common; their logs say more")
    # What counts the text is the same code on both sides, but it may be called with something else.
    counted = [judge.scored_text(directory, stages[-1]) for directory in (base, new)]
    if counted[0] != counted[1]:
        raise RecordError(f"{base} and {new} did not score the same text ({' against '.join(counted)}): the "
                          "change reaches the scoring, and their difference says nothing")
    return Pair(seed, overview.read_row(base), overview.read_row(new), stages[-1])


def table(pairs: Sequence[Pair]) -> str:
    """A line for each pair, and their means."""
    heads = ["seed", "base bpb", "new bpb", "new − base", "base ms/step", "new", "base bytes", "new"]
    lines = [cells(pair.seed, [pair]) for pair in pairs]
    return columns(heads, [*lines, cells("mean", pairs)])


def cells(name: str, pairs: Sequence[Pair]) -> list[str]:
    """One line of the table: the means over these pairs."""
    found = [name]
    for side in (BASE, NEW):
        found.append(f"{fmean(getattr(pair, side).scores[pair.stage] for pair in pairs):.5f}")
    found.append(f"{fmean(pair.difference for pair in pairs):+.5f}")
    for what, form in (("ms", ".1f"), ("bytes", ",.0f")):
        for side in (BASE, NEW):
            values = [getattr(getattr(pair, side), what) for pair in pairs]
            found.append(UNSET if None in values else f"{fmean(values):{form}}")
    return found


def remarks(pairs: Sequence[Pair], folder: Path, outcome: Verdict, equal: str) -> list[str]:
    """What a reader of the table should know."""
    lines = []
    if equal == "steps":
        streams = []
        for name in (BASE, NEW):
            summaries = [required_object(directory_of(folder, name, pair.seed) / SUMMARY) for pair in pairs]
            streams.append([summary.get("stream_hash") for summary in summaries])
        if streams[0] != streams[1]:
            lines.append("note: the sides read the training data in different orders")
        steps = sorted({row.steps or 0 for pair in pairs for row in (pair.base, pair.new)})
        if len(steps) > 1:
            lines.append(f"note: the runs made {' and '.join(map(str, steps))} steps, not the same number")
    trained = [(pair.base.scores.get(STAGES[0]), pair.new.scores.get(STAGES[0])) for pair in pairs]
    if all(base is not None and base == new for base, new in trained):
        lines.append("note: with each seed both sides score the same before quantization, so your change did "
                     "nothing in training; if it should have, is something that it needs off in this budget?")
    stopped = [row.path.name for pair in pairs for row in (pair.base, pair.new) if row.stopped_learning]
    if stopped:
        lines.append(f"note: the clock ended test-time training early in {', '.join(stopped)}: raise "
                     "MAX_EVAL_SECONDS, or a busy machine changes scores")
    if outcome.interval is not None:
        low, high = outcome.interval
        lines.append(f"interval that holds at every look (p < {LOOK_P} each): {low:+.5f} to {high:+.5f}")
    return lines


def last_line(pairs: Sequence[Pair], outcome: Verdict) -> str:
    """The verdict with the numbers that it is based on."""
    change = of_pairs([pair.difference for pair in pairs])
    text = f"{outcome.word}: {outcome.why}; new − base {change.difference:+.5f} bits per byte"
    if change.interval is not None and change.p is not None:
        low, high = change.interval
        text += f", 95% interval {low:+.5f} to {high:+.5f}, {p_text(change.p)} ({change.test_in_words})"
    *_, base_ms, new_ms, base_bytes, new_bytes = cells("", pairs)
    return f"{text}; {base_ms} → {new_ms} ms/step, {base_bytes} → {new_bytes} bytes"
