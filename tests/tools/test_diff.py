"""Welch tests against published values; settings, code and losses of two runs, and of public logs."""

import functools
import json
import math
import re
from pathlib import Path

import pytest
import scipy

from tests.support.ancestors import load_ancestors
from tests.support.runs import SOURCE, STEPS, make_run, make_runs, pack
from tests.tools.conftest import Tool, without_drawing
from tools.runs.folder import Folder
from tools.runs.script import Config
from tools.runs.settings import changed_settings, in_our_names
from tools.runs.stats import PAIRED, WELCH, compare, deviation, difference, of_pairs, welch_lower

# Seed results of public records, by pull request (bits per byte).
PUBLISHED = {
    1493: [1.08079, 1.08103, 1.08118],
    1514: [1.07928348, 1.07997217, 1.08024254],
    549: [1.11922988, 1.12002032, 1.11888882],
    1019: [1.11508120, 1.11437394, 1.11475014],
    1736: [1.06473025, 1.06562743, 1.06610085],
    1769: [1.06509678, 1.06516558, 1.06413130, 1.06356801, 1.06466993],
    1868: [1.06083288, 1.06090748, 1.06248776],
    1855: [1.06124613, 1.06208695, 1.05989454],
}


def test_published_p_values_and_margins() -> None:
    for new, base, p in ((1514, 1493, 0.020), (1769, 1736, 0.063), (1855, 1868, 0.355)):
        test = welch_lower(PUBLISHED[new], PUBLISHED[base])
        assert test is not None and round(test.p, 3) == p
    # One seed is no test, nor are seeds without spread; and a log may hold anything.
    assert welch_lower([1.0], [1.1, 1.2]) is None and deviation([1.0]) is None
    assert welch_lower([1.0, 1.0], [1.1, 1.1]) is None and of_pairs([-0.5, -0.5]).p is None
    assert math.isnan(deviation([math.inf, 1.0]) or 0.0)
    scale = 1.88976776 / 1.11922988  # nats per token of one bit per byte, sp1024
    new, base = ([value * scale for value in PUBLISHED[pull]] for pull in (1019, 549))
    verdict = compare(PUBLISHED[1019], PUBLISHED[549], new, base)
    assert verdict.margin is not None and round(verdict.margin.p, 4) == 0.0095
    assert verdict.meets_margin and verdict.meets_frontier
    assert verdict.nats_per_token == pytest.approx(-0.00784, abs=1e-5)
    verdict = compare([1.08, 1.081], [1.09, 1.091], [2.78, 2.79], [1.89, 1.90])
    assert verdict.nats_per_token is None and verdict.margin is None and verdict.frontier is not None
    assert changed_settings({"A": "0.020", "B": "x", "C": "1"}, {"A": "0.02", "B": "y"}) == [
        ("B", "x", "y"),
        ("C", "1", "–"),
    ]


def test_a_difference_is_new_less_base_and_two_sided() -> None:
    """Pairs where both sides have the same seeds, in any order; else Welch's test. Both are scipy's."""
    new, base = [1.06, 1.11, 1.08], [1.07, 1.13, 1.12]
    found = difference(dict(zip("abc", new, strict=True)), dict(zip("cab", (1.12, 1.07, 1.13), strict=True)))
    expected = scipy.stats.ttest_rel(new, base)
    assert (found.test, found.difference) == (PAIRED, pytest.approx(-0.07 / 3))
    assert found.p == pytest.approx(expected.pvalue) and found.interval is not None
    assert found.interval == pytest.approx(tuple(expected.confidence_interval()))
    found = difference(dict(zip("abc", new, strict=True)), dict(zip("abd", base, strict=True)))
    expected = scipy.stats.ttest_ind(new, base, equal_var=False)
    assert (found.test, found.p) == (WELCH, pytest.approx(expected.pvalue)) and found.interval is not None
    assert found.interval == pytest.approx(tuple(expected.confidence_interval()))
    # Worse is as significant as better.
    assert of_pairs([0.1, 0.2, 0.4]).p == of_pairs([-0.1, -0.2, -0.4]).p
    assert difference({1: 2.0}, {2: 1.5, 3: 1.0}).interval is None


