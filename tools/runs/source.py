"""Scripts in a folder: unwrap without executing, and the facts that the syntax tree gives."""

from __future__ import annotations

import ast
import base64
import binascii
import contextlib
import hashlib
import importlib
import io
import lzma
import re
import tokenize
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

UNWRAPPED_BYTES_MAX = 64 * 2**20  # more than any script; a longer payload is refused, not expanded
PAYLOAD_CHARACTERS_MIN = 32  # a shorter literal holds no program
WRAPPER_CODE_BYTES_MAX = 4_000  # what is left of a wrapper without its payload
NETWORK_MODULES = {
    "urllib",
    "requests",
    "http",
    "socket",
    "huggingface_hub",
    "httpx",
    "aiohttp",
    "boto3",
    "ftplib",
}

Removal = Callable[[ast.AST], None]  # takes something out of a node of a syntax tree


class UnwrapError(ValueError):
    """A payload that decodes to more than `UNWRAPPED_BYTES_MAX`."""


@dataclass(frozen=True)
class Call:
    """A call of interest and its line in the unwrapped source."""

    name: str
    detail: str
    line: int


@dataclass
class Script:
    """A script as shipped: `raw` bytes, the readable `text` inside, and whether that text was wrapped.

    `problem` says why a shell was left packed; None otherwise.
    """

    path: Path
    raw: bytes
    text: str
    wrapped: bool
    problem: str | None = None

    @property
    def bytes(self) -> int:
        return len(self.raw)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()

    @cached_property
    def tree(self) -> ast.Module | SyntaxError:
        """The syntax tree, or the error that this Python raises."""
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError) as error:
            return error if isinstance(error, SyntaxError) else SyntaxError(str(error))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree)) if isinstance(self.tree, ast.Module) else []

    def where(self, line: int) -> str:
        return f"{self.path.name}{' (unwrapped)' if self.wrapped else ''}:{line}"


def read_script(path: Path) -> Script:
    """Read and, where it is a compressed shell, unwrap; an unreadable payload leaves the shell itself."""
    raw = path.read_bytes()
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
    return raw.decode("latin-1" if encoding == "iso-8859-1" else "utf-8", errors="replace")


def unwrap(text: str) -> str | None:
    """The program inside a compress-and-encode shell, or None for a plain script. Nothing is executed.

    A shell is a short program that decodes one long literal: base 85, base 64, Ascii 85 or plain bytes (as
    latin-1 text) of lzma (any container, or a bare LZMA2 stream), zlib, gzip or brotli. Raises UnwrapError on
    too large a payload.
    """
    if "exec" not in text:
        return None
    payload = _longest_literal(text)
    if payload is None or len(text) - len(payload) > WRAPPER_CODE_BYTES_MAX + len(payload) // 10:
        return None
    for decode in (base64.b85decode, _strict_base64, base64.a85decode, bytes):
        try:
            packed = decode(payload)
        except (ValueError, binascii.Error):
            continue
        inner = _decompress(packed)
        if inner is not None:
            return inner
    return None


def same_program(first: str, second: str, also_ignored: Sequence[Removal] = ()) -> bool:
    """Whether two texts are one program: equal but for layout, comments and docstrings.

    That is what a wrapped script goes without (`shipped_code` of train_gpt.py). also_ignored: what older ones
    went without besides, see `IGNORED_IN`.
    """
    if first == second:
        return True
    try:
        return _program(first, also_ignored) == _program(second, also_ignored)
    except (SyntaxError, ValueError):
        return False


def _program(source: str, also_ignored: Sequence[Removal]) -> str:
    """The syntax tree as text, without docstrings and what else is ignored."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        remove_docstring(node)
        for remove in also_ignored:
            remove(node)
    return ast.dump(tree)


def remove_docstring(node: ast.AST) -> None:
    """What else a body holds stays; an empty one gets a `pass`."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if ast.get_docstring(node) is not None:
            del node.body[0]
        node.body = node.body or [ast.Pass()]


def remove_annotations(node: ast.AST) -> None:
    """Those of a function's arguments and result; a decorator may read them, so not where there is one."""
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:
        node.returns = None
        for part in ast.walk(node.args):
            if isinstance(part, ast.arg):
                part.annotation = None


