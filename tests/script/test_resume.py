"""A run that was stopped goes on as if it had not been; a damaged or foreign checkpoint is never believed."""

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train_gpt
from tests.faults.faults import make_small_shards
from tests.script.test_signals import SLOW_CLOCK
from tests.support import tiny
from tests.support.here import main_here
from tests.support.planted import (
    FORWARD_SECONDS,
    after_step,
    before,
    counted_clock,
    full_disk,
    in_phase,
    send,
    signal_at_step,
)
from tests.support.processes import ROUNDED, SCRIPT, SHORT_END, Ended, Lab, train_losses


def stop_at(lab: Lab, step: int, number: int = signal.SIGTERM, **changes: Any) -> Ended:
    """A run that gets a signal in the middle of a step; the process must save and leave soon."""
    unignored = f"import signal; signal.signal({int(number)}, signal.SIG_DFL)"  # as outside nohup
    ended = lab.start(fault=unignored + signal_at_step(step, number), **changes).wait()
    assert ended.status == 128 + number, ended.err
    assert f"stopped by signal {number}; continue with RESUME={ended.directory}\n" in ended.out
    assert re.search(f"signal {number}, .*with a checkpoint", ended.err), ended.err
    assert re.findall(r"^checkpoint:\S+checkpoint.pt step:(\d)$", ended.out, re.M)[-1] == str(step)
    assert not (ended.directory / "summary.json").exists()
    return ended


def assert_same_result(ended: Ended, finished: Ended) -> None:
    """The same weights, data and scores, to the last bit."""
    assert ended.summary["artifact"]["sha256"] == finished.summary["artifact"]["sha256"]
    assert ended.summary["stream_hash"] == finished.summary["stream_hash"]
    assert ended.summary["losses"] == finished.summary["losses"]
    assert (ended.summary["steps"], ended.summary["tokens"]) == (6, 6 * 128)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Ended:
    """A run with a short end and a checkpoint, stopped by a signal; to be copied, not used."""
    lab = Lab(tmp_path_factory.mktemp("stopped"), dataset)
    return stop_at(lab, 3, CHECKPOINT_EVERY_SECONDS=0.001, **SHORT_END)


@pytest.fixture
def copy(stopped: Ended, lab: Lab) -> Path:
    """A run directory of this test's own, to resume and to damage."""
    return Path(shutil.copytree(stopped.directory, lab.folder / "runs" / "run"))


def test_a_run_stopped_twice_equals_one_never_stopped(lab: Lab, finished: Ended) -> None:
    """Also where the last part evaluates by other batches, and reads the text between them."""
    directory = stop_at(lab, 1, signal.SIGHUP).directory  # a lost terminal
    stop_at(lab, 4, signal.SIGINT, RESUME=directory, TRAIN_PREFETCH=0)
    nohup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + signal_at_step(5, signal.SIGHUP)
    evaluation = {"VAL_BATCH_SIZE": 4096, "VAL_PREFETCH": 0}
    ended = lab.succeed(fault=nohup, RESUME=directory, WARMUP_STEPS=2, **evaluation)
    assert_same_result(ended, finished)
    assert train_losses(ended) == train_losses(finished)
    log = (ended.directory / "log.txt").read_text("utf-8")
    assert log.index("stopped by signal") < log.index("resumed:") < log.index("done: ")


def test_a_run_stopped_twice_on_other_numbers_of_ranks(copy: Path, lab: Lab, short: Ended) -> None:
    """Of one rank, then two, then one: each reads what the others have saved."""
    # One rank catches it: all save and leave.
    each = {1: {"fault": signal_at_step(5)}}
    ended = [rank.wait() for rank in lab.ranks(2, each=each, RESUME=copy, WARMUP_STEPS=1, **SHORT_END)]
    assert all(one.status == 128 + signal.SIGTERM for one in ended) and "stopped by signal" in ended[0].out
    last = lab.succeed(RESUME=copy, **SHORT_END)
    assert re.search("^resumed:.* step:5 ", last.out, re.M)
    assert last.summary["stream_hash"] == short.summary["stream_hash"]
    for name, loss in last.summary["losses"].items():
        assert math.isclose(loss["nats"], short.summary["losses"][name]["nats"], rel_tol=2e-3), name
    assert train_losses(last) == pytest.approx(train_losses(short), rel=1e-4)


