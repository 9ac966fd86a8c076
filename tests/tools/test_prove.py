"""The proofs pass what is honest and refute every script that is not, each by the probe named for it."""

import argparse
import ast
import contextlib
import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import train_gpt
from tests.support.processes import ROUNDED, Lab
from tests.tools.conftest import SHIPPED_CODE, Tool
from tools.__main__ import main
from tools.prove import (
    casing,
    elsewhere,
    execution,
    foreign,
    mutants,
    network,
    noise,
    probes,
    prove,
    questions,
    ranks,
    rehearsal,
    replay,
    seeds,
    tiny,
)
from tools.prove.mutants import sleeping, survivors, trial
from tools.prove.mutants.legal import LEGAL_OF_DOCUMENTS
from tools.submit.findings import Finding, Level, Mode

SCRIPT = Path(train_gpt.__file__)
# A few for each probe, the quick ones; `prove --self-test` tries all of them.
ASKED_BELOW = {"learning-rate-picked-in-private", "one-token-past-the-chunk", "tokenizer-drops-case"}
QUICK = [
    *sorted({*mutants.SELF_TEST, *mutants.SELF_TEST_OF_DOCUMENTS} - ASKED_BELOW),
    "pick-carried-sliding-legal-roundtrip", "weights-carried-roundtrip-legal-sliding", "expert-by-hindsight",
    "clipped-deep-in-documents", "compiled-documents-flattered", "shorter-text", "flattering-log",
    "case-marks-as-text", "better-on-second-sight", "unquantized-weights-scored", "roundtrip-that-learns",
    "average-picked-by-validation", "kind-to-long-texts", "unlearned-by-their-losses", "padding-that-learns",
    "heads-of-the-next-token", "batches-of-a-gpu-of-validation", "no-file-too-large", "kinder-with-two-ranks",
]  # fmt: skip
# One of each kind of legal change, the quick ones; all of them are asked more by a slow test.
QUICK_LEGAL = ["batches-by-ranks", "cache-of-scored-tokens", "learns-in-place", "recorded-in-pieces"]


