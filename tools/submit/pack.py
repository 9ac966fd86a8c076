"""`pack RUN…`: make a record folder from finished runs of one program and one configuration, one per seed."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data import caseops, shards
from data.files import DataError, sha256_file, write_bytes
from tools import RECORDS, REPO
from tools.runs.conditions import conditions_of, data_of
from tools.runs.derive import (
    Evidence,
    compare_with,
    data_facts,
    hardware,
    is_limited,
    is_of_mixed_code,
    mapping,
    nested,
    proof_facts,
    submission,
    validation_set,
)
from tools.runs.errors import RecordError
from tools.runs.folder import (
    BASELINE_DIFF,
    CASEOPS,
    CONFIG,
    LOG_NAME,
    MANIFEST,
    NATS_NAME,
    PER_RUN_SETTINGS,
    PROOF,
    READABLE_SCRIPT,
    README,
    REQUIREMENTS,
    SCRIPT,
    SUBMISSION,
    SUMMARY_NAME,
    Folder,
    is_own,
    number,
    read_object,
    required_object,
)
from tools.runs.hardware import GPU_MODEL, compact
from tools.runs.rules import (
    ARTIFACT_BYTES_MAX,
    EVAL_SECONDS_MAX,
    OWN,
    RECORD_GPU,
    RECORD_TEXT,
    RECORD_TRACK,
    RECORD_WORLD_SIZE,
    TRAIN_SECONDS_MAX,
    VALIDATION_BYTES,
    VALIDATION_BYTES_TOLERANCE,
    is_record_gpu,
)
from tools.runs.runs import (
    FINISHED,
    LOG,
    SHIPPED,
    SUMMARY,
    Group,
    RunDirectory,
    load_group,
    seeds_of,
    settings_that_differ,
)
from tools.runs.settings import changed_settings
from tools.runs.source import changed_lines, decoded, parses, read_script, same_program, unified, unwrap
from tools.runs.techniques import attribution
from tools.runs.texts import different_texts
from tools.runs.writing import json_text, print_json, write_text
from tools.submit import readme

NAME = re.compile(r"[A-Za-z0-9._+-]+")
TRACK = re.compile(r"track_[A-Za-z0-9_]+")
UNLIKE_SETTINGS_MAX = 10  # that a refusal names
IMPORTED = ("torch", "numpy", "sentencepiece", "triton")  # by a shipped script
BUILD = re.compile(r"cpu|cu\d+")  # of torch, which has an index of its own: torch 2.13.0+cu128
TORCH_INDEX = "https://download.pytorch.org/whl/"
RANKING_PHASES = ("eval_legal_ttt", "eval_sliding_window", "eval_roundtrip")  # the first one of a run counts
SETTINGS_MAX = 60  # that a comparison lists
FLASH_WHEELS = "https://windreamer.github.io/flash-attention3-wheels/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories, one per seed")
    parser.add_argument("--name", required=True, help="name of the record: letters, digits and . _ + -")
    parser.add_argument("--track", help="track folder (default: named for hardware, time and size)")
    parser.add_argument(
        "--date", default=datetime.date.today().isoformat(), help="YYYY-MM-DD (default: today)"
    )
    parser.add_argument("--author", default="", help="author's name")
    parser.add_argument("--github-id", default="", help="author's GitHub id")
    parser.add_argument("--blurb", default="", help="one paragraph: what is new, and its gain")
    parser.add_argument("--baseline", type=Path, help="record folder to compare with and to diff against")
    parser.add_argument(
        "--with", nargs="+", type=Path, default=[], dest="also", metavar="FILE",
        help="more files for the record, such as the program that made its data",
    )
    parser.add_argument("--proof", type=Path, metavar="JSON", help="what `prove --json` printed")
    parser.add_argument(
        "--no-replay", action="store_true",
        help=f"pack for {RECORD_TRACK} without `prove --replay` of the runs, if their data is elsewhere",
    )
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of tracks (default: records)")
    parser.add_argument(
        "--wrap",
        action="store_true",
        help="ship a compressed script even if the run counted the readable one, as runs of 0.5 may have",
    )
    parser.add_argument("--json", action="store_true", help="print submission.json instead of a sentence")


def run(args: argparse.Namespace) -> int:
    _check_names(args)
    base = load_group(args.baseline) if args.baseline is not None else None
    runs = read_runs(args.runs)
    if base is not None:
        refuse_other_text(base, runs[0])
    track = args.track or track_with_reasons(runs[0])
    identity = {key: getattr(args, key) for key in ("author", "github_id", "name", "blurb", "date")}
    identity["track"] = track.removeprefix("track_")  # as the challenge's own folders have it
    missing = missing_options(identity)
    if track == RECORD_TRACK:
        _check_record(runs)
        if missing:
            raise RecordError(f"{RECORD_TRACK} needs {' '.join(missing)}: the challenge asks for it")
    identity["attribution"] = attribution(runs[0].config)
    proof = proof_of(args.proof, runs[0].script.sha256)
    if track == RECORD_TRACK and not args.no_replay:
        proof = {**(proof or {"sha256": runs[0].script.sha256}), "replays": replays_of(runs)}
    destination = _destination(args.records, track, f"{args.date}_{args.name}")
    code = code_to_ship(runs[0], args.wrap)
    with _staged(destination) as staging:
        packed = write_folder(staging, runs, code, identity, base, args.also, proof)
        over = over_cap(packed, runs, track)
        if over:
            raise RecordError(over)
    if args.json:
        print_json({"folder": str(destination), **packed})
        return 0
    print(f"{destination}: {packed['val_bpb']:.8f} bits per byte over {len(runs)} seed(s)")
    if missing:
        told = f"{', '.join(missing)} not given"
        print(f"note: {told}: a submission needs them. Pack again with them, under a new --name")
    if base is None:
        print("note: without --baseline, README.md does not say what is new")
    unsourced = readme.without_source(packed)
    if unsourced:
        print(f"note: README.md names no source for {', '.join(unsourced)}; it takes one from the table in "
              "docs/design.md")
    if track == RECORD_TRACK:
        print(f"say what is new below the end mark of {destination / README}: the challenge asks for it")
    if proof is None:
        print(not_proved(destination))
    return 0


def refuse_other_text(base: Group, directory: RunDirectory) -> None:
    """RecordError if the baseline's scores are of another text than those of the runs."""
    texts = different_texts(base.runs, load_group(directory.path).runs)
    if texts:
        raise RecordError(
            f"--baseline {base.name} scored another text than these runs ({texts}): name a baseline with "
            "their validation set, or leave it out"
        )


