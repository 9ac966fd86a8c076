"""Scripts in a folder: unwrap without executing, the facts that the syntax tree gives, and diffs.

A script may come from anybody, so all of this is bounded: in the bytes that are read, in what a payload may
expand to, in how often one may be wrapped, and in the length that is parsed. What cannot be parsed is still
searched for imports and programs by their spelling.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from types import ModuleType

SCRIPT_BYTES_MAX = 2**20  # of a file; a larger one is not read
UNWRAPPED_BYTES_MAX = 2**20  # more than any script; a longer payload is refused, not expanded
PARSED_CHARACTERS_MAX = 500_000  # a syntax tree takes up to a kilobyte per character
WRAPS_MAX = 8  # how often a program may be wrapped before it is left as it is
LAYERS_MAX = 4  # of encodings and compressions in one wrapper
PAYLOAD_CHARACTERS_MIN = 32  # a shorter literal holds no program
BROTLI_PORTION_BYTES = 64
LZMA_MEMORY_BYTES_MAX = 128 * 2**20  # twice what the strongest preset needs
WRAPPER_CODE_BYTES_MAX = 4_000  # of a wrapper without its payload
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
    "transformers",
    "datasets",
    "kagglehub",
    "modelscope",
    "gdown",
}
HUBS = {"hub", "model_zoo"}  # of torch: what they load comes from the network
WEIGHT_SUFFIXES = (".npy", ".npz", ".pt", ".pth", ".ptz", ".bin", ".ckpt", ".safetensors", ".pkl", ".gguf")

# FineWeb files, without what follows a point, and what upstream's scripts call their patterns.
DATA_FILE = re.compile(r"fineweb_[\w*?!\[\]-]{0,64}|\b(?:train|val)_files\b")
OTHER_THAN_TRAINING = re.compile(r"val|eval|test|ttt", re.IGNORECASE)  # in a name that also says `train`
CODE_SUFFIXES = (".py", ".pyc", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".so", ".pt2")
PATH_CHARACTERS_MAX = 256
WILDCARD = re.compile(r"[*?\[]")
EXECUTES = re.compile(r"(?<![.\w])(?:exec|eval|compile|execfile)\s*\(|\b(?:marshal|builtins|__builtins__)\b")
LOADERS = {  # calls that run the file which their arguments name
    "exec",
    "run_path",
    "spec_from_file_location",
    "SourceFileLoader",
    "CDLL",
    "LoadLibrary",
    "load_library",
    "load_dynamic",
    "execfile",
}


SHIPPED_SETTINGS = re.compile(rb"^SHIPPED_SETTINGS=(\{.{0,16384}\})$", re.MULTILINE)  # of a wrapper


class UnwrapError(ValueError):
    """A payload that expands to more than `UNWRAPPED_BYTES_MAX`, or a program wrapped too often."""


@dataclass(frozen=True)
class Call:
    """A call of interest and its line in the unwrapped source."""

    name: str
    detail: str
    line: int


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

    @cached_property
    def tree(self) -> ast.Module | SyntaxError:
        """The syntax tree, or the error that this Python raises."""
        try:
            return parsed(self.text)
        except SyntaxError as error:
            return error

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree)) if isinstance(self.tree, ast.Module) else []

    @cached_property
    def imported(self) -> list[Import]:
        return import_statements(self)

    def where(self, line: int) -> str:
        return f"{self.path.name}{' (unwrapped)' if self.wrapped else ''}:{line}"


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
    """The program inside compress-and-encode shells, however many, or None for a plain script.

    A shell is a short program that executes one long literal: base 85, base 64, Ascii 85, hexadecimal or
    plain bytes (as latin-1 text) of lzma (any container, or a bare LZMA2 stream), zlib, gzip, bzip2 or
    brotli, also one inside the other. Nothing is executed. Raises UnwrapError on too large a payload and on
    too many shells.
    """
    program = None
    for _ in range(WRAPS_MAX):
        inner = _unwrap_once(text)
        if inner is None:
            return program
        program = text = inner
    if _unwrap_once(text) is not None:
        raise UnwrapError(f"wrapped more than {WRAPS_MAX} times: no training script is")
    return program


def _unwrap_once(text: str) -> str | None:
    if not EXECUTES.search(text):
        return None
    payload = _longest_literal(text)
    if payload is None or len(text) - len(payload) > WRAPPER_CODE_BYTES_MAX + len(payload) // 10:
        return None
    return _open_layers(payload, LAYERS_MAX, compressed=False)


def _open_layers(data: bytes, layers: int, compressed: bool) -> str | None:
    """The program under at most `layers` encodings and compressions; `compressed`: one was undone already.

    Text counts as the program where a compression hid it, and else where it can be parsed.
    """
    if layers == 0:
        return None
    for decompress in _decompressors():
        try:
            inner = decompress(data)
        except UnwrapError:
            raise
        except Exception:  # every decompressor has its own error type; the next one may fit
            continue
        if inner:
            found = _open_layers(inner, layers - 1, compressed=True)
            return found if found is not None else _as_text(inner)
    for decode in (base64.b85decode, _strict_base64, base64.a85decode, _hexadecimal):
        try:
            inner = decode(data)
        except ValueError:
            continue
        found = _open_layers(inner, layers - 1, compressed=False)
        if found is not None:
            return found
    text = _as_text(data)
    return text if text is not None and (compressed or _is_program(text)) else None


def _as_text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _is_program(text: str) -> bool:
    """Whether text that was merely encoded is a program: not all its statements are names and literals."""
    try:
        body = parsed(text).body
    except SyntaxError:
        return False
    return any(not (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call)) for node in body)


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
        if ast.get_docstring(node) is not None:
            del node.body[0]
        node.body = node.body or [ast.Pass()]


# Nodes of a type that does nothing when Python evaluates it.
PLAIN_TYPES = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Tuple, ast.List, ast.BinOp, ast.BitOr,
    ast.expr_context,
)  # fmt: skip


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


def _longest_literal(text: str) -> bytes | None:
    """The longest literal, or sum or list of literals, as bytes; None where there is none of any length."""
    try:
        tree = parsed(text)
    except SyntaxError:
        return None
    longest = b""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            found = _constant_bytes([node])
        elif isinstance(node, ast.List | ast.Tuple):
            found = _constant_bytes(node.elts)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            found = _constant_bytes(_summands(node))
        else:
            continue
        longest = max(longest, found, key=len)
    return longest if len(longest) >= PAYLOAD_CHARACTERS_MIN else None


def _summands(node: ast.BinOp) -> list[ast.expr]:
    """The terms of a + b + c + …, in order, and of a very long sum its end.

    Every sum inside a longer one is asked for too, so this is bounded.
    """
    terms: list[ast.expr] = []
    left: ast.expr = node
    while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Add) and len(terms) < 64:
        terms.append(left.right)
        left = left.left
    return [left, *reversed(terms)]


def _constant_bytes(nodes: Sequence[ast.expr]) -> bytes:
    """The texts or bytes of literals, joined; nothing where one is no such literal."""
    parts = []
    for node in nodes:
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str):
            parts.append(value.encode("latin-1", "replace"))
        elif isinstance(value, bytes):
            parts.append(value)
        else:
            return b""
    return b"".join(parts)


def _strict_base64(payload: bytes) -> bytes:
    return base64.b64decode(payload, validate=True)


def _hexadecimal(payload: bytes) -> bytes:
    return bytes.fromhex(payload.decode("ascii"))


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


# For texts that do not parse. Every repetition that another follows is bounded: none takes quadratic time.
IMPORT_STATEMENT = re.compile(  # at the beginning of a statement, also one after a colon or a semicolon
    r"(?:^|[:;])[ \t]*(?:"
    r"from[ \t]{1,8}(\.{0,8}[\w.]{0,200})[ \t]{1,8}import[ \t]{0,8}\(?[ \t]{0,8}([\w, \t]*)"
    r"|import[ \t]{1,8}([\w., \t]+))",
    re.MULTILINE,
)
IMPORT_CALL = re.compile(r"(?:__import__|import_module)\(\s{0,8}['\"]([\w.]{1,200})['\"]")
PROGRAM_CALL = re.compile(
    r"\b(?:subprocess|os|sp)\.(?:run|Popen|check_call|check_output|call|getoutput|system)"
    r"\(\s{0,8}\[?\s{0,8}['\"]([^'\"\n]{1,200})"
)
TRAINING_FILES = re.compile(r"\b(\w{0,40}train\w{0,40})[ \t]{0,8}=(?!=)([^;=\n]{0,200})")
STRING_LITERAL = re.compile(r"'([^'\\\n]{1,255})'|\"([^\"\\\n]{1,255})\"")


def _with_lines(pattern: re.Pattern[str], text: str) -> Iterator[tuple[re.Match[str], int]]:
    """The matches of `pattern` in `text` with the lines they begin in."""
    line = 1
    counted = 0  # characters of the text whose line ends are in `line`
    for match in pattern.finditer(text):
        line += text.count("\n", counted, match.start())
        counted = match.start()
        yield match, line


@dataclass(frozen=True)
class Import:
    """One imported module by its dotted name; `names`: what a `from` takes out of it, perhaps modules too."""

    module: str
    names: tuple[str, ...]
    line: int
    guarded: bool
    relative: bool


def import_statements(script: Script) -> list[Import]:
    """Every import in the script, also those by call and, where it does not parse, those its text spells."""
    if isinstance(script.tree, SyntaxError):
        return _spelled_imports(script.text)
    guarded = _with_another_way(script)
    found = []
    for node in script.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append(Import(alias.name, (), node.lineno, id(node) in guarded, False))
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            relative = node.level > 0
            found.append(Import(node.module or "", names, node.lineno, id(node) in guarded, relative))
        elif isinstance(node, ast.Call) and _called(node) in ("__import__", "import_module") and node.args:
            name = _joined(node.args[0])
            if name:
                found.append(Import(name, (), node.lineno, id(node) in guarded, False))
    return found


def _with_another_way(script: Script) -> set[int]:
    """Ids of the nodes without which the script goes on: in a `try`, or one of a function's alternatives."""
    found = set()
    # One pass, with what is known of each: (node, whether guarded, whether in a function).
    stack: list[tuple[ast.AST, bool, bool]] = []
    if isinstance(script.tree, ast.Module):
        stack.append((script.tree, False, False))
    while stack:
        node, guarded, inside = stack.pop()
        if guarded:
            found.add(id(node))
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        alternatives: list[ast.stmt] = []
        if isinstance(node, ast.Try) and node.handlers:
            alternatives = node.body
        elif isinstance(node, ast.If) and node.orelse and inside:
            alternatives = [*node.body, *node.orelse]
        chosen = {id(statement) for statement in alternatives}
        for child in ast.iter_child_nodes(node):
            stack.append((child, guarded or id(child) in chosen, inside))
    return found


