"""The gateway's configuration, in Debian's HAProxy, with a stand-in for the workers."""

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket

import httpx2
import pytest

from tests.eventually import HANG_S, eventually

CONFIGURATION = (Path(__file__).parents[2] / "deploy/gateway/haproxy.cfg").read_text()

pytestmark = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="haproxy is not installed: apt-get install haproxy"
)


class _Worker(BaseHTTPRequestHandler):
    """Answers every request with 200."""

    protocol_version = "HTTP/1.1"

    def _respond(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_DELETE = _respond  # noqa: N815 - names of the base class

    def log_message(self, *_: object) -> None:
        pass


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def gateway(folder: Path, **environment: str) -> Iterator[str]:
    """Yield the URL of a gateway in front of one worker."""
    worker = ThreadingHTTPServer(("127.0.0.1", 0), _Worker)
    threading.Thread(target=worker.serve_forever, daemon=True).start()
    port = free_port()
    file = folder / "haproxy.cfg"
    text = CONFIGURATION.replace("bind :8000", f"bind 127.0.0.1:{port}")
    text = text.replace("bind :8404", f"bind 127.0.0.1:{free_port()}")
    # Docker's DNS names the workers.
    text = re.sub(r"resolvers docker\n(    .*\n)+", "", text)
    text = text.replace(" resolvers docker init-addr none", "")
    text = re.sub(
        r"server-template worker \d+ \w+:8000",
        f"server worker 127.0.0.1:{worker.server_port}",
        text,
    )
    file.write_text(text)
    with subprocess.Popen(
        ["haproxy", "-db", "-f", str(file)],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
    ) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            eventually(lambda: status(url, "GET", "/readyz") == 200)
            yield url
        finally:
            process.kill()
            worker.shutdown()
            worker.server_close()


def status(url: str, method: str, path: str, **headers: str) -> int:
    try:
        return httpx2.request(method, url + path, headers=headers, timeout=HANG_S).status_code
    except httpx2.ConnectError:
        return 0


def test_routes_that_concern_one_worker_are_denied(tmp_path: Path) -> None:
    with gateway(tmp_path) as url:
        assert status(url, "POST", "/encode") == 200
        assert status(url, "GET", "/models") == 200
        assert status(url, "GET", "/models/a/info") == 200
        for method, path in (
            ("GET", "/metrics"),
            ("GET", "/%6Detrics"),
            ("GET", "/debug/state"),
            ("POST", "/models/a"),
            ("DELETE", "/models/a"),
            ("POST", "/%6Dodels/a"),
        ):
            assert status(url, method, path) == 403, path


def test_rate_limit_applies_to_each_key_alone(tmp_path: Path) -> None:
    with gateway(tmp_path, RATE_LIMIT="3") as url:

        def is_limited(**headers: str) -> bool:
            return status(url, "POST", "/encode", **headers) == 429

        # More within a second than the limit, however slow this machine is: in the end one is.
        eventually(lambda: is_limited(Authorization="Bearer first"))
        assert not is_limited(Authorization="Bearer second")
        eventually(lambda: is_limited(**{"X-API-Key": "third"}))
        response = httpx2.post(f"{url}/encode", headers={"Authorization": "Bearer other"})
        assert response.status_code == 200


def test_without_a_limit_no_request_is_refused(tmp_path: Path) -> None:
    with gateway(tmp_path) as url:
        assert {status(url, "POST", "/encode") for _ in range(50)} == {200}