def read_runs(paths: Sequence[Path]) -> list[RunDirectory]:
    """The runs by their seeds. RecordError with every reason why they are no record."""
    progress = tqdm(paths, desc="reading runs", disable=not sys.stderr.isatty())
    runs = [RunDirectory(path) for path in progress]
    refusals = refuse(runs)
    if refusals:
        raise RecordError("refused:\n  - " + "\n  - ".join(refusals))
    return sorted(runs, key=lambda directory: directory.seed or 0)


def track_with_reasons(directory: RunDirectory) -> str:
    """The track that a run belongs to; prints why that is not the record track."""
    track = track_of(directory)
    for reason in no_record_because(directory):
        print(f"note: {track}, not {RECORD_TRACK}: {reason}", file=sys.stderr)
    return track


@contextlib.contextmanager
def _staged(destination: Path) -> Iterator[Path]:
    """A folder beside the destination that takes its place at the end, whole, unless there is an error."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=destination.parent, prefix=".pack_"))
    try:
        yield staging
        staging.chmod(0o755)
        staging.rename(destination)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def proof_of(path: Path | None, sha256: str) -> dict[str, Any] | None:
    """The report of `prove --json` on the source of this hash. RecordError where it is another's, or none."""
    if path is None:
        return None
    try:
        report = required_object(path)
    except RecordError as error:
        raise RecordError(f"--proof: {error}; python -m tools prove SCRIPT --json writes one") from error
    proof_facts(report, sha256)
    if report.get("status") != 0 or report.get("only"):
        raise RecordError(f"--proof {path}: {report.get('verdict')}; only a whole proof of status 0 counts")
    return report


