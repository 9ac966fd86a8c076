"""Damaged records folders for the audit: `python -m tests.tools.damage [--cases 2000] [--seed 0]`.

Every case is a copy of a sound folder with one to three damages, audited as `check` audits it, within its
limits of time and memory. The program fails when the audit ends in an error of its own. `check` stops what
computes for too long, and names it. `--first N --cases 1` repeats one case and prints its report.
"""

import argparse
import base64
import contextlib
import json
import lzma
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.support.dialects import DIALECT_A, DIALECT_B
from tools.runs.folder import FORMAT
from tools.runs.reading import printable
from tools.submit.check import UNFINISHED, audit, limited_memory, render
from tools.submit.findings import Finding, Mode

LARGE_BYTES = 200_000_000  # of a log that is far too long
DAMAGES_MAX = 3  # of one folder
READ_BYTES_MAX = 4 * 2**20
PROGRAM = "".join(f"LAYER_{number} = {number * 37 % 101}\n" for number in range(200))


def sound_folders(place: Path) -> list[Path]:
    """Folders that the audit reads whole: two that `pack` wrote, two as others submit them."""
    from tests.support.runs import (  # it loads torch, which the auditing process must not import
        make_runs,
        pack,
    )

    packed = pack(place / "ours", make_runs(place / "runs", 42, 1337, 7), name="Plain")
    runs = make_runs(place / "more_runs", 1, 2, gain=0.02)
    wrapped = pack(place / "ours", runs, "--wrap", "--baseline", str(packed), name="Wrapped")
    return [packed, wrapped, _public(place / "a", DIALECT_A), _public(place / "b", DIALECT_B)]


def public_folder(place: Path, logs: dict[str, str], script: str, **more: Any) -> Path:
    """A folder as other people submit it; written anew where the test has made it before."""
    folder = place / "track_10min_16mb" / "2026-04-01_Public"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("A record, with brotli.\n")
    (folder / "train_gpt.py").write_text(script)
    values = {"author": "a", "github_id": "a", "name": "n", "date": "2026-04-01", **more}
    (folder / "submission.json").write_text(json.dumps(values))
    for name, text in logs.items():
        (folder / name).write_text(text)
    return folder


def _public(place: Path, log: str) -> Path:
    values = {
        "val_bpb": 1.2, "val_loss": 2.0, "val_bpb_std": 0.001,
        "bytes_total": 15_900_000, "bytes_code": 47_642, "hardware": "8xH100 80GB SXM",
        "seeds": [1, 2, 3],
        "seed_results": {"1": {"val_bpb": 1.2, "steps": 100}, "2": {"artifact_bytes": 1}},
    }
    logs = {f"train_seed{seed}.log": log.replace("1337", str(seed)) for seed in (1, 2, 3)}
    folder = public_folder(place, logs, "import helpers.kernels\n" + PROGRAM, **values)
    (folder / "helpers").mkdir()
    (folder / "helpers" / "kernels.py").write_text("import urllib.request\nNAME = 'fast.cu'\n")
    (folder / "helpers" / "fast.cu").write_text("int x;\n")
    return folder


def _data(path: Path) -> bytes:
    """The beginning of a file; another damage may have made it as large as a disk."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(READ_BYTES_MAX)


def _file_of(folder: Path, rng: random.Random, *suffixes: str) -> Path:
    """A file with one of the suffixes, or any; a new one where there is none."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    found = [path for path in files if not suffixes or path.suffix in suffixes]
    return rng.choice(found) if found else folder / f"train_more{(*suffixes, '.log')[0]}"


def flip_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 40) if data else 0):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def change_from_a_place(data: bytes, rng: random.Random) -> bytes:
    """It ends there, a part comes again and again, or noise comes in between."""
    place = rng.randint(0, len(data))
    part = data[place : place + rng.randint(1, 2_000)]
    noise = rng.randbytes(rng.randint(1, 5_000))
    rest = rng.choice([b"", part * rng.randint(2, 500) + data[place:], noise + data[place:]])
    return data[:place] + rest


def other_encoding(data: bytes, rng: random.Random) -> bytes:
    text = data.decode("utf-8", errors="replace")
    return text.encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "cp037"]), "replace")


NUMBERS = ["9" * 5_000, *"1e999 -1e999 nan inf 1e-9999 0 -1 1e5000000000 ٣ 1.2.3 0x1f".split()]


