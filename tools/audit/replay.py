"""`prove --replay RUN`: documents of a real run are scored again, at its own width, from data that we read.

A run leaves the nats of each document. Its own script and artifact score some of them again in a sandbox, on
a CPU. Which ones is drawn at random when the replay begins. Their loss must be what the run reports. Then
each gets another ending after a random token, and every score before it must stay the same, bit by bit. At a
few targets, the probabilities of the whole vocabulary must sum to one. So a cheat that sleeps in small worlds
is caught where it is awake, and one that is awake only in the run itself shows up as a difference.
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
from typing import Any, NamedTuple

import numpy as np
import sentencepiece

from data import shards
from data.files import sha256_file
from data.shards import BOS_ID
from tools.audit import box
from tools.audit import equalities as same
from tools.audit.broken import Broken, NotChecked
from tools.audit.settings import ON_CPU, PRIVATE
from tools.audit.verdict import Verdict
from tools.audit.worlds import UNKNOWN, decoded_bytes, spelled_bytes, write
from tools.runs.errors import RecordError
from tools.runs.runs import ARTIFACT, RunDirectory, settings_of, settings_sha256
from tools.runs.source import same_program, unwrap

MODES = "eval_modes.json"
LEARNING = "legal_ttt"  # the label of test-time training
AMPLE_SECONDS = "1000000000"  # with a limit, what is noted about learning is followed
DOCUMENTS = 8  # of a run in fp32
TOKENS = 20_000  # of a run in another precision: its rounding is seen in one document, a flattery in the mean
SAME_MACHINE = 1e-6  # nats per target, in fp32
# Nats per target, of a run in bfloat16: of the mean, plus four standard errors, and of one document.
MEAN, OF_A_DOCUMENT = 1e-4, 1e-2
VISIBLE = 1e-3  # where the mean may be further off than this, a thousandth of a score could hide
OF_A_VOCABULARY = 1e-4  # of a sum of probabilities
TOKENS_AT_ONCE = 8192  # that learn side by side in a replay: of a large model they take gigabytes
PREFIXES = (1, 3, 7)  # tokens before a target at which all pieces are tried; one more divides a window
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

    def ends_of(self, number: int) -> tuple[int, int]:
        """The first target of a document, and the first after it."""
        return int(self.begins[number]), int(self.begins[number + 1])

    @property
    def documents_at_once(self) -> int:
        """Documents of full length that learned side by side; shorter ones may have been more."""
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
            raise RecordError(f"{folder}: no {name} of its own; --replay takes a whole run directory")
    seed = secrets.randbits(48) if seed is None else seed
    settings = settings_of(run.path / "config.env")
    verdict = Verdict({
        "replay": run.path.name, "sha256": sha256_file(run.path / "train_gpt.py"),
        "artifact_sha256": sha256_file(run.path / ARTIFACT), "settings_sha256": settings_sha256(settings),
        "seed": seed,
    })
    say(f"  documents drawn with seed {seed}")
    with tempfile.TemporaryDirectory(prefix="replay_") as scratch:
        place = Path(scratch).resolve()
        (place / "given").mkdir()
        for name in (ARTIFACT, "train_gpt.py"):
            shutil.copy(run.path / name, place / "given")
        given, script = place / "given", place / "given" / "train_gpt.py"
        with verdict.judging():
            dtype = str(run.summary["hardware"]["dtype"]).removeprefix("torch.")
            original = read_original(run.path, settings, dtype)
            with box.opened(script, place / "runs", [given], processors()) as opened:
                verdict.walls = opened.walls
                say(f"  walls: {opened.walls}")
                again = Again(original, opened, given, np.random.default_rng(seed))
                for name, text in experiments(run, original, again, documents):
                    verdict.note(name, text)
                    say(f"  pass {name}: {text}")
                opened.check_it_stayed_inside()
    return verdict


def processors() -> int:
    """As many as there are for us."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_original(folder: Path, settings: dict[str, str], dtype: str) -> Original:
    """The data of a run. Whatever config.env names, only shards and a SentencePiece model are read."""
    data, tokenizer = (
        Path(os.environ.get(name) or settings.get(name, "")).expanduser()
        for name in ("DATA_PATH", "TOKENIZER_PATH")
    )
    files = sorted(data.glob("fineweb_val_[0-9]*.bin"))
    try:
        tokens = np.concatenate([shards.read_shard(path) for path in files])
        sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    except (OSError, ValueError, RuntimeError, shards.DataError) as error:
        places = f"DATA_PATH={data} TOKENIZER_PATH={tokenizer}"
        raise NotChecked(f"{places}: {error}; name the data of the run in these variables") from error
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
            wanted = len(order)  # all: then the same are batched together, and rounding is the same
    chosen = np.sort(order[:wanted])
    for question in again.questions(labels, chosen.tolist()):
        yield from again.answers(question, exact)
    yield from again.probabilities(chosen)


