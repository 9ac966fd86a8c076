"""Read a training log: both public dialects and ours, into one `RunLog`; every value keeps its line number.

Dialect A (`step:5/100 train_loss:…`) is the upstream baseline's and ours; dialect B (`5/100 train_loss: …`, a
sorted `Hyperparameters:` block) is that of the records from April 2026 on. Logs often begin with the script's
source, whose f-strings look like log lines: only lines with literal numbers match.

torchrun, srun, Docker and Python's logging put a rank, a time, a level or a name before each line. They are
taken off first, so every tool that reads a log through `read_log` sees the line that the script printed.

A log may come from anybody: reading is bounded in bytes and lines, and no expression here takes more than
linear time on a line (none has two neighbors that repeat over the same characters).
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.runs.reading import as_text, name_of

LOG_BYTES_MAX = 16 * 2**20  # of a file; the rest is left unread
LINES_MAX = 100_000  # of a log
LINE_CHARACTERS_MAX = 4_000  # a longer line is part of a script's source and says nothing about the run
DECIMALS_MAX = 20  # more digits than any number here has

# Digits are those that scripts print: `\d` would also read Arabic and full-width ones.
NUMBER = r"-?(?:[0-9]{1,40}(?:\.[0-9]{1,40})?(?:[eE][-+]?[0-9]{1,4})?|nan|inf)"
COUNT = r"[0-9]{1,15}"
STEP_LINE = re.compile(rf"^(?:step:)?\s*({COUNT})/({COUNT})\s+(.*)$")
PAIR = re.compile(r"(?<![\w/])([A-Za-z_][\w/]*)[:=]\s*(\S+)")
SCORES = re.compile(rf"\sval_loss:\s*({NUMBER})\s+val_bpb:\s*({NUMBER})\b")
LABEL = re.compile(r"[A-Za-z][\w+\-() ]*")
TAG = re.compile(r"\w+:\d+")  # between a label and its scores, such as `step:100`
BYTES_LINE = re.compile(rf"^(Serialized model|Code size|Total submission size)([^:]*):\s*({COUNT}) bytes")
STOP_LINE = re.compile(
    rf"^stopping_early:\s*(\w+)\s+train_time:\s*({NUMBER})(ms|s)\s+step:\s*({COUNT})/({COUNT})"
)
HESSIAN_LINE = re.compile(rf"collected {COUNT} [Hh]essians in ({NUMBER})s")
SETTINGS_LINE = re.compile(r"^\w{3,}:\S+(?: \w{3,}[:=]\S+)*$")
# How data gets to the device: words like `prefetch:`, which are not names of settings.
INPUT_LINE = re.compile(r"^(train|val)_io:")
HYPERPARAMETER_LINE = re.compile(r"^  (\w+): (.*)$")
LABELED_LINE = re.compile(rf"^(train_shards|val_tokens|model_params|seed)\s*[:=]\s*({COUNT})$")
TRAIN_LOADER_LINE = re.compile(rf"^train_loader:dataset:(\S+) train_shards:({COUNT})")
TRAIN_PATTERN_LINE = re.compile(r"^train_loader:.*\bpattern=(\S+)")
VAL_LOADER_LINE = re.compile(rf"^val_loader:.*\btokens:({COUNT})(?: bytes:({COUNT})( comparable:0)?)?")
# Of which set the validation text is, as our script prints it.
VALIDATION_LINE = re.compile(r"^validation: (your own|official \([\w.-]{1,40}\))$")
GPU_LINE = re.compile(r"^\|\s+\d+\s+((?:NVIDIA|AMD|Tesla)(?:\s\S+)+)\s+(?:On|Off|N/A)\s+\|")
VERSION_LINE = re.compile(r"^Running (Python|PyTorch) (\S+)")
# What ours add to it: the devices, and the attention implementation of the run.
DEVICE_LINE = re.compile(
    r"^Running Python \S+ PyTorch (?P<PyTorch>\S+) on (?P<device>.+?)"
    r"( dtype:(?P<dtype>\S+) compile:(?P<compile>\S+) threads:(?P<threads>\S+))?$"
)
ATTENTION_LINE = re.compile(r"^attention:(\w+) (?:tried:|\(reference)")
CLOCK_LINE = re.compile(rf"^limit:train_seconds ({NUMBER})(?: of |, no limit)")  # of our script, at the end
EVAL_CLOCK_LINE = re.compile(rf"^eval_clock: scoring ({NUMBER}) s, from reading the artifact ({NUMBER}) s")
TOTAL_EVAL_LINE = re.compile(rf"^total_eval_time:\s*({NUMBER})s")
# Lines that report a score again, while it is computed.
DONE_LINE = re.compile(rf"^(\w{{1,80}}):done val_loss=({NUMBER}) val_bpb=({NUMBER})(?:\s|$)")
PROGRESS_LINE = re.compile(
    rf"^val_progress:(\w{{1,80}}) 100% partial_mean_loss:({NUMBER}) tokens_seen:({COUNT})\b"
)
# What is left of a document batch in test-time training: the lengths of its shortest and longest document.
BATCH_LINE = re.compile(rf"^ttp: (b{COUNT}/{COUNT}) .*\bdl:({COUNT}-{COUNT})\b")
# This script stopped training in an evaluation: the seconds used, the limit, what the rest would have taken.
# The other words are those of 0.6.
UNLEARNED_LINE = re.compile(
    rf"^warning: (\w{{1,80}}) continues without (?:training|learning): ({NUMBER})s? of ({NUMBER}) ?s are"
    rf" used, the rest (?:would take|needs) ({NUMBER}) ?s"
)
MODEL_BYTES = "Serialized model"  # begins a line of bytes
FENCE = "=" * 100
# The scores of a run in order; those after the first are named by the rank of their label.
STAGES = ("before quantization", "quantized", "sliding window", "test-time training")
EXACT = "_exact"  # ends the label of the line that repeats a score with all its digits

# What comes before the lines of a script that another program started or whose output it keeps.
ESCAPES = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")  # colors
DAY = r"(?:[0-9]{4}[-/][0-9]{2}[-/][0-9]{2}|[0-9]{2}/[0-9]{2}/[0-9]{2,4}|[A-Z][a-z]{2} [ 0-9][0-9])"
HOUR = r"[0-9]{1,2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})?(?: ?(?:Z|UTC|[-+][0-9]{2}:?[0-9]{2}))?"
LEVEL = r"(?:DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL)"
PREFIX = re.compile(
    r"\[default([0-9]{1,4})\]:"  # torchrun --tee; a group has the rank
    r"|\[(?:rank)?([0-9]{1,4})\]: ?"
    r"|\[[0-9]{1,4},([0-9]{1,4})\]<std(?:out|err)>:"  # mpirun --tag-output
    r"|rank ?([0-9]{1,4}): "
    rf"|{DAY} {HOUR} \| {LEVEL} {{0,8}} \| [\w.:<>]{{1,80}} - "  # loguru
    rf"|\[?{DAY}[T ]{HOUR}\]?(?: -)?(?: |$)"
    rf"|\[?{HOUR}\]?(?: -)?(?: |$)"
    r"|[0-9]{9,13}\.[0-9]{1,9} "  # seconds since 1970
    rf"|[IWEF][0-9]{{4}} {HOUR} {{1,8}}[0-9]{{1,10}} [\w./-]{{1,80}}:[0-9]{{1,6}}\] "  # glog and absl
    rf"|{LEVEL}:(?:[\w.]{{1,80}}:| )"  # Python's logging as it is without a format
)
# What a logger puts after its time: a level, the name of a logger, a place in a program.
LOGGER = re.compile(
    rf"\[?{LEVEL}\]?(?::| -)?(?: |$)"
    rf"|\[{LEVEL}\](?= ?\[)"
    r"|\[(?:Rank )?[\w.:<>]{1,80}\](?: -)?(?: |$|(?=\[))"
    r"|[\w.:<>]{1,80} - "
    r"|[\w.-]{1,80} [\w./-]{1,80}\[[0-9]{1,10}\]: "  # syslog: machine and program
    r"|std(?:out|err) [FP] "  # of a container
)
PREFIXES_MAX = 6  # before one line
# Any other prefix is what comes before most of these: the labels of srun, names of containers.
ANCHOR = re.compile(
    rf"(?:step:)?{COUNT}/{COUNT}\s{{1,4}}(?:train_loss|val_loss|loss):|Serialized model|Total submission size"
    r"|Code size|stopping_early:"
)
DIGITS = re.compile("[0-9]{1,20}")
PREFIX_CHARACTERS_MAX = 80  # of such a one
FIRST_LINE_CHARACTERS = 80  # of a log that gives nothing, to name it

MILLISECONDS = {"ms": 1.0, "s": 1e3, "m": 6e4}
DURATION = re.compile(rf"^({NUMBER})(ms|s|m)$")


@dataclass(frozen=True)
class Located:
    """A value and the 1-based line of the log it was read from."""

    value: str
    line: int

    @property
    def integer(self) -> int | None:
        """The value where it is a count; None for any other text."""
        return int(self.value) if re.fullmatch(COUNT, self.value) else None


@dataclass(frozen=True, slots=True)
class Pace:
    """Training clock and mean time of a step, as one line prints both; `*_unit_ms`: of the last digit."""

    time_ms: float
    time_unit_ms: float
    average_ms: float
    average_unit_ms: float

    def fits(self, steps: float, time_ms: float) -> bool:
        """Whether `steps` of the mean time make `time_ms`, apart from rounding."""
        slack_ms = abs(steps) * self.average_unit_ms + 2 * self.time_unit_ms
        return abs(steps * self.average_ms - time_ms) <= slack_ms


@dataclass(frozen=True, slots=True)
class Point:
    """One step line. `loss` in nats per token, `bpb` on validation lines, `time_ms` of the training clock.

    `limit` is what comes after the slash, `pace` the clock and the mean time where the line prints both.
    `printed_ms` is the clock as printed, where `time_ms` follows from a speed; `loss_text` the loss.
    """

    step: int
    loss: float
    line: int
    time_ms: float | None = None
    bpb: float | None = None
    limit: int | None = None
    pace: Pace | None = None
    printed_ms: float | None = None
    loss_text: str = ""


@dataclass(frozen=True, slots=True)
class Final:
    """One scoring line after training; `loss_text` and `bpb_text` keep the printed digits."""

    label: str
    loss_text: str
    bpb_text: str
    line: int
    eval_seconds: float | None = None
    scored_tokens: int | None = None
    val_bytes: int | None = None
    learned_tokens: int | None = None

    @property
    def loss(self) -> float:
        return float(self.loss_text)

    @property
    def bpb(self) -> float:
        return float(self.bpb_text)

    @property
    def rank(self) -> int:
        """Claim of the label: 3 test-time training, 2 sliding window, 1 artifact round trip, 0 no score."""
        label = self.label.lower()
        if re.search(r"pre-?quant|post[-_ ]ema|diagnostic|^raw", label):
            return 0
        if "ttt" in label:
            return 3
        if "sliding" in label:
            return 2
        return 1

    @property
    def stage(self) -> str:
        """The part of a run that this score follows, one of STAGES; empty where the label names none."""
        if self.rank > 0:
            return STAGES[self.rank]
        label = self.label.lower()
        if re.search(r"pre-?quant|post[-_ ]ema|^raw|^diagnostic final$", label):
            return STAGES[0]
        return STAGES[1] if "quantized" in label else ""


@dataclass(frozen=True, slots=True)
class ByteCount:
    """A line of bytes: `what` is the line's beginning, such as 'Code size'; `form` what follows it."""

    what: str
    form: str
    bytes: int
    line: int


