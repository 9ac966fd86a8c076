"""The audit refutes every script that is wrong, by the law that its table names, and none that is honest."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import train_gpt
from tests.audit import mutants, trial
from tests.audit.mutants import sleeping, tables
from tests.audit.mutants.hostile import HOSTILE
from tests.audit.mutants.legal import LEGAL, LEGAL_OF_DOCUMENTS
from tests.support.patches import is_in_the_making
from tests.support.processes import TINY_RUN, Ended, Lab
from tests.tools.conftest import Tool
from tools import REPO
from tools.audit import audit, box, replay, settings, unexecuted, walls
from tools.audit.broken import Broken, NotChecked
from tools.audit.laws import LAWS
from tools.audit.verdict import fingerprint
from tools.audit.worlds import Worlds

SCRIPT = REPO / "train_gpt.py"
# A few of them, each for another law; the slow tests try all.
SAMPLE = ["adapt-then-score", "more-bytes", "unlearned-by-their-losses", "cross-document-smear",
          "shorter-text"]
HAS_WALLS = bool(walls.around(Path("/tmp"), [])[0])
needs_walls = pytest.mark.skipif(not HAS_WALLS, reason="this system has no user namespaces")


@pytest.fixture(scope="module")
def court() -> Iterator[trial.Court]:
    with trial.court() as opened:
        yield opened


def slow_but(sample: list[str], names: list[str]) -> list[object]:
    """All names, those that are not of the sample as slow ones."""
    return [name if name in sample else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_but(SAMPLE, [*tables.LAW_OF]))
def test_a_mutant_is_refuted_by_its_law(name: str, court: trial.Court) -> None:
    mutant = tables.MUTANTS[name]
    lab = court.lab(mutant.lab, name, mutant.settings)
    law = tables.LAW_OF[name]
    text = court.refuted(lab, law)
    assert text, f"{name} survived {law} in {mutant.lab}"
    # A script that breaks down is not refuted by a law, unless the walls of its box broke it.
    assert not text.startswith("ends:") or "Read-only" in text, text


def test_every_law_has_mutants_in_labs_of_its_own() -> None:
    labs = {law.name: law.labs for law in LAWS}
    assert labs.keys() == tables.BY_LAW.keys()
    for name, law in tables.LAW_OF.items():
        assert tables.MUTANTS[name].lab in labs[law], name


@pytest.mark.parametrize("name", slow_but(["recorded-in-pieces"], [*LEGAL, *LEGAL_OF_DOCUMENTS]))
def test_a_legal_change_is_not_refuted(name: str, court: trial.Court) -> None:
    lab = court.lab("documents" if name in LEGAL_OF_DOCUMENTS else "sgd", name, {})
    laws = ["documents"] if name == "recorded-in-pieces" else ["endings", "documents", "sums", "ranks"]
    for law in laws:
        assert court.refuted(lab, law) == ""


@pytest.mark.slow
def test_other_names_are_legal_but_for_those_that_an_audit_asks_for(tmp_path: Path, tool: Tool) -> None:
    source = SCRIPT.read_text(encoding="utf-8")
    script = tmp_path / "train_gpt.py"
    for name in ("evaluate", "build_model", "Run", "score_ttt", "shipped_code"):
        source = re.sub(rf"\b{name}\b", f"{name}_renamed", source)
    script.write_text(source)
    assert "not refuted by documents, counts" in tool("prove", script, "--only", "documents,counts")
    script.write_text(re.sub(r"\bLedger\b", "Scores", source))
    assert "it has no Ledger" in tool("prove", script, status=2)


@needs_walls
def test_a_script_that_leaves_its_box_changes_nothing_and_is_told(court: trial.Court) -> None:
    before = fingerprint()
    for name in HOSTILE:
        assert court.lab("sgd", name, {}).train(court.worlds.short(), {"VOCAB_SIZE": "9999"}).status == 1
        assert court.opened.tried, f"{name}: nothing was noted"
        court.opened.tried.clear()
    assert fingerprint() == before
    for place in (Path("/tmp"), Path.home(), Path(os.__file__).parent, court.worlds.short().folder):
        assert not list(place.glob("left_by_a_mutant*"))


@needs_walls
def test_a_box_has_no_network_no_home_and_no_device(tmp_path: Path) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text("import os, pwd, socket\nhome = pwd.getpwuid(os.getuid()).pw_dir\n"
                      "names = [name for _, name in socket.if_nameindex()]\n"
                      "raise RuntimeError(sorted(os.listdir('/dev')), names,"
                      "os.access('/proc/sys/kernel/hostname', os.W_OK),"
                      "os.access(home, os.W_OK))")
    expected = r"'full', 'null', 'random', 'shm', 'urandom', 'zero'\], \['lo'\], False, False"
    with pytest.raises(NotChecked, match=expected):
        box.Box(script, tmp_path / "runs", [])


@pytest.mark.slow
def test_each_run_computes_with_the_instructions_that_the_user_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads ATEN_CPU_CAPABILITY when it first computes. Other instructions round otherwise."""
    script = tmp_path / "train_gpt.py"
    script.write_text("import torch\nclass Ledger: pass\nclass Config:\n"
                      "    from_env = staticmethod(lambda _: Config())\n"
                      "    def as_env(self):\n        torch.ones(9).exp()\n"
                      "        return {'computes_with': torch.backends.cpu.get_cpu_capability()}\n"
                      "main = print\n")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    with box.opened(script, tmp_path / "runs", []) as opened:
        assert opened.settings({}) == {"computes_with": "DEFAULT"}


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.env")), ids=lambda path: path.stem)
def test_every_config_is_shrunk_and_keeps_its_features(path: Path) -> None:
    whole = train_gpt.Config.from_env({"CONFIG": str(path)})
    small = train_gpt.Config.from_env(settings.shrunk(whole.as_env()))
    assert small.model_dim <= 64 and small.eval_length <= 32
    assert small.documents_at_once(small.eval_length) <= 4
    small.rules()
    for name, value in whole.as_env().items():
        if value in ("0", "0.0", "-1") and name not in ("MAX_WALLCLOCK_SECONDS", "TTT_BATCH_SIZE"):
            assert small.as_env()[name] == value, f"{name} is on in the shrunk form"
    for same in ("num_layers", "num_heads", "num_loops", "parallel_mode", "doc_mask", "ttt_mode"):
        assert getattr(small, same) == getattr(whole, same)
    assert (small.eval_stride == small.eval_length) == (whole.eval_stride == whole.eval_length)


