"""Wrapped scripts are unwrapped as text, never executed; programs are compared, and the files they name."""

import base64
import lzma
import zlib
from pathlib import Path

import pytest

import train_gpt
from tests.support.runs import SOURCE, wrap
from tests.tools.damage import shell
from tools.runs import source
from tools.runs.source import UNWRAPPED_BYTES_MAX, UnwrapError, read_script, same_program, unwrap


def bare_lzma2(data: bytes) -> bytes:
    return lzma.compress(data, lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9}])


def test_public_shells_unwrap() -> None:
    bare = "L.decompress(B.b85decode({!r}),L.FORMAT_RAW,None,[{{'id':33}}])"
    for expression, encode, compress in (
        ("lzma.decompress(base64.b85decode({!r}))", base64.b85encode, lzma.compress),
        ("zlib.decompress(base64.b64decode({!r}))", base64.b64encode, zlib.compress),
        (bare, base64.b85encode, bare_lzma2),
    ):
        payload = encode(compress(SOURCE.encode())).decode()
        text = f"import lzma,zlib,base64,lzma as L,base64 as B\nexec({expression.format(payload)})"
        assert unwrap(text) == SOURCE, expression


def test_the_form_that_our_runs_ship_is_read(repo: Path, tmp_path: Path) -> None:
    text = (repo / "train_gpt.py").read_bytes()
    (tmp_path / "train_gpt.py").write_bytes(train_gpt.shipped_code(text))
    script = read_script(tmp_path / "train_gpt.py")
    assert script.wrapped and same_program(script.text, text.decode("utf-8"))


def test_encodings_and_reading(tmp_path: Path) -> None:
    for cookie in ("latin-1", "utf-8", "no such codec", "base64", "undefined", "utf-16"):
        raw = f"# -*- coding: {cookie} -*-\nx = 'é'\n".encode("latin-1" if cookie == "latin-1" else "utf-8")
        (tmp_path / "a.py").write_bytes(raw)
        assert "x = 'é'" in read_script(tmp_path / "a.py").text, cookie
    marker = tmp_path / "executed"
    program = f"open({str(marker)!r}, 'w')\n" + SOURCE
    (tmp_path / "train_gpt.py").write_bytes(wrap(program))
    script = read_script(tmp_path / "train_gpt.py")
    assert script.wrapped and same_program(script.text, program) and not marker.exists()


def test_same_program_and_plain_scripts() -> None:
    assert unwrap(SOURCE) is None
    assert unwrap("DATA = " + repr("ab" * 4000) + "\n") is None
    decorated = "@jit\ndef f(a: {}): pass\n"  # a decorator may read the types
    assert not same_program(decorated.format("int"), decorated.format("str"))
    assert same_program("def f(a: list[int | None]) -> None: pass\n", "def f(a): pass\n")
    assert not same_program("def f(a: exec('1')): pass\n", "def f(a): pass\n")
    assert same_program("x = 1  # one\n", "x=1\n")
    documented = '"""A."""\ndef f():\n    """One."""\n    return "one"\nclass E(Exception):\n    """E."""\n'
    assert same_program(documented, 'def f():\n    return "one"\nclass E(Exception):\n    pass\n')
    assert not same_program(documented, 'def f():\n    return "two"\nclass E(Exception):\n    pass\n')
    assert not same_program("x = 1\n", "x = 2\n")
    assert not same_program("x = 1\n", "x = (\n")


def test_closures(tmp_path: Path) -> None:
    (tmp_path / "train_gpt.py").write_text(
        "exec(open(__file__.replace('train_gpt.py', 'inner.py')).read())\n"
    )
    (tmp_path / "inner.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("KERNEL = 'fast.cpp'\n")
    (tmp_path / "fast.cpp").write_text("int x;\n")
    (tmp_path / "unused.py").write_text("\n")
    assert _closure_of(tmp_path) == {"inner.py", "helper.py", "fast.cpp"}
    (tmp_path / "pkg" / "deep").mkdir(parents=True)
    (tmp_path / "train_gpt.py").write_text("from pkg.deep import inner\nexec(open('weights.dat').read())\n")
    for name in ("pkg/__init__.py", "pkg/deep/__init__.py", "pkg/deep/inner.py", "pkg/deep/unused.py"):
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "weights.dat").write_text("x = 1\n")
    expected = {"pkg/__init__.py", "pkg/deep/__init__.py", "pkg/deep/inner.py", "weights.dat"}
    assert _closure_of(tmp_path) == expected


@pytest.mark.parametrize("text", [
    "# see helper.py, which is not read\n", '"""It was made by helper.py."""\n', "helper = 'helper'\n",
    "x = 'a helper.py in words'\n", "x = 1  # don't read 'helper.py'\n", "print('''\nimport helper\n''')\n",
])
def test_what_only_explains_names_no_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "train_gpt.py").write_text(text)
    (tmp_path / "helper.py").write_text("x = 1\n")
    assert _closure_of(tmp_path) == set()


def _closure_of(folder: Path) -> set[str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    scripts = {path: read_script(path) for path in files if path.suffix == ".py"}
    found = source.closure(scripts[folder / "train_gpt.py"], scripts, files)
    return {path.relative_to(folder).as_posix() for path in found}


@pytest.mark.parametrize("text", [
    "if True:import helper\n", "x = 1;from helper import work\n",
    "import os, helper as h\n", "from . import helper\n",
    "import importlib\nimportlib.import_module('helper')\n",
    "__import__('helper')\n",
    "exec(open('helper.py').read())\n",
])
@pytest.mark.parametrize("parses", [True, False])
def test_every_form_of_import_is_followed(text: str, parses: bool, tmp_path: Path) -> None:
    (tmp_path / "train_gpt.py").write_text(text + ("" if parses else "x = (\n"))
    (tmp_path / "helper.py").write_text("x = 1\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    assert _closure_of(tmp_path) == {"helper.py"}


def test_what_is_wrapped_often_is_read_up_to_a_limit() -> None:
    for times in range(1, source.WRAPS_MAX + 1):
        assert unwrap(shell(SOURCE, times)) == SOURCE
    assert unwrap(shell(SOURCE, source.WRAPS_MAX + 1)) == shell(SOURCE, 1)


def test_what_expands_or_nests_without_end(tmp_path: Path) -> None:
    for program in (" " * (UNWRAPPED_BYTES_MAX + 1), "a;" * UNWRAPPED_BYTES_MAX):
        packed = base64.b85encode(lzma.compress(program.encode())).decode()
        text = f"exec(lzma.decompress(base64.b85decode({packed!r})))"
        assert len(text) < 11_000
        with pytest.raises(UnwrapError, match="expands beyond"):
            unwrap(text)
    for text in ("-" * 200_000 + "1", "(" * 200_000, "1+" * 100_000 + "1", "a" + ".a" * 100_000):
        (tmp_path / "a.py").write_text(f"exec({text})")
        assert not read_script(tmp_path / "a.py").wrapped and not source.parses(text)


HARD = ['\\"' * 200_000, "'''" * 200_001, '"' * 400_001, "# '" * 200_000, "import " * 100_000]


@pytest.mark.parametrize("text", HARD, ids=range(len(HARD)))
def test_no_script_takes_more_than_linear_time(text: str, tmp_path: Path) -> None:
    """In quadratic time these would take hours, and the test would end by its timeout."""
    (tmp_path / "train_gpt.py").write_text(text)
    (tmp_path / "helper.py").write_text("x = 1\n")
    assert _closure_of(tmp_path) == set()