@dataclass(frozen=True, slots=True)
class Told:
    """What a log says of a score while it is made; bits per byte and tokens where the line has them."""

    name: str
    loss_text: str
    bpb_text: str | None
    tokens: int | None
    line: int


@dataclass(frozen=True)
class EvalClocks:
    """Seconds of an evaluation: of the scoring that counts, and from reading the artifact to its end."""

    scoring_seconds: float
    from_artifact_seconds: float
    line: int


@dataclass(frozen=True)
class Unlearned:
    """Where a score went on without learning: seconds used, of how many, and those that the rest needed."""

    name: str
    used_seconds: float
    limit_seconds: float
    needed_seconds: float
    line: int


@dataclass(frozen=True)
class Stop:
    """Why and when training stopped early."""

    reason: str
    train_seconds: float
    step: int
    line: int


@dataclass
class RunLog:
    """Everything a log says about one run."""

    path: Path
    lines: int = 0
    dialect: str = "A"
    train: list[Point] = field(default_factory=list)
    validation: list[Point] = field(default_factory=list)
    finals: list[Final] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    byte_counts: list[ByteCount] = field(default_factory=list)
    settings: dict[str, Located] = field(default_factory=dict)
    versions: dict[str, Located] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    # Of rank 0, as our script prints them: PyTorch, device, dtype, compile, threads.
    conditions: dict[str, str] = field(default_factory=dict)
    attention: list[str] = field(default_factory=list)  # kernels that our script chose, such as `fa3`
    stop: Stop | None = None
    clock_seconds: Located | None = None  # the training clock at its end, as our script prints it
    hessian_seconds: Located | None = None
    total_eval_seconds: Located | None = None
    eval_clocks: EvalClocks | None = None
    validation_bytes: Located | None = None  # of the text, as the loader of our script counts them
    is_limited: bool = False  # to the first tokens of the text, by VAL_TOKENS_LIMIT
    validation_set: Located | None = None  # `your own`, or `official (sp8192)`
    batches: dict[str, Located] = field(default_factory=dict)  # lengths of the documents in each
    unlearned: Unlearned | None = None
    source: str | None = None  # the script's text, where the log begins with it
    first_line: str = ""
    unread: str | None = None  # why the rest of the file was not read

    @property
    def says_nothing(self) -> bool:
        """Whether no line is a step or a score: this is not a log that these tools can read."""
        return not (self.finals or self.train or self.validation)

    @property
    def nothing(self) -> str:
        """A sentence on a file that says nothing."""
        if not self.first_line:
            return f"{name_of(self.path)} is empty"
        lines = f"{self.lines:,} line{'s' if self.lines != 1 else ''}"
        return f"{name_of(self.path)}: {lines}, none is a step or a score; the first: {self.first_line!r}"

    @property
    def seed(self) -> int | None:
        located = self.settings.get("seed")
        return located.integer if located else None

    @property
    def headline(self) -> Final | None:
        """The score with the strongest label."""
        strongest = max((final.rank for final in self.finals), default=0)
        return self.score_of(strongest) if strongest > 0 else None

    def score_of(self, rank: int) -> Final | None:
        """The score with a label of that rank: exact digits before rounded, late before early."""
        return exact([final for final in self.finals if final.rank == rank])

    def score_after(self, stage: str) -> Final | None:
        """The score of a stage: its exact digits before rounded ones, late before early."""
        return exact([final for final in self.finals if final.stage == stage])

    @property
    def model_bytes(self) -> ByteCount | None:
        """Bytes of the compressed model: the last line that names a compression."""
        return self._last_bytes(MODEL_BYTES)

    @property
    def total_bytes(self) -> ByteCount | None:
        return self._last_bytes("Total submission size")

    def _last_bytes(self, what: str) -> ByteCount | None:
        """The last line of that kind that names a form; where the same form comes again, the larger one."""
        found = [count for count in self.byte_counts if count.what == what and count.form]
        same = [count for count in found if count.form == found[-1].form]
        return max(same, key=lambda count: (count.bytes, count.line), default=None)

    @property
    def code_bytes(self) -> ByteCount | None:
        """Bytes of the script as it ran: the plain or 'uncompressed' line."""
        found = [c for c in self.byte_counts if c.what == "Code size" and c.form in ("", "uncompressed")]
        return found[-1] if found else None

    @property
    def steps(self) -> int | None:
        """Steps up to the last line that has them."""
        if self.stop:
            return self.stop.step
        reached = [point.step for point in (*self.train, *self.validation)]
        return max(reached) if reached else None

    @property
    def steps_done(self) -> int | None:
        """Steps of the run. A run that was scored without a line of an early stop went to its step limit.

        Its last line of training may come before the limit. A run without a score has not ended.
        """
        limit = self.settings.get("iterations")
        whole = self.stop is None and bool(self.finals)
        if whole and self.steps is not None and limit is not None and limit.integer is not None:
            return limit.integer
        return self.steps

    @property
    def train_seconds(self) -> float | None:
        """Seconds on the training clock when it stopped; the largest that a log of dialect A prints.

        Times in dialect B follow from a rounded speed: there the line that says where it stopped counts.
        """
        if self._seconds_past_its_lines is not None:
            return self._seconds_past_its_lines
        times = [p.time_ms / 1e3 for p in (*self.train, *self.validation) if p.time_ms is not None]
        if self.stop:
            times = [self.stop.train_seconds, *(times if self.dialect == "A" else [])]
        return max(times, default=None)

    @property
    def clock_is_whole(self) -> bool:
        """Whether the log has the training clock to the end: where training stopped, or at the last step."""
        if self._seconds_past_its_lines is not None:
            return True
        points = (*self.train, *self.validation)
        last = max((point.step for point in points), default=None)
        return self.stop is not None or any(p.step == last and p.time_ms is not None for p in points)

    @property
    def _seconds_past_its_lines(self) -> float | None:
        """The clock told at the end, where training went on to its step limit after the last line of it."""
        if self.clock_seconds is None or self.steps == self.steps_done:
            return None
        return float(self.clock_seconds.value)

    @property
    def step_ms(self) -> float | None:
        steps = self.steps if self._seconds_past_its_lines is None else self.steps_done
        seconds = self.train_seconds
        return seconds * 1e3 / steps if steps and seconds else None

    @property
    def validation_tokens(self) -> Located | None:
        return self.settings.get("val_tokens")

    def where(self, line: int) -> str:
        return f"{name_of(self.path)}:{line}"