@pytest.mark.parametrize("seeds", [(1, 2, 3), (4, 5, 6)])
def test_diff_and_a_packed_readme_give_one_p(seeds: tuple[int, ...], tmp_path: Path, tool: Tool) -> None:
    base = pack(tmp_path / "records", make_runs(tmp_path / "base", 1, 2, 3), name="Base")
    runs = [make_run(tmp_path / "new" / str(seed), seed, gain=0.002 * seed) for seed in seeds]
    new = pack(tmp_path / "records", runs, "--baseline", str(base), name="New")
    found = re.compile(r"p [=<] [\d.]+(?= \(two-sided (.+), 3 seeds( against 3)?\))")
    in_diff = found.search(tool("diff", base, new, "--no-code").split("bits/byte")[1])
    in_readme = found.search((new / "README.md").read_text())
    assert in_diff is not None and in_readme is not None and in_diff[0] == in_readme[0]
    assert in_diff[1] == in_readme[1] == (PAIRED if seeds == (1, 2, 3) else WELCH)
    assert "one-sided" not in (new / "README.md").read_text()  # as the track is not the challenge's
    assert "0 FAIL" in tool("check", new)


def test_what_others_wrote_reaches_nothing_outside_and_does_not_steer(
    tmp_path: Path, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_drawing(monkeypatch)
    secret = tmp_path / "credentials"
    secret.write_text("KEY=secret\n")
    runs = [make_run(tmp_path / name, 1) for name in ("a$b", "c$d")]
    packed = pack(tmp_path / "records", make_runs(tmp_path / "runs", 1, 2), name="Linked")
    for folder in (runs[1], packed):
        (folder / "config.env").unlink()
        (folder / "config.env").symlink_to(secret)
    (runs[0] / "config.env").write_text("MATRIX_LR=\x1b[2J0.5\n")
    summary = json.loads((runs[0] / "summary.json").read_text())
    (runs[0] / "summary.json").write_text(json.dumps({**summary, "phases": {"train": "long", "eval": [1]}}))
    for new in (runs[1], packed):
        shown = tool("diff", runs[0], new)
        assert "secret" not in shown and "\x1b" not in shown
    assert "\\x1b[2J0.5" in shown or "MATRIX_LR" not in shown
    shown = tool("plot", *runs, "--out", tmp_path / "plot.png") + tool("runs", *runs)
    assert "secret" not in shown


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """A packed base of three seeds, wrapped; a run that differs in code, a setting and its losses."""
    base = pack(tmp_path / "records", make_runs(tmp_path / "base", 1, 2, 3), "--wrap", name="Base")
    changed = SOURCE.replace("LEARNING_RATE = 0.02", "LEARNING_RATE = 0.03 if '<b>&' else 0")
    return base, make_run(tmp_path / "new", 4, source=changed, config={"MATRIX_LR": "0.03"}, gain=0.05)


@pytest.fixture
def told(two: tuple[Path, Path], tool: Tool) -> Tool:
    """What the command prints of both."""
    return functools.partial(tool, "diff", *two)


def test_text_and_json_name_what_differs(told: Tool) -> None:
    text = told()
    assert re.search(r"MATRIX_LR +0\.02 +0\.03", text)
    assert "+LEARNING_RATE = 0.03" in text and "code: +1 -1 lines" in text
    assert "difference -0.0" in text and "cannot be tested" in text
    assert re.search(r"^20 +3\.2000 +3\.1500 +-0\.0500$", text, re.MULTILINE)
    assert re.search(r"^train +[\d.]+ .*[\d.]+", text, re.MULTILINE)  # seconds of a phase
    value = json.loads(told("--json"))
    assert value["settings"] == [{"name": "MATRIX_LR", "base": "0.02", "new": "0.03"}]
    assert value["comparison"]["difference_bpb"] < 0 and value["code"]["lines_added"] == 1


def test_kinds_of_score_are_compared_kind_by_kind(two: tuple[Path, Path], told: Tool) -> None:
    """A run that learns at test time against one that does not."""
    alike = told("--no-code")
    assert "Score: legal_ttt." in alike and "two kinds" not in alike
    log = two[1] / "log.txt"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if not line.startswith("legal_ttt")))
    unlike = told("--no-code")
    assert re.search(r"final_int6_sliding_window with legal_ttt, two kinds of score", unlike)
    change = re.search(r"^val_bpb, sliding window .* ([+-][\d.]+) +[+-][\d.]+$", unlike, re.MULTILINE)
    assert change is not None and f"sliding window {change[1]}" in unlike.splitlines()[0]
    assert re.search(r"^val_bpb, test-time training .* – +–$", unlike, re.MULTILINE)