def replays_of(runs: Sequence[RunDirectory]) -> list[dict[str, Any]]:
    """What `prove --replay` says of each run. RecordError for one that is refuted or cannot be replayed."""
    from tools.audit.replay import replayed

    found = []
    for directory in runs:
        print(f"replay of {directory.path}", file=sys.stderr)
        verdict = replayed(directory.path, None, None, lambda line: print(line, file=sys.stderr))
        if verdict.status:
            raise RecordError(f"{directory.path}: {verdict}; --no-replay packs it without")
        found.append(verdict.as_json())
    return found


def missing_options(identity: dict[str, Any]) -> list[str]:
    """The options for what the challenge asks of a submission and was not given."""
    return [f"--{key.replace('_', '-')}" for key in RECORD_TEXT if not identity[key]]


def not_proved(folder: Path) -> str:
    """That packing proves nothing, and the command that would."""
    script = shlex.quote(str(Folder(folder).readable or folder / SCRIPT))
    settings = shlex.quote(str(folder / CONFIG))
    return f"not yet proven legal by experiment: python -m tools prove {script} --config {settings}"


def _check_names(args: argparse.Namespace) -> None:
    if not NAME.fullmatch(args.name):
        raise RecordError(f"--name {args.name!r}: use letters, digits and . _ + - only")
    if args.track is not None and not TRACK.fullmatch(args.track):
        raise RecordError(
            f"--track {args.track!r}: expected track_ and letters, digits or _: a folder in --records"
        )
    try:
        datetime.date.fromisoformat(args.date)
    except ValueError as error:
        raise RecordError(f"--date {args.date!r}: expected YYYY-MM-DD") from error


def _destination(records: Path, track: str, name: str) -> Path:
    """The folder to write, new and inside `records`."""
    destination = records / track / name
    if not destination.parent.resolve().is_relative_to(records.resolve()):
        raise RecordError(f"{destination.parent} is a link that leaves {records}: choose another --track")
    if destination.exists():
        raise RecordError(
            f"{destination} exists and is never overwritten: choose another --name or remove it"
        )
    return destination


def track_of(directory: RunDirectory) -> str:
    """The track that a run belongs to by its configuration: hardware, training time, limit of the artifact.

    A run that keeps the record track's rules belongs there; of another, these three make the name, such as
    `track_cpu_60s_450kb`.
    """
    if not no_record_because(directory):
        return RECORD_TRACK
    gpus = nested(directory.summary, "hardware", "gpus")
    world = nested(directory.summary, "hardware", "world_size") or 1
    parts = ["track", "cpu"]
    if isinstance(gpus, list) and gpus:
        model = GPU_MODEL.search(str(gpus[0]))
        parts[1] = f"{world}x{compact(model[2]).lower() if model else 'gpu'}"
    seconds = _setting(directory, "MAX_WALLCLOCK_SECONDS")
    if seconds:
        parts.append(f"{seconds / 60:.0f}min" if seconds >= 120 and seconds % 60 == 0 else f"{seconds:.0f}s")
    cap = _setting(directory, "ARTIFACT_BYTES_MAX")
    if cap:
        parts.append(f"{cap / 1e6:.0f}mb" if cap % 1_000_000 == 0 else f"{cap / 1e3:.0f}kb")
    return "_".join(parts)


def _setting(directory: RunDirectory, name: str) -> float | None:
    """A number of the run's configuration; None where it has none."""
    try:
        return float(directory.config.get(name, ""))
    except ValueError:
        return None