def test_the_clock_goes_on_where_it_stopped_and_what_was_trained_is_not_trained_on(lab: Lab) -> None:
    """A step is one micro-batch of a hundredth of a second, by a clock that counts them.

    A run is stopped in its training, goes on, is killed while it is scored, and goes on once more.
    """
    changes: dict[str, Any] = {**SHORT_END, "GPTQ": 1, "MAX_WALLCLOCK_SECONDS": 0.425, "TRAIN_LOG_EVERY": 5,
                               "GPTQ_RESERVE_SECONDS": 0.25, "ITERATIONS": 100000,
                               "TRAIN_BATCH_TOKENS": 64, "VAL_LOSS_EVERY": 0}
    clock = counted_clock()
    ended = lab.run(fault=clock + signal_at_step(10), **changes)
    assert ended.status == 128 + signal.SIGTERM, ended.err
    kill = in_phase("eval_roundtrip", send(signal.SIGKILL))
    killed = lab.run(fault=clock + kill, RESUME=ended.directory, WARMUP_STEPS=1, **changes)
    assert killed.status == -signal.SIGKILL
    (resumed_ms,) = re.findall(r"^resumed:\S+ step:10 train_time:(\d+)ms", killed.out, re.M)
    assert int(resumed_ms) == 100
    last = lab.succeed(fault=clock, RESUME=ended.directory, **changes)
    whole = lab.elsewhere("straight").succeed(fault=clock, **changes)
    for key in ("steps", "losses", "artifact", "stream_hash"):
        assert last.summary[key] == whole.summary[key], key
    # 17 steps fit into 0.175 s, and one is kept free.
    assert last.summary["steps"] == 16
    for ended in (last, whole):
        limit = ended.summary["limits"]["train_seconds"]
        assert limit["ok"] and limit["value"] == pytest.approx(0.16 + 4 * FORWARD_SECONDS)
    times_ms = [event["train_time_ms"] for event in last.events if event["event"] == "train"]
    assert times_ms == pytest.approx([10.0 * step for step in range(1, 17)])
    shown = [int(step) for step in re.findall(r"^step:(\d+)/\d+ train_loss:", killed.out, re.M)]
    assert shown == [15]  # the console keeps its interval


def test_a_signal_in_evaluation_leaves_the_artifact_and_says_how_to_go_on(lab: Lab) -> None:
    fault = in_phase("eval_sliding_window", send(signal.SIGTERM))
    ended = lab.run(fault=fault, **ROUNDED, TTT_ENABLED=0, ITERATIONS=1, VAL_LOSS_EVERY=0)
    assert ended.status == 128 + signal.SIGTERM and "Traceback" not in ended.err
    ways = f"RESUME={ended.directory}", f"EVAL_ONLY={ended.directory / 'model.bin'}"
    assert all(words in ended.err for words in (*ways, "phase eval_sliding_window"))


def error_of(environ: dict[str, str]) -> str:
    """What `main` prints, here in this process, of a run that must not begin."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main_here(environ)
    assert (status, out.getvalue()) == (1, "")
    return err.getvalue()


def refused(lab: Lab, directory: Path, *named: str, **changes: Any) -> None:
    """Nothing may be read from a checkpoint that this run could not have written, and nothing is changed."""
    before = tiny.contents(directory)
    error = error_of(lab.settings(RESUME=directory, **{**SHORT_END, **changes}))
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert all(words in error for words in named), error
    assert tiny.contents(directory) == before


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


OLDER = {"config": {}, "loader": {}, "step": 3}  # as 0.5.4 wrote it
DAMAGES: dict[str, Any] = {
    "cut": lambda content, canary: content[: len(content) // 2],
    "empty": lambda content, canary: b"",
    "pickle": lambda content, canary: pickle.dumps(Touch(canary)),
    "a pickle in torch's form": lambda content, canary: train_gpt.torch_file(Touch(canary)),
    "older": lambda content, canary: train_gpt.torch_file(OLDER),
}


def test_a_directory_that_is_not_there_is_named_before_anything_else(lab: Lab) -> None:
    error = error_of({"RESUME": str(lab.folder / "typo")})
    assert re.match(r"error: RESUME=\S+typo: no such directory", error), error


def test_a_directory_without_a_checkpoint_is_told_from_a_damaged_one(copy: Path, lab: Lab) -> None:
    (copy / "checkpoint.pt").unlink()
    refused(lab, copy, f"RESUME: there is no {copy / 'checkpoint.pt'}", "has finished", "another RUN_ID")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_nothing_in_it_runs(damage: str, copy: Path, lab: Lab) -> None:
    path, canary = copy / "checkpoint.pt", lab.folder / "canary"
    content = path.read_bytes()
    path.write_bytes(DAMAGES[damage](content, canary))
    refused(lab, copy, f"RESUME: {path} cannot be read", "0.5.4")
    assert not canary.exists()


def read_again(directory: Path) -> dict[str, Any]:
    """The checkpoint of a run as its own settings and code read it."""
    state = torch.load(directory / "checkpoint.pt", weights_only=True)
    settings = {"CONFIG": str(directory / "config.env"), "RESUME": str(directory)}
    return train_gpt.read_checkpoint(train_gpt.Config.from_env(settings), state["hashes"], torch.float32)


def assert_equal(one: Any, other: Any) -> None:
    """The same values, to the last bit, in whatever they are nested."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert one == other