def remove_meaning_of_setting(node: ast.AST) -> None:
    """The text that is the second argument of `knob(default, meaning, …)`, which only --help shows."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "knob" and len(node.args) > 1:
        meaning = node.args[1]
        if isinstance(meaning, ast.Constant) and isinstance(meaning.value, str):
            node.args[1] = ast.Constant("")


# Records whose wrapped scripts went without more than docstrings and comments, by the names of their folders.
IGNORED_IN: dict[str, tuple[Removal, ...]] = {
    "2026-11-22_DefaultStack": (remove_annotations, remove_meaning_of_setting),
    "2026-11-22_PR1493": (remove_annotations, remove_meaning_of_setting),
    "2026-11-22_PR549": (remove_annotations, remove_meaning_of_setting),
    "2026-11-22_UpstreamBaseline": (remove_annotations, remove_meaning_of_setting),
}


def _longest_literal(text: str) -> bytes | None:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    literals = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    encoded = []
    for value in literals:
        if isinstance(value, str):
            encoded.append(value.encode("latin-1", "replace"))
        elif isinstance(value, bytes):
            encoded.append(value)
    longest = max(encoded, key=len, default=b"")
    return longest if len(longest) >= PAYLOAD_CHARACTERS_MIN else None


def _strict_base64(payload: bytes) -> bytes:
    return base64.b64decode(payload, validate=True)


def _decompress(packed: bytes) -> str | None:
    decompressors: list[Callable[[bytes], bytes]] = [_lzma_container, _lzma_bare, _zlib_or_gzip]
    with contextlib.suppress(ImportError):  # such a shell is then reported as unreadable, never guessed
        decompressors.append(importlib.import_module("brotli").decompress)
    for decompress in decompressors:
        try:
            text = decompress(packed).decode("utf-8")
        except UnwrapError:
            raise
        except Exception:  # every decompressor has its own error type; the next one may fit
            continue
        return text
    return None


def _bounded(data: bytes, finished: bool) -> bytes:
    if not finished and len(data) >= UNWRAPPED_BYTES_MAX:
        raise UnwrapError(
            f"the payload expands beyond {UNWRAPPED_BYTES_MAX:,} bytes: no training script does"
        )
    return data


def _lzma_container(packed: bytes) -> bytes:
    decompressor = lzma.LZMADecompressor()
    return _bounded(decompressor.decompress(packed, UNWRAPPED_BYTES_MAX), decompressor.eof)


def _lzma_bare(packed: bytes) -> bytes:
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2}])
    return _bounded(decompressor.decompress(packed, UNWRAPPED_BYTES_MAX), decompressor.eof)


def _zlib_or_gzip(packed: bytes) -> bytes:
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)
    return _bounded(decompressor.decompress(packed, UNWRAPPED_BYTES_MAX), decompressor.eof)


def imports(script: Script) -> list[Call]:
    """Absolute imports anywhere in the script, by top-level module; `detail` is 'guarded' inside a `try`."""
    guarded = {
        id(inner)
        for node in script.nodes
        if isinstance(node, ast.Try) and node.handlers
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = []
    for node in script.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
        else:
            continue
        detail = "guarded" if id(node) in guarded else ""
        found += [Call(name.split(".")[0], detail, node.lineno) for name in names]
    return found


def subprocess_calls(script: Script) -> list[Call]:
    """Programs started by `subprocess.*` or `os.system`; `name` is '?' where the program is no literal."""
    starters = {"run", "Popen", "check_call", "check_output", "call", "getoutput", "system"}
    found = []
    for node in script.nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        if owner not in ("subprocess", "os", "sp") or node.func.attr not in starters:
            continue
        words = _literal_words(node.args[0])
        found.append(Call(words[0] if words else "?", " ".join(words), node.lineno))
    return found


def _literal_words(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.split()
    if isinstance(node, ast.List | ast.Tuple):
        return [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
    return []


def closure(script: Script, scripts: Mapping[Path, Script], files: Iterable[Path]) -> list[Path]:
    """Files among `files` that `script` imports, executes or loads as code, through `scripts`; not itself."""
    by_name = {path.name: path for path in files}
    seen: dict[Path, None] = {script.path: None}
    pending = [script]
    while pending:
        for name in sorted(_code_names(pending.pop())):
            path = by_name.get(name)
            if path is None or path in seen:
                continue
            seen[path] = None
            if path in scripts:
                pending.append(scripts[path])
    return [path for path in seen if path != script.path]


def _code_names(script: Script) -> set[str]:
    if isinstance(script.tree, SyntaxError):  # written for a newer Python; its import lines can be read
        return {
            f"{name}.py" for name in re.findall(r"^\s*(?:import|from)\s+(\w+)", script.text, re.MULTILINE)
        }
    names = {f"{call.name}.py" for call in imports(script)}
    for node in script.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 256:
            name = Path(node.value).name
            if Path(name).suffix in (".py", ".c", ".cpp", ".cu", ".so", ".npy"):
                names.add(name)
    return names


def validation_training(script: Script) -> list[Call]:
    """Functions that take validation tokens and step an optimizer: candidates for `prove`, no verdict."""
    found = []
    for node in script.nodes:
        if not isinstance(node, ast.FunctionDef):
            continue
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        methods = {
            n.func.attr
            for n in ast.walk(node)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
        }
        if (
            any(name.startswith("val_") for name in names)
            and {"backward", "step"} <= methods
            and node.name != "main"
        ):
            found.append(Call(node.name, "backward and step beside validation tokens", node.lineno))
    return found


def argument_defaults(script: Script, option: str) -> list[Call]:
    """Literal defaults of `add_argument(option, …)`; `detail` is the default's text."""
    found = []
    for node in script.nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr != "add_argument" or option not in [
            w for a in node.args for w in _literal_words(a)
        ]:
            continue
        for keyword in node.keywords:
            if keyword.arg == "default" and isinstance(keyword.value, ast.Constant):
                found.append(Call(option, str(keyword.value.value), node.lineno))
    return found
