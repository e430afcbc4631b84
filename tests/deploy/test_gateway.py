"""The gateway's configuration, in Debian's HAProxy, with a stand-in for the workers."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from socket import create_connection, socket
from socketserver import StreamRequestHandler
from urllib.parse import quote, unquote

import httptools
import httpx2
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from starlette.routing import Match, Route

from service.app import create_app
from service.settings import Settings
from tests.eventually import HANG_S, eventually
from tests.service.api.test_paths import PIECES
from tests.serving import flat_routes
from tests.threaded_server import in_thread

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


class _Recorder(StreamRequestHandler):
    """Answers a request without a body with 204, and records its first line."""

    lines: SimpleQueue[bytes] = SimpleQueue()

    def handle(self) -> None:
        with suppress(ConnectionError):  # health checks reset their connections
            self._serve()

    def _serve(self) -> None:
        while line := self.rfile.readline():
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            if b" /readyz " not in line:
                self.lines.put(line)
            self.wfile.write(b"HTTP/1.1 204 No Content\r\n\r\n")


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def gateway(
    folder: Path,
    handler: type[StreamRequestHandler] = _Worker,
    *,
    has_gradients: bool = True,
    **environment: str,
) -> Iterator[str]:
    """Yield the URL of a gateway in front of one worker, which has gradients or not."""
    port = free_port()
    with in_thread(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as worker:
        # Nobody listens on a free port.
        ports = {
            "encode": worker.server_port,
            "debug": worker.server_port if has_gradients else free_port(),
        }
        text = re.sub(
            r"server-template worker \d+ (\w+):8000",
            lambda match: f"server worker 127.0.0.1:{ports[match[1]]}",
            configuration_without_dns(port),
        )
        with haproxy(folder / "haproxy.cfg", text, **environment):
            url = f"http://127.0.0.1:{port}"
            eventually(lambda: status(url, "GET", "/readyz") in (200, 204))
            yield url


def configuration_without_dns(port: int) -> str:
    """Return the gateway's configuration on a local port, without Docker's DNS for the workers."""
    text = CONFIGURATION.replace("bind :8000", f"bind 127.0.0.1:{port}")
    text = text.replace("bind :8404", f"bind 127.0.0.1:{free_port()}")
    text = re.sub(r"resolvers docker\n(    .*\n)+", "", text)
    return text.replace(" resolvers docker init-addr none", "")


@contextmanager
def haproxy(file: Path, text: str, **environment: str) -> Iterator[None]:
    """Run HAProxy with a configuration, which is written to the file."""
    file.write_text(text)
    with subprocess.Popen(
        ["haproxy", "-db", "-f", str(file)],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            yield
        finally:
            process.kill()


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


def test_page_comes_from_workers_without_gradients_if_there_are_no_others(tmp_path: Path) -> None:
    with gateway(tmp_path, has_gradients=False) as url:
        eventually(lambda: status(url, "GET", "/debug") == 200)
        assert status(url, "GET", "/debug/assets/page.js") == 200
        assert status(url, "GET", "/debug/capabilities") == 503


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


@pytest.mark.slow
def test_without_a_limit_no_request_is_refused(tmp_path: Path) -> None:
    with gateway(tmp_path) as url:
        assert {status(url, "POST", "/encode") for _ in range(50)} == {200}


# Routes that concern one worker, by name.
CLOSED = {"metrics", "process_state", "load_model", "delete_model"}
targets = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(("/", "/", "//", "http://x/", "ftp://x//", "/./", "")),
        st.sampled_from(("metrics", "models", "debug/state", "%6Dodels", "debug%2fstate", "")),
        st.lists(
            st.sampled_from((*PIECES, "#", "?", "\\", "\x7f", "\xe9", "state")), max_size=4
        ).map("".join),
    ),
)


@pytest.fixture(scope="module")
def routes() -> list[Route]:
    """All routes of a worker."""
    routes = flat_routes(create_app(Settings()).routes)
    assert {getattr(route, "name", None) for route in routes} >= CLOSED
    return routes


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a gateway whose worker records requests."""
    with gateway(tmp_path_factory.mktemp("gateway"), _Recorder) as url:
        yield httpx2.URL(url).port or 80


def passed_by(port: int, method: str, target: str) -> str | None:
    """Return the target that the worker gets; None: the gateway denies the request."""
    request = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
        connection.sendall(request.encode("latin-1"))
        response = b"".join(iter(lambda: connection.recv(4096), b""))
    if response.startswith(b"HTTP/1.1 204 "):
        return (
            _Recorder.lines.get(timeout=HANG_S)
            .decode("latin-1")
            .rsplit(" ", 1)[0]
            .partition(" ")[2]
        )
    assert response[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.1 403 "), response
    return None


@hypothesis_settings(max_examples=300)
@given(st.sampled_from(("GET", "HEAD", "POST", "DELETE", "PUT", "post", "delete")), targets)
@example("GET", "/metrics%0a")
@example("GET", "/metrics#a")
@example("POST", "/models/x%")
@example("POST", "/models/%zz")
@example("DELETE", "http://x/models/x%")
@example("GET", "/metricsmodels?\x7f")
def test_no_spelling_of_a_closed_route_passes(
    recorded: int, routes: list[Route], method: str, target: str
) -> None:
    passed = passed_by(recorded, method, target)
    if passed is not None:
        # As an ASGI server decodes it that refuses no path, unlike a worker.
        try:
            path = unquote((httptools.parse_url(passed.encode()).path or b"/").decode())
        except httptools.HttpParserInvalidURLError:
            return  # servers refuse it: it is no URL
        served = method.upper().replace("HEAD", "GET")
        scope = {"type": "http", "method": served, "path": path}
        reached = {route.name for route in routes if route.matches(scope)[0] == Match.FULL}
        assert reached.isdisjoint(CLOSED), (method, target, passed)


@pytest.mark.parametrize("name", ["e5", "org/name", "a b", "100%", "x?y#z", "'\"<|>", "猫", "é"])
def test_descriptions_of_models_pass_whatever_their_name(recorded: int, name: str) -> None:
    for target in (f"/models/{quote(name)}/info", f"/models/{quote(name, safe='')}/info?a=%zz"):
        assert passed_by(recorded, "GET", target) == target
        assert passed_by(recorded, "POST", target) is None
