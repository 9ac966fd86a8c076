"""The first screen of RESULTS.md: a question, its answer, how sure it is, and the table that it is from.

Each figure is read from a table of RESULTS.md or of results/0.5.md, which follow from raw figures. p is of
a t-test on a difference and its standard error; in brackets it is corrected for all rows of its table (Holm).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from benchmarks import paired, results
from benchmarks.gpu_model import calibration
from tools.markdown import Block, table

BEGIN, END = "<!-- answers:begin (make docs) -->", "<!-- answers:end -->"
HEADER = ["question", "answer (row of the table: bits per byte)", "how sure", "does not show"]
FROZEN = results.FOLDER / "0.5.md"
ERRORS = ("its error", "standard error")
SEEDS = ("n", "seeds")


class Asked(NamedTuple):
    """A question; the section, the column and the rows that answer it; what its figures do not show."""

    question: str
    section: str
    column: str
    rows: tuple[str, ...]
    limit: str


SAMPLE = "fineweb_sample_sp1024"
BESIDE, NOT_IN = "A public script beside this one: ", "What the default does not have: "
READ_OUT = "Read-out: the last weights, their average, or a blend: "
PARTS, EQUAL = f"What each part brings: {SAMPLE}-200steps", f"Quantizers at equal bytes: {SAMPLE}"
IDEAS = ("Adam betas 0.8 0.95", "momentum mixture, from the start", "short pieces in the first third")
BOTH = ("trellis, steps of columns",)
# Three sizes after equal CPU seconds, and after equal floating-point operations of training; one after more.
STACKS = {
    "equal seconds": (
        ("0.25 M weights, 40 s", "4x64-40s"), ("0.86 M weights, 80 s", "4x128-80s"),
        ("2.1 M weights, 160 s", "4x208-160s"),
    ),
    "four times the operations": (("0.25 M weights, 6 TFLOP of training each", "4x64-6tflop"),),
    "equal operations": (
        ("0.25 M weights, 1.5 TFLOP", "4x64-1.5tflop"), ("0.86 M weights, 3 TFLOP", "4x128-3tflop"),
        ("2.1 M weights, 6 TFLOP", "4x208-6tflop"),
    ),
}  # fmt: skip
CANDIDATES = (("0.25 M weights, 300 steps", "4x64-300steps"), ("1.0 M, 240 steps", "6x128-240steps"),
              ("2.1 M, 200 steps", "4x208-200steps"))  # fmt: skip
QUESTIONS = (
    Asked("Is this file better than the challenge's script after equal CPU seconds?",
          f"{BESIDE}{SAMPLE}-60s", "minus theirs", ("ours",),
          "8 GPUs. The default's settings: this is the demo's recipe"),
    Asked("How much of that is shuffled data, and how much other code?", f"{BESIDE}{SAMPLE}-60s",
          "minus theirs", ("theirs shuffled", "ours as theirs", "ours as theirs, shuffled", "ours in order"),
          "data so large that order matters less"),
    *(Asked(f"Is the default better than the baseline's settings in this file? {size}",
            f"Experiment: stacks-{SAMPLE}-{run}", "float minus upstream_baseline", ("default", "pr1493"),
            "longer runs: these read 0.2 to 13 tokens a weight")
      for runs in STACKS.values() for size, run in runs),
    Asked("Is it better than #549's script, before quantization?", f"{BESIDE}pr549-{SAMPLE}-90s",
          "minus theirs", ("ours",), "8 GPUs, for which that script is made"),
    Asked("Than #1493's?", f"{BESIDE}pr1493-{SAMPLE}-90s", "minus theirs", ("ours",), "the same"),
    Asked("Which parts of the default help, each left out alone?", PARTS, "minus default stack",
          ("no smear gate", "no XSA", "relu²", "no row normalisation"), "runs longer than 200 steps"),
    Asked("Which do not help at this size?", PARTS, "minus default stack",
          ("no recurrence", "no head gate", "no parallel layers", "no weight average"),
          "effects below 0.005"),
    Asked("What does test-time training gain?", f"Test-time training: {SAMPLE}", "minus sliding window",
          ("LoRA", "SGD"), "the default's learning rate. Text like the training text"),
    Asked("And with 8,192 tokens?", "Test-time training: mixed_text_sp8192", "minus sliding window",
          ("LoRA", "SGD"), "the same"),
    Asked("On training text like the scored text, also at the default's learning rate?",
          "Experiment: ttt-fineweb_head_sp1024-4x64-300steps", "legal_ttt minus sliding_window",
          ("adapters, context 512, chunk 48, rate 6.1e-05", "adapters, context 512, chunk 48, rate 0.003",
           "SGD, context 512, chunk 4096, rate 0.006"), "models that have seen much text"),
    Asked("Do ideas of the speedruns help after 300 steps?", f"{NOT_IN}{SAMPLE}-tiny-300steps", "minus base",
          IDEAS, "long runs"),
    Asked("At another size?", f"{NOT_IN}{SAMPLE}-looped-240steps", "minus base", IDEAS, "long runs"),
    Asked("After 1,500 steps?", f"{NOT_IN}{SAMPLE}-tiny-1500steps", "minus base",
          ("betas, mixture, pieces, half the average",), "4,900 steps"),
    *(Asked(f"Does a lower softcap help, a restored norm, or another start? {size}",
            f"Experiment: candidates-{SAMPLE}-{run}", "float minus base",
            ("softcap 15", "softcap 20", "Frobenius norm restored", "V and O from a negative identity"),
            "long runs")
      for size, run in CANDIDATES),
    Asked("Do trellis and per-column steps lose less than GPTQ?", f"{EQUAL}-demo", "minus GPTQ's", BOTH,
          "trained models of 36 M weights"),
    Asked("On 10.6 M weights?", f"{EQUAL}-10M", "minus GPTQ's", BOTH,
          "trained weights: these are near their start"),
    Asked("On 35.9 M weights after 280 steps?", "Quantizers on trained models: 35.9M", "minus GPTQ",
          ("steps of columns, trellis, 3.55 bits a weight", "trellis, 3.55 bits a weight",
           "steps of columns, 3.55 bits a weight"), "weights of a long run"),
    Asked("Is half EMA, half last weights better than the EMA?", f"{READ_OUT}{SAMPLE}-tiny-300steps",
          "minus default", ("0.5 of decay 0.95",), "long runs"),
    Asked("Does CaseOps help on small models?", "CaseOps against plain text: docs_selected-1024-190steps",
          "minus plain", ("caseops", "caseops_fused"), "more than 190 steps"),
    Asked("Is our coder shorter than Brotli? (Bytes)", "Entropy coder", "bytes",
          ("rANS, train_gpt.py: trained, demo, seed 42, 0.43 M", "Brotli-11: trained, demo, seed 42, 0.43 M",
           "rANS, train_gpt.py: Gaussian, 2.00 M", "Brotli-11: Gaussian, 2.00 M"),
          "weights of an 8-GPU run"),
    Asked("Does a step wait for a shard that needs 4 s? (s lost in 100 steps; p99, longest wait in ms)",
          "Loader", "4 s: lost s/100 steps, p99 ms, longest ms", ("ours", "#1532"), "a gain over #1532"),
)  # fmt: skip


class Row(NamedTuple):
    """A row of a table: its first cell, its whole name, and its cells by their columns."""

    label: str
    name: str
    cells: dict[str, str]


def sections(text: str) -> dict[str, list[Row]]:
    """The rows of all tables of a page, by the heading that they stand under."""
    found: dict[str, list[Row]] = {}
    rows: list[Row] = []
    header: list[str] = []
    above = ""  # of a table: the line before it
    for line in text.splitlines():
        if line.startswith("## "):
            rows = found[line[3:]] = []
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            header, above = [], line or above
        elif not header:
            header = cells
        elif "---" not in line:
            named = dict(zip(reversed(header), reversed(cells), strict=True))  # the first of equal names
            bits = f", {above[:-1]}" if above.endswith("bits a weight:") else ""
            coder = f"{named['coder']}: {cells[0]}" if "coder" in named else cells[0]
            rows.append(Row(cells[0], coder + bits, named))
    return found


def first(row: Row, names: tuple[str, ...]) -> str:
    """The first of these columns that has a figure in this row, or nothing."""
    return next((row.cells[name] for name in names if row.cells.get(name, "-") != "-"), "")


def p_of(row: Row, column: str) -> float | None:
    """Two-sided p of the row's difference; None where the table has no standard error of it."""
    error, seeds = first(row, ERRORS), first(row, SEEDS)
    if not error or not seeds or row.cells[column] == "-":
        return None
    return paired.p_of(float(row.cells[column]), float(error), int(seeds))