def exact(finals: Iterable[Final]) -> Final | None:
    """The score with the most digits, and of equal ones the last."""
    return max(finals, key=lambda final: (decimals(final.bpb_text), final.line), default=None)


def decimals(text: str) -> int:
    """Digits after the point of a printed number, at most DECIMALS_MAX."""
    mantissa, _, exponent = text.lower().partition("e")
    places = len(mantissa.partition(".")[2]) - (int(exponent) if exponent else 0)
    return max(0, min(places, DECIMALS_MAX))


def read_log(path: Path) -> RunLog:
    """Parse `path`: its first LOG_BYTES_MAX bytes; undecodable ones are replaced, unknown lines skipped."""
    with path.open("rb") as file:
        data = file.read(LOG_BYTES_MAX)
        whole = not file.read(1)
    log = parse_log(as_text(data), path)
    if not whole:
        log.unread = f"it has {path.stat().st_size:,} bytes, the first {LOG_BYTES_MAX:,} were read"
    return log


def parse_log(text: str, path: Path) -> RunLog:
    """Parse the text of a log; `path` is only remembered."""
    log = RunLog(path=path)
    taken = itertools.islice(io.StringIO(text, newline=None), LINES_MAX + 1)
    lines = without_prefixes([ESCAPES.sub("", line.rstrip("\n")) for line in taken])
    if len(lines) > LINES_MAX:
        lines.pop()
        log.unread = f"it has more lines than the {LINES_MAX:,} that were read"
    log.lines = len(lines)
    log.first_line = next((line.strip() for line in lines if line.strip()), "")[:FIRST_LINE_CHARACTERS]
    start = _skip_source(lines, log)
    in_hyperparameters = False
    for number, line in enumerate(lines[start:], start + 1):
        if len(line) > LINE_CHARACTERS_MAX:
            continue
        if line.startswith("Hyperparameters:"):
            in_hyperparameters = True
            log.dialect = "B"
            continue
        pair = HYPERPARAMETER_LINE.match(line) if in_hyperparameters else None
        if pair:
            log.settings[pair[1]] = Located(pair[2].strip(), number)
            continue
        in_hyperparameters = in_hyperparameters and not line
        _read_line(line.lstrip(" "), number, log)
    _share_eval_seconds(log)
    return log


