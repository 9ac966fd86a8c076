"""The process that a script under audit runs in, its cell, and the calls that the auditor makes there.

The auditor asks functions marked `in_cell`, gets numbers and text through a pipe, and judges them itself. So
nothing that a script does to its own process can say "proven": it can only answer. An answer out of turn or
none at all ends the proof without a verdict. Without a cell the same functions run in place, as tests and
mutants do it.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import secrets
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np

from tools.prove import network, walls
from tools.prove.execution import MARKS, Execution
from tools.runs.load import load_script

LENGTH_BYTES = 8  # of a message, before it
MESSAGE_BYTES_MAX = 2**30
PLAIN = (str, int, float, bool, type(None))

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


class CellError(RuntimeError):
    """The cell raised an error, or answers no more. kind: the error's class. function, where: its place."""

    def __init__(self, text: str, kind: str = "", function: str = "", where: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.function = function
        self.where = where


class Handle:
    """Stands in for an object of the cell: a script, settings, a model.

    Of settings and named tuples it has the attributes that are plain values.
    """

    def __init__(self, number: int, attributes: dict[str, Any]) -> None:
        self.number = number
        self.attributes = attributes

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["attributes"][name]
        except KeyError:
            raise AttributeError(f"the cell tells nothing of {name}") from None

    def as_env(self) -> dict[str, str]:
        """Of settings: their text."""
        return dict(self.attributes["as_env"])


# ======================================================================================================
# WHAT CROSSES
# ======================================================================================================

RECORDS: dict[str, Any] = {}  # classes whose fields cross, or what `to_cell` gives of them
FUNCTIONS: dict[str, Callable[..., Any]] = {}  # those of the cell


def record(cls: Class) -> Class:
    """A class of plain data that crosses as itself."""
    RECORDS[cls.__name__] = cls
    return cls


class Things:
    """The objects that stay in a cell, by number. The auditor has none: there handles stay handles."""

    def __init__(self, is_cell: bool) -> None:
        self.is_cell = is_cell
        self.kept: list[Any] = []
        self.numbers: dict[int, int] = {}

    def number(self, thing: Any) -> int:
        """The number of an object, a new one where it has none."""
        if id(thing) not in self.numbers:
            self.numbers[id(thing)] = len(self.kept)
            self.kept.append(thing)
        return self.numbers[id(thing)]

    def encode(self, value: Any) -> Any:
        """What JSON holds of a value."""
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, list):
            return [self.encode(one) for one in value]
        if isinstance(value, dict):
            return {"is": "dict", "of": [[self.encode(key), self.encode(one)] for key, one in value.items()]}
        if isinstance(value, set):
            return {"is": "set", "of": [self.encode(one) for one in value]}
        if isinstance(value, bytes):
            return {"is": "bytes", "of": base64.b64encode(value).decode()}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return {"is": "array", "of": [value.dtype.str, list(value.shape), content]}
        if isinstance(value, Path):
            return {"is": "path", "of": str(value)}
        if isinstance(value, FunctionType):
            return {"is": "function", "of": f"{value.__module__}:{value.__qualname__}"}
        if isinstance(value, Handle):
            return {"is": "thing", "of": [value.number, []]}
        if type(value).__name__ in RECORDS and RECORDS[type(value).__name__] is type(value):
            fields = value.to_cell() if hasattr(value, "to_cell") else values_of(value)
            return {"is": type(value).__name__, "of": [self.encode(one) for one in fields]}
        if type(value) is tuple:
            return {"is": "tuple", "of": [self.encode(one) for one in value]}
        assert self.is_cell, f"{type(value)} does not cross"
        return {"is": "thing", "of": [self.number(value), self.encode(attributes_of(value))]}

    def decode(self, value: Any) -> Any:
        """The value again."""
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, list):
            return [self.decode(one) for one in value]
        kind, content = value["is"], value["of"]
        if kind == "dict":
            return {self.decode(key): self.decode(one) for key, one in content}
        if kind in ("set", "tuple"):
            return (set if kind == "set" else tuple)(map(self.decode, content))
        if kind == "bytes":
            return base64.b64decode(content)
        if kind == "array":
            dtype, shape, text = content
            if np.dtype(dtype).kind not in "biuf":
                raise ValueError(f"an array of {dtype}")
            return np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
        if kind == "path":
            return Path(content)
        if kind == "thing":
            number, attributes = content
            return self.kept[number] if self.is_cell else Handle(number, self.decode(attributes))
        if kind == "function":
            if not self.is_cell:
                raise ValueError("a function")
            module, _, name = content.partition(":")
            return getattr(importlib.import_module(module), name)
        cls = RECORDS[kind]
        make = cls.from_cell if hasattr(cls, "from_cell") else cls
        return make(*map(self.decode, content))