def answer(asked: Asked, file: str, rows: list[Row]) -> list[str]:
    """The cells of a question."""
    rows = [row for row in rows if asked.column in row.cells]
    known = {row.name: p for row in rows if (p := p_of(row, asked.column)) is not None}
    corrected = dict(zip(known, paired.holm(list(known.values())), strict=True))
    lines, sure = [], []
    for row in [row for name in asked.rows for row in rows if name in (row.label, row.name)]:
        error, seeds = first(row, ERRORS), first(row, SEEDS)
        lines.append(f"{row.name}: {row.cells[asked.column]}" + (f" ± {error}" if error else ""))
        p = f", p {paired.told_p(known[row.name])} ({corrected[row.name]:.2g})" if row.name in known else ""
        sure.append(f"{seeds} seeds{p}" if seeds else "-")
    anchor = re.sub(r"[^\w\- ]", "", asked.section.lower()).replace(" ", "-")
    return [f"[{asked.question}]({file}#{anchor})", "<br>".join(lines), "<br>".join(sure), asked.limit]


def answers() -> str:
    """The table, and the modelled times below it."""
    pages = {"results/0.5.md": sections(FROZEN.read_text("utf-8")), "": sections(results.page())}
    rows = []
    for asked in QUESTIONS:
        (file,) = [file for file, found in pages.items() if asked.section in found]
        rows.append(answer(asked, file, pages[file][asked.section]))
    return f"{table(HEADER, rows)}\n\n{step_times()}"


def step_times() -> str:
    """Measured and modelled step times, with the factor between them and its spread."""
    factor = calibration.logged_over_modelled()
    modelled_ms = calibration.STEP_MS
    measured_ms = calibration.MEASURED_MS
    ours_ms, theirs_ms = calibration.BESIDE_1855_MS
    return f"""**On one H100.** A step of the default needs {measured_ms[0]:.1f} ms, and {measured_ms[1]:.1f}
with recurrence: the work of one of eight ranks and the optimizer's of all eight, without communication
([measured](results/h100/README.md)). Beside #1855's script on the same card, one step with recurrence takes
{ours_ms:.1f} ms against {theirs_ms:.1f} ms, or {ours_ms / theirs_ms:.2f} of its time: one run of each,
ours with `FUSED_HEADS=0`. A step is modelled at
{modelled_ms[0]:.1f} and {modelled_ms[1]:.1f} ms
([gpu_model](gpu_model/README.md)), so it needs {factor.likely:.2f} times as long. Public logs of other stacks
have {factor.least:.2f} to {factor.most:.2f} times the model's figure. No run on eight cards has been made."""


def block() -> Block:
    """The first screen of RESULTS.md."""
    return Block(results.PAGE, BEGIN, END, answers)
