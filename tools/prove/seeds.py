"""Whether the honest script is proven with every seed and all kinds of instructions: a table of small proofs.

    python -m tools.prove.seeds train_gpt.py --seeds 20 --capability default avx2 avx512
    python -m tools.prove.seeds train_gpt.py --seeds 1 --whole

A small proof has the checks whose verdict hangs on rounding or on the seed, at fewer places: a tenth of the
work. --whole: whole proofs. ATEN_CPU_CAPABILITY chooses the instructions of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.files import escape_unprintable
from tools.check.findings import Finding, Mode
from tools.prove import elsewhere, full_size, probes, prove, questions, ranks, tiny
from tools.runs.load import load_script

NUMBER = r"(\d\.\d+e[+-]\d+)"
# By check: what its findings say of noise, and the tolerance; of B7 and B13 that of labels that learn.
NOISE = {
    "B1": (f"most: {NUMBER}", questions.REPACKING_TOLERANCE),
    "B2": (f"are 1 to {NUMBER}", questions.KRAFT_TOLERANCE),
    "B7": (f"apart by {NUMBER}", elsewhere.LEARNING_TOLERANCE),
    "B13": (f"at most {NUMBER} from the nats of one", ranks.LEARNING_TOLERANCE),
}
ROW = "{:20} {:>4} {:10} {:12} {:62} {:>7}"


def small(script: Any, seed: int, config: Any, name: str, folder: Path) -> Iterator[Finding]:
    """The findings of a small proof. config, name: of the configuration beside the tiny ones."""
    shrunk, _ = tiny.shrink(config, tiny.FOR_SCORER)
    subjects = [
        probes.make_subject(script, seed),
        probes.subject_of(script, shrunk, seed, name),
        probes.make_subject(script, seed, "tiny, documents", **tiny.LORA),
    ]
    for subject in subjects:
        case = subject.case()
        yield from probes.ledger_order(subject)
        yield from questions.repetition(case)
        yield from questions.kraft(case, [75])
        yield from questions.future(case, [60], [64])
        yield from probes.document_isolation(subject)
        yield from probes.evaluation_warmup(subject)
        yield from elsewhere.same_as_on_gpu(subject)
    wide = probes.make_subject(script, seed, VOCAB_SIZE=str(config.vocab_size))
    yield full_size.kraft_at_full_size(wide, wide.model(), 1)[1]
    yield from prove.rank_invariance(subjects[0], folder, *subjects[1:], numbers=(8,))


def noise_of(findings: list[dict[str, Any]]) -> dict[str, float]:
    """The largest noise that the findings of each check tell; 0 where none does."""
    found = dict.fromkeys(NOISE, 0.0)
    for finding in findings:
        for value in re.findall(NOISE.get(finding["check"], ("$^",))[0], finding["text"]):
            found[finding["check"]] = max(found[finding["check"]], float(value))
    return found


def proof(script: Any, args: argparse.Namespace, seed: int) -> tuple[str, list[dict[str, Any]]]:
    """Verdict and findings of a proof, small or whole."""
    if args.whole:
        options = ["--json", "--seed", str(seed), *(["--config", str(args.config)] if args.config else [])]
        command = [sys.executable, "-m", "tools", "prove", str(args.script), *options]
        report = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
        return ("proven", "refuted", "not checked")[report["status"]], report["findings"]
    config = script.Config.from_env({"CONFIG": str(args.config)} if args.config else {})
    name = args.config.name if args.config else "defaults"
    with tempfile.TemporaryDirectory() as folder:
        found = list(small(script, seed, config, name, Path(folder)))
    listed = [finding.as_json(Mode.AGREED) for finding in found]
    return ("passed", "refuted", "not checked")[prove.exit_status(found)], listed


def rows(args: argparse.Namespace) -> int:
    """Print the rows of this process's instructions, and below each what did not pass; how many did not."""
    import torch

    torch.set_num_threads(1)
    script = load_script(args.script.resolve())
    failed = 0
    for seed in range(args.first, args.first + args.seeds):
        began = sum(os.times()[:4])
        verdict, findings = proof(script, args, seed)
        most = noise_of(findings)
        noise = "  ".join(f"{check} {most[check]:.0e}/{limit:.0e}" for check, (_, limit) in NOISE.items())
        kind = f"{'whole' if args.whole else 'small'}, {args.config.name if args.config else 'defaults'}"
        capability = os.environ.get("ATEN_CPU_CAPABILITY") or "as it is"
        seconds = f"{sum(os.times()[:4]) - began:.0f}"
        print(ROW.format(kind, seed, capability, verdict, noise, seconds), flush=True)
        for finding in findings:
            if finding["level"] == "FAIL" or finding["text"].startswith("not checked"):
                print(f"    {finding['check']} {finding['text']}  [{finding['where']}]", flush=True)
        failed += verdict not in ("proven", "passed")
    return failed


def main(arguments: list[str]) -> int:
    """Print a table; 1 if a row did not pass. noise: in nats or parts of one, beside its tolerance."""
    parser = argparse.ArgumentParser(prog="python -m tools.prove.seeds", description=main.__doc__)
    parser.add_argument("script", type=Path)
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="how many")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of them")
    parser.add_argument("--capability", nargs="*", default=["default", "avx2", "avx512"], metavar="NAME",
                        help="ATEN_CPU_CAPABILITY; without a name: as it is")  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FILE", help="these settings, not the defaults")
    parser.add_argument("--whole", action="store_true", help="whole proofs, of minutes each")
    escape_unprintable()
    args = parser.parse_args(arguments)
    if not args.capability:
        return int(rows(args) > 0)
    print(ROW.format("proof", "seed", "capability", "verdict", "noise / tolerance", "seconds"), flush=True)
    command = [sys.executable, "-m", "tools.prove.seeds", *arguments, "--capability"]
    environments = [{**os.environ, "ATEN_CPU_CAPABILITY": name} for name in args.capability]
    return max(subprocess.run(command, env=one, check=False).returncode for one in environments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