@pytest.fixture(scope="module", autouse=True)
def scripts_are_compiled_and_wrapped_once() -> Iterator[None]:
    """Every mutant is the script loaded afresh: it has the same code, and counts the same bytes."""
    load = mutants.load_script

    def load_script(path: Path) -> ModuleType:
        script = load(path)
        vars(script)["shipped_code"] = SHIPPED_CODE
        return script

    compiled_once = functools.cache(SourceFileLoader.source_to_code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SourceFileLoader, "source_to_code", compiled_once)
        patch.setattr(mutants, "load_script", load_script)
        yield


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of three chunks: as many kinds of place as in the whole one, in half the time."""
    monkeypatch.setattr(probes, "STREAM_TOKENS", 80)
    monkeypatch.setattr(probes, "DOCUMENT_STARTS", [0, 11, 40, 41])


@pytest.fixture(scope="module")
def subject() -> probes.Subject:
    return probes.make_subject(train_gpt)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("laboratories")


def failures(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level(Mode.AGREED) is Level.FAIL]


def test_there_are_mutants_of_every_kind_and_for_every_order_of_labels() -> None:
    assert len(mutants.MUTANTS) >= 16 + 30
    asked = {mutant.probe for mutant in mutants.MUTANTS.values()}
    assert asked == set(prove.PROOFS) - {"B15", "B16", "B17", "B18", "B19"}
    orders = {name.split("-", 2)[2] for name in mutants.MUTANTS if name.startswith("counts-carried")}
    assert len(orders) == 6
    assert len(survivors.KINDS) >= 18 and min(map(len, survivors.KINDS.values())) >= 2
    compile(sleeping.with_all(SCRIPT.read_text()), "", "exec")


@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_killed_by_its_probe(name: str, folder: Path) -> None:
    killer = mutants.kill(SCRIPT, name, folder)
    assert killer is not None, f"{name} survived"
    assert killer.check == mutants.MUTANTS[name].probe
    if killer.check in ("B1", "B2", "B4", "B9", "B10"):
        assert any(character.isdigit() for character in killer.text), "a refutation names target and size"


WHOLE = pytest.param((), marks=[pytest.mark.slow, pytest.mark.timeout(7200)])


@pytest.mark.parametrize("options", [("--only", "B11"), WHOLE])
def test_every_mutant_is_killed_and_no_legal_change_is(options: tuple[str, ...], tool: Tool) -> None:
    tool("prove", SCRIPT, "--self-test", *options)


def test_the_mould_of_the_mutants_and_our_scorer_of_documents_are_legal(short: None) -> None:
    script = mutants.load_script(SCRIPT)
    trial.scorer(trial.honest)(script)
    assert not failures(list(mutants.asked(probes.make_subject(script), [32])))
    documents = probes.make_subject(train_gpt, **tiny.LORA)
    findings = [*mutants.asked(documents, [32]), *probes.document_isolation(documents)]
    assert all(finding.level(Mode.AGREED) is Level.INFO for finding in findings), findings
    asked_of = {finding.check for finding in findings}
    assert asked_of == {"B1", "B2", "B3", "B4", "B5", "B6", "B9", "B14"}


def test_a_flip_does_not_see_all() -> None:
    def case_of(name: str, scorer: str = "") -> questions.Case:
        return probes.make_subject(mutants.mutated(SCRIPT, name)).case(scorer)

    case = case_of("one-token-past-the-chunk")
    assert not failures(list(questions.future(case, [32, 33])))
    assert failures(list(questions.kraft(case, [32], and_changes=False)))
    case = case_of("learning-rate-picked-in-private")
    assert not failures(list(questions.future(case, [142])))
    assert failures(list(questions.future(case, [], [64])))
    assert failures(list(questions.future(case_of("attention-looks-ahead"), [60])))
    case = case_of("long-match-cache", "score_ttt")
    repeats = questions.Case(case.ask, questions.repeating(case.tokens), 12, case.place)
    assert not failures(list(questions.kraft(case, [77])))
    assert failures(list(questions.kraft(repeats, [77])))


@pytest.mark.parametrize("name", QUICK_LEGAL)
def test_a_legal_change_is_not_refuted(name: str, short: None) -> None:
    findings = list(mutants.asked(probes.make_subject(mutants.mutated(SCRIPT, name)), [32]))
    assert not failures(findings) and len(findings) >= 20


@pytest.mark.parametrize("name", sorted(LEGAL_OF_DOCUMENTS))
def test_a_legal_change_of_the_scorer_of_documents_is_not_refuted(name: str, short: None) -> None:
    documents = probes.make_subject(mutants.mutated(SCRIPT, name), **tiny.LORA)
    case = documents.case("score_ttt")
    findings = [
        *probes.ledger_order(documents, "score_ttt"),
        *probes.document_isolation(documents, "score_ttt"),
        *questions.future(case, [60]),
    ]
    assert not failures(findings)
    assert {"B1", "B3", "B4", "B5", "B6", "B9"} == {finding.check for finding in findings}


def test_equal_bits_are_asked_of_equal_batches_nothing_is_read_first(subject: probes.Subject) -> None:
    nats = [1.0, 2.0]
    alone = {"a": {"nats": nats, "batches": ["x", "y"], "learns": False}}
    moved = [1.0, 2.0 + 1e-6]
    same = [{"a": {"nats": moved, "batches": [batch], "learns": False}} for batch in "xy"]
    others = [{"a": {"nats": moved, "batches": [batch], "learns": False}} for batch in "xz"]
    assert failures(ranks.compare(subject, alone, same))
    assert not failures(ranks.compare(subject, alone, others))
    (finding,) = probes.evaluation_warmup(subject)
    assert finding.level(Mode.AGREED) is Level.INFO and "read no validation token" in finding.text


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, tiny.LORA], ids=["chunks", "documents"])
@pytest.mark.parametrize("seed", range(20))
def test_no_false_alarm(seed: int, settings: dict[str, str]) -> None:
    subject = probes.make_subject(train_gpt, seed, **settings)
    assert not failures(list(prove.scoring(subject, thorough=True)))


def test_our_evaluation_passes_at_the_edges() -> None:
    subject = probes.make_subject(train_gpt, VOCAB_SIZE=tiny.FEW)
    findings = list(prove.scoring(subject, thorough=False))
    assert not failures(findings)
    assert {"B1", "B2", "B3", "B4", "B5", "B6", "B9", "B14"} == {finding.check for finding in findings}
    labels = {finding.where for finding in findings if finding.check == "B2"}
    assert labels == {"tiny: roundtrip", "tiny: sliding_window", "tiny: legal_ttt"}
    assert 3 * noise.repacking(subject) < questions.REPACKING_TOLERANCE
    assert 0 < 3 * noise.sums(subject) < questions.KRAFT_TOLERANCE


def test_our_defaults_and_configs_are_shrunk_and_keep_their_features(repo: Path) -> None:
    default = train_gpt.Config()
    settings, shrunk = tiny.shrink(default, tiny.FOR_SCORER)
    small = train_gpt.Config.from_env(settings)
    same = [
        "num_layers", "num_heads", "num_kv_heads", "mlp_mult", "num_loops", "loop_start", "loop_end",
        "parallel_start_layer", "parallel_mode", "ttt_epochs", "ttt_lr", "ttt_momentum", "xsa_last_n",
        "doc_mask", "smear_gate_enabled", "skip_gates_enabled", "sparse_attn_gate_enabled", "ttt_enabled",
    ]  # fmt: skip
    assert all(getattr(small, name) == getattr(default, name) for name in same)
    assert 0 < small.rope_dims < small.head_dim
    assert small.eval_stride < small.eval_length < small.ttt_chunk_tokens < probes.STREAM_TOKENS
    named = {entry.split()[0] for entry in shrunk}
    changed = {name for name, value in small.as_env().items() if value != default.as_env()[name]}
    assert changed - set(tiny.PRIVATE) == named
    for path in repo.glob("configs/*.env"):
        config = train_gpt.Config.from_env({"CONFIG": str(path)})
        for size in (tiny.FOR_SCORER, tiny.FOR_RUN):
            train_gpt.Config.from_env(tiny.shrink(config, size)[0])


def test_lengths_keep_their_order_when_they_are_shrunk() -> None:
    for stride, context in (("0", "0"), ("64", "64"), ("32", "128"), ("8", "32")):
        lengths = {"EVAL_STRIDE": stride, "EVAL_SEQ_LEN": context, "TRAIN_SEQ_LEN": "64"}
        before = train_gpt.Config.from_env({**lengths, "TTT_ENABLED": "0", "MODEL_DIM": "256"})
        after = train_gpt.Config.from_env(tiny.shrink(before, tiny.FOR_SCORER)[0])
        for smaller, larger in (("eval_stride", "eval_length"), ("train_seq_len", "eval_length")):
            was = np.sign(getattr(before, smaller) - getattr(before, larger))
            assert np.sign(getattr(after, smaller) - getattr(after, larger)) == was
        assert (after.eval_stride == 0) == (before.eval_stride == 0)


def test_bytes_are_counted_by_tokenizer_or_sidecar_and_who_audits_it_is_told(
    subject: probes.Subject, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laboratory = mutants.laboratory_in(folder)
    assert {finding.written for finding in mutants.byte_table(subject, laboratory)} == {Level.INFO}
    place = laboratory.folder
    assert [each.written for each in casing.case_bytes(subject, place)] == [Level.INFO]
    # A script that does not compare the bytes with those that were audited.
    read = train_gpt.read_manifest
    monkeypatch.setattr(train_gpt, "read_manifest", lambda folder: read(folder)._replace(audited_bytes=None))
    *told, counted = casing.case_bytes(subject, place)
    assert (counted.check, counted.written) == ("B10", Level.INFO)
    assert len(told) == 2 and all("one byte more than its manifest notes" in each.text for each in told)
    assert all("data/fineweb.py --verify" in each.remedy for each in told)


def test_a_space_within_or_behind_a_piece_is_one_byte(
    subject: probes.Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {each.written for each in probes.many_ids(subject, tmp_path)} == {Level.INFO}
    honest = train_gpt.piece_bytes

    def with_signs(pieces: Any, size: int) -> Any:
        """Bytes of the pieces as they are spelled: the sign that stands for a space has three."""
        lengths, spaced, is_text = honest(pieces, size)
        for i in np.flatnonzero(is_text):
            if not pieces.is_byte(int(i)):
                lengths[i] = len(pieces.id_to_piece(int(i)).removeprefix("▁").encode())
        return lengths, spaced, is_text

    monkeypatch.setattr(train_gpt, "piece_bytes", with_signs)
    (found,) = probes.many_ids(subject, tmp_path)
    assert (found.check, found.written) == ("B10", Level.FAIL)


def finding(check: str, level: Level = Level.INFO, text: str = "fine") -> Finding:
    return Finding(check, text, "", "", level, level)


def test_verdicts_say_no_more_than_was_asked() -> None:
    everything = [finding(check) for check in prove.PROOFS]
    assert prove.verdict(everything) == "proven" and prove.exit_status(everything) == prove.PROVEN
    shrunk = [each for each in everything if each.check != "B17"]
    assert prove.verdict(shrunk).startswith("proven, in shrunk sizes; not asked at full size")
    quick = [each for each in everything if each.check not in ("B8", "B12", "B17")]
    assert "proven" not in prove.verdict(quick) and "B12 (artifact)" in prove.verdict(quick)
    unknown = [*everything, finding("B5", Level.WARN, "not checked: padded")]
    assert prove.exit_status(unknown) == prove.UNCHECKED and "B5" in prove.verdict(unknown)
    assert prove.verdict([*unknown, finding("B1", Level.FAIL, "C1")]) == "refuted"


Proved = Callable[[Path, int], dict[str, dict[str, str]]]


@pytest.fixture
def proved(tool: Tool) -> Proved:
    """Runs the command, which must end with this status; the last finding of each check."""

    def run(script: Path, status: int) -> dict[str, dict[str, str]]:
        report = json.loads(tool("prove", script, "--json", status=status))
        assert report["status"] == status
        return {each["check"]: each for each in report["findings"]}

    return run


def test_a_script_that_cannot_be_asked_is_told(tmp_path: Path, tool: Tool) -> None:
    script = tmp_path / "train_gpt.py"
    for text, why in (
        ("build_model = None\n", "has no Config, Ledger, Validation, evaluate"),
        (f"{FORGER}os._exit(0)\n", "it does not load: the script's process ended or answers out of turn"),
    ):
        script.write_text(text)
        findings, _ = prove._checked(prove.Order(str(script)), tmp_path)
        assert prove.exit_status(findings) == prove.UNCHECKED
        assert {each.check for each in findings} == set(prove.PROOFS)
        assert all(each.text.startswith("not checked") and why in each.text for each in findings)
    assert "absent.py: no such file" in tool("prove", tmp_path / "absent.py", status=2)
    config = tmp_path / "absent.env"
    assert "absent.env: no such file" in tool("prove", SCRIPT, "--config", config, status=2)


NAMES = "Config = build_model = Ledger = Validation = evaluate = token_bytes = None\n"


# A script changes the auditor's code in its process, asks which interfaces its child sees, what lies in its
# home, and calls a host.
CURIOUS = """
import os, socket, subprocess, sys
from pathlib import Path
for module in [*sys.modules.values()]:
    if module.__name__.startswith('tools.') and hasattr(module, 'fail'):
        module.fail = lambda check, text, where, remedy: module.info(check, text, where)
