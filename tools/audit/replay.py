"""`prove --replay RUN`: documents of a real run are scored again, at its width, from data that the auditor reads.

A run leaves the nats of each document. Its own artifact and script score some of them anew in a box, on a CPU;
which, is drawn when the replay begins. They must cost what the run says they cost. Then each gets another
ending after a random token, and every score before it stays, bit by bit; and at a few targets the
probabilities of the whole vocabulary sum to one. So a cheat that sleeps in small worlds is met where it is
awake, and one that is awake in the run alone is a difference.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from data import shards
from data.files import sha256_file
from data.shards import BOS_ID
from tools.audit import box
from tools.audit import equalities as same
from tools.audit.audit import PLACES, Verdict, fingerprint, hash_of_settings
from tools.audit.broken import Broken, NotChecked
from tools.audit.settings import ON_CPU, PRIVATE
from tools.audit.worlds import UNKNOWN, World, decoded_bytes, spelled_bytes, write
from tools.runs.errors import RecordError
from tools.runs.runs import RunDirectory, settings_of
from tools.runs.source import same_program, unwrap

ARTIFACT, MODES = "model.bin", "eval_modes.json"
DOCUMENTS = 8  # of a run in fp32
TOKENS = 20_000  # of a run in another precision: its rounding is seen in one document, a flattery in the mean
SAME_MACHINE = 1e-6  # nats a target, in fp32
# Nats a target, of a run in bfloat16: of the mean, beside three standard errors, and of one document. Above the
# last a thousandth of a score could hide.
MEAN, OF_A_DOCUMENT, VISIBLE = 1e-4, 1e-2, 1e-3
OF_A_VOCABULARY = 1e-4  # of a sum of probabilities
TOKENS_AT_ONCE = 8192  # that learn side by side in a replay: of a large model they take gigabytes
PREFIXES = (1, 3, 7)  # tokens before a target at which the whole vocabulary is tried; one more divides a window
CHECKED_IDS = 400  # of ordinary text before odd one, as a run checks whether its text is text


@dataclass(frozen=True)
class Original:
    """What a run directory says, and the data that it names, as the auditor reads them."""

    folder: Path
    settings: dict[str, str]
    tokens: np.ndarray  # of the validation text that was scored
    counts: np.ndarray | None  # bytes of each token, if there is a sidecar
    tokenizer: Path
    dtype: str  # of its activations: other rounding has a bias, which a mean would show

    @property
    def begins(self) -> np.ndarray:
        """The first target of each document, and the end of the last."""
        return np.append(np.flatnonzero(self.tokens[:-1] == BOS_ID), len(self.tokens) - 1)

    def nats(self, label: str) -> np.ndarray:
        """Of each document, as the run has noted them."""
        return np.fromfile(self.folder / f"nats_{label}.bin")

    def length(self, name: str) -> int:
        """A setting that is a number."""
        return int(self.settings.get(name, 0))

    @property
    def context(self) -> int:
        """Tokens of context in evaluation."""
        return self.length("EVAL_SEQ_LEN") or self.length("TRAIN_SEQ_LEN")

    @property
    def documents_at_once(self) -> int:
        """Documents that learned side by side."""
        return self.length("TTT_BATCH_SIZE") or max(1, self.length("MICRO_BATCH_TOKENS") // self.context)

    @property
    def by_documents(self) -> bool:
        """Whether test-time training is that of one document."""
        return self.settings.get("TTT_MODE") == "lora"

    @property
    def pieces(self) -> Any:
        """Its tokenizer."""
        return sentencepiece.SentencePieceProcessor(model_file=str(self.tokenizer))


def replayed(folder: Path, documents: int | None, seed: int | None, say: Callable[[str], None]) -> Verdict:
    """A verdict on a run directory."""
    run = RunDirectory(folder.resolve())
    for name in (ARTIFACT, "train_gpt.py", "train_gpt.shipped.py", "config.env"):
        if not (run.path / name).is_file() or (run.path / name).is_symlink():
            raise RecordError(f"{folder}: no {name} of its own; --replay needs a run directory with its artifact")
    seed = secrets.randbits(48) if seed is None else seed
    settings = settings_of(run.path / "config.env")
    verdict = Verdict({
        "replay": run.path.name, "sha256": sha256_file(run.path / "train_gpt.py"),
        "artifact_sha256": sha256_file(run.path / ARTIFACT), "settings_sha256": hash_of_settings(settings),
        "seed": seed,
    })  # fmt: skip
    say(f"  seed {seed} draws the documents")
    ours = fingerprint()
    with tempfile.TemporaryDirectory(prefix="replay_") as scratch:
        place = Path(scratch).resolve()
        (place / "given").mkdir()
        for name in (ARTIFACT, "train_gpt.py"):
            shutil.copy(run.path / name, place / "given")
        try:
            dtype = str(run.summary["hardware"]["dtype"]).removeprefix("torch.")
            original = read_original(run.path, settings, dtype)
            threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            with box.opened(place / "given" / "train_gpt.py", place / "runs", [place / "given"], threads) as opened:
                verdict.walls = opened.walls
                say(f"  walls: {opened.walls}")
                again = Again(original, opened, place / "given", np.random.default_rng(seed))
                for name, text in experiments(run, original, again, documents):
                    verdict.passed.append({"law": name, "text": text})
                    verdict.cpu_seconds = opened.cpu_seconds
                    say(f"  pass {name}: {text}")
                if opened.tried:
                    raise Broken("walls", f"it tried to leave its box: {', '.join(opened.tried[:3])}")
        except Broken as error:
            verdict.refuted = str(error)
        except NotChecked as error:
            verdict.not_checked = str(error)
        except (KeyError, TypeError, ValueError, OSError) as error:
            verdict.not_checked = f"its files cannot be read: {type(error).__name__}: {error}"
    if fingerprint() != ours:
        verdict.refuted = "walls: the auditor's own files have changed"
    return verdict


def read_original(folder: Path, settings: dict[str, str], dtype: str) -> Original:
    """The data of a run. Whatever a foreign config.env names, only shards and a SentencePiece model are read."""
    given = {name: os.environ.get(name) or settings.get(name, "") for name in PLACES}
    data, tokenizer = (Path(given[name]).expanduser() for name in PLACES)
    files = sorted(data.glob("fineweb_val_[0-9]*.bin"))
    try:
        tokens = np.concatenate([shards.read_shard(path) for path in files])
        sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    except (OSError, ValueError, RuntimeError, shards.DataError) as error:
        raise NotChecked(f"DATA_PATH={data} TOKENIZER_PATH={tokenizer}: {error or 'no shards'}; name the data of "
                         "the run by these variables") from error  # fmt: skip
    sidecars = sorted(data.glob("fineweb_val_bytes_[0-9]*.bin"))
    counts = np.concatenate([shards.read_shard(path) for path in sidecars]) if sidecars else None
    limit = int(settings.get("VAL_TOKENS_LIMIT", 0))
    tokens = tokens[: limit + 1] if limit else tokens
    return Original(folder, settings, tokens, counts, tokenizer, dtype)


def experiments(
    run: RunDirectory, original: Original, again: Again, documents: int | None
) -> Iterator[tuple[str, str]]:
    """(law, what held), the quick ones first."""
    yield "counts", figures(run, original)
    yield "program", same_files(run)
    labels = list(run.summary["losses"])
    exact = original.dtype == "float32" and not run.summary["hardware"]["gpus"]
    begins = original.begins
    order = again.random.permutation(len(begins) - 1)
    wanted = documents
    if wanted is None:
        sizes = np.cumsum(np.diff(begins)[order])
        wanted = DOCUMENTS if exact else int(np.searchsorted(sizes, TOKENS)) + 1
        if begins[-1] <= 2 * TOKENS:
            wanted = len(order)  # all: then the same stand side by side, and rounding is the same
    chosen = np.sort(order[:wanted])
    for label, numbers, first, place_of in again.scored(labels, chosen):
        yield "replay", compared(original, label, numbers, first, place_of, exact)
    for label, held in again.other_endings(labels, chosen):
        yield "endings", f"{label}: {held}"
    for label, held in again.probabilities(chosen):
        yield "sums", f"{label}: {held}"


def figures(run: RunDirectory, original: Original) -> str:
    """The figures of log and summary are the sums of the documents, over the bytes that the auditor counts."""
    targets = len(original.tokens) - 1
    if original.counts is None:
        count = decoded_bytes(original.pieces, original.tokens)
    else:
        count = int(original.counts[1 : targets + 1].astype(np.int64).sum())
    lines = {name: found for name, *found in same.EXACT.findall((run.path / "log.txt").read_text())}
    for label, loss in run.summary["losses"].items():
        nats = original.nats(label)
        if len(nats) != len(original.begins) - 1 or not np.isfinite(nats).all():
            raise Broken("coverage", f"{label}: {len(nats)} of {len(original.begins) - 1} documents")
        total = math.fsum(nats)
        right = (total / targets, total / math.log(2) / count, targets, count)
        line = next((found for name, found in lines.items() if name.endswith(label)), None)
        if line is None:
            raise Broken("ledgers", f"{label}: no exact line in the log")
        told = (loss["nats"], loss["bits_per_byte"], loss["scored_tokens"], loss["bytes"])
        for said in (told, tuple(map(float, line))):
            if not np.allclose(said, right, rtol=1e-8, atol=1e-8):
                raise Broken("counts", f"{label}: says {said}, the documents and the text give {right}")
    return f"log and summary are the sums of {len(original.begins) - 1} documents over {count} bytes"


def same_files(run: RunDirectory) -> str:
    """Artifact and script are those of the summary, and what is shipped is the same program."""
    summary = run.summary
    for name, sha256 in ((ARTIFACT, summary["artifact"]["sha256"]), ("train_gpt.py", summary["code"]["sha256"])):
        if sha256_file(run.path / name) != sha256:
            raise Broken("program", f"{name} is not the file of the run: summary.json notes another SHA-256")
    shipped = (run.path / "train_gpt.shipped.py").read_bytes().decode("latin-1")
    if not same_program(unwrap(shipped) or shipped, (run.path / "train_gpt.py").read_text(encoding="utf-8")):
        raise Broken("program", "what is shipped is another program than its source")
    return "artifact and script are those of the run; what is shipped is the same program"


def compared(
    original: Original, label: str, numbers: Sequence[int], run: box.Run, place_of: Mapping[int, int], exact: bool
) -> str:
    """The documents cost what the run says they cost."""
    begins = original.begins
    sizes = np.diff(begins)[numbers]
    apart = np.array([
        math.fsum(run.nats[label][place_of[number] : place_of[number] + size]) - original.nats(label)[number]
        for number, size in zip(numbers, sizes, strict=True)
    ])  # fmt: skip
    each = np.abs(apart) / sizes
    limit = SAME_MACHINE if exact else OF_A_DOCUMENT
    if not each.max() <= limit:
        worst = numbers[int(each.argmax())]
        raise Broken("replay", f"{label}: document {worst} is {each.max():.1e} nats a target apart, {limit:.0e} "
                               "are allowed")  # fmt: skip
    mean = apart.sum() / sizes.sum()
    found = (f"{label}: {len(numbers)} documents of {sizes.sum()} targets scored again: one is {each.max():.1e} nats a "
             f"target apart, the mean {abs(mean):.1e}")  # fmt: skip
    if exact:
        return found
    noise = math.sqrt(((apart - mean * sizes) ** 2).sum()) / sizes.sum()
    limit = MEAN + 3 * noise
    if not abs(mean) <= limit:
        raise Broken("replay", f"{found}; {limit:.1e} are allowed")
    if limit > VISIBLE:
        raise NotChecked(f"{found}: rounding hides what {limit:.1e} nats could be; ask for more --documents")
    return f"{found}, of {limit:.1e}"


@dataclass
class Again:
    """Scores texts that are made of a run's own, by its artifact."""

    original: Original
    opened: box.Box
    given: Path
    random: np.random.Generator
    asked: int = 0

    def ask(self, ids: np.ndarray, counts: np.ndarray | None, **more: str) -> box.Run:
        """The artifact's scores of a text."""
        self.asked += 1
        folder = self.given / f"q{self.asked}"
        world: World = write(folder, ids, self.original.tokenizer.read_bytes(), (), counts)
        artifact = folder / ARTIFACT
        os.link(self.given / ARTIFACT, artifact)
        modes = more.pop("modes", "")
        if modes:
            (folder / MODES).write_text(modes)
        settings = {name: value for name, value in self.original.settings.items() if name not in PRIVATE}
        rows = min(self.original.documents_at_once, max(2, TOKENS_AT_ONCE // self.original.context))
        few = {"VAL_BATCH_SIZE": str(16 * self.original.context), "TTT_BATCH_SIZE": str(rows)}
        limit = {"MAX_EVAL_SECONDS": "1000000000" if modes else "0"}
        run = self.opened.run({**settings, **few, **ON_CPU, "COMPUTE_DTYPE": self.original.dtype, **limit, "EVAL_ONLY": str(artifact), **more},
                              folder, world.tokens)  # fmt: skip
        same.ended(run)
        return run

    # --- which texts ---

    def learned(self, number: int) -> bool:
        """Whether the run learned from a document: it has noted that of the first one of each batch."""
        path = self.original.folder / MODES
        if not path.is_file():
            return True
        longest_first = np.argsort(-np.diff(self.original.begins), kind="stable")
        size = self.original.documents_at_once
        place = int(np.flatnonzero(longest_first == number)[0])
        return bool(json.loads(path.read_text()).get(str(longest_first[place // size * size]), 1))

    def side_by_side(self, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None, dict[int, int]]:
        """Documents one after the other, and where each begins: its first target, by number."""
        begins, parts, place_of, at = self.original.begins, [], {}, 0
        for number in sorted(numbers):
            begin, end = int(begins[number]), int(begins[number + 1])
            place_of[number] = at
            parts.append(np.arange(begin, end))
            at += end - begin
        last = int(begins[max(numbers) + 1])  # the BOS that ends the last one, or the last token of the text
        index = np.append(np.concatenate(parts), last)
        counts = self.original.counts
        return self.original.tokens[index], None if counts is None else counts[index], place_of

    def in_their_windows(self, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None, dict[int, int]]:
        """Documents with what stands before them, so that each has the windows that it had in the whole text."""
        original, parts, place_of, at = self.original, [], {}, 0
        stride = original.length("EVAL_STRIDE") or original.context
        step = math.lcm(original.context, stride)
        for number in sorted(numbers):
            begin, end = int(original.begins[number]), int(original.begins[number + 1])
            first = max(0, (begin - original.context) // step * step)
            place_of[number] = at + begin - first
            index = np.arange(first, end + 1)
            padded = np.full(math.ceil(len(index) / step) * step, -1)
            padded[: len(index)] = index
            if first > 0:
                padded[0] = -1  # a text begins with a document; nothing that is compared reads this token
            parts.append(padded)
            at += len(padded)
        index = np.append(np.concatenate(parts), -1)
        ids = np.where(index < 0, BOS_ID, original.tokens[index])
        counts = original.counts
        return ids, None if counts is None else np.where(index < 0, 0, counts[index]), place_of

    # --- what is asked of them ---

    def texts(
        self, labels: Sequence[str], chosen: np.ndarray
    ) -> Iterator[tuple[list[str], list[int], tuple[np.ndarray, np.ndarray | None, dict[int, int]], dict[str, str]]]:
        """(labels, documents, text, settings) of all that is asked."""
        windows = [label for label in labels if label != "legal_ttt"]
        if windows:
            yield windows, chosen.tolist(), self.in_their_windows(chosen.tolist()), {"TTT_ENABLED": "0"}
        if "legal_ttt" not in labels:
            return
        if not self.original.by_documents:
            # Only the first chunk has the weights of the artifact.
            chunk = self.original.length("TTT_CHUNK_TOKENS")
            inside = np.flatnonzero(self.original.begins[1:] <= chunk).tolist()
            if inside:
                ids, counts, place_of = self.side_by_side(range(inside[-1] + 1))
                yield ["legal_ttt"], inside, (ids, counts, place_of), {}
            return
        learned = [number for number in chosen.tolist() if self.learned(number)]
        plain = [number for number in chosen.tolist() if number not in learned]
        if learned:
            yield ["legal_ttt"], learned, self.side_by_side(learned), {"EVAL_STRIDE": "0"}
        if plain:
            modes = json.dumps({str(number): 0 for number in range(len(plain))})
            yield ["legal_ttt"], plain, self.side_by_side(plain), {"EVAL_STRIDE": "0", "modes": modes}

    def scored(
        self, labels: Sequence[str], chosen: np.ndarray
    ) -> Iterator[tuple[str, list[int], box.Run, dict[int, int]]]:
        """(label, documents, run, where each begins) of all that is scored again."""
        for of_these, numbers, (ids, counts, place_of), more in self.texts(labels, chosen):
            run = self.ask(ids, counts, **more)
            for label in of_these:
                yield label, numbers, run, place_of

    def other_endings(self, labels: Sequence[str], chosen: np.ndarray) -> Iterator[tuple[str, str]]:
        """Each document ends like another one from a random token on: no score before it moves."""
        begins = self.original.begins
        for of_these, numbers, (ids, counts, place_of), more in self.texts(labels, chosen):
            changed, changed_counts = ids.copy(), None if counts is None else counts.copy()
            places = {}
            for number in numbers:
                size = int(begins[number + 1] - begins[number])
                token = int(self.random.integers(1, max(2, size)))
                places[number] = token
                source = self.random.integers(0, len(self.original.tokens) - size + token)
                index = np.arange(source, source + size - token)
                keeps_no_start = self.original.tokens[index] != BOS_ID
                here = np.arange(place_of[number] + token, place_of[number] + size)[keeps_no_start]
                changed[here] = self.original.tokens[index][keeps_no_start]
                if changed_counts is not None and self.original.counts is not None:
                    changed_counts[here] = self.original.counts[index][keeps_no_start]
            first, second = self.ask(ids, counts, **more), self.ask(changed, changed_counts, **more)
            for label in of_these:
                for number, token in places.items():
                    at = place_of[number]
                    before = slice(at, at + token - 1)  # target i is token i + 1
                    moved = np.abs(second.nats[label][before] - first.nats[label][before]).max(initial=0.0)
                    if not moved <= same.BIT_BY_BIT:
                        raise Broken("future", f"{label}: another ending from token {token} of document {number} "
                                               f"on moves a score before it by {moved:.1e} nats")  # fmt: skip
                yield label, f"{len(places)} documents with another ending have the same scores before it"

    def probabilities(self, chosen: np.ndarray) -> Iterator[tuple[str, str]]:
        """Behind some beginnings of documents every piece in turn, each in a document of its own."""
        original = self.original
        if original.settings.get("DOC_MASK") == "0":
            return  # a document sees those before it
        pieces = original.pieces.vocab_size()
        spelled = spelled_bytes(original.pieces)
        # A run checks that its text is text, and ends at a window, so that no later document lies in two.
        ordinary = original.tokens[: int(original.begins[np.searchsorted(original.begins, CHECKED_IDS)])]
        ordinary = np.append(ordinary, np.full(-len(ordinary) % original.context, BOS_ID))
        more = {"COMPUTE_DTYPE": "float32"}  # in which a thousandth of a score shows
        if not original.by_documents:
            more["TTT_ENABLED"] = "0"
        totals: dict[str, list[float]] = {}
        for number in self.random.choice(chosen, len(PREFIXES)):
            begin = int(original.begins[number])
            length = int(self.random.choice(PREFIXES))
            prefix = np.append(BOS_ID, original.tokens[begin + 1 : begin + length])
            candidates = [np.append(prefix, piece) for piece in range(pieces) if piece != BOS_ID]
            ids = np.concatenate([ordinary, *candidates, prefix, [BOS_ID, UNKNOWN]])
            run = self.ask(ids, spelled[ids], **more)
            for label, nats in run.nats.items():
                each = np.exp(-nats[len(ordinary) + length - 1 :: length + 1][: len(candidates)])
                totals.setdefault(label, []).append(math.fsum(each) + math.exp(-nats[-2]))
        for label, found in totals.items():
            for total in found:
                same.sum_to_one({label: total}, f"{pieces} pieces", OF_A_VOCABULARY)
            yield label, f"at {len(found)} targets the probabilities of {pieces} pieces sum to one"