def test_two_runs_of_other_seeds_differ_in_that(tmp_path: Path, tool: Tool) -> None:
    """Nothing else need be the reason, and one run a side is no test."""
    runs = make_runs(tmp_path, 1, 2)
    reason = "They ran under different conditions, which may explain part of the change: seed 1 against 2."
    assert reason in tool("diff", *runs)
    again = make_run(tmp_path / "again", 1, gain=0.01)
    assert "seed 1 against" not in tool("diff", runs[0], again)


def test_a_stage_that_a_seed_lacks_has_no_change(tmp_path: Path, tool: Tool) -> None:
    """Its mean would be of other seeds than those of the stages around it."""
    folders = [pack(tmp_path / name, make_runs(tmp_path / "runs" / name, 1, 2, 3)) for name in ("a", "b")]
    assert re.search(r"^val_bpb, quantized .* \+0\.000000 +\S+$", tool("diff", *folders), re.MULTILINE)
    log = folders[1] / "train_seed3.log"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if not line.startswith("final_int6_roundtrip")))
    text = tool("diff", *folders)
    assert re.search(r"^val_bpb, quantized .*\(n=3\).*\(n=2\) +– +–$", text, re.MULTILINE)
    assert re.search(r"^val_bpb, sliding window .* \+0\.000000 +\S+$", text, re.MULTILINE)


def test_other_texts_and_steps_of_the_whole_run(two: tuple[Path, Path], told: Tool) -> None:
    log = two[1] / "log.txt"
    half = re.sub(r"val_bytes:(\d+)", lambda found: f"val_bytes:{int(found[1]) // 2}", log.read_text())
    log.write_text(half)
    text = told("--no-code")
    assert "cannot be compared" in text and "different texts" in text and "p = " not in text
    assert re.search(r"^val_bpb, headline .* –$", text, re.MULTILINE)
    # The last line of training may come before the end.
    lines = log.read_text().splitlines(keepends=True)
    last_step = f"step:{STEPS}/"
    assert any(line.startswith(last_step) for line in lines)
    log.write_text("".join(line for line in lines if not line.startswith((last_step, "stopping_early"))))
    assert re.search(r"^steps .* \+0\.0$", told("--no-code"), re.MULTILINE)


def test_unlike_conditions_are_named(two: tuple[Path, Path], told: Tool) -> None:
    assert "different conditions" not in told("--no-code")
    log = two[1] / "log.txt"
    text = log.read_text()
    for there in ("dtype:torch.float32", "threads:2", "world_size:1"):
        assert there in text
        text = text.replace(there, there[:-1] + "8")
    log.write_text(text)
    line = next(line for line in told("--no-code").splitlines() if "different conditions" in line)
    for part in ("dtype torch.float32 against torch.float38", "threads 2 against 8", "world_size 1 against"):
        assert part in line
    assert "device" not in line and json.loads(told("--json"))["unlike_conditions"] == line


