"""The table of official validation sets, read out of the script without importing it."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from data import official, shards
from data.fineweb import VARIANTS

CLASS = "class OfficialText(NamedTuple):\n    documents: int\n    bytes: int\n    sha256: str | None\n"
ALL = {"a": {"documents": 1000, "bytes": 2, "sha256": "x"}}
TABLES = {
    'FINGERPRINT_TOKENS = 500_000\nOFFICIAL_VALIDATION = {\n    "a": T(1_000, 2, "x"),\n}': (ALL, 500_000),
    'OFFICIAL_VALIDATION = {"a": t.Text(1_000, sha256="x", bytes=2)}\nFINGERPRINT_TOKENS = 9': (ALL, 9),
    'OFFICIAL_VALIDATION = {"a": T(1, 2, None)}': ({"a": {"documents": 1, "bytes": 2, "sha256": None}}, 0),
    "x = 1": ({}, 0), "": ({}, 0), "def f(:": ({}, 0), "\0": ({}, 0),
    "OFFICIAL_VALIDATION = {}": ({}, 0), "OFFICIAL_VALIDATION = read()": ({}, 0),
    'OFFICIAL_VALIDATION = {"a": 3}': ({}, 0), 'OFFICIAL_VALIDATION = {"a": T(1, 2)}': ({}, 0),
    'OFFICIAL_VALIDATION = {"a": T(n, 2, 3)}': ({}, 0), "OFFICIAL_VALIDATION = {**other}": ({}, 0),
    'OFFICIAL_VALIDATION = {"a": T(1, 2, 3, 4)}': ({}, 0),
    'OFFICIAL_VALIDATION = {"a": T(1, 2, 3, more=4)}': ({}, 0),
}


@pytest.mark.parametrize("number", range(len(TABLES)))
def test_a_table_in_any_form(number: int, tmp_path: Path) -> None:
    text, expected = list(TABLES.items())[number]
    script = tmp_path / f"script{number}.py"
    script.write_text(CLASS + text, encoding="utf-8")
    assert official.official_table(script) == expected
    assert official.official_table(tmp_path / "none.py") == ({}, 0)


def test_the_script_has_the_sets_that_the_downloader_fetches(shared_data: Path) -> None:
    texts, length = official.official_table()
    assert texts.keys() <= VARIANTS.keys() and {"sp1024", "sp8192"} <= texts.keys()
    for name in ("sp1024", "sp8192"):
        tokens = shards.read_shard(shared_data / f"datasets/fineweb_sample_{name}/fineweb_val_000000.bin")
        facts = official.facts_of(tokens, 0, int(name.removeprefix("sp")))
        assert length <= len(tokens) and facts["sha256"] == texts[name]["sha256"]
        assert facts.keys() == texts[name].keys() and facts["pieces"] == texts[name]["pieces"]
        assert official.official_name(facts) == official.OWN  # a part of the set, which begins like it
        assert official.official_name(texts[name]) == f"official ({name})"


def test_facts_are_of_all_tokens_and_the_hash_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "official_table", lambda: ({}, 4))
    tokens = np.array([1, 5, 300, 1, 7, 8])
    sha256 = hashlib.sha256(tokens[:4].astype("<u2").tobytes()).hexdigest()
    found = official.facts_of(tokens, 9, 400)
    assert found == {"pieces": 400, "documents": 2, "bytes": 9, "targets": 5, "sha256": sha256}