def values_of(value: Any) -> list[Any]:
    """The fields of a data class or a named tuple, in order."""
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(value)


def attributes_of(value: Any) -> dict[str, Any]:
    """What a handle tells of an object: of settings all that is plain, also what they compute."""
    if hasattr(value, "_asdict"):
        found = value._asdict()
    elif hasattr(value, "as_env") and dataclasses.is_dataclass(value):
        settings: Any = value
        names = {field.name for field in dataclasses.fields(value)}
        kind: Any = type(value)
        for parent in kind.__mro__:
            names |= {name for name, member in vars(parent).items() if isinstance(member, property)}
        found = {name: getattr(value, name) for name in names} | {"as_env": settings.as_env()}
    else:
        found = {}
    return {name: one for name, one in found.items() if isinstance(one, (*PLAIN, list, dict))}


def in_cell(function: Function) -> Function:
    """A function that runs where the script is: in the cell of the proof under way, or else in place."""
    name = f"{function.__module__}:{function.__name__}"
    FUNCTIONS[name] = function

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if Cell.current is None:
            return function(*args, **named)
        return Cell.current.call(name, args, named)

    return call  # type: ignore[return-value]


@in_cell
def offers(script: Any, *names: str) -> bool:
    """Whether a script has all of these names."""
    return all(hasattr(script, name) for name in names)


# ======================================================================================================
# THE AUDITOR'S END
# ======================================================================================================


class Cell:
    """A script in a process of its own."""

    current: Cell | None = None  # of the proof under way

    def __init__(self, folder: Path, keep: list[Path], quiet: bool = False) -> None:
        """folder: of the proof. keep: files of the user that the script needs. quiet: drop all it prints."""
        own = folder / "home"
        own.mkdir(parents=True, exist_ok=True)
        self.things = Things(is_cell=False)
        requests, self.to_cell = os.pipe()
        self.from_cell, answers = os.pipe()
        prefix, self.said = walls.command(folder, keep)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-B", "-m", "tools.prove.cell", str(requests), str(answers)],
            pass_fds=(requests, answers), stdin=subprocess.DEVNULL, cwd=own,
            stdout=subprocess.DEVNULL if quiet else 2, stderr=subprocess.DEVNULL if quiet else 2,
            start_new_session=True,  # a signal to its group reaches nobody else
            env={**walls.environment(), "HOME": str(own), "TMPDIR": str(own)},
        )  # fmt: skip
        os.close(requests)
        os.close(answers)

    def call(self, function: str, args: tuple[Any, ...] = (), named: dict[str, Any] | None = None) -> Any:
        """What a function of the cell returns. CellError with its error, or if the cell is gone."""
        token = secrets.token_hex(16)  # so that an answer is one to this question
        request = [token, function, self.things.encode(list(args)), self.things.encode(named or {})]
        try:
            send(self.to_cell, request)
            told, kind, value = receive(self.from_cell)
            if token != told:
                raise ValueError("an answer to another question")
            answer = self.things.decode(value)
        except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            ended = f", exit status {self.process.returncode}" if self.process.returncode is not None else ""
            text = f"the script's process ended or answers out of turn{ended}: {type(error).__name__} {error}"
            raise CellError(text) from None
        if kind == "error":
            raise CellError(*map(str, answer))
        return answer

    def __enter__(self) -> Cell:
        Cell.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Cell.current = None
        os.close(self.to_cell)
        os.close(self.from_cell)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def send(file: int, message: Any) -> None:
    """Write a message with its length before it."""
    data = json.dumps(message).encode()
    pending = memoryview(len(data).to_bytes(LENGTH_BYTES, "big") + data)
    while pending:
        pending = pending[os.write(file, pending) :]


def receive(file: int) -> Any:
    """Read a message. EOFError at the end, ValueError for what is none."""
    length = int.from_bytes(_exactly(file, LENGTH_BYTES), "big")
    if length > MESSAGE_BYTES_MAX:
        raise ValueError("a message too long")
    return json.loads(_exactly(file, length))