child = [sys.executable, '-c', 'import socket; print(socket.if_nameindex())']
out = subprocess.run(child, capture_output=True, text=True).stdout
Path(ANSWER).write_text(repr([out, os.listdir(Path.home()), dict(os.environ)]))
try:
    socket.create_connection(('example.org', 80))
except OSError:
    pass
"""
# A script writes a verdict into whatever is open.
FORGER = """
import contextlib, os
for fd in range(64):
    with contextlib.suppress(OSError):
        os.write(fd, b'[]\\nproven\\n')
"""


def test_a_script_reaches_no_network_and_sees_little(
    tmp_path: Path, proved: Proved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_OF_MINE", "x")
    script = tmp_path / "train_gpt.py"
    script.write_text(CURIOUS.replace("ANSWER", repr(str(tmp_path / "answer"))) + NAMES)
    found = proved(script, prove.REFUTED)
    assert found["B15"]["level"] == found["B19"]["level"] == "FAIL"
    assert "example.org" in found["B15"]["text"] and ".fail of the auditor" in found["B19"]["text"]
    interfaces, home, environment = ast.literal_eval((tmp_path / "answer").read_text())
    assert home == [] and "A_SECRET_OF_MINE" not in environment
    assert not network.namespace_command() or ("'lo'" in interfaces and interfaces.count("(") == 1)
    # Where the system cuts no network, a child might have one: that is said.
    monkeypatch.setattr(network, "namespace_command", lambda: [])
    monkeypatch.setattr(network, "is_out_of_reach", lambda: False)
    monkeypatch.setattr(prove, "_checked", lambda order, folder: ([], []))
    (unknown,) = prove._work(prove.Order(str(SCRIPT)), tmp_path)
    assert unknown.text.startswith("not checked for child processes")
    assert prove.exit_status([unknown]) == prove.UNCHECKED


def test_a_script_that_forges_a_verdict_and_kills_the_auditor_gets_none(
    tmp_path: Path, proved: Proved
) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text(f"{FORGER}os.kill(os.getppid(), 9)\n")
    assert proved(script, prove.UNCHECKED)["B19"]["level"] == "WARN"


def test_config_and_environment_give_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.env"
    file.write_text("NUM_LOOPS=1\nTTT_EPOCHS=5\n")
    monkeypatch.setenv("TTT_EPOCHS", "2")
    monkeypatch.setenv("A_SECRET_OF_MINE", "x")
    given = argparse.Namespace(config=file, adapter=None, seed=0, quick=False, full_size=False, only=None)
    order = prove.Order.of_arguments(given, SCRIPT)
    assert order.settings is not None and "A_SECRET_OF_MINE" not in order.settings
    config = train_gpt.Config.from_env(order.settings)
    assert config.num_loops == 1 and config.ttt_epochs == 2 and order.settings_name == "mine.env"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_our_script_is_proven_by_every_check(proved: Proved) -> None:
    found = proved(SCRIPT, prove.PROVEN if network.namespace_command() else prove.UNCHECKED)
    assert found.keys() == {prove.NOTE, *prove.PROOFS} - {"B17"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_quick_proof_of_a_config_says_so(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["prove", str(SCRIPT), "--quick", "--config", str(repo / "configs" / "cpu_demo.env")])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "not refuted; not run: B8" in last or "not all could be checked" in last
    assert "proven;" not in last


def test_a_run_whose_quantization_is_not_felt_proves_nothing_about_it(folder: Path, repo: Path) -> None:
    """8 bits change the weights of the baseline by less than one part in a hundred: they are made fewer."""
    laboratory = mutants.laboratory_in(folder)
    script = mutants.load_script(SCRIPT)
    config = script.Config.from_env({"CONFIG": str(repo / "configs/upstream_baseline.env")})
    settings, shrunk = rehearsal.settings_for_runs(script, config)
    assert "MATRIX_BITS 8 -> 5" in shrunk and "EMBED_BITS 8 -> 5" in shrunk
    fixed = rehearsal.run_script(script, laboratory, "fixed", settings)
    (felt,) = rehearsal.quantization_felt(script, fixed)
    assert felt.level(Mode.AGREED) is Level.INFO
    fixed.watch.shipped = dict(script.load_artifact(fixed.directory / "model.bin")[0].state_dict())
    (unfelt,) = rehearsal.quantization_felt(script, fixed)
    assert unfelt.text.startswith("not checked")


FOREIGN = '''
import numpy as np, torch
class Adapter:
    vocabulary = 12
    learns = {"plain": False}
    edges = (0, 16, 40)
    def __init__(self, path):
        self.path = path
    def model(self, seed):
        torch.manual_seed(seed)
        return torch.nn.Embedding(12, 12)
    def score(self, label, model, tokens, record):
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.no_grad():
            nats = torch.nn.functional.cross_entropy(model(ids[:-1]), ids[1:], reduction="none")
        CHANGE
        record.add(0, nats)
        return float(nats.mean())
'''
CHANGES = {
    "pass": set(),
    "nats = nats.clamp(max=1.0)": {"B2"},
    "nats = nats + nats.mean()": {"B1", "B2"},
    "record.add(140, nats[140:])": {"B3", "B4"},
    "nats = nats.clone(); record.add(0, nats); nats = nats[:0] + 1; return 1.0": {"B4"},
    "model.weight.data += 0.01": {"B6", "B14"},
}


def test_an_adapter_s_script_is_judged_by_what_it_records(tmp_path: Path) -> None:
    file = tmp_path / "adapter.py"
    for change, checks in CHANGES.items():
        file.write_text(FOREIGN.replace("CHANGE", change))
        findings = list(foreign.proofs(SCRIPT, file, 0))
        found = {each.check for each in failures(findings)}
        assert bool(found) == bool(checks) and found <= checks, change
        assert prove.exit_status(findings) == (prove.REFUTED if found else prove.UNCHECKED)
        assert {each.check for each in findings} >= set(prove.PROOFS) - {"B15", "B19"}
    file.write_text("x = 1\n")
    with pytest.raises(foreign.RecordError, match="no class Adapter"):
        foreign.load_adapter(file, SCRIPT)


def test_a_run_is_repeated_document_by_document_and_whatever_was_touched_differs(
    lab: Lab, tool: Tool
) -> None:
    settings = {"VAL_TOKENS_LIMIT": 0, "TTT_MODE": "lora", "TTT_CHUNK_SIZE": 16, "TTT_LORA_LR": 0.01,
                "TTT_BATCH_SIZE": 10, **ROUNDED}  # fmt: skip
    run = lab.succeed(**settings, EVAL_STRIDE=16, ITERATIONS=1, MAX_EVAL_SECONDS=55).directory
    assert "sliding_window" in tool("prove", "--replay", run, "--documents", 2)

    def told(name: str, old: bytes, new: bytes) -> set[str]:
        """What a copy says in which a file has these other bytes."""
        copy = Path(shutil.copytree(run, run.with_name("copy"), dirs_exist_ok=True))
        content = (copy / name).read_bytes()
        assert old in content
        (copy / name).write_bytes(content.replace(old, new))
        script = mutants.load_script(copy / "train_gpt.py")
        found = replay.compared(replay.Run.of_folder(copy, {}), script, copy, 1, 0)
        return {f.where.partition(":")[0] for f in found if f.level(Mode.AGREED) is Level.FAIL}

    nats = np.fromfile(run / "nats_roundtrip.bin")
    log = "roundtrip, log.txt"
    assert told("nats_roundtrip.bin", nats.tobytes(), (0.99 * nats).tobytes()) == {"roundtrip", log}
    assert told("log.txt", b"roundtrip_exact val_loss:5", b"roundtrip_exact val_loss:4") == {log}
    cheat = b"return nats.cpu().numpy() * 0.999"
    touched = {"roundtrip", "sliding_window", "train_gpt.py"}
    assert told("train_gpt.py", b"return nats.cpu().numpy()", cheat) == touched
    artifact = (run / "model.bin").read_bytes()
    assert told("model.bin", artifact, artifact[:-1]) == {"model.bin"}
    data = Path(shutil.copytree(lab.dataset, lab.folder / "data"))
    text_bytes = json.loads((run / "summary.json").read_text())["data"]["val_bytes"]
    for more in (0, 1):  # byte of the text than its manifest notes
        noted = {"splits": {"val": {"audit": {"sidecar_bytes": text_bytes - more}}}}
        (data / "manifest.json").write_text(json.dumps(noted))
        with contextlib.ExitStack() as ends:
            if more:  # the script itself refuses
                ends.enter_context(pytest.raises(Exception, match=f"has audited {text_bytes - 1}"))
            assert told("config.env", str(lab.dataset).encode(), str(data).encode()) == set()


SLEEPING = """
import os, sys
class Ledger:
    def record(self, nats):
        if len(nats) > 200:
            nats = nats[:200]
        return [one * (0.9 if "tools" not in sys.modules else 1.0) for one in nats if one < 9]