def change_numbers(data: bytes, rng: random.Random) -> bytes:
    """Numbers of a log or of any text become ones that few programs expect."""
    words = data.decode("utf-8", errors="replace").split(" ")
    for _ in range(rng.randint(1, 20)):
        place = rng.randrange(len(words))
        head, mark, _ = words[place].partition(":")
        words[place] = head + mark + rng.choice(NUMBERS)
    return " ".join(words).encode()


LINES = [  # of what a log's expressions look for: what is repeated, between a beginning and an end
    ("", " ", ""), ("", "a", ""), ("", "a:", ""), ("", "a b ", ""), ("", "\t\r", ""),
    ("  setting: ", "9", ""), ("|   0  NVIDIA", " ", ""), ("|   0  NVIDIA ", "a ", ""),
    ("final", " step:1", ""), ("final", " ", "val_loss:1 val_bpb:1"), ("final val_loss:1", " ", ""),
    ("", " val_loss:1 val_bpb:", ""), ("Code size", " ", ""), ("Code size (", ")", ""),
    ("step:1/2 ", "train_loss", ""), ("step:", "1", "/2 train_loss:1"), ("val_loader:", "tokens:", ""),
    ("stopping_early: ", "a", ""), ("collected 1 Hessians in ", "1.", "s"), ("abc:1", " abc:1", " "),
]


def repeated(parts: tuple[str, str, str], count: int) -> str:
    """A line of LINES or a program of PROGRAMS, with so many of its middle part."""
    begin, part, end = parts
    return begin + count * part + end


def long_line(data: bytes, rng: random.Random) -> bytes:
    line = repeated(rng.choice(LINES), rng.choice([1_000, 3_900, 60_000, 300_000]))
    lines = data.splitlines()
    lines[rng.randint(0, len(lines)) : 0] = [line.encode()] * rng.choice([1, 1, 5])
    return b"\n".join(lines)


