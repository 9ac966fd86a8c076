"""The audit: a packed folder passes, each alteration is named, public layouts get no false FAIL."""

import itertools
import json
import random
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import shards
from data.files import sha256_file
from tests.support import tiny
from tests.support.dialects import DIALECT_A, DIALECT_B, OURS
from tests.support.runs import SOURCE, TEXT_BYTES, TOKENS, make_run, make_runs, pack
from tests.tools import damage
from tests.tools.conftest import Tool, without_drawing
from tests.tools.damage import public_folder
from tools.__main__ import main
from tools.runs.derive import Evidence, compare_with
from tools.runs.folder import Folder
from tools.runs.logs import read_log
from tools.runs.runs import load_group, settings_of, settings_sha256
from tools.runs.source import read_script
from tools.submit import check, readme
from tools.submit import nats as nats_of
from tools.submit.check import audit
from tools.submit.findings import Finding, Level, Mode
from train_gpt import ScoreClock


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    return pack(folder / "records", make_runs(folder / "runs", 42, 1337, 2025))


@pytest.fixture
def packed(pristine: Path, tmp_path: Path) -> Path:
    """A packed folder of three seeds that the test may alter."""
    return Path(shutil.copytree(pristine, tmp_path / "records" / "track_demo" / pristine.name))


READABLE = "train_gpt_readable.py"


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """A packed folder, wrapped, with a baseline beside it."""
    base = pack(tmp_path / "records", make_runs(tmp_path / "base", 1, 2, 3), name="Base")
    runs = make_runs(tmp_path / "new", 4, 5, 6, gain=0.02)
    return pack(tmp_path / "records", runs, "--wrap", "--baseline", str(base), name="New")


def fails(folder: Path, mode: Mode = Mode.AGREED) -> list[Finding]:
    return [finding for finding in audit(folder) if finding.level(mode) is Level.FAIL]


def levels(folder: Path, mode: Mode = Mode.AGREED) -> set[tuple[str, str]]:
    return {(f.check, f.level(mode).name) for f in audit(folder)}