def figures(run: RunDirectory, original: Original) -> str:
    """The figures of log and summary are the sums of the documents, over the bytes that we count."""
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
                raise Broken("counts", f"{label}: says {said}, but documents and text give {right}")
    return f"log and summary are the sums of {len(original.begins) - 1} documents over {count} bytes"


def same_files(run: RunDirectory) -> str:
    """Artifact and script are those of the summary, and what is shipped is the same program."""
    summary = run.summary
    noted = {ARTIFACT: summary["artifact"]["sha256"], "train_gpt.py": summary["code"]["sha256"]}
    for name, sha256 in noted.items():
        if sha256_file(run.path / name) != sha256:
            raise Broken("program", f"{name} is not the file of the run: summary.json has another SHA-256")
    shipped = (run.path / "train_gpt.shipped.py").read_bytes().decode("latin-1")
    if not same_program(unwrap(shipped) or shipped, (run.path / "train_gpt.py").read_text(encoding="utf-8")):
        raise Broken("program", "the shipped script is not the same program as its source")
    return "artifact and script are the run's own; the shipped script is the same program"


class Text(NamedTuple):
    """Documents of the run: ids, the bytes of each if there is a sidecar, and the first target of each."""

    ids: np.ndarray
    counts: np.ndarray | None
    place_of: dict[int, int]  # by the number of the document


class Question(NamedTuple):
    """What is asked of a text, and which documents of it count. modes: where a score learned, if noted."""

    labels: list[str]
    documents: list[int]
    text: Text
    settings: dict[str, str]
    modes: str = ""