def no_record_because(directory: RunDirectory) -> list[str]:
    """The reasons that keep a run out of the record track; empty for a run by its rules."""
    reasons = []
    world = nested(directory.summary, "hardware", "world_size")
    gpus = nested(directory.summary, "hardware", "gpus")
    known = isinstance(gpus, list) and bool(gpus) and all(is_record_gpu(str(gpu)) for gpu in gpus)
    if world != RECORD_WORLD_SIZE or not known:
        machine = hardware(directory.summary, directory.log)
        reasons.append(f"it ran on {machine}, not on {RECORD_WORLD_SIZE} x {RECORD_GPU}")
    seconds = _setting(directory, "MAX_WALLCLOCK_SECONDS")
    if seconds is None or not 0 < seconds <= TRAIN_SECONDS_MAX:
        shown = "no limit" if not seconds else f"{seconds:g}"
        reasons.append(f"MAX_WALLCLOCK_SECONDS is {shown}; expected at most {TRAIN_SECONDS_MAX:g}")
    reasons += _clocks_exceeded(directory.summary)
    if validation_set(directory.summary, directory.log) == OWN:
        reasons.append("it was scored on your own validation set, not on the challenge's")
    text_bytes = nested(directory.summary, "data", "val_bytes")
    if isinstance(text_bytes, int) and abs(text_bytes / VALIDATION_BYTES - 1) > VALIDATION_BYTES_TOLERANCE:
        reasons.append(
            f"it was scored on {text_bytes:,} bytes, but the challenge's text has {VALIDATION_BYTES:,}"
        )
    return reasons


def _clocks_exceeded(summary: dict[str, Any]) -> list[str]:
    """The clocks of the challenge that a run exceeded as measured, whatever limits it had set itself.

    Of evaluation the score that ranks counts, as in public records.
    """
    phases = mapping(summary, "phases")
    ranking = next((name for name in RANKING_PHASES if name in phases), "")
    evaluation = number(phases.get(ranking)) or 0.0
    reasons = []
    training = number(summary.get("train_seconds")) or 0.0
    if training > TRAIN_SECONDS_MAX:
        reasons.append(f"it trained for {training:.2f} s; the limit is {TRAIN_SECONDS_MAX:g} s")
    if evaluation > EVAL_SECONDS_MAX:
        reasons.append(f"it evaluated for {evaluation:.2f} s; the limit is {EVAL_SECONDS_MAX:g} s")
    return reasons


def _check_record(runs: Sequence[RunDirectory]) -> None:
    reasons = [f"{directory.path}: {reason}" for directory in runs for reason in no_record_because(directory)]
    if reasons:
        raise RecordError(
            f"these runs do not qualify for {RECORD_TRACK}:\n  - "
            + "\n  - ".join(reasons)
            + f"\nleave --track out ({track_of(runs[0])}), or name another one"
        )


def refuse(runs: Sequence[RunDirectory]) -> list[str]:
    """Why these runs are not a record; empty when they are. Every reason is listed, not only the first."""
    reasons = []
    trained = []
    for directory in runs:
        try:
            if nested(directory.summary, "config", "EVAL_ONLY"):
                reasons.append(f"{directory.path} scored an artifact with EVAL_ONLY: leave it out")
                continue
            reasons += _refuse_one(directory)
            trained.append(directory)
        except RecordError as error:
            reasons.append(str(error))
    if trained:
        reasons += _refuse_together(trained)
    return reasons


def _refuse_together(runs: Sequence[RunDirectory]) -> list[str]:
    """Why these runs are not the seeds of one record."""
    reasons = []
    seeds = [directory.seed for directory in runs]
    reasons += [
        f"seed {seed} comes more than once: pass one run per seed" for seed in sorted(_repeated(seeds))
    ]
    first = runs[0]
    others = [str(other.path) for other in runs if other.script.sha256 != first.script.sha256]
    if others:
        reasons.append(f"{', '.join(others)} ran different code from {first.path}: a record has one script")
    return reasons + unlike_settings(runs) + unlike_places(runs)


def unlike_settings(runs: Sequence[RunDirectory]) -> list[str]:
    """One line for each setting that the runs do not share: its values, each with its runs."""
    lines = []
    for name in sorted({name for directory in runs for name in directory.config} - PER_RUN_SETTINGS):
        lines += unlike(name, [(directory.config.get(name, "unset"), directory) for directory in runs])
    if len(lines) > UNLIKE_SETTINGS_MAX:
        more = len(lines) - UNLIKE_SETTINGS_MAX
        lines[UNLIKE_SETTINGS_MAX:] = [f"{more} more settings differ: these are runs of several records"]
    return lines