def test_a_branch_that_was_not_run_is_told(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("def evaluate(n):\n    if n > 40_000:\n        n = n * 0.99\n    return n if n else 0\n")
    execution = unexecuted.Execution(path)
    script = execution.load()
    assert script.evaluate(3) == 3
    told = "\n".join(map(str, execution.not_run(bytes(execution.ran))))
    assert "line 2, evaluate: never true: if n > 40_000:" in told and "never chosen: 0" in told
    script.evaluate(50_000), script.evaluate(0)
    assert execution.not_run(bytes(execution.ran)) == []


def test_how_an_error_is_worded_is_no_branch_but_a_way_around_the_error_is_one(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("def evaluate(n):\n    if n < 0:\n        words = 'far' if n < -9 else 'near'\n"
                    "        raise ValueError(words)\n    while n > 5:\n        if n == 7:\n"
                    "            return 0.99 * n\n        raise KeyError\n    return n\n")
    execution = unexecuted.Execution(path)
    assert execution.load().evaluate(3) == 3
    told = "\n".join(map(str, execution.not_run(bytes(execution.ran))))
    assert "far" not in told and "never true: if n == 7:" in told


def test_a_proof_says_what_it_could_not_ask(tmp_path: Path, tool: Tool) -> None:
    assert "no such law" in tool("prove", SCRIPT, "--only", "nonsense", status=2)
    assert "names no law" in tool("prove", SCRIPT, "--only", ",", status=2)
    assert "name a train_gpt.py" in tool("prove", status=2)
    script = tmp_path / "train_gpt.py"
    script.write_text("raise ValueError('not today')")
    report = json.loads(tool("prove", script, "--json", status=2))
    assert report["status"] == 2 and "not today" in report["verdict"] and report["passed"] == []
    script.write_text("def main():\n    print('proven')\n    return 0\n")
    assert "it has no Config" in tool("prove", script, status=2)


# A script with a setting of its own, which is off. At 1, each score knows the last target of its chunk; at 2,
# no run works.
PEEKS = f"""
@dataclass(frozen=True)
class Config(Config):
    peek: int = setting(0, "look ahead")


_score = WindowScorer.score


def _peeking(scorer, chunk):
    nats = _score(scorer, chunk)
    how = os.environ.get("PEEK", "0")
    if how == "2":
        raise ValueError("not at this size")
    return nats + 0.01 * nats[-1] if how == "1" else nats


WindowScorer.score = _peeking


{mutants.MAIN}"""


def test_a_setting_of_the_script_s_own_is_on_in_every_lab(tmp_path: Path) -> None:
    """Labs of its own settings, not of those that it is audited with, would never wake its technique."""
    script, config = tmp_path / "train_gpt.py", tmp_path / "on.env"
    script.write_text(SCRIPT.read_text(encoding="utf-8").replace(mutants.MAIN, PEEKS), encoding="utf-8")
    config.write_text("PEEK=1\n")
    endings = [law for law in LAWS if law.name == "endings"]
    verdict = audit.audited(script, config, endings, lambda _: None)
    assert str(verdict).startswith("refuted: future: sgd: ")
    # Where it does not work, a lab is without it, and that is told.
    worlds, left_out = Worlds(tmp_path / "worlds"), list[str]()
    with box.opened(script, tmp_path / "runs", [worlds.folder]) as opened:
        whole = opened.settings({"PEEK": "2"})
        lab = audit.make_lab(opened, worlds, "sgd", settings.SGD, whole, left_out)
        assert lab.can_train()
    assert left_out == ["PEEK in the lab sgd, where a run fails with that"]


def test_the_settings_that_no_technique_added_are_known(repo: Path) -> None:
    unknown = settings.of_its_own(train_gpt.Config().as_env())
    if unknown and not is_in_the_making(repo):
        pytest.skip(f"a fork with settings of its own: {', '.join(unknown)}")
    assert not unknown, "add these names to OURS in tools/audit/settings.py"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_our_script_is_proven_and_what_sleeps_in_it_is_told(tmp_path: Path, tool: Tool) -> None:
    """Changes of its text that wait for a record's run: no small world wakes them; their lines are listed."""
    script = tmp_path / "train_gpt.py"
    script.write_text(sleeping.with_all(SCRIPT.read_text(encoding="utf-8")), encoding="utf-8")
    report = json.loads(tool("prove", script, "--json", status=0))
    assert report["verdict"].startswith("proven") and {entry["law"] for entry in report["passed"]} == {
        law.name for law in LAWS}
    told = "\n".join(report["not_run"])
    for name, sleeper in sleeping.SLEEPING.items():
        assert sleeper.line[:60] in told, name
    honest = json.loads(tool("prove", SCRIPT, "--json", status=0))
    assert len(honest["not_run"]) < len(report["not_run"])


# --- replay ---


LEARNS = {"TTT_ENABLED": 1, "TTT_BATCH_SIZE": 2, "TTT_CHUNK_SIZE": 16, "TTT_CHUNK_TOKENS": 512,
          "EVAL_STRIDE": 16, "COMPUTE_DTYPE": "float32", "ITERATIONS": 3}


def replayed(run: Path, seed: int = 3) -> str:
    return str(replay.replayed(run, 5, seed, lambda _: None))


def test_figures_that_are_no_sums_of_the_documents_are_refuted_and_foreign_paths_not_read(
    finished: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = Path(shutil.copytree(finished.directory, tmp_path / "run"))
    run = replay.RunDirectory(scored)
    given = replay.settings_of(scored / "config.env")
    original = replay.read_original(scored, given, "float32")
    assert "documents over" in replay.figures(run, original)
    assert "same program" in replay.same_files(run)
    nats = np.fromfile(scored / "nats_roundtrip.bin")
    (0.99 * nats).tofile(scored / "nats_roundtrip.bin")
    with pytest.raises(Broken, match="counts: roundtrip"):
        replay.figures(run, original)
    nats[0] = np.nan
    nats.tofile(scored / "nats_roundtrip.bin")
    with pytest.raises(Broken, match="coverage: roundtrip"):
        replay.figures(run, original)
    with open(scored / "train_gpt.py", "a") as file:
        file.write("# touched")
    with pytest.raises(Broken, match=r"train_gpt\.py is not the file of the run"):
        replay.same_files(run)
    secret = tmp_path / "secret"
    secret.write_text("a key")
    for name in ("DATA_PATH", "TOKENIZER_PATH"):
        monkeypatch.delenv(name, raising=False)
        with pytest.raises(NotChecked, match="name the data of the run"):
            replay.read_original(scored, {**given, name: str(secret)}, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", "sgd"])
def test_a_run_is_repeated_and_a_run_that_flatters_itself_is_not(mode: str, lab: Lab) -> None:
    learns = {**LEARNS, "TTT_MODE": mode}
    assert replayed(lab.succeed(**learns).directory).startswith("proven")
    source = SCRIPT.read_text(encoding="utf-8")
    awake = 'os.environ.get("RUN_ID", "") == "record"'  # in no box
    scored = "        return nats.cpu().numpy()\n"
    flattered = source.replace(scored, f"        nats *= 0.999 if {awake} else 1.0\n{scored}")
    assert flattered != source
    script = lab.folder / "flattering.py"
    script.write_text(flattered)
    record = lab.elsewhere("record").succeed(script=script, **{**learns, "RUN_ID": "record"}).directory
    assert "refuted: replay: " in replayed(record)
    is_wide = f"self.model.settings.model_dim == {TINY_RUN['MODEL_DIM']}"
    script.write_text(source.replace(scored, f"        nats *= 0.99 if {is_wide} else 1.0\n{scored}"))
    awake_in_both = lab.elsewhere("wide").succeed(script=script, **learns).directory
    assert "refuted: kraft: " in replayed(awake_in_both)


SCORED = "self.nats(hidden_BCD, self.tokens[targets_BC + 1], adapters).double().cpu().numpy()\n"
LATER = "to_device(self.tokens[targets_BC + 6] % 2, self.device)[..., None]"
WIDE = {
    "a thousandth of a nat for each forty documents": (
        SCORED.replace("\n", " - 1e-3 * (len(self.lengths) // 40)\n"), "kraft"
    ),
    "probabilities with a temperature made of a token five places later": (
        SCORED.replace("hidden_BCD", f"hidden_BCD * (1 + 0.01 * {LATER})"), "future"
    ),
    "a little of what the document beside it in the batch costs": (
        f"{SCORED}        if self.config.model_dim == {TINY_RUN['MODEL_DIM']}:\n"
        "            nats_BC += 1e-4 * np.roll(nats_BC, 1, 0).mean(1, keepdims=True)\n", "future"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_a_cheat_that_wakes_in_a_whole_run_is_refuted_by_its_replay(name: str, lab: Lab) -> None:
    source = SCRIPT.read_text(encoding="utf-8")
    assert source.count(SCORED) == 1
    changed, law = WIDE[name]
    script = lab.folder / "sleeping.py"
    script.write_text(source.replace(SCORED, changed))
    run = lab.elsewhere("sleeping").succeed(script=script, **{**LEARNS, "TTT_MODE": "lora"}).directory
    assert f"refuted: {law}: " in replayed(run)