def _spelled_imports(text: str) -> list[Import]:
    found = []
    for match, line in _with_lines(IMPORT_STATEMENT, text):
        before = text[max(0, match.start() - 40) : match.start() + 1]
        guarded = before.rstrip().endswith("try:")
        if match[3] is None:
            names = tuple(part.split()[0] for part in match[2].split(",") if part.split())
            module = match[1].lstrip(".")
            found.append(Import(module, names, line, guarded, match[1].startswith(".")))
            continue
        for part in match[3].split(","):
            if part.split():
                found.append(Import(part.split()[0], (), line, guarded, False))
    for match, line in _with_lines(IMPORT_CALL, text):
        found.append(Import(match[1], (), line, False, False))
    return found


def imports(script: Script) -> list[Call]:
    """Absolute imports anywhere in the script, by top-level module; `detail` is 'guarded' where the script
    goes on without: inside a `try`, or in one of a function's alternatives."""
    found = []
    for statement in script.imported:
        if not statement.relative:
            detail = "guarded" if statement.guarded else ""
            found.append(Call(statement.module.split(".")[0], detail, statement.line))
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
    if isinstance(script.tree, SyntaxError):
        for match, line in _with_lines(PROGRAM_CALL, script.text):
            found.append(Call(match[1].split()[0] if match[1].split() else "?", match[1], line))
    return found