def without_prefixes(lines: list[str]) -> list[str]:
    """The lines as the script printed them: without what its launcher or a logger put before each.

    Where several ranks print, those of the first one that prints a step are kept, and the others left blank.
    """
    ranks: list[int | None] = []
    for index, line in enumerate(lines):
        rank, begin = _known_prefix(line)
        lines[index] = line[begin:]
        ranks.append(rank)
    found: Counter[str] = Counter()  # what comes before a step
    speaking: int | None = None
    for line, rank in zip(lines, ranks, strict=True):
        step = ANCHOR.search(line) if len(line) <= LINE_CHARACTERS_MAX else None
        if step is not None:
            found[DIGITS.sub("0", line[: step.start()])] += 1
            speaking = rank if speaking is None else speaking
    if speaking is not None:
        kept = (None, speaking)
        lines = [line if rank in kept else "" for line, rank in zip(lines, ranks, strict=True)]
    prefix = max(found, key=lambda text: found[text], default="")
    if not prefix or found[prefix] < 2 or len(prefix) > PREFIX_CHARACTERS_MAX:
        return lines
    pattern = re.compile("[0-9]{1,20}".join(re.escape(part) for part in prefix.split("0")))
    return [pattern.sub("", line, count=1) if pattern.match(line) else line for line in lines]


