"""Scripts in a folder: unwrapped without executing, compared, and the files that one of them names.

A script may come from anybody, so all of this is bounded: in the bytes that are read, in what a payload may
expand to, and in the length that is parsed.
"""

from __future__ import annotations

import ast
import base64
import bz2
import contextlib
import difflib
import fnmatch
import hashlib
import importlib
import io
import lzma
import re
import tokenize
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from types import ModuleType

SCRIPT_BYTES_MAX = 2**20  # of a file; a larger one is not read
UNWRAPPED_BYTES_MAX = 2**20  # more than any script; a longer payload is refused, not expanded
PARSED_CHARACTERS_MAX = 500_000  # a syntax tree takes up to a kilobyte per character
WRAPS_MAX = 4  # how often a program may be wrapped before it is left as it is
PAYLOAD_CHARACTERS_MIN = 32  # a shorter literal holds no program
BROTLI_PORTION_BYTES = 64
LZMA_MEMORY_BYTES_MAX = 128 * 2**20  # twice what the strongest preset needs
WRAPPER_CODE_BYTES_MAX = 4_000  # of a wrapper without its payload
EXECUTES = re.compile(r"(?<![.\w])(?:exec|eval|compile)\s*\(")

# What a script names: comments and long texts are passed over, short literals are the two groups. A literal
# ends with its line, and every repetition is bounded, so no text takes more than linear time. A backslash
# outside of a literal hides a quote after it.
LITERAL = re.compile(
    r"\\.|#[^\n]*|\"{3}.*?\"{3}|'{3}.*?'{3}"
    r"|\"((?:[^\"\\\n]|\\.){0,256})\"|'((?:[^'\\\n]|\\.){0,256})'",
    re.DOTALL,
)
IMPORT = re.compile(  # at the beginning of a statement, also one after a colon or a semicolon
    r"(?:^|[:;])[ \t]*(?:"
    r"from[ \t]{1,8}\.{0,8}([\w.]{0,200})[ \t]{1,8}import[ \t]{0,8}\(?[ \t]{0,8}([\w, \t]*)"
    r"|import[ \t]{1,8}([\w., \t]+))",
    re.MULTILINE,
)
IMPORT_CALL = re.compile(r"(?:__import__|import_module)\(\s{0,8}['\"]([\w.]{1,200})['\"]")
WILDCARD = re.compile(r"[*?\[]")

SHIPPED_SETTINGS = re.compile(rb"^SHIPPED_SETTINGS=(\{.{0,16384}\})$", re.MULTILINE)  # of a wrapper


class UnwrapError(ValueError):
    """A payload that expands to more than `UNWRAPPED_BYTES_MAX`."""


@dataclass
class Script:
    """A script as shipped: `raw` bytes, the readable `text` inside, and whether that text was wrapped.

    `problem` says why a shell was left packed, or the file unread; None otherwise. `size`: bytes of the file.
    """

    path: Path
    raw: bytes
    text: str
    wrapped: bool
    problem: str | None = None
    size: int | None = None

    @property
    def bytes(self) -> int:
        return len(self.raw) if self.size is None else self.size

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()

    @cached_property
    def shipped_settings(self) -> dict[str, str] | None:
        """The defaults that a run wrote into the wrapper; None where it has none, as before version 0.6."""
        found = SHIPPED_SETTINGS.search(self.raw) if self.wrapped else None
        try:
            return dict(ast.literal_eval(found[1].decode("ascii"))) if found else None
        except (SyntaxError, TypeError, ValueError):  # the latter is UnicodeDecodeError's base
            return {}


def parsed(text: str) -> ast.Module:
    """The syntax tree of `text`. Raises SyntaxError on any text without one, also a too long or deep one."""
    if len(text) > PARSED_CHARACTERS_MAX:
        raise SyntaxError(f"{len(text):,} characters; at most {PARSED_CHARACTERS_MAX:,} are parsed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the audited text would warn of is not the reader's concern
            return ast.parse(text)
    except SyntaxError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error) or "nested too deeply") from error


def read_script(path: Path) -> Script:
    """Read and, where it is a compressed shell, unwrap; an unreadable payload leaves the shell itself."""
    with path.open("rb") as file:
        raw = file.read(SCRIPT_BYTES_MAX + 1)
    if len(raw) > SCRIPT_BYTES_MAX:
        size = path.stat().st_size
        problem = f"{size:,} bytes; at most {SCRIPT_BYTES_MAX:,} are read"
        return Script(path=path, raw=b"", text="", wrapped=False, problem=problem, size=size)
    text = decoded(raw)
    try:
        inner = unwrap(text)
    except UnwrapError as error:
        return Script(path=path, raw=raw, text=text, wrapped=False, problem=str(error))
    return Script(path=path, raw=raw, text=text if inner is None else inner, wrapped=inner is not None)