def test_the_comparison_opens_with_its_verdict(tmp_path: Path, tool: Tool) -> None:
    records = tmp_path / "records"
    base = pack(records, make_runs(tmp_path / "base", 1, 2, 3), name="Base")
    new = pack(records, make_runs(tmp_path / "new", 4, 5, 6, gain=0.05), name="New")
    alike = pack(records, make_runs(tmp_path / "alike", 8, 9, 10), name="Alike")
    single = make_run(tmp_path / "single", 11)
    for one, other, verdict in (
        (base, new, "_New is better than .*That is significant"),
        (new, base, "_Base is worse than .*That is significant"),
        (base, alike, "not significant"), (base, single, r"cannot be tested: 1 seed against 3"),
    ):
        assert re.search(verdict, tool("diff", one, other, "--no-code").splitlines()[0]), verdict


@pytest.mark.parametrize("verb", ["diff", "plot"])
def test_a_folder_that_is_no_run_and_no_record_is_refused_without_a_walk(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: Tool
) -> None:
    inner = make_run(tmp_path / "inner", 1)  # a run below does not make the folder one
    (tmp_path / "notes.txt").write_text("text\n")
    monkeypatch.setattr(Folder, "files", lambda folder: pytest.fail(f"{folder.path} is walked"))
    more = [inner] if verb == "diff" else []
    assert "is neither a run nor a record" in tool(verb, tmp_path, *more, status=2)


PUBLIC_LOG = """Hyperparameters:
  iterations: 20000
  leaky_relu_sq_slope: 0.3
  logfile: logs/a.txt
  lqer_enabled: {lqer}
  model_dim: 512
  seed: {seed}
  ttt_lora_lr: {ttt_lora_lr}
20/20000 train_loss: {train:.4f} train_time: 0.1m tok/s: 6400000
stopping_early: wallclock_cap train_time: 599000ms step: 4900/20000
diagnostic pre-quantization post-ema val_loss:2.30000000 val_bpb:{float_:.8f} eval_time:9000ms
diagnostic quantized val_loss:2.32000000 val_bpb:{quantized:.8f} eval_time:9000ms
quantized_ttt_phased val_loss:2.29000000 val_bpb:{ttt:.8f} eval_time:500000ms
"""


def public_folder(folder: Path, gain: float, ttt_lora_lr: str) -> Path:
    """Three seeds of a public script; test-time training gives a third of the gain of training back."""
    folder.mkdir()
    for seed, luck, share in ((0, 0.004, 0.66), (42, 0.0, 0.67), (1234, 0.002, 0.67)):
        text = PUBLIC_LOG.format(
            seed=seed, ttt_lora_lr=ttt_lora_lr, lqer="False", train=3.2, float_=1.07 + luck - gain,
            quantized=1.08 + luck - gain, ttt=1.06 + luck - gain * share)
        (folder / f"train_seed{seed}.log").write_text(text)
    return folder


def test_stages_of_public_logs_and_pairs_of_seeds(tmp_path: Path, tool: Tool) -> None:
    base = public_folder(tmp_path / "base", 0.0, "0.0001")
    new = public_folder(tmp_path / "new", 0.003, "0.00008")
    text = tool("diff", base, new)
    assert re.search(r"^val_bpb, before quantization .* -0\.003000  –$", text, re.MULTILINE)
    assert re.search(r"^val_bpb, quantized .* -0\.003000  \+0\.000000$", text, re.MULTILINE)
    assert re.search(r"^val_bpb, test-time training .* -0\.002000  \+0\.001000$", text, re.MULTILINE)
    first = text.split(". ", 1)[0]
    assert "better than base by 0.002000" in first and "TTT_LORA_LR" in first
    assert "better by 0.003000 bits per byte before it (quantized)" in first
    # The seeds scatter by more than the gain: only as pairs are they significant.
    assert re.search(rf"That is significant \(p .*, two-sided {PAIRED}, 3 seeds\)", text.splitlines()[0])
    assert re.search(r"rule for records, a one-sided Welch test:\n  no margin: p = 0\.[12]", text)