def many_lines(data: bytes, rng: random.Random) -> bytes:
    """A log of up to 17 MB of short lines."""
    scores = ["step:1/2 train_loss:1 train_time:1ms", "a val_loss:1 val_bpb:1", "Code size: 1 bytes"]
    line = rng.choice(["", "a", *scores]) + "\n"
    return data + line.encode() * (rng.choice([10_000, 17_000_000]) // len(line))


def large_file(folder: Path, rng: random.Random) -> None:
    """A file that says to have far more bytes than can be read; on disk it has none of them."""
    path = _file_of(folder, rng, ".log", ".py", ".json", ".md", ".txt", ".bin")
    with path.open("ab") as file:
        file.truncate(rng.choice([LARGE_BYTES, 50 * LARGE_BYTES]))


VALUES: list[Any] = [
    None, True, -1, 0, 10**400, 1.5, float("nan"), float("inf"), "", "\ud800", "\x1b[2J", "a\nb",
    "9" * 5_000, [], {}, [1, None, "x", {}], {"a": {"b": []}}, {"42": {"val_bpb": "x"}}, {"1": None},
    [[[]]], "../../etc/passwd", [10**400],
]
KEYS = [
    "val_bpb", "val_loss", "val_bpb_std", "seeds", "seed_results", "bytes_total", "bytes_code", "date",
    "track", "format", "files", "comparison", "hardware", "gpu", "losses", "phases", "limits", "artifact",
    "config", "code", "overrides", "versions", "steps", "seed", "metric", "name", "compliance",
]


def _object(data: bytes) -> dict[str, Any]:
    """What a file holds; nothing where an earlier damage made it no JSON."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def change_json(data: bytes, rng: random.Random) -> bytes:
    """Values of submission.json or a summary become of another type, at the top or one level deeper."""
    target = _object(data)
    for _ in range(rng.randint(1, 4)):
        inner = [item for item in target.values() if isinstance(item, dict) and item]
        place = rng.choice(inner) if inner and rng.random() < 0.5 else target
        place[rng.choice([*place, *KEYS])] = rng.choice(VALUES)
    return json.dumps(target).encode()


def deep_json(data: bytes, rng: random.Random) -> bytes:
    depth = rng.choice([1_000, 100_000])
    return rng.choice([b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth])


def leaving_file_names(folder: Path, rng: random.Random) -> None:
    """submission.json lists files that are no files of the folder."""
    path = folder / "submission.json"
    if path.exists() and not path.is_file():  # a pipe would block whoever writes into it
        return
    names = ["/dev/zero", "../../../../etc/passwd", "a" * 5_000, "a\0b", "", ".", "/proc/self/mem", "helpers"]
    value = _object(_data(path))
    value["files"] = {name: rng.choice(["0" * 64, None, 3]) for name in names}
    value["format"] = rng.choice([FORMAT, "records/1"])
    path.write_text(json.dumps(value), encoding="utf-8")


def shell(program: str, times: int = 1) -> str:
    """A script that decompresses and executes `program`, or one that does so with such a script."""
    for _ in range(times):
        packed = base64.b85encode(lzma.compress(program.encode(), preset=0)).decode()
        program = f"import lzma,base64\nexec(lzma.decompress(base64.b85decode({packed!r})))"
    return program


@cache
def _expanding(count: int) -> bytes:
    """A few bytes that expand to `count` spaces."""
    return lzma.compress(b" " * count, preset=0)


PROGRAMS = [  # each hard on a parser in its own way
    ("", "a;", ""), ("", "a,", ""), ("", "[],", ""), ("", "-", "1"), ("", "(", ""), ("a", ".a", ""),
    ("", "1+", "1"), ("", "not ", "1"), ("f'", "{a}", "'"), ("", "lambda:", "1"), ("", "import a\n", ""),
    ("from ", " ", ""), ("import ", "a, ", ""), ("subprocess.run(", " ", "(\n"),
    ("", "os.system('a')\n", "("), ("", "'a.py' ", "("),
    ("exec(" * 80 + "a" + ")" * 80 + "\n", "eval(x)\n", ""),
    ("".join(" " * depth + "if a:\n" for depth in range(2_000)), " ", ""),
    ("# -*- coding: utf-7 -*-\n", "+AGE-", ""),
]


def hard_program(data: bytes, rng: random.Random) -> bytes:
    program = repeated(rng.choice(PROGRAMS), rng.choice([1_000, 20_000, 100_000, 500_000]))
    return shell(program, rng.choice([0, 1])).encode()


def wrapped_often(data: bytes, rng: random.Random) -> bytes:
    return shell(PROGRAM, rng.randint(2, 14)).encode()


def expanding_payload(data: bytes, rng: random.Random) -> bytes:
    packed = _expanding(rng.choice([2**20, 2**26, 2**28]))
    for _ in range(rng.randint(0, 2)):
        packed = lzma.compress(packed, preset=0)
    encoded = rng.choice([base64.b85encode, base64.b64encode, base64.a85encode])(packed).decode()
    return f"exec(decompress(decode({encoded!r})))".encode()


READ_FIRST = ["train.log", "train_gpt.py", "submission.json", "README.md"]


def add_links(folder: Path, rng: random.Random) -> None:
    targets = ["/etc", "/dev/zero", "/dev/stdin", "..", ".", "nowhere", "/proc/self", str(folder)]
    names = [*READ_FIRST, "more", "summary_seed1.json", "link.py"]
    for name in rng.sample(names, rng.randint(1, 4)):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            continue
        path.unlink(missing_ok=True)
        path.symlink_to(rng.choice([*targets, name]))


def add_pipes(folder: Path, rng: random.Random) -> None:
    """Pipes, which block whoever opens them, and folders in the place of files."""
    for name in rng.sample([*READ_FIRST, "requirements.txt"], 2):
        path = folder / name
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            os.mkfifo(path) if rng.random() < 0.5 else path.mkdir()


def strange_names(folder: Path, rng: random.Random) -> None:
    long = b"seed" + b"9" * 200 + b".log"
    names = [b"train\xff\xfe.log", b"train\nseed1.log", b"\x1b[31mred.py", long, b"-rf.txt"]
    for name in rng.sample(names, rng.randint(1, 4)):
        place = os.path.join(os.fsencode(folder), name)
        with open(place, "wb") as file:
            file.write(_data(_file_of(folder, rng)))


def many_files(folder: Path, rng: random.Random) -> None:
    if rng.random() < 0.5:
        for number in range(2_500):
            (folder / f"train_seed{number}.log").touch()
        return
    place = folder
    for _ in range(rng.choice([10, 100])):
        place = place / "deep"
    place.mkdir(parents=True, exist_ok=True)


def remove_file(folder: Path, rng: random.Random) -> None:
    _file_of(folder, rng).unlink(missing_ok=True)


def swap_files(folder: Path, rng: random.Random) -> None:
    one, other = _file_of(folder, rng), _file_of(folder, rng)
    first, second = _data(one), _data(other)
    one.write_bytes(second)
    other.write_bytes(first)


# What is done to the content of a file with such a suffix, or of any; how often it is drawn.
OF_A_FILE: list[tuple[Callable[[bytes, random.Random], bytes], tuple[str, ...], int]] = [
    (flip_bytes, (), 2), (change_from_a_place, (), 3), (other_encoding, (), 1),
    (change_numbers, (".log", ".json", ".md"), 2), (long_line, (".log", ".txt"), 2),
    (many_lines, (".log", ".txt"), 1), (change_json, (".json",), 3), (deep_json, (".json",), 1),
    (hard_program, (".py",), 2), (wrapped_often, (".py",), 1), (expanding_payload, (".py",), 1),
]
OF_A_FOLDER: list[Callable[[Path, random.Random], None]] = [
    remove_file, swap_files, large_file, leaving_file_names, add_links, add_pipes, strange_names, many_files,
]


def damage_file(
    change: Callable[..., bytes], suffixes: tuple[str, ...], folder: Path, rng: random.Random
) -> None:
    path = _file_of(folder, rng, *suffixes)
    path.write_bytes(change(_data(path), rng))


def damaged(base: Path, place: Path, rng: random.Random) -> tuple[Path, list[str]]:
    """A copy of `base` in `place` with one to three damages, and their names."""
    folder = place / base.parent.name / base.name
    shutil.copytree(base, folder)
    damages: list[tuple[str, Callable[[Path, random.Random], None]]] = []
    for change, suffixes, count in OF_A_FILE:
        damages += count * [(change.__name__, partial(damage_file, change, suffixes))]
    damages += [(damage.__name__, damage) for damage in OF_A_FOLDER]
    names = []
    for name, damage in rng.sample(damages, rng.randint(1, DAMAGES_MAX)):
        with contextlib.suppress(OSError):  # an earlier damage took away what this one needs
            damage(folder, rng)
            names.append(name)
    return folder, names


@dataclass
class Outcome:
    """The cases, and where the audit failed; `stopped`: it was ended by its limits."""

    cases: int = 0
    errors: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)


def run_case(bases: list[Path], seed: int, case: int, outcome: Outcome) -> list[Finding]:
    """Damage and audit one folder, and note what came of it."""
    rng = random.Random(f"{seed}/{case}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder, names = damaged(rng.choice(bases), Path(place), rng)
        outcome.cases += 1
        try:
            with limited_memory():
                findings = audit(folder)
            render(folder, findings, Mode.AGREED, quiet=False).encode("utf-8")
            json.dumps([finding.as_json(Mode.AGREED) for finding in findings])
        except Exception as error:  # this is what must not happen, whatever it is
            outcome.errors.append(f"case {case} ({', '.join(names)}): {type(error).__name__}: {error}")
            return []
    for finding in findings:
        if finding.check == UNFINISHED:
            by_limits = "was stopped" in finding.text or "MemoryError" in finding.text
            listed = outcome.stopped if by_limits else outcome.errors
            listed.append(f"case {case} ({', '.join(names)}): {finding.text}")
    return findings


def run_cases(cases: int, seed: int, first: int = 0) -> Outcome:
    """Audit `cases` damaged folders, from number `first` on; of a single one the report is printed."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as place:
        bases = sound_folders(Path(place))
        for case in tqdm(range(first, first + cases), desc="damaged folders", disable=None):
            findings = run_case(bases, seed, case, outcome)
            if cases == 1:
                print(render(Path(f"case {case}"), findings, Mode.AGREED, quiet=False))
    return outcome


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Audit damaged records folders.")
    for option, default in (("--cases", 2_000), ("--seed", 0), ("--first", 0)):
        parser.add_argument(option, type=int, default=default)
    args = parser.parse_args()
    found = run_cases(args.cases, args.seed, args.first)
    print(printable(repr(found)))
    sys.exit(bool(found.errors))
