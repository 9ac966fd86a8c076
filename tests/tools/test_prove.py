"""The proofs pass what is honest and kill every scorer that is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import train_gpt
from tools.check.findings import Finding, Level, Mode
from tools.prove import probes, prove, rehearsal
from tools.prove.mutants import MUTANTS, honest, with_scorer

KILLED_BY = {
    "adapt-then-score": "B5",
    "one-token-past-the-chunk": "B2",
    "pre-quantization-ttt": "B5",
    "rescore": "B3",
    "min-over-passes": "B3",
    "target-in-key-cache": "B2",
    "gate-on-the-realised-token": "B2",
    "unnormalised-mixture": "B2",
    "random-scores": "B14",
    "dropped-tail": "B3",
    "double-tail": "B3",
    "weights-not-restored": "B6",
    "warm-up-on-validation": "B7",
    "cross-document-smear": "B9",
    "wrong-byte-table": "B10",
    "calibration-on-validation": "B8",
}
LOGGED = ["adapt-then-score", "pre-quantization-ttt", "rescore", "min-over-passes"]


@pytest.fixture(scope="module")
def subject() -> probes.Subject:
    return probes.make_subject(train_gpt)


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> rehearsal.Laboratory:
    return rehearsal.build_laboratory(tmp_path_factory.mktemp("laboratory"))


def failures(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level(Mode.AGREED) is Level.FAIL]


def test_every_mutant_has_an_expected_killer() -> None:
    assert set(KILLED_BY) == set(MUTANTS) and len(MUTANTS) >= 14


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_is_killed(name: str, subject: probes.Subject, laboratory: rehearsal.Laboratory) -> None:
    killer = prove.kill(subject, name, laboratory)
    assert killer is not None, f"{name} survived"
    assert killer.check == KILLED_BY[name], killer
    assert any(character.isdigit() for character in killer.text) or name == "weights-not-restored"


@pytest.mark.parametrize("name", LOGGED)
def test_the_black_box_alone_finds_what_the_log_of_events_finds(name: str, subject: probes.Subject) -> None:
    with MUTANTS[name](subject) as mutant:
        sums = list(probes.kraft_sums(mutant, "score_ttt", [0, 32]))
    assert [finding.check for finding in failures(sums)] == ["B2"]


def test_a_flip_does_not_see_one_token_too_many_but_sees_whole_chunks(subject: probes.Subject) -> None:
    with MUTANTS["adapt-then-score"](subject) as mutant:
        assert failures(list(probes.future_flip(mutant, "score_ttt", [30])))
    with MUTANTS["one-token-past-the-chunk"](subject) as mutant:
        assert not failures(list(probes.future_flip(mutant, "score_ttt", [32, 33])))


def test_the_mould_of_the_mutants_is_legal(subject: probes.Subject) -> None:
    with with_scorer(honest)(subject) as mould:
        findings = [
            *probes.ledger_order(mould, "score_ttt"),
            *probes.kraft_sums(mould, "score_ttt", [0, 32]),
            *probes.future_flip(mould, "score_ttt", [20, 140]),
        ]
    assert not failures(findings)


@pytest.mark.parametrize("name", probes.SCORERS)
def test_our_scorers_pass_at_the_edges(name: str, subject: probes.Subject) -> None:
    edges = [1, 16, 33, 40, 96, 149]
    findings = [
        *probes.ledger_order(subject, name),
        *probes.determinism(subject, name),
        *probes.kraft_sums(subject, name, [0, 15, 32, 39, 148]),
        *probes.future_flip(subject, name, edges),
        *(probes.document_isolation(subject, name) if name != "score_ttt" else ()),
    ]
    assert not failures(findings)
    assert {"B1", "B2", "B3", "B4", "B5", "B6", "B14"} <= {finding.check for finding in findings}


def test_our_evaluation_reads_nothing_before_its_timers(subject: probes.Subject) -> None:
    (finding,) = probes.evaluation_warmup(subject)
    assert finding.level(Mode.AGREED) is Level.INFO and finding.text.startswith("0 ")


def prove_file(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools", "prove", str(path), *options]
    root = Path(train_gpt.__file__).parent
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280, check=False)


def test_a_script_without_the_entry_point_is_told_what_was_not_checked(tmp_path: Path) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text("def build_model(config):\n    return None\n")
    done = prove_file(script, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == report["status"] == 2
    assert {finding["check"] for finding in report["findings"]} == {f"B{i}" for i in range(1, 17)}
    assert all("has no Config, Ledger, score_roundtrip" in finding["text"] for finding in report["findings"])


def test_a_script_that_does_not_load_or_does_not_exist_is_no_verdict(tmp_path: Path) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text("import a_package_that_is_not_there\n")
    done = prove_file(script)
    assert done.returncode == 2 and "a_package_that_is_not_there" in done.stdout
    absent = prove_file(tmp_path / "absent.py")
    assert absent.returncode == 2 and "no such file" in absent.stderr


def test_the_network_is_refused_and_named(tmp_path: Path) -> None:
    script = tmp_path / "train_gpt.py"
    call = (
        "import socket\ntry:\n    socket.create_connection(('example.org', 80))\nexcept OSError:\n    pass\n"
    )
    names = "Config = build_model = Ledger = score_roundtrip = score_sliding = score_ttt = None\n"
    script.write_text(call + names)
    done = prove_file(script)
    assert done.returncode == 1 and "FAIL B15" in done.stdout and "example.org" in done.stdout


@pytest.mark.slow
def test_our_script_is_proven_by_every_check() -> None:
    done = prove_file(Path(train_gpt.__file__), "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, [finding for finding in report["findings"] if finding["level"] != "INFO"]
    assert {finding["check"] for finding in report["findings"]} == {f"B{i}" for i in range(1, 17)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_false_alarm(seed: int) -> None:
    subject = probes.make_subject(train_gpt, seed)
    for name in subject.scorers:
        findings = [
            *probes.ledger_order(subject, name),
            *probes.determinism(subject, name),
            *probes.kraft_sums(subject, name),
            *probes.future_flip(subject, name),
            *(probes.document_isolation(subject, name) if name != "score_ttt" else ()),
        ]
        assert not failures(findings)
