"""Python that is run in a process before the script: a clock that counts work, a signal, a fault."""

import signal
import textwrap

FORWARD_SECONDS = 0.01  # of the counted clock
NO_SPACE = 'raise OSError(28, "No space left on device", str(given[0]))'

INSTEAD_OF = """
import PACKAGE
def instead(real):
    def call(*given, **more):
BODY
    return call
PACKAGE.NAME = instead(PACKAGE.NAME)
"""


def instead_of(function: str, body: str) -> str:
    """`body` runs in the place of a function, which it knows as `real`, with `given` and `more`."""
    package, name = function.split(".", 1)
    lines = textwrap.indent(textwrap.dedent(body).strip(), 8 * " ")
    return INSTEAD_OF.replace("BODY", lines).replace("PACKAGE", package).replace("NAME", name)


def before(function: str, action: str) -> str:
    """`action` runs each time before the function does."""
    return instead_of(function, textwrap.dedent(action) + "\nreturn real(*given, **more)")


def after_step(step: int, action: str) -> str:
    """`action`, a statement, runs at the end of this step, in which `given[0]` is the optimizer AdamW.

    Steps of the warm-up count as well.
    """
    return instead_of("torch.optim.AdamW.step", f"""
        result = real(*given)
        if max(float(state["step"]) for state in given[0].state.values()) == {step}:
            {action}
        return result
    """)


def send(*numbers: int) -> str:
    """A process sends itself these signals."""
    return "import os; " + "; ".join(f"os.kill(os.getpid(), {int(number)})" for number in numbers)


def signal_at_step(step: int, *numbers: int) -> str:
    """A process signals itself in a step, which lies behind WARMUP_STEPS."""
    return after_step(step, send(*numbers or (signal.SIGTERM,)))


def in_phase(phase: str, action: str) -> str:
    """`action`, a statement, runs when this phase has begun."""
    return instead_of("contextlib._GeneratorContextManager.__enter__", f"""
        begins = given[0].args[1:]
        result = real(*given)
        if given[0].gen.__name__ == "phase" and begins == ({phase!r},):
            {action}
        return result
    """)


def counted_clock(forward_seconds: float = FORWARD_SECONDS) -> str:
    """A forward pass takes so long by the clock that the script reads, and nothing else takes any time.

    So a test sees the same on any machine.
    """
    clock = "import time\nnow = [0.0]\ntime.perf_counter = lambda: now[0]\n"
    return clock + before("torch.nn.functional.embedding", f"now[0] += {forward_seconds}")


def full_disk(*ends: str) -> str:
    """There is no room for files whose names end so."""
    return before("builtins.open", f"""
        if [*given, "r"][1][0] in "wax" and str(given[0]).endswith({ends!r}):
            {NO_SPACE}
    """)