def unlike_places(runs: Sequence[RunDirectory]) -> list[str]:
    """The same for where they ran and what they read, as far as their summaries say.

    A record has one hardware, one requirements.txt, and one set of data. The number of threads may differ: on
    GPUs it changes nothing.
    """
    lines = []
    for kind, read in (("{}", conditions_of), ("the hash of the {}", data_of)):
        found = [(read(directory.summary), directory) for directory in runs]
        names = dict.fromkeys(name for said, _ in found for name in said if name != "threads")
        for name in names:
            lines += unlike(kind.format(name), [(said[name], run) for said, run in found if name in said])
    return lines


def unlike(name: str, values: Sequence[tuple[str, RunDirectory]]) -> list[str]:
    """The values of something, each with its runs, in one line; none where there is one value."""
    runs_by_value: dict[str, list[str]] = {}
    for value, directory in values:
        runs_by_value.setdefault(value, []).append(str(directory.path))
    if len(runs_by_value) < 2:
        return []
    places = [f"{value} in {', '.join(paths)}" for value, paths in runs_by_value.items()]
    return [f"{name} is {'; '.join(places)}"]


def _repeated(values: Sequence[int | None]) -> set[int]:
    return {value for value in values if value is not None and values.count(value) > 1}


def _refuse_one(directory: RunDirectory) -> list[str]:
    summary = directory.summary
    reasons = []
    if directory.log.unread:
        reasons.append(f"{directory.path / LOG} is too long to be audited: {directory.log.unread}")
    if summary.get("exit") != FINISHED:
        reasons.append(f"{directory.path} did not finish: exit is {summary.get('exit')!r}")
    if directory.log.headline is None or directory.log.model_bytes is None:
        reasons.append(f"{directory.path / LOG} has no final metric or no model bytes")
    if directory.seed is None:
        reasons.append(f"{directory.path} names no seed")
    if directory.log.seed is not None and directory.log.seed != directory.seed:
        reasons.append(
            f"{directory.path / LOG} says seed {directory.log.seed}, but {SUMMARY} says {directory.seed}"
        )
    recorded = str(nested(summary, "code", "sha256") or "")
    if is_of_mixed_code(summary):
        reasons.append(f"{directory.path} was continued with different code: train that seed again")
    elif recorded and recorded != directory.script.sha256:
        reasons.append(f"{directory.path / SCRIPT} is not the code that ran: sha256 differs from {SUMMARY}")
    ran = mapping(summary, "config")
    for key in settings_that_differ(directory.config, ran) if ran else ():
        reasons.append(
            f"{directory.path / CONFIG} says {key}={directory.config.get(key, 'nothing')}, but the run ended "
            f"with {ran.get(key, 'no such setting')}: it was resumed with another setting, or the file edited"
        )
    counted, audited = nested(summary, "data", "val_bytes"), nested(summary, "data", "audited_bytes")
    if audited not in (None, counted) and not is_limited(summary):
        reasons.append(
            f"{directory.path} counted {counted!r} bytes of text, but its data holds {audited!r}:"
            " its bits per byte are wrong"
        )
    if summary.get("comparable") is False:
        reasons.append(
            f"{directory.path} is marked not comparable: validation was limited or another text was scored"
        )
    return reasons


@dataclass(frozen=True)
class ShippedCode:
    """The script of the folder: `train_gpt.py`'s bytes, and the readable source next to it when wrapped."""

    script: bytes
    readable: bytes | None


def code_to_ship(directory: RunDirectory, wrapped: bool) -> ShippedCode:
    """The form that the run counted, or a wrapped one; a wrapped script is proved to be the same program."""
    source = directory.script.raw
    counted = directory.path / SHIPPED
    shipped = counted.read_bytes() if is_own(counted) else source
    if wrapped and shipped == source:
        from tools.runs.script import shipped_code  # loads torch, which nothing else here needs

        shipped = shipped_code(source).replace(b"SHIPPED_SETTINGS={}\n", b"")  # older ones read none
    if shipped == source:
        return ShippedCode(source, None)
    inner = unwrap(decoded(shipped))
    if inner is not None and not parses(inner):
        made_by = nested(directory.summary, "versions", "python")
        raise RecordError(
            f"{counted} is not a program for Python {platform.python_version()}: scripts until November 22,"
            f" 2026, wrote what only the Python of the run reads; pack with that one ({made_by})"
        )
    if inner is None or not same_program(inner, directory.script.text):
        raise RecordError(f"{counted} is not the program in {SCRIPT}: do not change files of a run directory")
    return ShippedCode(shipped, source)


