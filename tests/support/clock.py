"""A clock that counts work instead of seconds, for a process: a test sees the same on any machine."""

import signal

FORWARD_SECONDS = 0.01

# To be run before the script: every forward pass takes FORWARD_SECONDS of the clock that the script reads,
# nothing else takes any.
COUNTED_CLOCK = """
import time, torch
now = [0.0]
time.perf_counter = lambda: now[0]
embedding = torch.nn.functional.embedding
def counted(*given, **more):
    now[0] += FORWARD_SECONDS
    return embedding(*given, **more)
torch.nn.functional.embedding = counted
"""

# To be run before the script: the process sends itself a signal in this step, whenever that comes.
SIGNAL = """
import signal, torch
step = torch.optim.AdamW.step
def step_and_signal(self, *given):
    result = step(self, *given)
    count = max(float(state["step"]) for state in self.state.values())
    if count == SIGNAL_AT and "base_lr" in self.param_groups[0]:  # not the one of adapters
        os.kill(os.getpid(), signal.SIGTERM)
    return result
torch.optim.AdamW.step = step_and_signal
"""


# To be run before the script: ACTION, a statement, when this phase has begun.
IN_PHASE = """
import contextlib, signal
enter = contextlib._GeneratorContextManager.__enter__
def begin(manager):
    begins = manager.args[1:]
    result = enter(manager)
    if manager.gen.__name__ == "phase" and begins == (PHASE,):
        ACTION
    return result
contextlib._GeneratorContextManager.__enter__ = begin
"""


def in_phase(phase: str, action: str) -> str:
    """Python that makes a process do something when it enters this phase: IN_PHASE."""
    return IN_PHASE.replace("PHASE,", f"{phase!r},").replace("ACTION", action)


def signal_at_step(step: int, number: int = signal.SIGTERM) -> str:
    """Python that lets a process signal itself in a step, which lies behind WARMUP_STEPS: SIGNAL."""
    return SIGNAL.replace("SIGNAL_AT", str(step)).replace("signal.SIGTERM", str(int(number)))


def counted_clock(signal_at: int = 0, forward_seconds: float = FORWARD_SECONDS) -> str:
    """Python that gives a process this clock: COUNTED_CLOCK; with `signal_at`, `signal_at_step` as well."""
    program = COUNTED_CLOCK.replace("FORWARD_SECONDS", str(forward_seconds))
    return program + signal_at_step(signal_at) if signal_at else program