def edit(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text, f"{name} does not hold {old!r}"
    (folder / name).write_text(text.replace(old, new, 1))


def submission(folder: Path, **changes: object) -> dict[str, Any]:
    """What submission.json says once it is changed."""
    value = {**json.loads((folder / "submission.json").read_text("utf-8")), **changes}
    (folder / "submission.json").write_text(json.dumps(value), "utf-8")
    return value


def test_packed_folders_pass_under_every_reading(packed: Path, compared: Path) -> None:
    for mode in Mode:
        assert fails(packed, mode) == []
    assert main(["check", "--strict", str(packed), str(compared)]) == 0


Mutation = Callable[[Path], None]


def hash_again(folder: Path) -> None:
    """What somebody does who changed a packed file."""
    names = [name for name in submission(folder)["files"] if (folder / name).exists()]
    submission(folder, files={name: sha256_file(folder / name) for name in names})


def edited(name: str, old: str, new: str, *, hashed: bool = True) -> Mutation:
    """Another text in a file; its hash follows, but where that is what is tried."""

    def mutate(folder: Path) -> None:
        edit(folder, name, old, new)
        if hashed and name != "submission.json":
            hash_again(folder)

    return mutate


def without(name: str) -> Mutation:
    def mutate(folder: Path) -> None:
        (folder / name).unlink()
        hash_again(folder)

    return mutate


def nats(change: Callable[[np.ndarray], np.ndarray]) -> Mutation:
    """Other nats of the documents in one score."""

    def mutate(folder: Path) -> None:
        path = folder / "nats_legal_ttt_seed42.bin"
        change(np.fromfile(path)).tofile(path)
        hash_again(folder)

    return mutate


def summary(section: str, **changes: Any) -> Mutation:
    def mutate(folder: Path) -> None:
        path = folder / "summary_seed42.json"
        value = json.loads(path.read_text())
        value[section] = {**value.get(section, {}), **changes}
        path.write_text(json.dumps(value))
        hash_again(folder)

    return mutate


def exchanged(one: str, other: str) -> Mutation:
    def mutate(folder: Path) -> None:
        first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
        (folder / one).write_bytes(second)
        (folder / other).write_bytes(first)
        hash_again(folder)

    return mutate


def added(name: str, text: str) -> Mutation:
    def mutate(folder: Path) -> None:
        (folder / name).write_text(text)

    return mutate


LOG = "train_seed42.log"
SCORE = (LOG, "legal_ttt_exact val_loss:2.9", "legal_ttt_exact val_loss:2.8")
CODE_EDIT = ("train_gpt.py", "LEARNING_RATE = 0.02", "LEARNING_RATE = 0.03")
SEED_CODE = ("summary_seed42.json", '"code": {"sha256": "')
AFTER = f'"code": {{"sha256": "{"1" * 64} after {"0" * 64}", "was": "'
FORMER = f'"code": {{"former": [{{"sha256": "{"0" * 64}"}}], "sha256": "'
MIXED = "seed 42 ran mixed code: it began with another script"
LOSS = "nats, over 40,000 tokens"
# What is done to a packed folder; the rule, its level, and words of what it says.
MUTATIONS: dict[str, tuple[Mutation, str, Level, str]] = {
    "a file that is not the packed one": (edited(*SCORE, hashed=False), "A2", Level.FAIL,
                                          "its sha256 differs"),
    "a file less": (without("config.env"), "A4", Level.FAIL, "`config.env` is missing"),
    "a file more": (added("extra.bin", "x"), "A2", Level.WARN, "`extra.bin` (1 bytes) was not packed"),
    "a log of another seed": (exchanged(LOG, "train_seed1337.log"), "A5", Level.FAIL, "but says seed 1337"),
    "steps of a submission": (edited("submission.json", '"steps": 400', '"steps": 401'),
                              "A4", Level.FAIL, "`seed_results.42.steps` is 401"),
    "a loss in the log: arithmetic": (edited(*SCORE), "C1", Level.FAIL, "is not val_loss"),
    "a loss in the log: summary": (edited(*SCORE), "A4", Level.FAIL, "in the summary"),
    "a loss in the log: nats": (edited(*SCORE), "A4", Level.FAIL, LOSS),
    "steps in a summary": (edited("summary_seed42.json", '"steps": 400', '"steps": 401'),
                           "A4", Level.FAIL, "steps: 400 in the log, 401 in the summary"),
    "a score that no summary has": (edited(LOG, "legal_ttt_exact", "best_ttt_exact"), "A4", Level.FAIL,
                                    "`best_ttt_exact` is in the log, but the summary has no such score"),
    "nats that are smaller": (nats(lambda nats: 0.95 * nats), "A4", Level.FAIL, LOSS),
    "one document less": (nats(lambda nats: nats[:-1]), "A4", Level.FAIL, LOSS),
    "two documents in one": (nats(lambda nats: np.append(nats[2:], nats[:2].sum())), "C1", Level.FAIL,
                             "49 documents in nats_legal_ttt_seed42.bin, 50 documents"),
    "nats that are none": (nats(lambda nats: np.append(nats[1:], np.nan)), "A4", Level.FAIL,
                           "nan nats for document 49"),
    "nats without end": (nats(lambda nats: np.append(nats[1:], np.inf)), "A4", Level.FAIL,
                         "inf nats for document 49"),
    "nats below zero": (nats(lambda nats: np.append(nats[1:] + nats[0], -nats[0])), "A4", Level.FAIL,
                        "nats for document 49"),
    "half a number": (nats(lambda nats: nats.view(np.uint8)[:-3]), "A4", Level.FAIL, "expected 8 for each"),
    "nats of another score": (exchanged("nats_legal_ttt_seed42.bin", "nats_roundtrip_seed42.bin"),
                              "A4", Level.FAIL, LOSS),
    "no nats": (without("nats_legal_ttt_seed42.bin"), "A4", Level.WARN, "its score cannot be added up again"),
    "tokens that were not scored": (edited(LOG, "tokens:40000 bytes", "tokens:40001 bytes"), "C1", Level.FAIL,
                                    "has 40,000 scored tokens, but the loader read 40001"),
    "other code": (edited(*CODE_EDIT), "A6", Level.FAIL, "the shipped source is not what seed 42 ran"),
    "mixed code": (edited(*SEED_CODE, AFTER), "A6", Level.FAIL, MIXED),
    "mixed code before 0.5.4": (edited(*SEED_CODE, FORMER), "A6", Level.FAIL, MIXED),
    "another setting": (edited("config.env", "MATRIX_LR=0.02", "MATRIX_LR=0.5"), "A4", Level.FAIL,
                        "config.env says MATRIX_LR=0.5, seed 42 ran with 0.02"),
    "a setting less": (edited("config.env", "MATRIX_LR=0.02\n", ""), "A4", Level.FAIL,
                       "config.env says MATRIX_LR=nothing, seed 42 ran with 0.02"),
    "a setting more": (edited("config.env", "MATRIX_LR=0.02", "MATRIX_LR=0.02\nXSA_LAST_N=4"),
                       "A4", Level.FAIL, "XSA_LAST_N=4, seed 42 ran with no such setting"),
    "a limit that a run broke": (summary("limits", train_seconds={"value": 61.0, "limit": 60.0, "ok": False}),
                                 "C2", Level.WARN, "seed 42 broke its own limit: train_seconds 61.0 > 60.0"),
    "a page": (edited("README.md", "| 400 |", "| 399 |"), "A4", Level.FAIL, "README.md says `"),
    "another index": (edited("requirements.txt", "numpy", "--index-url https://example.org/simple\nnumpy"),
                      "A2", Level.WARN, "`--index-url https://example.org/simple`: pip would read"),
    "a package from an address": (edited("requirements.txt", "numpy", "a @ git+https://example.org/a\nnumpy"),
                                  "A2", Level.WARN, "`a @ git+https://example.org/a`: pip would read"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_a_packed_folder_is_named(name: str, packed: Path) -> None:
    mutate, rule, level, words = MUTATIONS[name]
    assert not [f.text for f in audit(packed) if words in f.text]
    mutate(packed)
    found = audit(packed)
    told = [(f.check, f.level(Mode.AGREED)) for f in found if words in f.text]
    assert (rule, level) in told, [f"{f.check} {f.text}" for f in found]


@pytest.mark.parametrize("share", [0.99, 0.997])
def test_typed_scores_fail_wherever_they_were_typed(share: float, tmp_path: Path) -> None:
    """Somebody lowers the scores in log and summary before packing: all derived figures then agree."""
    runs = make_runs(tmp_path / "runs", 1, 2, 3)

    def lower(match: re.Match[str]) -> str:
        return f"{match[1]}{float(match[2]) * share:.{len(match[2].partition('.')[2])}f}"

    for run in runs:
        log = run / "log.txt"
        log.write_text(re.sub(r"(val_(?:loss|bpb):)([\d.]+)", lower, log.read_text()))
        value = json.loads((run / "summary.json").read_text())
        for loss in value["losses"].values():
            loss["nats"] *= share
            loss["bits_per_byte"] *= share
        (run / "summary.json").write_text(json.dumps(value))
    found = fails(pack(tmp_path / "records", runs))
    assert {f.check for f in found} == {"A4"}
    assert sum(LOSS in f.text for f in found) == 9  # three scores of three seeds


@pytest.mark.parametrize(("more", "level"), [(0, None), (7, Level.FAIL)])
def test_bytes_are_those_of_the_data_where_they_are_here(
    more: int, level: Level | None, tmp_path: Path
) -> None:
    counts = np.zeros(TOKENS + 1, np.uint16)
    counts[1 : TEXT_BYTES // 4 + 1] = 4
    counts[TOKENS] = more
    for kind, values in (("", np.ones_like(counts)), ("bytes_", counts)):
        shards.write_shard(tmp_path / f"fineweb_val_{kind}000000.bin", values)
    (tmp_path / "t.model").write_bytes(b"x")
    places = {"DATA_PATH": str(tmp_path), "TOKENIZER_PATH": str(tmp_path / "t.model")}
    data = {"data": {"val_tokens": TOKENS, "val_bytes": TEXT_BYTES}}
    run = make_run(tmp_path / "run", 1, config=places, summary_changes=data)
    found = audit(pack(tmp_path / "records", [run]))
    told = {f.level(Mode.AGREED) for f in found if "97,519 bytes (counted in the data)" in f.text}
    assert told == ({level} if level is not None else set())


def test_the_bytes_of_data_are_counted_as_the_data_tools_count_them(dataset: Path) -> None:
    tokenizer = dataset / "tokenizer.model"
    tokens = tiny.joined(dataset, "val")
    text = shards.load_tokenizer(tokenizer).decode([part.tolist() for part in np.split(tokens, np.flatnonzero(
        tokens == shards.BOS_ID))])
    facts = {"val_tokens": len(tokens) - 1, "hashes": {"tokenizer": sha256_file(tokenizer)}}
    config = {"DATA_PATH": str(dataset), "TOKENIZER_PATH": str(tokenizer)}
    evidence = Evidence(1, read_log(tokenizer), {"config": config, "data": facts})
    assert nats_of.count_bytes(evidence) == len("".join(text).encode())
    for more, limit in ((-2, "0"), (0, "0"), (0, "99")):  # other data than the run's
        facts["val_tokens"], config["VAL_TOKENS_LIMIT"] = len(tokens) + more, limit
        assert nats_of.count_bytes(evidence) is None


def report_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """What `prove --json` prints of a script with these settings."""
    settings = settings_sha256(settings_of(folder / "config.env"))
    proven = {"status": 0, "verdict": "proven", "sha256": sha256_file(folder / "train_gpt.py")}
    return {**proven, "settings_sha256": settings, "passed": [{"law": "sums", "text": "x"}], **changes}


PROOFS: list[tuple[dict[str, Any], Level | None, str]] = [
    ({}, None, ""),
    ({"status": 1, "verdict": "refuted: x"}, Level.FAIL, "the proof ended with status 1: refuted: x"),
    ({"status": None}, Level.FAIL, "the proof ended with status None"),
    ({"findings": [{"check": "B2", "level": "FAIL", "text": "x"}]}, Level.FAIL, "the proof has a FAIL: B2 x"),
    ({"settings_sha256": "0" * 64}, Level.FAIL, "the proof used other settings than config.env"),
    ({"settings_sha256": ...}, Level.WARN, "the proof does not say which settings it used"),
    ({"replays": [{"status": 2, "verdict": "not checked"}]}, Level.FAIL, "ended with status 2: not checked"),
    ({"replays": [{"status": 0, "sha256": "0" * 64}]}, Level.FAIL, "is for a script with sha256 000"),
    ({"replays": [{"status": 0, "artifact_sha256": "0"}]}, Level.FAIL, "a replay used artifact 0, which"),
    ({"replays": ["x", None]}, Level.FAIL, "the proof ended with status None"),
]


@pytest.mark.parametrize(("changes", "level", "words"), PROOFS)
def test_a_proof_counts_only_for_what_it_proved(
    changes: dict[str, Any], level: Level | None, words: str, packed: Path
) -> None:
    report = {key: value for key, value in report_of(packed, **changes).items() if value is not ...}
    (packed / "proof.json").write_text(json.dumps(report))
    told = {f.level(Mode.AGREED) for f in audit(packed) if f.where == "proof.json" and words in f.text}
    told -= {Level.WARN} if level is None else set()  # it was not packed
    assert told == ({level} if level is not None else set())


def test_seeds_without_a_log_are_named(packed: Path) -> None:
    edit(packed, "submission.json", '"42"', '"43"')
    edit(packed, "submission.json", "    42,", "    43,")
    told = "\n".join(f"{finding.check} {finding.text}" for finding in fails(packed))
    assert "A5 seed 43 is declared, but lacks its log or summary" in told


def test_the_scores_of_a_baseline_are_those_of_its_folder(compared: Path) -> None:
    value = submission(compared)
    bpbs = [score + 0.1 for score in value["comparison"]["baseline_val_bpb"]]
    name, losses = value["comparison"]["baseline"], value["comparison"]["baseline_val_loss"]
    seeds = value["comparison"]["baseline_seeds"]
    others = {key: value["comparison"][key] for key in ("settings", "source_lines")}
    comparison = {**compare_with(name, value["seed_results"], bpbs, losses, seeds), **others}
    value = submission(compared, comparison=comparison)
    page = readme.render(value, Folder(compared).summaries, wrapped=True, baked=False)
    (compared / "README.md").write_text(page)
    found = fails(compared)
    assert {f.check for f in found} == {"A4"} and "`comparison.baseline_val_bpb` is" in found[0].text
    elsewhere = compared.parents[1] / "track_other"
    elsewhere.mkdir()  # a baseline of another track is found as well
    (compared.parent / "2026-05-01_Base").rename(elsewhere / "2026-05-01_Base")
    assert fails(compared) == found
    shutil.rmtree(elsewhere)  # without it, its scores are only claimed
    (claim,) = [f for f in audit(compared) if "only claimed" in f.text]
    assert claim.level(Mode.STRICT) is Level.WARN and fails(compared) == []


def test_files_and_authors_are_named(packed: Path) -> None:
    for name in ("extra.bin", "notes.md", "linked.md", "curve.png", "more.py"):
        (packed / name).write_text("x")
    with (packed / "README.md").open("a") as file:
        file.write('\n[more](linked.md) <img src="curve.png"> [code](more.py)\n')
    found = {f.where for f in audit(packed) if "was not packed" in f.text}
    assert found == {"extra.bin", "notes.md", "more.py"} and fails(packed, Mode.STRICT) == []
    submission(packed, author="", github_id="", blurb="")
    missing = [f"`{key}` is missing" for key in ("author", "github_id", "blurb")]
    assert not [f.text for f in fails(packed) for text in missing if text in f.text]
    record = packed.parent.rename(packed.parent.with_name("track_10min_16mb")) / packed.name
    for text in missing:
        assert [f.check for f in fails(record) if text in f.text] == ["A3"]


def test_the_readable_source_is_the_program_that_ran(tmp_path: Path) -> None:
    folder = pack(tmp_path, make_runs(tmp_path / "runs", 1), "--wrap")
    source = folder / "train_gpt_readable.py"
    assert not fails(folder) and load_group(folder).script == read_script(source)
    source.write_text(SOURCE.replace("0.02", "0.03"))
    texts = [finding.text for finding in fails(folder)]
    assert any("is not the program in train_gpt_readable.py" in text for text in texts)
    assert any("the shipped source is not what seed 1 ran" in text for text in texts)
    source.unlink()
    assert any("of the wrapped script" in f.text and "not in the folder" in f.text for f in fails(folder))


def test_the_records_of_the_repository_are_what_pack_writes(repo: Path) -> None:
    for folder in repo.glob("records/track_*/*_*"):
        assert fails(folder) == [], folder


def test_a_folder_of_another_format_or_without_its_mark(packed: Path) -> None:
    submission(packed, format="records/1")
    (finding,) = fails(packed)
    assert "'records/1'" in finding.text and "pack the runs again" in finding.remedy
    edit(packed, "submission.json", '"format"', '"form"')
    edit(packed, *CODE_EDIT)
    assert any("the shipped source is not what seed" in finding.text for finding in fails(packed))


def test_prose_is_free_and_derived_values_are_not(packed: Path) -> None:
    path = packed / "README.md"
    generated = path.read_text()
    path.write_text(f"Prose above.\n{path.read_text()}\nWhat I learned.\n")
    assert fails(packed) == []
    edit(packed, "README.md", "| 400 |", "| 399 |")
    (finding,) = fails(packed)
    changed = path.read_text().splitlines()[int(finding.where.split(":")[1]) - 1]
    assert finding.check == "A4" and f"README.md says `{changed}`" in finding.text
    path.write_text(generated)
    assert fails(packed) == []
    pristine = submission(packed)
    values = itertools.cycle([None, 3, "text", [1, None], {"a": {}}])
    for key, value in zip(DERIVED, values, strict=False):
        submission(packed, **{**pristine, key: value})
        assert fails(packed), f"{key}={value}"


DERIVED = [
    "val_bpb", "val_loss_std", "seeds", "seed_results", "bytes_total", "bytes_code", "hardware", "compliance",
    "all_runs", "files", "metric", "pytorch_version",
]


A_SCORE = {"val_bpb": 1.21972502, "val_loss": 2.0594546}
CODE_BYTES = 47_642  # as the log of dialect A says
PLAIN_A = DIALECT_A.split("=" * 100 + "\n")[1]  # without the source at its head


def filled(script: str) -> str:
    """A script of as many bytes as the log says."""
    return script + "#" * (CODE_BYTES - len(script))


CODE = filled(SOURCE)


def public_a(tmp_path: Path, log: str = PLAIN_A, script: str = CODE, **more: Any) -> Path:
    """A folder with one log, that of dialect A and its score where nothing else is given."""
    return public_folder(tmp_path, {"train.log": log}, script, **{**A_SCORE, **more})


def test_scores_of_a_public_folder_are_those_of_its_logs(tmp_path: Path) -> None:
    """A score may be declared with fewer digits, but few digits excuse nothing."""
    for declared in (1.2197, 1.21972, 1.21972502):
        assert fails(public_a(tmp_path, val_bpb=declared)) == []
    for declared in (1.2152, 1.0, 1.2, 1.22, 1.21, 1.2195, 1.219, 1.21974):
        (found,) = fails(public_a(tmp_path, val_bpb=declared))
        assert found.check == "A4" and f"`val_bpb` {declared}, but" in found.text
        assert "train.log" in found.where
    assert ("A3", "FAIL") in levels(public_a(tmp_path, val_loss=1.21972502))  # bits stored as loss


def test_logs_are_of_the_seed_and_the_script_that_stand_beside_them(tmp_path: Path) -> None:
    def told(logs: dict[str, str], script: str = CODE) -> str:
        found = fails(public_folder(tmp_path, logs, script, **A_SCORE))
        return " ".join(f"{finding.check} {finding.text}" for finding in found)

    assert "is named for seed 7, but says seed 1337" in told({"train_seed7.log": PLAIN_A})
    text = PLAIN_A.replace("seed:1337\n", "")
    assert "is identical to" in told({"train_seed1.log": text, "train_seed2.log": text})
    second = PLAIN_A.replace("seed:1337", "seed:7").replace("train_seq_len:1024", "train_seq_len:2048")
    assert "`train_seq_len` is " in told({"train_seed1337.log": PLAIN_A, "train_seed7.log": second})
    assert "A6 " in told({"train.log": PLAIN_A}, CODE + "\n")  # of another size


def test_contested_points_follow_the_reading(tmp_path: Path) -> None:
    script = SOURCE + "#" * (157_868 - len(SOURCE))
    scores = {"val_bpb": 1.05989454, "val_loss": 2.31944212}
    folder = public_folder(tmp_path, {"train_seed42.log": DIALECT_B}, script, **scores)
    for rule in ("A9", "C2"):  # over the cap as shipped; Hessians after the clock
        assert (rule, "WARN") in levels(folder)
        assert (rule, "FAIL") in levels(folder, Mode.STRICT)
        assert (rule, "INFO") in levels(folder, Mode.CONVENTION)
    assert fails(folder) == []


def test_unreadable_contents_are_findings_not_crashes(tmp_path: Path) -> None:
    folder = public_a(tmp_path, "\0\xff garbage", "def broken(:\n")
    (folder / "submission.json").write_text("[1, 2")
    assert {("A2", "FAIL"), ("A3", "FAIL")} <= levels(folder)
    shutil.rmtree(folder)
    assert main(["check", str(folder)]) == 2


def test_a_file_that_gives_nothing_is_named_with_its_first_line(tmp_path: Path, tool: Tool) -> None:
    folder = public_a(tmp_path, "Epoch 1: 5.1\nEpoch 2: 4.9\n")
    told = "train.log: 2 lines, none is a step or a score; the first: 'Epoch 1: 5.1'"
    (found,) = [f for f in fails(folder) if f.check == "A2"]
    assert found.text == told
    for verb, *paths in (("diff", folder / "train.log", folder), ("diff", folder, folder), ("plot", folder)):
        assert told in tool(verb, *paths, status=2), verb
    (folder / "train.log").rename(folder / "train.log.gz")
    (found,) = [f for f in fails(folder) if f.check == "A2"]
    assert found.text == "it has no log: no file ends in .log or .txt"
    assert "`train.log.gz` is compressed and was not read" in [f.text for f in audit(folder)]
    (folder / "TRAIN_SEED1337.LOG").write_text(PLAIN_A)
    assert fails(folder) == []


WEIGHTS = ["prior.pt", "more/prior.npz", "prior.bin", "prior.safetensors", "prior.model"]


@pytest.mark.parametrize(("name", "line", "count"), [
    *((name, "torch.load(Path(__file__).parent / {!r})", 12_000_000) for name in WEIGHTS),
    *((name, "x = ({!r}", 12_000_000) for name in WEIGHTS),  # that does not parse
    ("README.md", "open('README.md', 'rb')", 900_000), ("NOTES.md", "glob.glob('*.md')", 900_000),
])
def test_weights_that_the_script_reads_count(name: str, line: str, count: int, tmp_path: Path) -> None:
    folder = public_a(tmp_path, script=filled(line.format(name) + "\n"))
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("wb") as file:
        file.truncate(count)
    (found,) = fails(folder)
    total = f"{15_863_489 + count:,}"
    assert found.check == "A9" and f"+ files it runs or reads {count:,} = {total}" in found.text
    assert any(f.check == "A10" and f"also reads {name}" in f.text for f in audit(folder))


def test_two_seeds_may_print_one_score_and_a_rerun_beside_them(tmp_path: Path) -> None:
    logs = of_a_seed(1, *drawn(1)) | of_a_seed(42, *drawn(2))
    (again,) = of_a_seed(42, *drawn(3)).values()
    for seed, found in (("1", "norm=1.2345 stage_ms=424ms"), ("42", "norm=1.2444 stage_ms=347ms")):
        name = f"train_seed{seed}.log"
        logs[name] = logs[name].replace(f"seed:{seed}\n", f"seed:{seed}\ngate:init {found}\n")
    logs["train_seed42_rerun.log"] = again
    results = {str(seed): {"val_bpb": A_SCORE["val_bpb"]} for seed in (1, 42)}
    assert fails(public_folder(tmp_path, logs, CODE, **A_SCORE, seed_results=results)) == []


@pytest.mark.parametrize(
    "line", ["train_loader:shards pattern={}", "train_loader:x train_shards:1 pattern={}"]
)
def test_a_log_that_trains_on_validation_files_is_named(line: str, tmp_path: Path) -> None:
    text = PLAIN_A.replace("seed:1337", line.format("./data/fineweb_val_*.bin") + "\nseed:1337")
    (found,) = fails(public_a(tmp_path, text))
    assert found.check == "C6" and "`train_files` reads" in found.text
    assert fails(public_a(tmp_path, text.replace("fineweb_val_", "fineweb_train_"))) == []
    block = DIALECT_B.replace("  seed: 42", "  seed: 42\n  train_files: /data/fineweb_val_*.bin")
    assert ("C6", "FAIL") in levels(public_a(tmp_path, block))


def test_a_score_that_the_script_cannot_have_printed_is_named(tmp_path: Path) -> None:
    found = audit(public_a(tmp_path, script=filled("print('another program')\n")))
    words = "but the script has no word `final`"
    assert [f.level(Mode.AGREED) for f in found if words in f.text] == [Level.WARN]


def test_logs_of_seeds_contradict_each_other(tmp_path: Path) -> None:
    """What the text or the seed decides: lengths of documents, counts, bytes per token, first losses."""
    batch = "ttp: b{0}/782 bl:2.1 bb:1.0 rl:2.1 rb:1.0 dl:{1}-{2} gd:0\n"
    batches = "".join(batch.format(number, 9000 - number, 9100 - number) for number in range(5))
    step_line = "{0}/20000 train_loss: {1:.4f} train_time: 0.0m\n"
    losses = "".join(step_line.format(step, 9 - step * 0.1) for step in range(2, 5))
    first = DIALECT_B.replace("4900/20000", losses + "4900/20000") + batches
    second = first.replace("seed: 42", "seed: 7")
    for step in range(1, 5):  # an honest other seed
        second = re.sub(rf"(?m)^({step}/20000 train_loss: \d\.)\d\d", r"\g<1>77", second)
    honest = second.replace("2.31944212 val_bpb:1.05989454", "2.32000000 val_bpb:1.06014948")

    def told(text: str) -> set[str]:
        logs = {"train_seed42.log": first, "train_seed7.log": text}
        found = audit(public_folder(tmp_path, logs, SOURCE, val_bpb=1.06))
        return {f"{f.check} {f.level(Mode.AGREED).name} {f.text}" for f in found}

    before = told(honest)
    for old, new, words in (
        ("dl:8997-9097", "dl:8998-9097", "C1 FAIL the documents of 1 of 5 common batches have different"),
        ("val_bpb:1.06014948", "val_bpb:1.06054948", "C1 FAIL val_loss / val_bpb of `quantized_ttt_phased`"),
    ):
        assert old in honest
        new_found = told(honest.replace(old, new)) - before
        assert any(text.startswith(words) for text in new_found), new_found
    equal = told(first.replace("seed: 42", "seed: 7"))
    words = "A5 FAIL the first 3 training losses of train_seed42.log (seed 42) and train_seed7.log (seed 7)"
    assert any(text.startswith(words) for text in equal)
    assert not any(text.startswith(words) for text in before)


# As 0.6 wrote it; `test_the_line_of_this_script_says_when_learning_stopped` has that of this version.
STOPPED = (
    "warning: legal_ttt continues without learning: {used}s of 600.0s are used, the rest needs {needed}s\n"
)


def test_the_line_of_this_script_says_when_learning_stopped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    clock = ScoreClock(name="legal_ttt", limit_seconds=600.0)
    clock.start -= 100.0  # a hundred seconds ago
    assert not clock.learns("0", 1, 510.0)
    path = tmp_path / "log.txt"
    path.write_text(capsys.readouterr().out)
    stopped = read_log(path).unlearned
    assert stopped is not None and stopped.name == "legal_ttt"
    assert stopped.used_seconds >= 100.0
    assert (stopped.limit_seconds, stopped.needed_seconds) == (600.0, 510.0)


def test_a_run_or_a_folder_of_records_is_not_taken_for_a_record(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = make_runs(tmp_path / "runs", 42)
    for folder, answer in ((run, "pack it first"), (packed.parent, f"1 record(s): check {packed.parent}/*")):
        assert main(["check", str(folder)]) == 2
        assert answer in capsys.readouterr().err


def test_counts_of_our_logs_are_equal_between_seeds(tmp_path: Path) -> None:
    first = OURS.replace("val_bytes:151080891", "val_bytes:151080891 learned_tokens:50")
    stopped = STOPPED.format(used="480.0", needed="130.0")
    learned = "learned from 49 targets, but in another seed from 50, and no line says that its time was up"
    for old, new, rule, words in (
        ("scored_tokens:62021632", "scored_tokens:62021631", ("C1", Level.FAIL), "scored_tokens of `final"),
        ("learned_tokens:50", "learned_tokens:49", ("C3", Level.WARN), learned),
        ("learned_tokens:50", f"learned_tokens:49\n{stopped}", None, learned),
    ):
        second = first.replace("1337", "7").replace(old, new)
        logs = {"train_seed1337.log": first, "train_seed7.log": second}
        found = audit(public_folder(tmp_path, logs, SOURCE, val_bpb=2.8))
        told = [(f.check, f.level(Mode.AGREED)) for f in found if words in f.text]
        assert told == ([rule] if rule else []), words


@pytest.mark.parametrize(("used", "needed", "took", "words"), [
    ("480.0", "130.0", 560_000, None), ("480.0", "130.0", 500_000, "100.0 s of 600.0 s were left"),
    ("100.0", "130.0", 590_000, "with the time for the rest, that is 230.0 s of 600.0 s"),
])
def test_learning_that_stopped_while_time_was_left(
    used: str, needed: str, took: int, words: str | None, tmp_path: Path
) -> None:
    scored = f"legal_ttt val_loss:2.0390 val_bpb:1.2076 eval_time:{took}ms\n"
    log = PLAIN_A + STOPPED.format(used=used, needed=needed) + scored
    found = [f for f in audit(public_a(tmp_path, log)) if "stopped learning" in f.text]
    assert [(f.check, f.level(Mode.STRICT)) for f in found] == ([("C3", Level.WARN)] if words else [])
    assert all(words in f.text for f in found if words)


DOUBLE_COUNTED = f"{1.21972502 * 151_080_891 / 176_332_748:.8f}"
SLIDING = "\nfinal_int6_sliding_window val_loss:2.0400 val_bpb:1.2082"
EXACT = "1.21972502"
STEP = "step:1/20000 train_loss:6.9334 train_time:76ms step_avg:75.51ms"
DONE = "ttt_sliding:done val_loss=2.0698 val_bpb=1.2258 elapsed=1s"
WHOLE = "scored_tokens:62021632 val_bytes:151080891"
POST_EMA = "DIAGNOSTIC post_ema val_loss:2.1300 val_bpb:1.2616"
HALFWAY = "val_progress:roundtrip 100% partial_mean_loss:2.1011 tokens_seen:62021632 eta:0s"
FEWER_BYTES = (
    f"final_int6_sliding_window val_loss:2.00000000 val_bpb:{2 * 1.21972502 / 2.0594546 * (1 - 8e-5):.8f}"
)
ONCE_MORE = "diagnostic quantized val_loss:2.05945460 val_bpb:1.21972502"
# What a log says instead, and what is found in it.
LOGS = [
    ({EXACT: f"{EXACT}\nfinal_int8_zlib_roundtrip val_loss:2.0389 val_bpb:1.2075"},
     "C7", "WARN", "2 scores under"),
    ({EXACT: f"{EXACT}\nlegal_ttt val_loss:2.0400 val_bpb:1.2082",
      "seed:1337": "seed:1337\nttt_enabled:False"},
     "C7", "FAIL", "ttt_enabled is False"),
    ({"final_int8_zlib_roundtrip val": f"{DONE}\nfinal_int8_zlib_roundtrip val"},
     "C7", "FAIL", "ended with 1.2258"),
    ({EXACT: f"{EXACT} {WHOLE}\n{HALFWAY}"}, "C7", "FAIL", "ended with a loss of 2.1011"),
    ({"Serialized model int8": f"{POST_EMA}\nSerialized model int8"},
     "C9", "WARN", "is better than `DIAGNOSTIC post_ema`"),
    ({STEP: f"{STEP}\nstep:2/20000 train_loss:6.9 train_time:70ms step_avg:35.00ms"},
     "C2", "WARN", "runs backwards"),
    ({STEP: "\n".join(f"step:{n}/20000 train_loss:6.9 train_time:{n % 2 * 100}ms" for n in range(1, 6))},
     "C2", "FAIL", "expected it to go forward; this happens 2 times"),
    ({STEP: "step:13000/20000 train_loss:2.1 train_time:600000ms step_avg:46.15ms"},
     "C2", "WARN", "780 steps after"),
    ({"seed:1337": "seed:1337\nmodel_params:350000000"}, "C9", "WARN", "are 0.36 bits each"),
    ({EXACT: f"{EXACT}\n{ONCE_MORE}\n{FEWER_BYTES}"}, "C1", "WARN", "more bytes for its tokens"),
    ({EXACT: "".join(chr(0x660 + int(digit)) if digit != "." else "." for digit in EXACT)},
     "A4", "FAIL", "`val_bpb` 1.21972502, but the logs give 1.2197"),
    ({"1.21972502": DOUBLE_COUNTED, "bpb:1.2197 ": f"bpb:{DOUBLE_COUNTED} "}, "C1", "FAIL", "#1719"),
    ({"loss:2.05945460": "loss:nan", "loss:2.0595": "loss:nan"}, "C1", "WARN", "imply no number of bytes"),
    ({"1.21972502": "1.21942502"}, "C1", "FAIL", "the line `final_int8_zlib_roundtrip` before it"),
    ({"1.21972502": f"1.21872502{SLIDING}", "1.2197 ": "1.2187 "}, "C1", "FAIL", "the same text has"),
    ({"zlib: 15815847": "zlib: 15960000"}, "A9", "FAIL", "total 16,007,642 > 16,000,000"),
    ({"zlib: 15815847": "zlib: 15900000"}, "A9", "WARN", "the larger number counts, 15,947,642"),
    ({"H100 80GB HBM3": "H100 PCIe"}, "C4", "FAIL", "NVIDIA H100 PCIe"),
]


@pytest.mark.parametrize(("changes", "check", "level", "text"), LOGS)
def test_faults_of_a_log(changes: dict[str, str], check: str, level: str, text: str, tmp_path: Path) -> None:
    log = PLAIN_A
    for old, new in changes.items():
        assert old in log
        log = log.replace(old, new)
    found = [finding for finding in audit(public_a(tmp_path, log)) if text in finding.text]
    assert [(finding.check, finding.level(Mode.AGREED).name) for finding in found] == [(check, level)]


def test_a_loss_of_zero_stops_no_rule(tmp_path: Path) -> None:
    zero = ONCE_MORE.replace("2.05945460", "0.00000000")
    log = PLAIN_A.replace(EXACT, f"{EXACT}\n{ONCE_MORE}\n{zero}")
    assert not [found for found in audit(public_a(tmp_path, log)) if "could not be finished" in found.text]


# What submission.json says, and what is told of it.
SUBMISSIONS = [
    ({"date": "2126-01-01"}, "WARN", "date up to today"),
    ({"date": "2026-02-31"}, "WARN", "date up to today"),
    ({"bytes_total": "15863489"}, "WARN", "`bytes_total` is the text '15863489'"),
    ({'val_bpb": 1.0, "val_bpb': 1.21972502}, "FAIL", "`val_bpb` is there twice"),
]


@pytest.mark.parametrize(("changes", "level", "text"), SUBMISSIONS)
def test_what_a_submission_says_is_named(
    changes: dict[str, Any], level: str, text: str, tmp_path: Path
) -> None:
    folder = public_a(tmp_path, **changes)
    file = folder / "submission.json"
    file.write_text(file.read_text().replace('\\"', '"'))
    found = [(f.check, f.level(Mode.AGREED).name) for f in audit(folder) if text in f.text]
    assert found == [("A3", level)]


# What a log no longer holds, and the check that is then open.
EVIDENCE = [
    (r"(?m)^stopping_early.*\n| ?(train_time|step_avg):[\d.]+ms", "C2"),
    (r"(?m)^stopping_early.*\n| ?(train_time|step_avg):(600038|43.54)ms", "C2"),
    (r" eval_time:\d+ms", "C3"),
    (r"(?m)^\|.*\n", "C4"),
]


@pytest.mark.parametrize("track", ["track_10min_16mb", "track_demo"])
def test_missing_evidence_is_not_decided(track: str, tmp_path: Path) -> None:
    folder = public_a(tmp_path)
    folder = folder.parent.rename(tmp_path / track) / folder.name
    assert not [f.text for f in audit(folder) if "cannot decide" in f.text]
    for evidence, rule in EVIDENCE:
        (folder / "train.log").write_text(re.sub(evidence, "", PLAIN_A))
        found = [(f.check, f.level(Mode.STRICT)) for f in audit(folder) if "cannot decide" in f.text]
        assert found == [(rule, Level.WARN)] * (track != "track_demo"), evidence


def byte_count_off(factor: float) -> tuple[str, float]:
    """PLAIN_A without its number of tokens, with every score divided by `factor`; and its exact score."""
    text = re.sub(r"(?m)^val_loader.*\n", "", PLAIN_A)
    text = re.sub(r"val_bpb:([\d.]+)", lambda m: f"val_bpb:{float(m[1]) / factor:.{len(m[1]) - 2}f}", text)
    return text, float(re.findall(r"_exact .*val_bpb:([\d.]+)", text)[0])


@pytest.mark.parametrize("named", [True, False])
def test_bytes_per_token_are_a_tokenizers_where_no_tokens_are_counted(named: bool, tmp_path: Path) -> None:
    def found(factor: float) -> list[tuple[Level, str]]:
        text, score = byte_count_off(factor)
        if not named:
            text = text.replace("fineweb10B_sp1024", "own")
        folder = public_a(tmp_path, text, val_bpb=score)
        return [(f.level(Mode.AGREED), f.text) for f in audit(folder) if f.check == "C1"]

    assert found(1.0) == []
    ((level, said),) = found(1.0413)
    if named:
        assert level is Level.FAIL and "implied validation bytes 157," in said and "#1289" in said
    else:
        assert level is Level.WARN and "2.5365 bytes per token match no known tokenizer: cannot decid" in said
    text, score = byte_count_off(1.0413)
    tokens = f"val_loader:x tokens:{62021632 / 1.0413:.0f}"
    log = text.replace("world_size", f"{tokens}\nworld_size")
    folder = public_folder(tmp_path, {"train.log": log}, CODE, val_bpb=score)
    assert [f.check for f in fails(folder)] == ["C1"]


def trained(steps: list[int], clock: list[float], averages: list[float], *losses: float) -> str:
    """PLAIN_A with training lines of these steps, milliseconds, mean times of a step, and losses (3)."""
    columns = zip(steps, losses or [3.0] * len(steps), clock, averages, strict=True)
    lines = [
        f"step:{step}/20000 train_loss:{loss:.4f} train_time:{time:.0f}ms step_avg:{average:.2f}ms\n"
        for step, loss, time, average in columns
    ]
    before, _, after = PLAIN_A.partition("step:1/20000 train_loss")
    return before + "".join(lines) + "step:13780/20000" + after.partition("step:13780/20000")[2]


STEPS = list(range(500, 13_501, 500))
CLOCK = [step * 43.5 + 300 * (step % 1000 > 0) for step in STEPS]


def test_steps_are_those_that_the_clock_allows(tmp_path: Path) -> None:
    averages = [time / step for step, time in zip(STEPS, CLOCK, strict=True)]
    text = trained(STEPS, CLOCK, averages)
    assert fails(public_a(tmp_path, text)) == []
    folder = public_a(tmp_path, trained([2 * step for step in STEPS], CLOCK, averages))
    found = {f.text.split(" of ")[0].split(" at ")[0] for f in fails(folder)}
    assert found == {"step 21,000", "step 1,000"}  # beyond the limit; more than the clock allows
    text = text.replace("step:13780/20000 val", "step:14000/20000 val")
    (found_last,) = fails(public_a(tmp_path, text))
    assert "step 14,000 at 43.54 ms per step makes 609.6 s, but train_time says 600.0 s" in found_last.text
    windows = [(time - before) / 500 for time, before in zip(CLOCK, [0.0, *CLOCK], strict=False)]
    assert fails(public_a(tmp_path, trained(STEPS, CLOCK, windows))) == []
    since = [step - 6_250 * (step > 6_250) for step in STEPS]
    resumed = trained(STEPS, [step * 43.5 for step in since], [43.5] * len(STEPS))
    assert fails(public_a(tmp_path, resumed)) == []


def test_large_files_of_no_known_purpose_are_named_and_what_explains_a_run_is_not(tmp_path: Path) -> None:
    names = ["train.log", "README.md", "submission.json", "sp1024.model", "requirements.txt", "log.txt"]
    folder = public_a(tmp_path, script=filled(f"NAMES = {names}\n"))
    for name in names[3:]:
        (folder / name).write_text(PLAIN_A if name == "log.txt" else "x")
    assert not [f.text for f in audit(folder) if f.check == "A10"]
    writes = "open('final_model.ptz', 'wb')\n"
    for count, script, text in (
        (15_815_847, writes, "of a model in a log"), (9_999_999, "", "not mentioned anywhere")
    ):
        folder = public_a(tmp_path, script=filled(script))
        (folder / "final_model.ptz").write_bytes(bytes(count))
        (found,) = [f for f in audit(folder) if f.check in ("A9", "A10")]
        assert found.level(Mode.STRICT) is Level.WARN and text in found.text


@pytest.mark.parametrize(
    "start", ["if True:from helper import work;work()\n", "x = (\nif True:import json,helper as h\n"]
)
def test_bytes_of_imported_files_count(start: str, tmp_path: Path) -> None:
    folder = public_a(tmp_path, script=filled(start))
    (folder / "helper.py").write_text("#" * 136_511)  # with them, the log's total of 15,863,489 is the cap
    assert not [f for f in fails(folder) if f.check == "A9"]
    (folder / "helper.py").write_text("#" * 136_512)
    (found,) = [f for f in fails(folder) if f.check == "A9"]
    assert "total 16,000,001 > 16,000,000 by 1 " in found.text


def of_a_seed(seed: int, losses: list[float], clock: list[float]) -> dict[str, str]:
    """A log with these losses and milliseconds, every 50 steps."""
    steps = [50 * (number + 1) for number in range(len(losses))]
    averages = [time / step for step, time in zip(steps, clock, strict=True)]
    text = trained(steps, clock, averages, *losses)
    return {f"train_seed{seed}.log": text.replace("seed:1337", f"seed:{seed}")}


def drawn(seed: int) -> tuple[list[float], list[float]]:
    """Losses and milliseconds of a run."""
    noise = random.Random(seed)
    losses = [3.0 + noise.uniform(-0.01, 0.01) for _ in range(20)]
    return losses, [2177.0 * (index + 1) + noise.uniform(-20, 20) for index in range(20)]


@pytest.mark.parametrize("moved", [0.0, 0.0123])
def test_one_run_under_two_seeds(moved: float, tmp_path: Path) -> None:
    (losses, clock), (other_losses, other_clock) = drawn(1), drawn(2)
    two = of_a_seed(1, losses, clock) | of_a_seed(2, other_losses, other_clock)
    assert fails(public_folder(tmp_path, two, CODE, **A_SCORE)) == []
    copied = {
        "training losses": ([loss + moved for loss in losses], other_clock),
        "clock": (other_losses, [time + 1e3 * moved for time in clock]),
    }
    for what, second in copied.items():
        logs = of_a_seed(1, losses, clock) | of_a_seed(2, *second)
        found = [f for f in fails(public_folder(tmp_path, logs, CODE, **A_SCORE)) if f.check == "A5"]
        assert f"the {what} of train_seed2.log" in found[-1].text
        first_losses = what == "training losses" and not moved  # equal, not only moved by a constant
        assert len(found) == 1 + first_losses


def test_declared_bytes_and_links(tmp_path: Path) -> None:
    for declared, level in ((47_642, []), (40_000, ["FAIL"]), (60_000, ["WARN"]), (47_600, ["WARN"])):
        found = audit(public_a(tmp_path, bytes_code=declared))
        assert [f.level(Mode.AGREED).name for f in found if "`bytes_code`" in f.text] == level, declared
    folder = public_a(tmp_path)
    outside = tmp_path / "outside.log"
    outside.write_text("not JSON")
    for name in ("submission.json", "train_seed3.log", "more"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside if "." in name else tmp_path)
    (folder / "inside.md").symlink_to(folder / "README.md")
    found = {f.where for f in fails(folder) if "is a link that leaves the folder" in f.text}
    assert found == {"submission.json", "train_seed3.log", "more"}
    assert ("A2", "FAIL") in levels(folder) and not any("cannot be read" in f.text for f in fails(folder))


@pytest.mark.parametrize("hardware", ["8xA100 80GB", "4 x NVIDIA H100", "8xH200 SXM", "1xRTX5090"])
def test_declared_hardware_is_that_of_the_track_and_the_logs(hardware: str, tmp_path: Path) -> None:
    found = fails(public_a(tmp_path, hardware=hardware))
    assert {f.check for f in found if f"declares `{hardware}`" in f.text} == {"A4", "C4"}
    assert fails(public_a(tmp_path, hardware="8xH100 80GB SXM")) == []


def test_a_failing_folder_is_alone(packed: Path, tmp_path: Path, tool: Tool) -> None:
    broken = public_a(tmp_path)
    (broken / "submission.json").write_text("[" * 100_000)
    absent = tmp_path / "absent"
    of_broken, of_packed = tool("check", absent, broken, packed, status=1).split(str(packed))
    assert "absent is not a folder" in of_packed  # errors come last
    assert "nested too deeply" in of_broken and "0 FAIL" not in of_broken and "0 FAIL" in of_packed
    tool("check", absent, packed, status=2)


def test_a_rule_that_ends_in_an_error_is_a_finding(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Folder) -> Iterator[Finding]:
        yield from ()
        raise KeyError("unheard of")

    expected = audit(packed)
    monkeypatch.setattr(check, "RULES", (broken, *check.RULES))
    found = audit(packed)
    assert [f.text for f in found[1:]] == [f.text for f in expected]
    assert found[0].level(Mode.CONVENTION) is Level.FAIL and "KeyError: 'unheard of'" in found[0].text


def test_an_audit_that_takes_too_long_is_a_finding_and_the_next_one_runs(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(folder: Folder) -> Iterator[Finding]:
        while time.process_time() < begin + 20:
            try:
                re.match("(a+)+$", 26 * "a" + "b")  # one call of it may take minutes
            except Exception:
                continue
        yield from ()

    expected = audit(packed)
    begin = time.process_time()
    with monkeypatch.context() as patch:
        patch.setattr(check, "RULES", (endless, *check.RULES))
        patch.setattr(check, "CPU_SECONDS_MAX", 0.2)
        (stopped,) = audit(packed)
    assert stopped.level(Mode.CONVENTION) is Level.FAIL and "the audit was stopped after" in stopped.text
    assert audit(packed) == expected


@pytest.mark.skipif(not check.MAPPED_PAGES.is_file(), reason="the system has no such limit")
def test_an_audit_has_a_limit_of_memory(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def large(folder: Folder) -> Iterator[Finding]:
        np.empty(2 * check.MEMORY_BYTES_MAX, np.uint8)  # which only maps them
        yield from ()

    monkeypatch.setattr(check, "RULES", (large, *check.RULES))
    with check.limited_memory():
        found = audit(packed)
    assert "MemoryError" in found[0].text and len(found) > 1
    assert "MemoryError" not in audit(packed)[0].text


def test_a_log_without_an_end_is_read_in_part(tmp_path: Path) -> None:
    folder = public_a(tmp_path)
    with (folder / "train.log").open("ab") as file:
        file.truncate(200_000_000)
    tracemalloc.start()
    found = audit(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert any("`train.log` was not read to its end" in f.text for f in found) and peak < 150e6


def test_a_report_is_json_or_steers_no_terminal(tmp_path: Path, tool: Tool) -> None:
    folder = public_a(tmp_path, date="\x1b[2J\ud800\n  0 FAIL", val_bpb=1.2152)
    shown = tool("check", folder, status=1)
    assert "\x1b" not in shown and "\\x1b[2J\\ud800\\n" in shown
    findings = json.loads(tool("check", "--json", folder, status=1))[str(folder)]
    assert {"check", "level", "text", "where", "remedy"} == set(findings[0])


def test_names_are_one_line_and_in_one_direction(tmp_path: Path, tool: Tool) -> None:
    """A newline in a name may not look like a finding, and no mark turns the text around."""
    place = public_a(tmp_path)
    folder = place.rename(place.with_name("2026-04-01_a\n  FAIL A1  faked\u202e"))
    (folder / "train\nseed1.log").write_text("nothing\n")
    (folder / "x\u2066.log.gz").write_bytes(b"x")
    escaped = "2026-04-01_a\\n  FAIL A1  faked\\u202e"
    log = folder / "train\nseed1.log"
    for verb, *more in (("check", folder), ("diff", folder, folder), ("diff", log, folder)):
        shown = tool(verb, *more, status=2 if len(more) == 2 and more[0] != folder else 0)
        assert "\u202e" not in shown and "\u2066" not in shown, verb
        assert not any(line.startswith("  FAIL A1  faked") for line in shown.splitlines()), verb
        assert escaped in shown or "train\\nseed1.log: 1 line, none is" in shown


MANY = pytest.param(2_000, 0, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])


@pytest.mark.parametrize(("cases", "seed"), [(12, 1), MANY])
def test_damaged_folders_are_judged(cases: int, seed: int) -> None:
    outcome = damage.run_cases(cases, seed)
    assert outcome.cases == cases and outcome.errors == []


def test_names_of_runs_are_one_line(tmp_path: Path, tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    without_drawing(monkeypatch)
    run = make_run(tmp_path / "runs" / "a\nFAKED  finished\u202e", 1)
    other = make_run(tmp_path / "runs" / "b", 2)
    for verb, *paths in (("runs", tmp_path / "runs"), ("diff", run, other), ("plot", run)):
        shown = tool(verb, *paths)
        assert "\u202e" not in shown and "a\\nFAKED  finished\\u202e" in shown, verb
    (run / "summary.json").unlink()
    for verb, *paths in (("pack", run, "--name", "N"), ("summary", run)):
        assert "\nFAKED" not in tool(verb, *paths, status=2), verb