def _known_prefix(line: str) -> tuple[int | None, int]:
    """The rank that printed a line, if the line says so, and where the line itself begins.

    Its own first blanks belong to it: they may be an indent.
    """
    rank: int | None = None
    begin = 0
    for _ in range(PREFIXES_MAX):
        found = PREFIX.match(line, begin)
        if found is not None and found.lastindex is not None:
            rank = int(found[found.lastindex])
        if found is None and begin:
            found = LOGGER.match(line, begin)
        if found is None:
            break
        begin = found.end()
    return rank, begin


def _share_eval_seconds(log: RunLog) -> None:
    """Give `x_exact` lines, which print no time, the seconds of the `x` line before them."""
    seconds: dict[str, float | None] = {}
    for index, final in enumerate(log.finals):
        if final.eval_seconds is None and final.label.endswith(EXACT):
            rounded = final.label.removesuffix(EXACT)
            log.finals[index] = replace(final, eval_seconds=seconds.get(rounded))
        seconds[final.label] = final.eval_seconds


def _skip_source(lines: list[str], log: RunLog) -> int:
    """Index of the first line after the script's own text, where the log opens with it; keeps that text.

    Of a log of several runs the text of the last one is kept: its scores count.
    """
    begin = start = 0
    for fence, line in enumerate(lines):
        if line != FENCE:
            continue
        part = lines[begin:fence]
        first = next((i for i, line in enumerate(part) if _opens_source(line)), None)
        # No source, or one that log lines were written into.
        if first is not None and not any(STEP_LINE.match(line) for line in part[first:]):
            log.source = "\n".join(part[first:])
            start = start or fence
        elif begin == 0:
            return 0
        begin = fence + 1
    return start