def _exactly(file: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(file, min(count, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


# ======================================================================================================
# THE CELL'S END
# ======================================================================================================


class Server:
    """Answers in the cell, one question after the other."""

    def __init__(self) -> None:
        self.things = Things(is_cell=True)
        self.attempts: list[str] = []
        self.before: dict[str, Any] = {}

    def open(self, path: Path, marked: bool) -> Any:
        """The script; marked: so that it notes what it runs."""
        import tools.prove.casing
        import tools.prove.elsewhere
        import tools.prove.foreign
        import tools.prove.full_size
        import tools.prove.mutants
        import tools.prove.ranks
        import tools.prove.rehearsal
        import tools.prove.replay  # noqa: F401

        network.refuse(self.attempts)
        self.before = fingerprint()
        with contextlib.redirect_stdout(sys.stderr):
            return Execution(path).load() if marked else load_script(path)

    def ran(self, script: Any) -> bytes:
        """What the script has run."""
        return bytes(vars(script)[MARKS])

    def refused(self) -> list[str]:
        """The script's attempts to reach a network."""
        return list(self.attempts)

    def changed(self) -> list[str]:
        """Names in the cell's own copy of the auditor that are not what they were."""
        after = fingerprint()
        return sorted(name for name, value in self.before.items() if after.get(name) != value)

    def answer(self, request: list[Any]) -> list[Any]:
        """The answer to a request: its token, what it is, and its value."""
        token, name, args, named = request
        function = FUNCTIONS.get(name) or getattr(self, name)
        try:
            value = function(*self.things.decode(args), **self.things.decode(named))
            return [token, "value", self.things.encode(value)]
        except BaseException as error:  # a script may raise what it likes
            traceback.print_exc()
            places = traceback.extract_tb(error.__traceback__)
            # Where the script raised it, if it did.
            place = next(
                (one for one in reversed(places) if f"{os.sep}tools{os.sep}" not in one.filename), places[-1]
            )
            where = f"{Path(place.filename).name}:{place.lineno}"
            kind = type(error).__name__
            return [token, "error", [f"{kind}: {error}", kind, place.name, where]]


def fingerprint() -> dict[str, Any]:
    """What the names of the auditor's modules stand for, and the code of functions and methods among them."""
    found: dict[str, Any] = {}
    for module in [*sys.modules.values()]:
        if isinstance(module, ModuleType) and module.__name__.startswith(("tools.prove", "tools.check")):
            for name, value in [*vars(module).items()]:
                found[f"{module.__name__}.{name}"] = _print_of(value)
                if isinstance(value, type) and value.__module__.startswith("tools."):
                    for member, inner in [*vars(value).items()]:
                        found[f"{value.__module__}.{value.__name__}.{member}"] = _print_of(inner)
    return {name: value for name, value in found.items() if value is not None}


def _print_of(value: Any) -> Any:
    """What must not change of a value; None for what the auditor changes itself."""
    if isinstance(value, FunctionType):
        return (id(value), value.__code__, value.__defaults__)
    if isinstance(value, type | ModuleType):
        return id(value)
    return repr(value) if isinstance(value, (*PLAIN, tuple)) else None


def serve(requests: int, answers: int) -> None:
    """Answer until the auditor closes the pipe."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=end_with_the_auditor, args=(requests,), daemon=True).start()
    server = Server()
    while True:
        try:
            request = receive(requests)
        except EOFError:
            return
        send(answers, server.answer(request))


def end_with_the_auditor(requests: int) -> None:
    """End this process, whatever it does, when the other end of the pipe is closed."""
    end = select.poll()
    end.register(requests, 0)
    end.poll()
    os._exit(1)


@contextlib.contextmanager
def opened(
    path: Path, folder: Path, keep: list[Path], marked: bool, quiet: bool = False
) -> Iterator[tuple[Cell, Any]]:
    """A cell for the proof under way, and the script in it."""
    with Cell(folder, [path, *keep], quiet) as cell:
        yield cell, cell.call("open", (path, marked))


if __name__ == "__main__":
    from tools.prove import cell as one_module  # so that marked functions and records are those of its name

    one_module.serve(*map(int, sys.argv[1:]))
