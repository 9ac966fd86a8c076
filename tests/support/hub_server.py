"""A Hugging Face hub on 127.0.0.1 with one dataset repository, and faults to order."""

import hashlib
import json
import threading
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34
LFS_MIN_BYTES = 512


@dataclass
class Faults:
    """What the server does wrong: per path, how often; everything else it does right."""

    cut_after_bytes: dict[str, list[int]] = field(default_factory=dict)  # close the connection after so many
    wrong_content: Counter[str] = field(default_factory=Counter)  # flip a byte
    truncated: Counter[str] = field(default_factory=Counter)  # announce and send less than there is
    status: int | None = None  # answer everything so
    error_code: str | None = None  # with this X-Error-Code
    delay_s: float = 0.0  # before each block
    delayed: str = ""  # of files whose names end so
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, counts: Counter[str], path: str) -> bool:
        """Whether this fault is due for `path`; uses one up."""
        with self.lock:
            if counts[path] <= 0:
                return False
            counts[path] -= 1
            return True


class HubServer:
    """Serves `files` (path in the repository to content) as dataset `repo` at COMMIT."""

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        self.repo = repo
        self.files = files
        self.faults = Faults()
        self.sent: Counter[str] = Counter()  # body bytes per path
        self.completed: Counter[str] = Counter()  # bodies sent to their end, per path
        self.requested: Counter[str] = Counter()  # bodies asked for, per path
        handler = type("Handler", (HubHandler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def endpoint(self) -> str:
        """Value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class HubHandler(BaseHTTPRequestHandler):
    """The part of the hub's API that a download needs."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body would wait 40 ms for the acknowledgment of its headers

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Metadata of a file."""
        self.do_GET()

    def do_GET(self) -> None:
        """Route a request."""
        hub = self.hub
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if hub.faults.status is not None:
            self.reply(hub.faults.status, b'{"error": "ordered"}')
        elif path.startswith(f"/api/datasets/{hub.repo}/revision/"):
            self.reply_revision(path.rsplit("/", 1)[1])
        elif path == f"/api/datasets/{hub.repo}":
            self.reply_revision("main")
        elif path.startswith(f"/api/datasets/{hub.repo}/tree/{COMMIT}"):
            self.reply_tree(path.removeprefix(f"/api/datasets/{hub.repo}/tree/{COMMIT}").strip("/"))
        elif path.startswith(f"/datasets/{hub.repo}/resolve/{COMMIT}/"):
            self.reply_file(path.removeprefix(f"/datasets/{hub.repo}/resolve/{COMMIT}/"))
        else:
            hub.faults.error_code = hub.faults.error_code or "RepoNotFound"
            self.reply(404, b"{}")

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """A whole answer."""
        self.send_response(status)
        if self.hub.faults.error_code:
            self.send_header("X-Error-Code", self.hub.faults.error_code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply_revision(self, revision: str) -> None:
        """Commit of a branch."""
        if revision not in ("main", COMMIT):
            self.hub.faults.error_code = "RevisionNotFound"
            self.reply(404, b"{}")
            return
        siblings = [{"rfilename": name} for name in self.hub.files]
        body = {"id": self.hub.repo, "sha": COMMIT, "siblings": siblings, "private": False, "gated": False,
                "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        self.reply(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def reply_tree(self, folder: str) -> None:
        """Listing of a folder."""
        recursive = "recursive=true" in self.path.lower()
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, object]] = {}
        for name, content in self.hub.files.items():
            if not name.startswith(prefix):
                continue
            rest = name.removeprefix(prefix)
            if "/" in rest and not recursive:
                path = prefix + rest.split("/")[0]
                entries[path] = {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
            else:
                entries[name] = tree_entry(name, content)
        if not entries:
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        self.reply(200, json.dumps(list(entries.values())).encode(), {"Content-Type": "application/json"})

    def reply_file(self, name: str) -> None:
        """Content of a file, or the part that a Range header asks for."""
        faults = self.hub.faults
        content = self.hub.files[name]
        digest = content_hash(content)
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            self.reply(200, content, headers)
            return
        self.hub.requested[name] += 1
        if faults.take(faults.truncated, name):
            content = content[:len(content) // 2]
        if faults.take(faults.wrong_content, name):
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        for key, value in {**headers, "Content-Length": str(len(content) - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        self.send_body(name, content[start:])

    def send_body(self, name: str, body: bytes) -> None:
        """Send in blocks, and cut the connection where a fault says so."""
        with self.hub.faults.lock:
            cuts = self.hub.faults.cut_after_bytes.get(name) or []
            limit = cuts.pop(0) if cuts else len(body)
        try:
            for begin in range(0, min(limit, len(body)), 8192):
                if name.endswith(self.hub.faults.delayed):
                    time.sleep(self.hub.faults.delay_s)
                block = body[begin:min(begin + 8192, limit)]
                self.wfile.write(block)
                self.hub.sent[name] += len(block)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            return
        if limit < len(body):
            self.close_connection = True
        else:
            self.hub.completed[name] += 1


def content_hash(content: bytes) -> str:
    """Name the hub gives to a content: sha256 of large files, git's hash of small ones."""
    if len(content) >= LFS_MIN_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def tree_entry(name: str, content: bytes) -> dict[str, object]:
    """A file as the hub lists it."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": name, "oid": blob, "size": len(content)}
    if len(content) >= LFS_MIN_BYTES:
        entry["lfs"] = {"oid": content_hash(content), "size": len(content), "pointerSize": 130}
    return entry