def write_folder(
    folder: Path,
    runs: Sequence[RunDirectory],
    code: ShippedCode,
    identity: dict[str, Any],
    base: Group | None,
    also: Sequence[Path] = (),
    proof: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write every file of the record into `folder`, those of `also` too; returns submission.json's object.

    proof: of `proof_of`.
    """
    seeds = {int(directory.seed): directory for directory in runs if directory.seed is not None}
    for seed, directory in seeds.items():
        shutil.copyfile(directory.path / LOG, folder / LOG_NAME.format(seed=seed))
        shutil.copyfile(directory.path / SUMMARY, folder / SUMMARY_NAME.format(seed=seed))
        for nats in directory.path.glob(NATS_NAME.format(label="*")):  # what `prove --replay` compares
            if not is_own(nats):
                raise RecordError(f"{nats} is a link that leaves the run directory; put the file there")
            shutil.copyfile(nats, folder / f"{nats.stem}_seed{seed}{nats.suffix}")
    write_bytes(folder / SCRIPT, code.script)
    if code.readable is not None:
        write_bytes(folder / READABLE_SCRIPT, code.readable)
    kept = [line for line in runs[0].config_lines if line.split("=", 1)[0] not in PER_RUN_SETTINGS]
    write_text(folder / CONFIG, "\n".join(kept) + "\n")
    write_text(folder / REQUIREMENTS, requirements(runs[0].summary, runs[0].log.attention))
    if proof is not None:
        write_text(folder / PROOF, json_text(proof))
    diff = baseline_diff(base, runs[0]) if base is not None else None
    if diff:
        write_text(folder / BASELINE_DIFF, diff)
    case_marks = copy_data_sources(folder, runs[0])
    copy_more(folder, also)
    files = {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
    evidences = [
        Evidence(seed, directory.log, directory.summary) for seed, directory in sorted(seeds.items())
    ]
    facts = data_facts(runs[0].summary, read_object(folder / MANIFEST), case_marks)
    proved = proof_facts(proof, runs[0].script.sha256)
    packed = submission(identity, evidences, len(code.script), files, None, facts, proof=proved)
    if base is not None:
        packed["comparison"] = compare_with(
            base.name, packed["seed_results"], base.scores("bpb"), base.scores("loss"), seeds_of(base.runs)
        )
        packed["comparison"]["settings"] = settings_against(base, runs[0])
        packed["comparison"]["source_lines"] = list(changed_lines(diff)) if diff is not None else None
    write_text(folder / SUBMISSION, json_text(packed))
    summaries = {evidence.seed: evidence.summary for evidence in evidences}
    baked = read_script(folder / SCRIPT).shipped_settings is not None
    write_text(folder / README, readme.render(packed, summaries, code.readable is not None, baked))
    return packed


def copy_more(folder: Path, paths: Sequence[Path]) -> None:
    """Copy files into `folder`. RecordError for one that is missing, or whose name the record has already."""
    for path in paths:
        if not path.is_file():
            raise RecordError(f"--with {path}: no such file")
        if (folder / path.name).exists() or path.name in (README, SUBMISSION):
            raise RecordError(f"--with {path}: the record has a {path.name} of its own; rename the file")
        shutil.copyfile(path, folder / path.name)


def copy_data_sources(folder: Path, directory: RunDirectory) -> bool:
    """Copy into `folder` what says how the run's bytes are counted; whether the tokenizer has case marks.

    The manifest of the shards, where it is still the one of the run; and of a text with case marks (CaseOps)
    the tokenizer and the transform, since the challenge asks of such a change that its bits per byte can be
    proved. RecordError where that tokenizer is not here.
    """
    hashes = mapping(directory.summary, "data", "hashes")
    manifest = find(directory.config.get("DATA_PATH", "")) / MANIFEST
    if manifest.is_file() and sha256_file(manifest) == hashes.get("manifest"):
        shutil.copyfile(manifest, folder / MANIFEST)
    name = directory.config.get("TOKENIZER_PATH", "")
    tokenizer = find(name)
    if not tokenizer.is_file() or sha256_file(tokenizer) != hashes.get("tokenizer"):
        if "caseops" in name.lower():
            raise RecordError(
                f"TOKENIZER_PATH={name}: not the file that the run had, sha256 {hashes.get('tokenizer')}; a"
                " record on CaseOps data holds its tokenizer: fetch it (python data/fineweb.py --variant"
                " caseops --train-shards 1), or pack where the run was made"
            )
        return False
    try:
        pieces = shards.load_tokenizer(tokenizer)
    except DataError as error:
        raise RecordError(str(error)) from error
    if caseops.form_of(pieces) is None:
        return False
    shutil.copyfile(tokenizer, folder / tokenizer.name)
    shutil.copyfile(Path(caseops.__file__), folder / CASEOPS)
    return True


def find(path: str) -> Path:
    """A path of a run's settings: as given, else in this repository."""
    given = Path(path).expanduser()
    return given if given.exists() else REPO / given


def of_one_family(base: Group, directory: RunDirectory) -> bool:
    """Whether most lines of the baseline's script are in the run's: only then a diff says what is new."""
    if base.script is None:
        return False
    theirs = Counter(base.script.text.splitlines())
    kept = theirs & Counter(directory.script.text.splitlines())
    return 2 * kept.total() > theirs.total()


def settings_against(base: Group, directory: RunDirectory) -> list[list[str]]:
    """Settings that differ from a baseline: name, its value, the run's; the first ones."""
    from tools.runs.script import Config  # loads torch, which nothing else here needs

    theirs, ours = (
        {name: value for name, value in config.items() if name not in PER_RUN_SETTINGS}
        for config in (base.config, directory.config)
    )
    changed = changed_settings(theirs, ours, Config().as_env())
    return [list(row) for row in changed[:SETTINGS_MAX]]


def baseline_diff(base: Group, directory: RunDirectory) -> str | None:
    """The change of the source, empty where there is none; None for scripts of two families."""
    if base.script is None or not of_one_family(base, directory):
        return None
    return unified(base.script, directory.script, base.name, "this record")


def requirements(summary: dict[str, Any], attention: Sequence[str]) -> str:
    """requirements.txt: what the script imports, in the versions that the run recorded.

    A package of which nothing was recorded is named without a version; one that the run recorded as missing
    is left out. attention: the kernels that the run chose.
    """
    versions = mapping(summary, "versions")
    release, _, build = str(versions.get("torch", "")).partition("+")
    lines = []
    if BUILD.fullmatch(build):
        lines.append(f"--extra-index-url {TORCH_INDEX}{build}")
    for name in IMPORTED:
        if name in versions and not versions[name]:
            continue
        version = str(versions.get(name) or "")
        if name == "torch" and not BUILD.fullmatch(build):
            version = release  # an own build: no index has it
        lines.append(f"{name}=={version}" if version else name)
    if "fa3" in attention:
        lines.append(f"--find-links {FLASH_WHEELS}{build}_torch{release.replace('.', '')}/")
        lines.append("flash_attn_3")
    return "\n".join(lines) + "\n"


def over_cap(packed: dict[str, Any], runs: Sequence[RunDirectory], track: str) -> str | None:
    """The refusal when shipped code plus the largest model exceeds the run's cap, or the challenge's."""
    configured = runs[0].config.get("ARTIFACT_BYTES_MAX", "")
    cap = int(configured) if configured.isdecimal() and track != RECORD_TRACK else ARTIFACT_BYTES_MAX
    total = packed["bytes_total"]
    if total <= cap:
        return None
    return (
        f"total {total:,} bytes is {total - cap:,} over the cap of {cap:,} (code as shipped"
        f" {packed['bytes_code']:,}): lower the artifact's target, or ship a wrapped script with --wrap"
    )