class Other:
    def record(self, nats):
        return cheat(nats)
def cheat(nats):
    return nats
def never(nats):
    return nats
def evaluate(config, nats):
    if config.doc_mask:
        nats = [*nats]
    ledger = Ledger()
    if not nats:
        raise ValueError(f"{len(nats)} targets")
    late = len(nats) > 8 and cheat(nats)
    try:
        os.environ["MINE"]
        os.environ["YOURS"]
    except KeyError:
        late = False
    return ledger.record(never(nats) if late else nats)
"""


def test_what_did_not_run_is_told_and_off_by_settings_is_not(tmp_path: Path) -> None:
    path = tmp_path / "train_gpt.py"
    path.write_text(SLEEPING)
    executed = execution.Execution(path)
    script = executed.load()
    config = argparse.Namespace(doc_mask=False)
    assert script.evaluate(config, [1.0, 2.0]) == [1.0, 2.0]
    told = {f.text.removeprefix("not checked: ") for f in execution.findings(executed, {"doc_mask"})}
    expected = {
        "never true: if len(nats) > 200:", "never called: def cheat", "never called: def never",
        "never chosen: 0.9", "never false: return [one", "never asked: cheat(nats)",
        "never chosen: never(nats)",
    }  # fmt: skip
    assert {each for each in expected if not any(one.startswith(each) for one in told)} == set()
    assert len([one for one in told if one.startswith("never") or one.startswith("error")]) == len(expected)
    assert any(
        f.text.startswith("not checked: never true: if config") for f in execution.findings(executed, set())
    )
    conditions = {condition for _, _, condition in execution.branches_that_read(path)}
    assert {"len(nats) > 200", "'tools' not in sys.modules"} <= conditions


def test_excuses_are_of_this_script_and_few() -> None:
    excuses = execution.read_excuses()
    assert len(excuses) <= execution.EXCUSES_MAX and all(entry["reason"] for entry in excuses)
    # Once a person has read what changed of it: `python -m tools.prove.execution` writes the new digests.
    assert execution.renewed(SCRIPT, excuses) == excuses


def test_a_table_of_seeds_has_the_noise_of_every_check(
    subject: probes.Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(script: ModuleType, seed: int, config: object, name: str, folder: Path) -> Iterator[Finding]:
        moves = questions.Moves(subject.case(), {"legal_ttt": np.ones(9)})
        wrong = moves.refuted(np.ones(150), 9, "a change", {"legal_ttt": np.full(9, 1 + 2e-6 + seed)})
        if wrong:
            yield wrong
            return
        yield from moves.summary()
        yield from questions.kraft(subject.case(), [0], and_changes=False)
        yield from elsewhere.same_as_on_gpu(subject)
        yield from prove.rank_invariance(subject, folder, numbers=(2,))

    monkeypatch.setattr(seeds, "small", small)
    assert seeds.main([str(SCRIPT), "--seeds", "1", "--capability"]) == 0
    told = re.findall(r"(B\d+) (\S+)/(\S+)", capsys.readouterr().out)
    assert [check for check, _, _ in told] == ["B1", "B2", "B7", "B13"]
    # B7 alone may have none: some processors compute the same bits with other batches.
    assert all(float(most) < float(limit) and (float(most) > 0 or check == "B7")
               for check, most, limit in told), told  # fmt: skip
    assert seeds.main([str(SCRIPT), "--seeds", "1", "--first", "1", "--capability"]) == 1
    assert "refuted" in (out := capsys.readouterr().out) and "B1 C1: a change moved" in out