@dataclass
class Again:
    """Scores texts that are made of a run's own, by its artifact."""

    original: Original
    opened: box.Box
    given: Path  # what the box may read
    random: np.random.Generator
    asked: int = 0

    def ask(
        self, ids: np.ndarray, counts: np.ndarray | None, more: Mapping[str, str], modes: str = ""
    ) -> box.Run:
        """The artifact's scores of a text."""
        original = self.original
        self.asked += 1
        folder = self.given / f"q{self.asked}"
        world = write(folder, ids, original.tokenizer.read_bytes(), (), counts)
        os.link(self.given / ARTIFACT, folder / ARTIFACT)
        if modes:
            (folder / MODES).write_text(modes)
        rows = min(original.documents_at_once, max(2, TOKENS_AT_ONCE // original.context))
        settings = {name: value for name, value in original.settings.items() if name not in PRIVATE} | {
            **ON_CPU, "COMPUTE_DTYPE": original.dtype, "VAL_BATCH_SIZE": str(16 * original.context),
            "TTT_BATCH_SIZE": str(rows), "MAX_EVAL_SECONDS": AMPLE_SECONDS if modes else "0",
            "EVAL_ONLY": str(folder / ARTIFACT), **more,
        }
        run = self.opened.run(settings, folder, world.tokens)
        same.ended(run)
        return run

    def learned(self, number: int) -> bool:
        """Whether the run learned from a document: it has noted that of the first one of each batch."""
        path = self.original.folder / MODES
        if not path.is_file():
            return True
        noted = json.loads(path.read_text())
        longest_first = np.argsort(-np.diff(self.original.begins), kind="stable")
        place = int(np.flatnonzero(longest_first == number)[0])
        first_of_batch = [str(one) for one in longest_first[: place + 1] if str(one) in noted]
        return bool(noted[first_of_batch[-1]]) if first_of_batch else True

    def side_by_side(self, numbers: Sequence[int]) -> Text:
        """Documents one after the other."""
        original = self.original
        parts, place_of, at = [], {}, 0
        for number in sorted(numbers):
            begin, end = original.ends_of(number)
            place_of[number] = at
            parts.append(np.arange(begin, end))
            at += end - begin
        last = int(original.begins[max(numbers) + 1])  # the BOS after the last one, or the last token of all
        index = np.append(np.concatenate(parts), last)
        counts = original.counts
        return Text(original.tokens[index], None if counts is None else counts[index], place_of)

    def in_their_windows(self, numbers: Sequence[int]) -> Text:
        """Documents with what comes before them: each has the windows that it had in the whole text."""
        original = self.original
        parts, place_of, at = [], {}, 0
        step = math.lcm(original.context, original.length("EVAL_STRIDE") or original.context)
        for number in sorted(numbers):
            begin, end = original.ends_of(number)
            first = max(0, (begin - original.context) // step * step)
            place_of[number] = at + begin - first
            index = np.full(math.ceil((end + 1 - first) / step) * step, -1)  # -1: a BOS
            index[: end + 1 - first] = np.arange(first, end + 1)
            if first > 0:
                index[0] = -1  # a text begins with one; no score that is compared reads this token
            parts.append(index)
            at += len(index)
        index = np.append(np.concatenate(parts), -1)
        counts = original.counts
        return Text(np.where(index < 0, BOS_ID, original.tokens[index]),
                    None if counts is None else np.where(index < 0, 0, counts[index]), place_of)

    def questions(self, labels: Sequence[str], chosen: list[int]) -> Iterator[Question]:
        """All that is asked of the documents that were chosen."""
        windows = [label for label in labels if label != LEARNING]
        if windows:
            yield Question(windows, chosen, self.in_their_windows(chosen), {"TTT_ENABLED": "0"})
        if LEARNING not in labels:
            return
        if not self.original.by_documents:
            # Only the first chunk has the weights of the artifact.
            chunk = self.original.length("TTT_CHUNK_TOKENS")
            inside = np.flatnonzero(self.original.begins[1:] <= chunk).tolist()
            if inside:
                yield Question([LEARNING], inside, self.side_by_side(inside), {})
            return
        alone = {"EVAL_STRIDE": "0"}
        learned = [number for number in chosen if self.learned(number)]
        if learned:
            yield Question([LEARNING], learned, self.side_by_side(learned), alone)
        plain = [number for number in chosen if number not in learned]
        if plain:
            modes = json.dumps({str(number): 0 for number in range(len(plain))})
            yield Question([LEARNING], plain, self.side_by_side(plain), alone, modes)

    def answers(self, question: Question, exact: bool) -> Iterator[tuple[str, str]]:
        """The documents cost what the run says, and other endings move no score before them."""
        text = question.text
        first = self.ask(text.ids, text.counts, question.settings, question.modes)
        for label in question.labels:
            yield "replay", self.compared(question, first.nats[label], label, exact)
        changed, places = self.with_other_endings(question)
        second = self.ask(changed.ids, changed.counts, question.settings, question.modes)
        for label in question.labels:
            for number, token in places.items():
                at = text.place_of[number]
                before = slice(at, at + token - 1)  # target i is token i + 1
                moved = np.abs(second.nats[label][before] - first.nats[label][before]).max(initial=0.0)
                if not moved <= same.BIT_BY_BIT:
                    ending = f"another ending of document {number} from its token {token} on"
                    raise Broken("future", f"{label}: {ending} changes an earlier score by {moved:.1e} nats")
            yield "endings", f"{label}: in {len(places)} documents, other endings change no earlier score"

    def compared(self, question: Question, nats: np.ndarray, label: str, exact: bool) -> str:
        """The documents cost what the run says they cost. exact: its rounding is ours."""
        original = self.original
        sizes = np.diff(original.begins)[question.documents]
        apart = np.zeros(len(sizes))
        for i, (number, size) in enumerate(zip(question.documents, sizes, strict=True)):
            at = question.text.place_of[number]
            apart[i] = math.fsum(nats[at : at + size]) - original.nats(label)[number]
        each = np.abs(apart) / sizes
        limit = SAME_MACHINE if exact else OF_A_DOCUMENT
        if not each.max() <= limit:
            worst = question.documents[int(each.argmax())]
            raise Broken("replay", f"{label}: document {worst} differs by {each.max():.1e} nats per target, "
                                   f"expected at most {limit:.0e}")
        mean = apart.sum() / sizes.sum()
        found = (f"{label}: {len(sizes)} documents of {sizes.sum()} targets scored again: the largest "
                 f"difference is {each.max():.1e} nats per target, the mean {abs(mean):.1e}")
        if exact:
            return found
        if sizes.sum() < TOKENS and len(sizes) < len(original.begins) - 1:
            return f"{found}: too few targets to judge the mean"
        noise = math.sqrt(((apart - mean * sizes) ** 2).sum()) / sizes.sum()
        limit = MEAN + 4 * noise
        if not abs(mean) <= limit:
            raise Broken("replay", f"{found}; expected at most {limit:.1e}")
        if limit > VISIBLE:
            raise NotChecked(f"{found}: rounding could hide {limit:.1e} nats; ask for more --documents")
        return f"{found}, at most {limit:.1e} expected"

    def with_other_endings(self, question: Question) -> tuple[Text, dict[int, int]]:
        """The text whose documents end like others, each from a random token on; and these tokens."""
        original, text = self.original, question.text
        ids = text.ids.copy()
        counts = None if text.counts is None else text.counts.copy()
        places = {}
        for number in question.documents:
            begin, end = original.ends_of(number)
            places[number] = token = int(self.random.integers(1, max(2, end - begin)))
            source = int(self.random.integers(0, len(original.tokens) - (end - begin) + token))
            index = np.arange(source, source + end - begin - token)
            index = np.where(original.tokens[index] == BOS_ID, begin + token, index)  # no new document
            here = slice(text.place_of[number] + token, text.place_of[number] + end - begin)
            ids[here] = original.tokens[index]
            if counts is not None and original.counts is not None:
                counts[here] = original.counts[index]
        return Text(ids, counts, text.place_of), places

    def probabilities(self, chosen: np.ndarray) -> Iterator[tuple[str, str]]:
        """After some beginnings of documents every piece in turn, each in a document of its own."""
        original = self.original
        if original.settings.get("DOC_MASK") == "0":
            return  # a document sees those before it
        pieces = original.pieces.vocab_size()
        spelled = spelled_bytes(original.pieces)
        # A run checks that its text is text, and ends at a window, so that no later document is in two.
        ordinary = original.tokens[: int(original.begins[np.searchsorted(original.begins, CHECKED_IDS)])]
        ordinary = np.append(ordinary, np.full(-len(ordinary) % original.context, BOS_ID))
        more = {"COMPUTE_DTYPE": "float32"}  # in which a thousandth of a score shows
        if not original.by_documents:
            more["TTT_ENABLED"] = "0"
        totals: dict[str, list[float]] = {}
        for number in self.random.choice(chosen, len(PREFIXES)):
            begin, _ = original.ends_of(number)
            length = int(self.random.choice(PREFIXES))
            prefix = np.append(BOS_ID, original.tokens[begin + 1 : begin + length])
            candidates = [np.append(prefix, piece) for piece in range(pieces) if piece != BOS_ID]
            ids = np.concatenate([ordinary, *candidates, prefix, [BOS_ID, UNKNOWN]])
            run = self.ask(ids, spelled[ids], more)
            for label, nats in run.nats.items():
                each = np.exp(-nats[len(ordinary) + length - 1 :: length + 1][: len(candidates)])
                totals.setdefault(label, []).append(math.fsum(each) + math.exp(-nats[-2]))
        for label, found in totals.items():
            for total in found:
                same.sum_to_one({label: total}, f"{pieces} pieces", OF_A_VOCABULARY)
            yield "sums", f"{label}: at {len(found)} targets, the probabilities of {pieces} pieces sum to one"