def test_a_run_under_way_against_a_public_log(tmp_path: Path, tool: Tool) -> None:
    """It shows the steps that it made, and public names are ours before settings are compared."""
    config = {name: str(value) for name, value in Config().as_env().items()}
    run = make_run(tmp_path / "runs", 1, config={**config, "LEAKY_SLOPE": "0.3", "MODEL_DIM": "256"})
    lines = (run / "log.txt").read_text().splitlines(keepends=True)
    until = next(number for number, line in enumerate(lines) if line.startswith("step:20/"))
    (run / "log.txt").write_text("".join(lines[: until + 1]))
    (run / "summary.json").unlink()
    log = public_folder(tmp_path / "public", 0.0, "0.0001") / "train_seed42.log"
    text = tool("diff", run, log, "--no-code")
    assert "cannot be compared" in text and "At step 20 its training loss is 3.2000" in text
    assert re.search(r"^steps +20\.0 \(n=1\) +4,900", text, re.MULTILINE)
    assert re.search(r"^MODEL_DIM +256 +512$", text, re.MULTILINE)
    for same in ("LEAKY", "LOGFILE", "LQER", "MATRIX_LR"):
        assert same not in text


@pytest.mark.parametrize("system", load_ancestors())
def test_an_ancestor_has_the_settings_of_its_configuration(system: str, repo: Path) -> None:
    """All that its script reads, by its own names, beside a run of ours."""
    ancestor = load_ancestors()[system]
    defaults = Config().as_env()
    ours = Config.from_env({"CONFIG": str(repo / "configs" / f"{ancestor.config}.env")}).as_env()
    theirs = {name: value for name, value in {**ancestor.defaults, **ancestor.command}.items() if value}
    # Of one run and its machine, and 0, which means 2,048 tokens here.
    expected = set("DATA_PATH TOKENIZER_PATH SEED TRAIN_LOG_EVERY VAL_LOSS_EVERY NCCL_IB_DISABLE".split())
    expected |= {"PYTHONUNBUFFERED", "EVAL_SEQ_LEN", "ROPE_TRAIN_SEQ_LEN"}
    known = in_our_names(theirs, defaults).keys()
    for base, new in ((ours, theirs), (theirs, ours)):
        changed = {name for name, _, _ in changed_settings(base, new, defaults)}
        assert changed & known <= expected
    theirs |= {"MODEL_DIM": "9", "NEW_OPTION": "1"}
    changed = {name for name, _, _ in changed_settings(ours, theirs, defaults)}
    assert {"MODEL_DIM", "NEW_OPTION"} <= changed


def test_names_of_public_scripts_become_ours() -> None:
    defaults = Config().as_env()
    for theirs, ours in (
        ({"VAL_BATCH_TOKENS": "4096"}, {"VAL_BATCH_SIZE": "4096"}),
        ({"PARALLEL_RESIDUAL_START": "7"}, {"PARALLEL_START_LAYER": "7", "PARALLEL_MODE": "gptj"}),
        ({"MATRIX_CLIP_SIGMAS": "12.85", "MLP_CLIP_SIGMAS": "10"},
         {"MLP_CLIP_SIGMAS": "10", "ATTN_CLIP_SIGMAS": "12.85"}),
        ({"SLIDING_WINDOW_ENABLED": "0"}, {"EVAL_STRIDE": "0", "TTT_ENABLED": "0"}),
        ({"SLIDING_WINDOW_ENABLED": "1", "ADAM_EPS": "1e-08", "COMPRESSOR": "brotli"}, {}),
        ({"ADAM_EPS": "1e-6", "EMBEDDING_DIM": "64", "MODEL_DIM": "64"},
         {"ADAM_EPS": "1e-6", "MODEL_DIM": "64"}),
        ({"EMBEDDING_DIM": "64"}, {"EMBEDDING_DIM": "64"}),
    ):
        assert in_our_names(theirs, defaults) == ours