def test_a_flipped_bit_anywhere_is_found_or_does_no_harm(copy: Path) -> None:
    """Of fifty places in the file. torch itself reads past nearly all of them."""
    path = copy / "checkpoint.pt"
    content = path.read_bytes()
    state = read_again(copy)
    settings = {"CONFIG": str(copy / "config.env"), "RESUME": str(copy)}
    config = train_gpt.Config.from_env(settings)
    source = random.Random(5)
    found = 0
    for _ in range(50):
        flipped = bytearray(content)
        flipped[source.randrange(len(content))] ^= 1 << source.randrange(8)
        path.write_bytes(flipped)
        try:
            assert_equal(train_gpt.read_checkpoint(config, state["hashes"], torch.float32), state)
        except train_gpt.ConfigError as error:
            assert f"RESUME: {path} cannot be read" in str(error)
            found += 1
    assert found > 25


def test_noise_in_a_checkpoint_is_refused_when_it_is_read(copy: Path, lab: Lab) -> None:
    path = copy / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = random.Random(6).randbytes(200)
    path.write_bytes(content)
    refused(lab, copy, f"RESUME: {path} cannot be read (damaged: ", "checksum", "copy it again")


def link_to(target: Path) -> Callable[[Path], None]:
    return lambda place: place.symlink_to(target)


def hard_link_to(target: Path) -> Callable[[Path], None]:
    return lambda place: place.hardlink_to(target)


FILES_OF_A_RUN = """
log.txt metrics.jsonl config.env train_gpt.py checkpoint.pt .model.bin.tmp .checkpoint.pt.tmp model.bin
summary.json trace_rank0.json anything
""".split()


@pytest.mark.parametrize("name", FILES_OF_A_RUN)
def test_a_run_whose_files_lead_elsewhere_is_not_resumed(name: str, copy: Path, lab: Lab) -> None:
    """It may have come from anybody, and a run writes to its files."""
    target = lab.folder / "of the user"
    for link in (link_to(target), hard_link_to(target), os.mkfifo):
        place = copy / name
        content = place.read_bytes() if place.exists() else b"the user's"
        target.write_bytes(content)
        place.unlink(missing_ok=True)
        link(place)
        before = {path.name: path.lstat().st_mtime_ns for path in copy.iterdir()}
        # Settings are given, and the checkpoint is not read: either may be the pipe.
        config = train_gpt.Config.from_env(lab.settings(RESUME=copy))
        with pytest.raises(train_gpt.ConfigError, match=rf"RESUME=\S+: {re.escape(name)} is a link"):
            train_gpt.choose_directory(config, train_gpt.Machine())
        assert target.read_bytes() == content
        assert before == {path.name: path.lstat().st_mtime_ns for path in copy.iterdir()}
        place.unlink()
        target.unlink()
        if content != b"the user's":
            place.write_bytes(content)