def _opens_source(line: str) -> bool:
    return line.startswith(('"', "'", "import ", "from ", "#!", "# "))


def _read_line(line: str, number: int, log: RunLog) -> None:
    step = STEP_LINE.match(line)
    if step:
        _read_step(step, number, log)
        return
    final = _read_final(line, number)
    if final:
        log.finals.append(final)
        return
    counted = BYTES_LINE.match(line)
    if counted:
        log.byte_counts.append(ByteCount(counted[1], counted[2].strip(" ()"), int(counted[3]), number))
        return
    stop = STOP_LINE.match(line)
    if stop:
        seconds = float(stop[2]) * MILLISECONDS[stop[3]] / 1e3
        log.stop = Stop(stop[1], seconds, int(stop[4]), number)
        return
    _read_setting(line, number, log)


def _read_setting(line: str, number: int, log: RunLog) -> None:
    if pattern := TRAIN_PATTERN_LINE.match(line):
        log.settings.setdefault("train_files", Located(pattern[1], number))
    loader = TRAIN_LOADER_LINE.match(line)
    if loader:
        log.settings.setdefault("train_dataset", Located(loader[1], number))
        log.settings.setdefault("train_shards", Located(loader[2], number))
    elif match := VAL_LOADER_LINE.match(line):
        log.settings.setdefault("val_tokens", Located(match[1], number))
        if match[2] is not None:
            log.validation_bytes = Located(match[2], number)
            log.is_limited = match[3] is not None
    elif match := VALIDATION_LINE.match(line):
        log.validation_set = Located(match[1], number)
    elif match := LABELED_LINE.match(line):
        log.settings.setdefault(match[1], Located(match[2], number))
    elif match := GPU_LINE.match(line):
        log.gpus.append(match[1])
    elif match := VERSION_LINE.match(line):
        log.versions.setdefault(match[1].lower(), Located(match[2], number))
        if named := DEVICE_LINE.match(line):
            log.conditions = {name: value for name, value in named.groupdict().items() if value}
    elif match := ATTENTION_LINE.match(line):
        log.attention.append(match[1])
    elif match := HESSIAN_LINE.search(line):
        log.hessian_seconds = Located(match[1], number)
    elif match := CLOCK_LINE.match(line):
        log.clock_seconds = Located(match[1], number)
    elif match := EVAL_CLOCK_LINE.match(line):
        log.eval_clocks = EvalClocks(float(match[1]), float(match[2]), number)
    elif match := DONE_LINE.match(line):
        log.told.append(Told(match[1], match[2], match[3], None, number))
    elif match := PROGRESS_LINE.match(line):
        log.told.append(Told(match[1], match[2], None, int(match[3]), number))
    elif match := BATCH_LINE.match(line):
        log.batches.setdefault(match[1], Located(match[2], number))
    elif match := UNLEARNED_LINE.match(line):
        log.unlearned = Unlearned(match[1], float(match[2]), float(match[3]), float(match[4]), number)
    elif match := TOTAL_EVAL_LINE.match(line):
        log.total_eval_seconds = Located(match[1], number)
    elif not log.train and SETTINGS_LINE.match(line) and not INPUT_LINE.match(line):
        for name, value in PAIR.findall(line):
            log.settings.setdefault(name, Located(value, number))


