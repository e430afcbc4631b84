"""A Hugging Face hub on this machine: the part of its HTTP API that downloads a model."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.threaded_server import in_thread


class Hub:
    """Models by id, as lists of commits, of which the last is the branch main.

    Attributes:
        url: Value of `HF_ENDPOINT`.
        models: Folder of each commit, in their order, by id.
        refusals: Status and headers of the responses about other ids.
        token: Token that requests must have; None: none.
        cut: Name of a file whose next response ends after half of its bytes; None: none.
        requests: Paths of all requests about models.
        ranges: Header Range of all requests that have one.
    """

    def __init__(self) -> None:
        self.url = ""
        self.models: dict[str, dict[str, Path]] = {}
        self.refusals: dict[str, tuple[int, dict[str, str]]] = {}
        self.token: str | None = None
        self.cut: str | None = None
        self.requests: list[str] = []
        self.ranges: list[str] = []

    def add(self, model: str, folder: Path) -> str:
        """Add a commit with the files of a folder, and return its hash."""
        commits = self.models.setdefault(model, {})
        commit = hashlib.sha1(f"{model} {len(commits)}".encode()).hexdigest()  # noqa: S324
        commits[commit] = folder
        return commit

    def respond(
        self, path: str, token: str | None, range_: str | None
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of a response."""
        words = path.partition("?")[0].strip("/").split("/")
        if words[:2] == ["api", "models"]:
            words = words[2:]
        elif words[0] == "api":
            return 404, {}, b""
        self.requests.append(path)
        model, (action, revision, *rest) = "/".join(words[:2]), words[2:]
        if self.token is not None and token != f"Bearer {self.token}":
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""
        if model not in self.models:
            status, headers = self.refusals.get(model, (404, {"X-Error-Code": "RepoNotFound"}))
            return status, headers, b""
        commits = self.models[model]
        commit = list(commits)[-1] if revision == "main" else revision
        if commit not in commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = {str(p.relative_to(commits[commit])): p for p in commits[commit].rglob("*.*")}
        if action == "revision":
            siblings = [{"rfilename": name} for name in files]
            return 200, {}, json.dumps({"id": model, "sha": commit, "siblings": siblings}).encode()
        if action == "tree":
            tree = [
                {"type": "file", "path": name, "size": p.stat().st_size, "oid": _oid(p)}
                for name, p in files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        file = files["/".join(rest)]
        headers = {"ETag": f'"{_oid(file)}"', "X-Repo-Commit": commit}
        if range_ is None:
            return 200, headers, file.read_bytes()
        self.ranges.append(range_)
        first = int(range_.removeprefix("bytes=").removesuffix("-"))
        size = file.stat().st_size
        headers["Content-Range"] = f"bytes {first}-{size - 1}/{size}"
        return 206, headers, file.read_bytes()[first:]


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()  # noqa: S324 - as git does


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """Yield a hub that is reachable until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            token, range_ = self.headers["Authorization"], self.headers["Range"]
            status, headers, body = hub.respond(self.path, token, range_)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                if hub.cut and self.path.endswith(hub.cut):
                    hub.cut, body = None, body[: len(body) // 2]
                    self.close_connection = True
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - http.server's name

        def log_message(self, *_: object) -> None:
            pass

    with in_thread(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield hub