def decoded(raw: bytes) -> str:
    """The text of a script: UTF-8, or latin-1 where its first lines declare that; any other is replaced."""
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
    except SyntaxError:
        encoding = "utf-8"
    return raw.decode("latin-1" if encoding == "iso-8859-1" else "utf-8-sig", errors="replace")


@lru_cache(maxsize=8)  # a command reads one script several times
def unwrap(text: str) -> str | None:
    """The program inside a compress-and-encode shell, or None for a plain script. Nothing is executed.

    A shell is a short program that executes one long literal: base 85, base 64, Ascii 85 or plain bytes (as
    latin-1 text) of lzma (any container, or a bare LZMA2 stream), zlib, gzip, bzip2 or brotli. Raises
    UnwrapError on too large a payload.
    """
    program = None
    for _ in range(WRAPS_MAX):
        payload = _payload(text)
        inner = _opened(payload) if payload else None
        if inner is None:
            break
        program = text = inner
    return program


def _payload(text: str) -> bytes:
    """The longest literal of a program that executes one and has little else; empty for any other program."""
    if not EXECUTES.search(text):
        return b""
    try:
        tree = parsed(text)
    except SyntaxError:
        return b""
    longest = b""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str):
            value = value.encode("latin-1", "replace")
        if isinstance(value, bytes):
            longest = max(longest, value, key=len)
    is_shell = len(text) - len(longest) <= WRAPPER_CODE_BYTES_MAX + len(longest) // 10
    return longest if is_shell and len(longest) >= PAYLOAD_CHARACTERS_MIN else b""


def _opened(payload: bytes) -> str | None:
    """The text that a payload expands to, in whatever order of encoding and compression fits."""
    for decode in (bytes, base64.b85decode, _strict_base64, base64.a85decode):
        for decompress in _decompressors():
            try:
                return decompress(decode(payload)).decode("utf-8")
            except UnwrapError:
                raise
            except Exception:  # every decompressor has its own error type; the next one may fit
                continue
    return None


def parses(text: str) -> bool:
    """Whether this Python can read a text as a program."""
    try:
        parsed(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def same_program(first: str, second: str) -> bool:
    """Whether two texts are one program: equal but for layout, comments, docstrings and types of functions.

    That is what a wrapped script goes without (`shipped_code` of train_gpt.py).
    """
    if first == second:
        return True
    try:
        return _program(first) == _program(second)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


@lru_cache(maxsize=4)  # the wrapped form and the source of a run are compared more than once
def _program(source: str) -> str:
    """The syntax tree as text, without docstrings and the types of functions."""
    tree = parsed(source)
    for node in ast.walk(tree):
        remove_docstring(node)
        remove_types(node)
    return ast.dump(tree)


def remove_docstring(node: ast.AST) -> None:
    """What else a body holds stays; an empty one gets a `pass`."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
        node.body = node.body or [ast.Pass()]


# Nodes of a type that does nothing when Python evaluates it.
PLAIN_TYPES = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Tuple, ast.List, ast.BinOp, ast.BitOr,
    ast.expr_context,
)


# Decorators that read no types, as train_gpt.py has them.
READ_NO_TYPES = {"staticmethod", "contextlib.contextmanager", "torch.no_grad()", "property", "classmethod"}


def remove_types(node: ast.AST) -> None:
    """Those of a function's arguments and result, if no decorator reads them. One that could act stays."""
    if not isinstance(node, ast.FunctionDef):
        return
    if not READ_NO_TYPES.issuperset(map(ast.unparse, node.decorator_list)):
        return
    if _is_plain_type(node.returns):
        node.returns = None
    for argument in node.args.args:
        if _is_plain_type(argument.annotation):
            argument.annotation = None


def _is_plain_type(annotation: ast.expr | None) -> bool:
    """Whether evaluating it can only look names up."""
    return annotation is not None and all(isinstance(node, PLAIN_TYPES) for node in ast.walk(annotation))


def _strict_base64(payload: bytes) -> bytes:
    return base64.b64decode(payload, validate=True)


def _decompressors() -> list[Callable[[bytes], bytes]]:
    found: list[Callable[[bytes], bytes]] = [_lzma_container, _lzma_bare, _zlib_or_gzip, _bzip2]
    with contextlib.suppress(ImportError):  # such a shell is then reported as unreadable, never guessed
        brotli = importlib.import_module("brotli")
        found.append(lambda packed: _brotli(brotli, packed))
    return found


def _bounded(data: bytes, finished: bool) -> bytes:
    """`data` where it is all that the payload holds.

    Raises UnwrapError where that is too much, and ValueError where the payload ends early: no program could
    read it either.
    """
    if len(data) >= UNWRAPPED_BYTES_MAX:
        raise UnwrapError(
            f"the payload expands beyond {UNWRAPPED_BYTES_MAX:,} bytes: no training script does"
        )
    if not finished:
        raise ValueError("the payload ends early")
    return data


def _lzma_container(packed: bytes) -> bytes:
    decompressor = lzma.LZMADecompressor(memlimit=LZMA_MEMORY_BYTES_MAX)
    return _bounded(decompressor.decompress(packed, UNWRAPPED_BYTES_MAX), decompressor.eof)


def _lzma_bare(packed: bytes) -> bytes:
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2}])
    return _bounded(decompressor.decompress(packed, UNWRAPPED_BYTES_MAX), decompressor.eof)