def _read_step(match: re.Match[str], number: int, log: RunLog) -> None:
    pairs = dict(PAIR.findall(match[3]))
    step = int(match[1])
    time_ms = _train_time_ms(step, pairs, log)
    log.settings.setdefault("iterations", Located(match[2], number))
    is_validation = _is_number(pairs.get("val_loss"))
    loss = pairs["val_loss"] if is_validation else pairs.get("train_loss") or pairs.get("loss")
    if loss is None or not _is_number(loss):
        return
    bpb = pairs.get("val_bpb")
    point = Point(
        step,
        float(loss),
        number,
        time_ms,
        bpb=float(bpb) if is_validation and bpb is not None and _is_number(bpb) else None,
        limit=int(match[2]),
        pace=_pace(pairs),
        printed_ms=_duration_ms(pairs.get("train_time")),
        loss_text=loss,
    )
    (log.validation if is_validation else log.train).append(point)


def _train_time_ms(step: int, pairs: dict[str, str], log: RunLog) -> float | None:
    """The clock as printed; dialect B prints tenths of minutes, its tokens per second say more."""
    batch = log.settings.get("train_batch_tokens")
    rate = pairs.get("tok/s")
    if batch is not None and batch.integer is not None and rate is not None and _is_number(rate):
        tokens_per_second = float(rate)
        if tokens_per_second > 0:
            return step * batch.integer / tokens_per_second * 1e3
    return _duration_ms(pairs.get("train_time"))


def _read_final(line: str, number: int) -> Final | None:
    """A line `label [tag:number …] val_loss:… val_bpb:… [name:value …]`, else None."""
    scores = SCORES.search(line)
    if scores is None:
        return None
    label = line[: scores.start()].rstrip()
    before, _, last = label.rpartition(" ")
    while before and TAG.fullmatch(last):
        label = before.rstrip()
        before, _, last = label.rpartition(" ")
    label = label.removesuffix(":")
    if not LABEL.fullmatch(label):
        return None
    pairs = dict(PAIR.findall(line[scores.end() :]))
    eval_ms = _duration_ms(pairs.get("eval_time") or pairs.get("time"))
    return Final(
        label=label.strip(),
        loss_text=scores[1],
        bpb_text=scores[2],
        line=number,
        eval_seconds=eval_ms / 1e3 if eval_ms is not None else None,
        scored_tokens=_integer(pairs.get("scored_tokens")),
        val_bytes=_integer(pairs.get("val_bytes")),
        learned_tokens=_integer(pairs.get("learned_tokens")),
    )


def _duration_ms(text: str | None) -> float | None:
    match = DURATION.match(text) if text else None
    return float(match[1]) * MILLISECONDS[match[2]] if match else None


def _pace(pairs: dict[str, str]) -> Pace | None:
    """Clock and mean time of a step line; None where one of them is missing or no finite number."""
    found = []
    for name in ("train_time", "step_avg"):
        match = DURATION.match(pairs.get(name, ""))
        if match is None or not math.isfinite(float(match[1])):
            return None
        unit_ms = MILLISECONDS[match[2]]
        found += [float(match[1]) * unit_ms, 10.0 ** -decimals(match[1]) * unit_ms]
    return Pace(*found)


def _is_number(text: str | None) -> bool:
    return bool(text and re.fullmatch(NUMBER, text))


def _integer(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(COUNT, text) else None
