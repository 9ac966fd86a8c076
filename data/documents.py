"""Documents in files: where each begins, so that processes which share a file agree on their numbers.

`*.jsonl` and `*.json` hold one JSON object per line; any other file is plain UTF-8 text in which a line of
nothing but the separator ends a document. Documents are numbered from 0 over all files in the order given.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data.files import DataError, explain_os_error

CHUNK_BYTES = 2 << 20
MAX_DOCUMENT_BYTES = 256 << 20
JSON_SUFFIXES = (".jsonl", ".json")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# What a file that is not UTF-8 text begins with, what it is, and how it becomes text.
UNPACK = "unpack it first: "
CONVERT = "convert it first: iconv -f {code} -t UTF-8 {file} > {text}"
NO_TEXT = (
    (rb"\x1f\x8b", "gzip", UNPACK + "gunzip -k {file}"),
    (rb"\x1f\x9d", "compress", UNPACK + "uncompress {file}"),
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "Zstandard", UNPACK + "zstd -d {file}"),
    (rb"BZh[1-9]", "bzip2", UNPACK + "bunzip2 -k {file}"),
    (rb"\xfd7zXZ\0", "xz", UNPACK + "xz -dk {file}"),
    (rb"\x5d\0\0", "LZMA", UNPACK + "xz -dk --format=lzma {file}"),
    (rb"\x04\x22\x4d\x18", "lz4", UNPACK + "lz4 -d {file}"),
    (rb"PK(\x03\x04|\x05\x06)", "zip", UNPACK + "unzip {file}"),
    (rb"7z\xbc\xaf\x27\x1c", "7-Zip", UNPACK + "7z x {file}"),
    (rb"(?s:.{257})ustar", "tar", UNPACK + "tar -xf {file}"),
    (rb"PAR1", "Parquet", "write its texts as JSON lines first, for example with "
     "pandas.read_parquet(FILE).to_json(OUT, orient='records', lines=True)"),
    (rb"ARROW1|\xff\xff\xff\xff", "Arrow", "write its texts as JSON lines first, for example with "
     "datasets.Dataset.from_file(FILE).to_json(OUT)"),
    (rb"\xff\xfe\0\0|\0\0\xfe\xff", "UTF-32", CONVERT.replace("{code}", "UTF-32")),
    (rb"\xff\xfe|\xfe\xff", "UTF-16", CONVERT.replace("{code}", "UTF-16")),
    (rb"[^\0]\0[^\0]\0", "UTF-16", CONVERT.replace("{code}", "UTF-16LE")),
    (rb"\0[^\0]\0[^\0]", "UTF-16", CONVERT.replace("{code}", "UTF-16BE")),
    (rb"version https://git-lfs", "a pointer of Git LFS", "run `git lfs pull` where it came from"),
    (rb"\x88\xd8\x34\x01|\x93NUMPY", "token ids", "give the text that they were made of"),
    (rb"%PDF-", "PDF", "write its text to a file first"),
)
HEAD_BYTES = 512


@dataclass(frozen=True)
class Chunk:
    """A stretch of a file between document boundaries; `document`: global index of its first one."""

    path: str
    offset: int
    length_bytes: int
    document: int
    document_count: int


@dataclass(frozen=True)
class DocumentSource:
    """Files in order, and how documents are arranged in them."""

    paths: tuple[str, ...]
    text_key: str = "text"
    separator: str = "<|endoftext|>"

    def require_text(self) -> None:
        """Raise DataError where a file cannot be read, or is packed or encoded so that it is not UTF-8."""
        for path in self.paths:
            try:
                if not (Path(path).is_file() or stat.S_ISDIR(os.stat(path).st_mode)):
                    raise DataError(f"{path}: a pipe or a device, which cannot be read twice; write the "
                                    "documents to a file first")
                with open(path, "rb") as file:
                    head = file.read(HEAD_BYTES)
            except OSError as error:
                raise explain_os_error(error, Path(path)) from error
            for beginning, kind, advice in NO_TEXT:
                if re.match(beginning, head):
                    name = Path(path)
                    text = name.with_name(f"{name.stem}_utf8{name.suffix}")
                    told = advice.format(file=shlex.quote(path), text=shlex.quote(str(text)))
                    raise DataError(f"{path}: {kind}, expected UTF-8 text; {told}")

    def total_bytes(self) -> int:
        """Size of all files. Raises DataError where one is missing."""
        total = 0
        for path in self.paths:
            try:
                total += os.stat(path).st_size
            except OSError as error:
                raise explain_os_error(error, Path(path)) from error
        return total

    def chunks(self, first_file: int = 0, offset: int = 0, document: int = 0) -> Iterator[Chunk]:
        """Chunks of about CHUNK_BYTES from a position on; they are the same when reading resumes at one."""
        for path in self.paths[first_file:]:
            for chunk in self.file_chunks(path, offset, document):
                yield chunk
                document += chunk.document_count
            offset = 0

    def file_chunks(self, path: str, offset: int, document: int) -> Iterator[Chunk]:
        """Chunks of one file from byte `offset` on, whose first document has global index `document`."""
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                while length_bytes := len(block := self.read_block(file, path)):
                    count = len(self.split(path, block))
                    yield Chunk(path, offset, length_bytes, document, count)
                    offset += length_bytes
                    document += count
                    file.seek(offset)
        except OSError as error:
            raise explain_os_error(error, Path(path)) from error

    def read_block(self, file: BinaryIO, path: str) -> bytes:
        """The next bytes of `file` up to the last document end within CHUNK_BYTES, else up to the next."""
        block = b""
        wanted_bytes = CHUNK_BYTES
        while True:
            block += file.read(wanted_bytes - len(block))
            if len(block) < wanted_bytes:
                return block
            if end := self.last_document_end(path, block):
                return block[:end]
            if wanted_bytes >= MAX_DOCUMENT_BYTES:
                raise DataError(f"{path}: no document ends in the {MAX_DOCUMENT_BYTES} bytes before byte "
                                f"{file.tell()}; expected one JSON object per line, or plain text with "
                                f"{self.separator!r} on a line of its own after each document")
            wanted_bytes *= 2

    def last_document_end(self, path: str, block: bytes) -> int:
        """Offset after the last document that surely ends within `block`; 0 where none does."""
        if path.endswith(JSON_SUFFIXES):
            return block.rfind(b"\n") + 1
        ends = [end for _, end in self.separator_lines(block) if block[end - 1:end] == b"\n"]
        return ends[-1] if ends else 0

    def separator_lines(self, block: bytes) -> Iterator[tuple[int, int]]:
        """(begin, end) of each line of plain text that holds the separator alone, its line break included."""
        mark = self.separator.encode()
        begin = block.find(mark)
        while begin >= 0:
            end = begin + len(mark)
            line_break = next((ending for ending in (b"\n", b"\r\n") if block.startswith(ending, end)), b"")
            begins_line = begin == 0 or block[begin - 1:begin] == b"\n"
            if begins_line and (line_break or end == len(block)):
                yield begin, end + len(line_break)
            begin = block.find(mark, end)

    def split(self, path: str, block: bytes) -> list[bytes]:
        """Documents in a block that begins and ends at document boundaries; blank ones are none."""
        if path.endswith(JSON_SUFFIXES):
            pieces = block.split(b"\n")
        else:
            edges = [(0, 0), *self.separator_lines(block), (len(block), len(block))]
            pieces = [block[before[1]:after[0]] for before, after in itertools.pairwise(edges)]
        return [piece for piece in pieces if piece and not piece.isspace()]

    def read(self, chunk: Chunk) -> list[str]:
        """Texts of a chunk's documents. Raises DataError with file, document and bytes on damaged input."""
        try:
            with open(chunk.path, "rb") as file:
                file.seek(chunk.offset)
                block = file.read(chunk.length_bytes)
        except OSError as error:
            raise explain_os_error(error, Path(chunk.path)) from error
        pieces = self.split(chunk.path, block)
        if len(block) != chunk.length_bytes or len(pieces) != chunk.document_count:
            raise DataError(f"{chunk.path}: changed while it was read; leave it alone and start again")
        if chunk.offset == 0 and pieces:
            pieces[0] = pieces[0].removeprefix(BYTE_ORDER_MARK)
        return [self.text(piece, chunk, index) for index, piece in enumerate(pieces)]

    def text(self, piece: bytes, chunk: Chunk, index: int) -> str:
        """Text of one document, the `index`-th of its chunk."""
        where = (f"{chunk.path}: document {chunk.document + index} "
                 f"(bytes {chunk.offset} to {chunk.offset + chunk.length_bytes}, number {index + 1} of them)")
        try:
            if not chunk.path.endswith(JSON_SUFFIXES):
                return piece.decode().strip("\r\n")
            text = json.loads(piece)[self.text_key]
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not UTF-8 ({error}); convert or remove it") from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(f"{where}: expected a JSON object with {self.text_key!r}, got {piece[:60]!r} "
                            f"({type(error).__name__}: {error}); fix the line or give --text-key") from error
        if not isinstance(text, str):
            raise DataError(f"{where}: {self.text_key!r} holds {type(text).__name__}, expected a string")
        return replace_lone_surrogates(text)


def replace_lone_surrogates(text: str) -> str:
    """`text` with U+FFFD for halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
