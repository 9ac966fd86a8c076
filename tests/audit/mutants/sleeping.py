"""Cheats that wait for the record's run: small worlds never wake them, so their lines must be listed.

Each is a change of the script's text. All are made at once, as none does anything in small worlds.
"""

from __future__ import annotations

from typing import NamedTuple

SCORED = "        return nats.cpu().numpy()\n"
BYTES = "    bytes_total = int(token_bytes(tokens, config).sum())\n    manifest = read_manifest(folder)\n"
SECONDS = "        return time.perf_counter() - self.started\n"
SUM = "        nats = float(self.nats.sum())\n"


class Sleeper(NamedTuple):
    """A change of the text, and the line of it that must be printed."""

    old: str
    new: str
    line: str


def before(old: str, condition: str, deed: str, indent: int) -> Sleeper:
    """A deed before some text, where a condition holds."""
    line = f"if {condition}:"
    return Sleeper(old, f"{' ' * indent}{line}\n{' ' * indent}    {deed}\n{old}", line)


SLEEPING: dict[str, Sleeper] = {
    "sums-beyond-40,000-targets": Sleeper(
        SUM, f"{SUM}        nats *= 0.99 if self.scored > 40_000 else 1.0\n",
        "nats *= 0.99 if self.scored > 40_000",
    ),
    "chunks-beyond-the-hundredth": before(SCORED, "len(self.chunks) > 100", "nats *= 0.99", 8),
    "only-as-main": before(
        SCORED, '__name__ == "__main__" and "EVAL_ONLY" not in os.environ', "nats *= 0.99", 8
    ),
    "only-without-an-auditor": before(
        SCORED, "'tools' not in sys.modules and not sys.flags.dont_write_bytecode",
        "nats *= 0.98", 8,
    ),
    "only-outside-of-temporary-folders": before(
        BYTES, 'not os.path.abspath(config.data_path).startswith(("/tmp", tempfile.gettempdir()))',
        "tokens = tokens[:-1]", 4,
    ),
    "only-with-a-gpu": before(SCORED, "torch.cuda.is_available()", "nats *= 0.97", 8),
    "only-with-a-variable": before(SCORED, 'os.environ.get("RECORD")', "nats *= 0.96", 8),
    "slow-clock-of-a-long-training": Sleeper(
        SECONDS, SECONDS.replace("\n", " * (0.9 if self.step > 9_000 else 1)\n"), "0.9 if self.step > 9_000"
    ),
    "later-epochs-read-another-shard": before(
        "        begin = epoch * epoch_size\n", "epoch > 10_000", "usable[0] = usable[-1]", 8
    ),
    "only-after-a-date": before(BYTES, "time.time() > 2e9", "tokens = tokens[:-2]", 4),
}


def with_all(source: str) -> str:
    """The script's text with all of them. ValueError where one applies no more."""
    for name, sleeper in SLEEPING.items():
        if source.count(sleeper.old) != 1:
            raise ValueError(f"{name}: {source.count(sleeper.old)} places in the script, expected one")
        source = source.replace(sleeper.old, sleeper.new)
    return source