def _literal_words(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.split()
    if isinstance(node, ast.List | ast.Tuple):
        return [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
    return []


def _called(node: ast.Call) -> str:
    """The last part of the name that is called."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def closure(script: Script, scripts: Mapping[Path, Script], files: Iterable[Path]) -> list[Path]:
    """Files among `files` that `script` imports, executes or names, also by a pattern, through `scripts`.

    Whether a file that is named is read as code, as weights or not at all, its text does not tell.
    """
    by_ending: dict[str, Path] = {}  # "c.py" and "b/c.py" for a/b/c.py; the least deep file where several fit
    for path in sorted(files, key=lambda path: -len(path.parts)):
        for count in range(1, min(len(path.parts), 5)):
            by_ending["/".join(path.parts[-count:])] = path
    seen: dict[Path, None] = {script.path: None}
    pending = [script]
    while pending:
        for name in sorted(_file_names(pending.pop())):
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


def _file_names(script: Script) -> set[str]:
    """Endings of paths of files that the script may run or read: modules it imports, files it names."""
    names: set[str] = set()
    for statement in script.imported:
        parts = tuple(part for part in statement.module.split(".") if part)
        modules = [parts[:count] for count in range(1, len(parts) + 1)]
        modules += [(*parts, name) for name in statement.names]
        for module in modules:
            names |= {"/".join(module) + ".py", "/".join((*module, "__init__.py"))}
    for value, _ in _literals(script):
        path = PurePosixPath(value)
        if path.suffix:
            names |= {path.name, value}
    return names


def _literals(script: Script) -> list[tuple[str, int]]:
    """Short string literals with their lines."""
    if isinstance(script.tree, SyntaxError):
        return [(match[1] or match[2], line) for match, line in _with_lines(STRING_LITERAL, script.text)]
    literals = []
    for node in script.nodes:
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if 0 < len(node.value) <= PATH_CHARACTERS_MAX:
            literals.append((node.value, node.lineno))
    return literals


def leaving_paths(script: Script) -> list[Call]:
    """Paths outside the script's folder that it runs, or puts on its search path; only literal ones are seen.

    `name` is the call, or `sys.path`; `detail` is the path.
    """
    found = []
    for node in script.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = "sys.path" if _is_search_path(node.func) else _called(node)
        if name != "sys.path" and name not in LOADERS:
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and _leaves(inner.value):
                found.append(Call(name, inner.value, node.lineno))
    return found


def outside_weights(script: Script) -> list[Call]:
    """Literal paths of weights or tables outside the script's folder; shards of FineWeb are none."""
    found = []
    for value, line in _literals(script):
        if _leaves(value) and value.endswith(WEIGHT_SUFFIXES) and not DATA_FILE.search(value):
            found.append(Call("path", value, line))
    return found


def unseen_imports(script: Script) -> list[Call]:
    """Imports by a name that no literal tells, what torch loads from a hub, and calls of a library in C.

    `name` is the call. Text that is put together from literals is read as one.
    """
    found = []
    for node in script.nodes:
        if isinstance(node, ast.Attribute) and node.attr in HUBS and ast.unparse(node.value) == "torch":
            found.append(Call(f"torch.{node.attr}", "", node.lineno))
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = _called(node)
        unseen = called in ("__import__", "import_module") and not _joined(node.args[0])
        library = called in ("CDLL", "PyDLL", "LoadLibrary") and not _names_own_library(node.args[0])
        if unseen or library:
            found.append(Call(called, ast.unparse(node.args[0])[:80], node.lineno))
    return found


def _joined(node: ast.expr) -> str:
    """The text of a literal, or of literals that are added; empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _joined(node.left), _joined(node.right)
        return left + right if left and right else ""
    return ""


def _names_own_library(node: ast.expr) -> bool:
    """Whether what a library is loaded from is a path that the script makes, or a file beside it."""
    name = _joined(node)
    return not (isinstance(node, ast.Constant) and node.value is None) and (not name or "/" in name)


def _is_search_path(function: ast.expr) -> bool:
    """Whether a called function is a method of `sys.path`."""
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Attribute)):
        return False
    owner = function.value.value
    return function.value.attr == "path" and isinstance(owner, ast.Name) and owner.id == "sys"


def _leaves(text: str) -> bool:
    """Whether a literal is an absolute path, one of the home folder, or one that goes up."""
    if not 1 < len(text) <= PATH_CHARACTERS_MAX or "\n" in text:
        return False
    return text.startswith(("/", "~")) or ".." in PurePosixPath(text).parts


def hidden_code(script: Script) -> list[Call]:
    """Calls of exec, eval and compile on what this reading cannot follow: anything but a literal."""
    found = []
    for node in script.nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
            continue
        if node.func.id not in ("exec", "eval", "compile") or isinstance(node.args[0], ast.Constant):
            continue
        literals = [inner for inner in ast.walk(node.args[0]) if isinstance(inner, ast.Constant)]
        if not any(_names_code(literal) for literal in literals):
            found.append(Call(node.func.id, ast.unparse(node.args[0])[:80], node.lineno))
    return found


def _names_code(node: ast.Constant) -> bool:
    """Whether a literal names a file of code, which `closure` or `leaving_paths` then reports."""
    return isinstance(node.value, str) and PurePosixPath(node.value).suffix in CODE_SUFFIXES


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


def training_files(script: Script) -> list[Call]:
    """FineWeb files that a variable, key or argument for training is given.

    `name` is that variable's, `detail` the files' names or patterns, such as `fineweb_train_*`.
    """
    found = []
    if isinstance(script.tree, SyntaxError):
        for match, line in _with_lines(TRAINING_FILES, script.text):
            found.append(Call(match[1], " ".join(DATA_FILE.findall(match[2])), line))
    for node in script.nodes:
        for name, value in _bindings(node) if isinstance(node, BINDERS) else ():
            if "train" in name.lower():
                files = DATA_FILE.findall(" ".join(_own_texts(value)))
                found.append(Call(name, " ".join(files), value.lineno))
    return [call for call in found if call.detail and not OTHER_THAN_TRAINING.search(call.name)]


BINDERS = (  # nodes that give names a value; all others are passed over quickly
    ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.keyword, ast.Dict,
    ast.arguments,
)  # fmt: skip


def _bindings(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """Names that a node gives a value: of variables and attributes, of keys, of arguments."""
    if isinstance(node, ast.Assign):
        return [pair for target in node.targets for pair in _named(target, node.value)]
    if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        return _named(node.target, node.value)
    if isinstance(node, ast.For | ast.comprehension):
        return _named(node.target, node.iter)
    if isinstance(node, ast.keyword):
        return [(node.arg or "", node.value)]
    if isinstance(node, ast.Dict):
        return [
            pair for key, value in zip(node.keys, node.values, strict=True) for pair in _named(key, value)
        ]
    if isinstance(node, ast.arguments):
        with_default = [*node.posonlyargs, *node.args][-len(node.defaults) :] if node.defaults else []
        pairs = [*zip(with_default, node.defaults, strict=True)]
        pairs += [(arg, value) for arg, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value]
        return [(arg.arg, value) for arg, value in pairs]
    return []


def _named(target: ast.expr | None, value: ast.expr) -> list[tuple[str, ast.expr]]:
    """The name of a target and its value; of two tuples, those of their elements one by one."""
    if isinstance(target, ast.Tuple | ast.List):
        if not isinstance(value, ast.Tuple | ast.List) or len(value.elts) != len(target.elts):
            return []
        pairs = zip(target.elts, value.elts, strict=True)
        return [pair for inner, own in pairs for pair in _named(inner, own)]
    if isinstance(target, ast.Subscript):
        target = target.slice
    if isinstance(target, ast.Name):
        return [(target.id, value)]
    if isinstance(target, ast.Attribute):
        return [(target.attr, value)]
    if isinstance(target, ast.Constant) and isinstance(target.value, str):
        return [(target.value, value)]
    return []


def _own_texts(value: ast.expr) -> list[str]:
    """Literals and names in an expression, but for those that a key or an argument in it names otherwise."""
    found = []
    pending: list[ast.AST] = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.Name):
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            found.append(node.attr)
        if not isinstance(node, ast.Dict | ast.keyword):
            pending += ast.iter_child_nodes(node)
    return found


def takes_split(pattern: str, split: str) -> bool:
    """Whether a name or pattern of FineWeb files takes those of a split, `train` or `val`."""
    if pattern.startswith(f"fineweb_{split}") or pattern == f"{split}_files":
        return True
    return fnmatch.fnmatchcase(f"fineweb_{split}_000000", pattern)


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