def _bzip2(packed: bytes) -> bytes:
    decompressor = bz2.BZ2Decompressor()
    return _bounded(decompressor.decompress(packed, UNWRAPPED_BYTES_MAX), decompressor.eof)


def _brotli(brotli: ModuleType, packed: bytes) -> bytes:
    """Brotli in small portions of input: its decompressor knows no limit of its own."""
    decompressor = brotli.Decompressor()
    parts: list[bytes] = []
    size = 0
    for begin in range(0, len(packed), BROTLI_PORTION_BYTES):
        parts.append(decompressor.process(packed[begin : begin + BROTLI_PORTION_BYTES]))
        size += len(parts[-1])
        if size > UNWRAPPED_BYTES_MAX:
            break
    return _bounded(b"".join(parts), decompressor.is_finished())


def _zlib_or_gzip(packed: bytes) -> bytes:
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)
    return _bounded(decompressor.decompress(packed, UNWRAPPED_BYTES_MAX), decompressor.eof)


def closure(script: Script, scripts: Mapping[Path, Script], files: Iterable[Path]) -> list[Path]:
    """Files among `files` that `script` imports or names, also by a pattern, through `scripts`.

    Whether a file that is named is read as code, as weights or not at all cannot be seen from its text.
    """
    by_ending: dict[str, Path] = {}  # "c.py" and "b/c.py" for a/b/c.py; the least deep file where several fit
    for path in sorted(files, key=lambda path: -len(path.parts)):
        for count in range(1, min(len(path.parts), 5)):
            by_ending["/".join(path.parts[-count:])] = path
    seen: dict[Path, None] = {script.path: None}
    pending = [script]
    while pending:
        for name in sorted(_file_names(pending.pop().text)):
            fitting = [by_ending[name]] if name in by_ending else []
            if WILDCARD.search(name):
                fitting = [path for end, path in by_ending.items() if fnmatch.fnmatchcase(end, name)]
            for found in fitting:
                if found in seen:
                    continue
                seen[found] = None
                if found in scripts:
                    pending.append(scripts[found])
    return [path for path in seen if path != script.path]


def _file_names(text: str) -> set[str]:
    """Endings of paths of files that a script may run or read: modules it imports, files it names."""
    names: set[str] = set()
    for match in LITERAL.finditer(text):
        value = match[1] or match[2] or ""
        path = PurePosixPath(value)
        if path.suffix:
            names |= {path.name, value}
    code = LITERAL.sub("''", text)
    modules = [match[1] for match in IMPORT_CALL.finditer(text)]
    for match in IMPORT.finditer(code):
        if match[3] is not None:
            modules += [part.split()[0] for part in match[3].split(",") if part.split()]
            continue
        modules += [
            match[1],
            *(f"{match[1]}.{part.split()[0]}" for part in match[2].split(",") if part.split()),
        ]
    for module in modules:
        parts = [part for part in module.split(".") if part]
        for count in range(1, len(parts) + 1):
            place = "/".join(parts[:count])
            names |= {f"{place}.py", f"{place}/__init__.py"}
    return names


def unified(base: Script, new: Script, base_name: str, new_name: str) -> str:
    """Unified diff of the readable sources; empty when they are equal."""
    lines = difflib.unified_diff(
        base.text.splitlines(keepends=True),
        new.text.splitlines(keepends=True),
        f"{base_name}/{base.path.name}",
        f"{new_name}/{new.path.name}",
    )
    return "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )


def changed_lines(diff: str) -> tuple[int, int]:
    """Lines added and removed by a unified diff."""
    body = [line for line in diff.splitlines() if not line.startswith(("+++", "---"))]
    return sum(line.startswith("+") for line in body), sum(line.startswith("-") for line in body)