def test_a_link_stops_the_whole_run_with_one_message(copy: Path, lab: Lab) -> None:
    target = lab.folder / "start file of a shell"
    target.write_text("# mine\n")
    (copy / "metrics.jsonl").unlink()
    (copy / "metrics.jsonl").symlink_to(target)
    before = tiny.contents(copy)
    ended = lab.run(RESUME=copy, **SHORT_END)
    assert ended.status == 1 and re.match(r"error: .*\n\Z", ended.err), ended.err
    assert "metrics.jsonl is a link" in ended.err and "replace it with a copy" in ended.err
    assert tiny.contents(copy) == before
    assert target.read_text() == "# mine\n"


def test_nothing_is_written_through_a_link_that_comes_later(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("log.txt", ".model.bin.tmp"):
        (folder / name).symlink_to(target)
    run = train_gpt.Run(train_gpt.Machine(), folder)
    run.log("a line")
    train_gpt.write_atomically(folder / "model.bin", b"new")
    assert target.read_text() == "mine" and (folder / "model.bin").read_bytes() == b"new"
    assert not (folder / ".model.bin.tmp").is_symlink()


@pytest.mark.parametrize("changes", [{"SEED": 1}, {"MODEL_DIM": 64}, {"MATRIX_LR": 0.5}], ids=str)
def test_other_settings_are_refused_by_name(changes: dict[str, object], copy: Path, lab: Lab) -> None:
    (name,) = changes
    refused(lab, copy, f"{name} is ", f"{copy}/train_gpt.py", **changes)


def test_activations_of_another_dtype_are_refused_and_the_way_out_works(copy: Path, lab: Lab) -> None:
    """COMPUTE_DTYPE=auto is bfloat16 on one CPU and float32 on another, where a run may be resumed."""
    for there, here in (("float32", "bfloat16"), ("bfloat16", "float32")):
        state = torch.load(copy / "checkpoint.pt", weights_only=True)
        torch.save({**state, "dtype": there}, copy / "checkpoint.pt")
        refused(lab, copy, f"activations are in {here} here, but were in {there}",
                f"set COMPUTE_DTYPE={there}", COMPUTE_DTYPE=here)
    last = lab.succeed(RESUME=copy, COMPUTE_DTYPE="bfloat16", **SHORT_END)
    assert "dtype:torch.bfloat16 " in last.out and re.search("^resumed:", last.out, re.M)


def test_a_run_in_bfloat16_that_was_stopped_equals_one_never_stopped(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory, dataset: Path
) -> None:
    changes = {**SHORT_END, "COMPUTE_DTYPE": "bfloat16"}
    whole = Lab(tmp_path_factory.mktemp("whole"), dataset).succeed(**changes)
    ended = lab.succeed(RESUME=stop_at(lab, 3, **changes).directory, **changes)
    assert_same_result(ended, whole)
    assert train_losses(ended) == train_losses(whole)


def test_other_data_and_another_tokenizer_are_refused(copy: Path, lab: Lab) -> None:
    other = lab.copy_dataset()
    (other.dataset / "manifest.json").unlink()  # it would miss the shard first
    shard = other.dataset / "fineweb_train_000001.bin"
    shard.rename(shard.with_name("kept"))
    refused(other, copy, "shards is ")
    shard.with_name("kept").rename(shard)
    # The same pieces in a file with another hash: one that did not make the shards is refused before.
    with open(other.dataset / "tokenizer.model", "ab") as model:
        model.write(b"\xfa\x3f\x01x")  # a field that no version of the format knows
    refused(other, copy, "tokenizer is ")


GONE = {  # what happens to each training shard
    "removed": "os.remove(path)",
    "cut": "os.truncate(path, 1200)",
    "replaced": "open(path, 'wb').write(b'<html>' * 300)",
    "a folder": "(os.remove(path), os.mkdir(path))",
}


def lose_shards(damage: str) -> str:
    """In the third step, something happens to all training shards of DATA_PATH."""
    each = f"[{GONE[damage]} for path in glob.glob(os.environ['DATA_PATH'] + '/*train*')]"
    return after_step(3, f"import glob, os; {each}")


def with_small_shards(lab: Lab) -> Lab:
    """A dataset of the lab's own, in which a step takes one or two shards."""
    (lab.folder / "small").mkdir()
    make_small_shards(lab.folder / "small")
    return Lab(lab.folder, lab.folder / "small")


TWELVE: dict[str, Any] = {**SHORT_END, "ITERATIONS": 12, "VAL_LOSS_EVERY": 0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Ended:
    """Twelve steps on small shards that stay where they are."""
    return with_small_shards(Lab(tmp_path_factory.mktemp("whole"), dataset)).succeed(**TWELVE)


@pytest.mark.parametrize(("damage", "prefetch"), [
    ("cut", 0), ("cut", 1), ("a folder", 1),
    *(pytest.param(damage, 1, marks=pytest.mark.slow) for damage in ("removed", "replaced")),
])
def test_a_shard_that_goes_in_training_costs_no_step(
    damage: str, prefetch: int, lab: Lab, whole: Ended
) -> None:
    """What was trained is saved before the run ends, and goes on once the shard is back."""
    lab = with_small_shards(lab)
    changes = {**TWELVE, "TRAIN_PREFETCH": prefetch}
    kept = {path: path.read_bytes() for path in lab.dataset.glob("fineweb_train_*.bin")}
    ended = lab.run(fault=lose_shards(damage), **changes)
    assert ended.status == 1 and "step:3" in ended.out
    assert ended.err.splitlines()[-1] == f"continue with RESUME={ended.directory}", ended.err
    assert re.search(r"^error: rank 0, step \d+, position .*fineweb_train_\d+.bin: ", ended.err)
    assert damage == "a folder" or "Traceback" not in ended.err
    trained = train_losses(ended)
    checkpoint = torch.load(ended.directory / "checkpoint.pt", weights_only=True)
    assert checkpoint["step"] == len(trained) >= 3
    assert trained == {step: train_losses(whole)[step] for step in trained}
    if damage == "a folder":
        return  # what is saved goes on as after the other damages
    for path, content in kept.items():
        if path.is_dir():
            path.rmdir()
        path.write_bytes(content)
    last = lab.succeed(RESUME=ended.directory, **changes)
    for key in ("stream_hash", "artifact", "steps"):
        assert last.summary[key] == whole.summary[key]
    assert train_losses(last) == train_losses(whole)


def test_a_rank_without_a_batch_ends_all_with_a_checkpoint_of_the_last_step(lab: Lab, whole: Ended) -> None:
    """Its peer must not take the step alone, nor wait for ever."""
    lab = with_small_shards(lab)
    shutil.copytree(lab.dataset, lab.folder / "node2" / "small")
    loses = {1: {"fault": "os.chdir('node2')\n" + lose_shards("cut")}}  # its own disk, under the same name
    ranks = lab.ranks(2, each=loses, DATA_PATH="small", **TWELVE)
    ended, other = (rank.wait() for rank in ranks)
    assert (ended.status, other.status) == (1, 1)
    assert "rank 0: error: another rank got no batch; it prints the reason" in ended.err
    assert re.search(r"rank 1: error: rank 1, step \d+, position .*fineweb_train_\d+.bin: ", other.err)
    assert ended.err.splitlines()[-1] == f"continue with RESUME={ended.directory}", ended.err
    last = lab.succeed(RESUME=ended.directory, DATA_PATH="small", **TWELVE)
    assert last.summary["stream_hash"] == whole.summary["stream_hash"] and last.summary["steps"] == 12
    assert train_losses(last) == pytest.approx(train_losses(whole), rel=1e-4)


def test_a_file_is_on_the_disk_before_it_takes_the_place_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine leaves the old file or the new one, never an empty one."""
    done: list[str] = []
    path = tmp_path / "checkpoint.pt"

    def fsync(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        done.append(f"fsync {kind} {os.fstat(descriptor).st_size if kind == 'file' else ''}".strip())

    replace = os.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("replace"), replace(*names)))
    train_gpt.write_atomically(path, b"12345")
    assert done == ["fsync file 5", "replace", "fsync folder"] and path.read_bytes() == b"12345"

    def fails(number: int) -> Callable[[int], None]:
        def fail(_: int) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    # A full disk may show only here; a file system that cannot do it is no reason to lose a file.
    monkeypatch.setattr(os, "fsync", fails(errno.ENOSPC))
    with pytest.raises(train_gpt.ConfigError, match="No space left"):
        train_gpt.write_atomically(path, b"new")
    assert path.read_bytes() == b"12345" and [one.name for one in tmp_path.iterdir()] == ["checkpoint.pt"]
    monkeypatch.setattr(os, "fsync", fails(errno.EINVAL))
    train_gpt.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_full_disk_or_no_memory_costs_a_checkpoint_and_not_the_run(lab: Lab) -> None:
    fault = "import torch\nerrors = [MemoryError(), torch.cuda.OutOfMemoryError('none is left')]\n"
    fault += before("torch.save", "if errors:\n    raise errors.pop()") + full_disk("checkpoint.pt.tmp")
    ended = lab.succeed(fault=fault, CHECKPOINT_EVERY_SECONDS=0.001, ITERATIONS=3, **SHORT_END)
    warnings = re.findall(r"^warning: no checkpoint at step \d, .*?: (.+)$", ended.out, re.M)
    for warning, told in zip(warnings, ("none is left", "MemoryError()", "No space left"), strict=False):
        assert told in warning
    assert len(warnings) >= 3
    assert ended.summary["steps"] == 3 and not [*ended.directory.glob("*checkpoint*")]


def test_weights_that_were_asked_for_beside_the_artifact_cost_no_artifact(lab: Lab, short: Ended) -> None:
    fault = full_disk("final_model.pt.tmp", "nats_roundtrip.bin.tmp")
    ended = lab.succeed(fault=fault, SAVE_FLOAT=1, **SHORT_END)
    assert "warning: SAVE_FLOAT: " in ended.out and "warning: " in ended.out.split("roundtrip_exact")[1]
    assert ended.summary["losses"] == short.summary["losses"]
    assert not (ended.directory / "final_model.pt").exists()


def test_a_full_disk_at_the_end_costs_neither_the_end_nor_the_artifact(lab: Lab, short: Ended) -> None:
    ended = lab.run(fault=full_disk("summary.json.tmp"), **SHORT_END, ITERATIONS=1)
    assert ended.status == 1 and "Traceback" not in ended.err
    assert "summary.json" in ended.err and "No space left" in ended.err
    assert not (ended.directory / "summary.json").exists() and (ended.directory / "checkpoint.pt").exists()
    assert not [*ended.directory.glob(".*")]
    elsewhere = lab.folder / "elsewhere"
    elsewhere.mkdir()
    fault = f"import tempfile\ntempfile.tempdir = {str(elsewhere)!r}\n" + full_disk("run/.model.bin.tmp")
    # As the settings are all in the environment of this run, its artifact alone would say little.
    ended = lab.elsewhere("again").run(fault=fault, **SHORT_END)
    (kept,) = elsewhere.glob("*/model.bin")
    assert ended.status == 1 and "No space left" in ended.err
    assert kept.read_bytes() == (short.directory / "model.bin").read_bytes()
    # The command that is printed works as it is, with nothing else set and no room where the run was.
    (printed,) = re.findall(r" (RUNS_DIR=.*)$", ended.err, re.M)
    words = shlex.split(printed)
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    assert words[-2:] == ["python", str(SCRIPT)] and settings["EVAL_ONLY"] == str(kept)
    lab.elsewhere("third").succeed(**lab.nothing_but(**settings))
    (summary,) = kept.parent.glob("*/summary.json")
    losses = json.loads(summary.read_text())["losses"]
    for name, loss in short.summary["losses"].items():
        assert math.isclose(losses[name]["nats"], loss["nats"], rel_tol=1e-6), name


DIVERGES = after_step(3, 'given[0].param_groups[0]["params"][0].data[0] = float("nan")')


def test_a_loss_that_is_not_finite_stops_with_all_that_one_needs_to_go_on(lab: Lab, short: Ended) -> None:
    ended = lab.run(fault=DIVERGES, CHECKPOINT_EVERY_SECONDS=0.001, **SHORT_END)
    assert ended.status == 1 and "Traceback" not in ended.err
    checkpoint = ended.directory / "checkpoint.pt"
    told = f"error: step 4, batch at token {3 * 128}: train_loss nan, grad_norm nan; lower MATRIX_LR"
    assert ended.err.startswith(told) and checkpoint.exists()
    assert ended.err.splitlines()[-1] == f"continue with RESUME={ended.directory}"
    (warning,) = re.findall(r"^warning: no checkpoint at step 3.*$", ended.out, re.M)
    assert "weights are not finite" in warning
    assert set(train_losses(ended)) == {1, 2, 3}
    assert_same_result(lab.succeed(RESUME=ended.directory, **SHORT_END), short)


def test_resume_alone_goes_on_with_the_run_as_it_was(copy: Path, lab: Lab, short: Ended) -> None:
    ended = lab.succeed(**lab.nothing_but(RESUME=copy))
    assert_same_result(ended, short)
    assert ended.summary["code"]["sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    assert ended.directory == copy and ended.summary["config"]["WARMUP_STEPS"] == "0"


def made_by(directory: Path, code: str) -> None:
    """The checkpoint says that code with this hash has written it: a changed script would be compiled."""
    path = directory / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["hashes"]["code"] = code
    path.write_bytes(train_gpt.torch_file(state))


def test_other_code_goes_on_only_when_asked_for_and_all_records_tell(copy: Path, lab: Lab) -> None:
    """A run whose code was changed twice names both."""
    first, second = "1" * 64, "2" * 64
    ours = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    made_by(copy, first)
    (copy / "train_gpt.py").write_text("# the first code\n")
    refused(lab, copy, f"code is {ours} but was {first}", "RESUME_OTHER_CODE=1")
    # Other code, and nothing else: settings must be those of the run.
    refused(lab, copy, "MATRIX_LR is 0.5", RESUME_OTHER_CODE=1, MATRIX_LR=0.5)
    stopped_again = stop_at(lab, 5, RESUME=copy, RESUME_OTHER_CODE=1, **SHORT_END)
    told = rf"^resumed:\S+ step:3 train_time:\d+ms code:{ours} after {first}$"
    assert re.search(told, stopped_again.out, re.M)
    saved = torch.load(copy / "checkpoint.pt", weights_only=True)["hashes"]["code"]
    assert saved == f"{ours} after {first}"
    made_by(copy, f"{second} after {first}")
    # A given setting is stronger than one that is found.
    given = lab.nothing_but(RESUME=copy, RESUME_OTHER_CODE=1, EVAL_STRIDE=16)
    ended = lab.succeed(**given)
    assert set(ended.summary["losses"]) == {"roundtrip", "sliding_window"}
    config = train_gpt.Config.from_env({"CONFIG": str(copy / "config.env")})
    assert config.eval_stride == 16, "config.env says how the run was made that ended here"
    assert ended.summary["code"]["sha256"] == f"{ours} after {second} after {first}"
    assert (copy / "train_gpt.py").read_bytes() == SCRIPT.read_bytes()


def test_a_failure_after_training_tells_the_line_that_goes_on(lab: Lab, short: Ended) -> None:
    ended = lab.run(fault=in_phase("quantize", 'raise RuntimeError("injected")'), **SHORT_END)
    assert ended.status == 1 and "injected" in ended.err
    assert ended.err.splitlines()[-1] == f"continue with RESUME={ended.directory}"
    assert_same_result(lab.succeed(**lab.nothing_but(RESUME=ended.directory)), short)


def test_the_second_signal_ends_at_once(lab: Lab) -> None:
    """Both are sent in the middle of a step: after one the step is done and saved, after two nothing is."""
    ended = lab.run(fault=SLOW_CLOCK + signal_at_step(3, signal.SIGTERM, signal.SIGINT), **SHORT_END)
    assert ended.status == 128 + signal.SIGINT and not (ended.directory / "checkpoint.pt").exists()
    assert re.search("signal 15, .*with a checkpoint", ended.err)
    assert ended.err.splitlines()[-1].endswith("in phase train; no checkpoint or artifact was saved")


def test_a_signal_in_the_last_validation_of_training_is_heard(lab: Lab) -> None:
    """The last weights are saved by then; nothing else may begin."""
    fault = after_step(6, "sys.trained = True") + before("torch.nn.functional.embedding", f"""
        if getattr(sys, "trained", False) and not torch.is_grad_enabled():
            sys.trained = False
            {send(signal.SIGTERM)}
    """)
    ended = lab.run(fault=fault, VAL_LOSS_EVERY=6)
    assert ended.status == 128 + signal.SIGTERM
    assert ended.out.splitlines()[-1] == f"stopped by signal 15; continue with RESUME={ended.directory}"
    assert re.search("^step:6/6 val_loss", ended.out, re.M) and "gptq:" not in ended.out
