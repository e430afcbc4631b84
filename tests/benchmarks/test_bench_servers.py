"""Frame of the benchmarks, running peers and the comparison of vectors; no speed is measured."""

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks import comparison
from tests.benchmarks.bench_servers import OURS, PEER, compare_vectors
from tests.benchmarks.comparison import BenchmarkError, Figures, Turns, cpu, report
from tests.benchmarks.peers import find_peer, parse_peers
from tests.benchmarks.servers import Api, Client, ServerKind, ServerProcess
from tests.benchmarks.workloads import WORKLOADS
from tests.eventually import eventually
from tests.threaded_server import in_thread

SHAPES = {
    "tei": ("/embed", "inputs", None),
    "openai": ("/v1/embeddings", "input", "/v1/models"),
    "infinity": ("/embeddings", "input", "/models"),
}


def vector(text: str) -> list[float]:
    return [1.0, float(len(text)), 3.0]


class Handler(BaseHTTPRequestHandler):
    """Embedding API in one of the shapes, for at most 32 texts per request."""

    server: "FakePeer"

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": "a/model"}, {"id": "other"}]}
        self._send(200 if self.path == self.server.models else 404, models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        expected = {self.server.field} | ({"model"} if self.server.models else set())
        if self.path != self.server.path:
            self._send(404, {"error": "no such route"})
        elif body.keys() != expected or body.get("model", "a/model") != "a/model":
            self._send(422, {"error": "other fields"})
        elif len(body[self.server.field]) > 32:
            self._send(413, {"error": "too many texts"})
        else:
            texts = body[self.server.field]
            vectors = [vector(text) for text in texts[: len(texts) - self.server.dropped]]
            entries = [
                {"index": index, "object": "embedding", "embedding": of_text}
                for index, of_text in enumerate(vectors)
            ]
            self._send(200, {"data": entries[::-1]} if self.server.models else vectors)

    def _send(self, status: int, payload: object) -> None:
        content = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


class FakePeer(ThreadingHTTPServer):
    """Peer over loopback.

    Attributes:
        path, field, models: Its API. A peer with a route for models requires the first one's name.
        dropped: Number of texts that get no vector.
    """

    def __init__(self, path: str, field: str, models: str | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.path, self.field, self.models = path, field, models
        self.dropped = 0
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.mark.parametrize("shape", SHAPES)
def test_peer_shape_is_found_by_trying(shape: str) -> None:
    path, field, models = SHAPES[shape]
    with in_thread(FakePeer(path, field, models)) as server:
        peer = find_peer("other", server.url + "/")
        assert (peer.url, peer.api.path) == (server.url, path)
        texts = ["x" * length for length in range(70)]
        vectors = peer.encode(texts)
        assert vectors.tolist() == [vector(text) for text in texts]
        assert peer.api.fields == ({"model": "a/model"} if models else {})


def test_base_path_of_a_peer_is_kept() -> None:
    with in_thread(FakePeer("/v1/embeddings", "input", "/v1/models")) as server:
        peer = find_peer("vllm", server.url + "/v1")
        assert peer.url + peer.api.path == server.url + "/v1/embeddings"


def test_unreachable_peer_is_named() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound, and not listening: connections are refused
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(
            BenchmarkError, match=f"peer 'vllm' .* {url} does not answer: .*refused"
        ):
            find_peer("vllm", url)


def test_peer_without_known_route_is_named_with_what_was_tried() -> None:
    with (
        in_thread(FakePeer("/elsewhere", "texts", None)) as server,
        pytest.raises(
            BenchmarkError, match=r"'odd' .* tried POST http.*/embed: .*404.*; GET .*/v1/models"
        ),
    ):
        find_peer("odd", server.url)


def test_peer_that_stops_answering_with_vectors_is_named() -> None:
    with in_thread(FakePeer(*SHAPES["tei"])) as server:
        peer = find_peer("tei", server.url)
        server.path = "/moved"
        with pytest.raises(BenchmarkError, match=f"{server.url}/embed: status 404"):
            peer.encode(["a text"])


def test_peer_that_drops_texts_is_named() -> None:
    with in_thread(FakePeer(*SHAPES["tei"])) as server:
        peer = find_peer("tei", server.url)
        server.dropped = 1
        with pytest.raises(BenchmarkError, match=f"{server.url}/embed did not return 2 vectors"):
            peer.encode(["one", "two"])


def test_peer_with_other_vectors_is_refused_by_name() -> None:
    texts = ["a", "longer", "the longest of all"]
    with in_thread(FakePeer(*SHAPES["openai"])) as server:
        theirs = find_peer("vllm", server.url).encode(texts)
    other = theirs * [1, 1, -1]
    lines = compare_vectors({OURS: theirs, "vllm": theirs})
    assert lines[1] == "vllm: cosine to ours: mean 1.0000000, worst 1.0000000"
    with pytest.raises(BenchmarkError, match="'vllm' returns other vectors: the worst cosine"):
        compare_vectors({OURS: other, "vllm": theirs})
    with pytest.raises(BenchmarkError, match="'vllm' returns other vectors: 3 wide instead of 2"):
        compare_vectors({OURS: theirs[:, :2], "vllm": theirs})
    with pytest.raises(BenchmarkError, match="'vllm' returns other vectors: the worst cosine"):
        compare_vectors({OURS: theirs, "vllm": theirs * np.nan})


def test_int8_has_a_lower_bound_than_other_precisions() -> None:
    ours = np.array([[1.0, 0.0]])
    rounded = np.array([[0.995, np.sqrt(1 - 0.995**2)]])
    compare_vectors({OURS: ours, "int8": rounded})
    with pytest.raises(BenchmarkError, match=r"'bfloat16' .* 0\.9950, below 0\.999"):
        compare_vectors({OURS: ours, "bfloat16": rounded})


def test_peers_are_parsed() -> None:
    assert parse_peers("tei=http://a:80,vllm=http://b:8000/v1") == {
        "tei": "http://a:80",
        "vllm": "http://b:8000/v1",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://a:80", "not NAME=URL"),
        ("tei=http://a:80,", "'' is not NAME=URL"),
        ("tei=a:80", "URL of peer 'tei' must be http://host:port"),
        ("tei=https://a:80", "URL of peer 'tei' must be http://host:port"),
        ("tei=http://a:80,tei=http://b:80", "two peers 'tei'"),
        ("a|b=http://a:80", "not NAME=URL"),
    ],
)
def test_malformed_peers_are_refused(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse_peers(text)


def scripted(*results: Figures | BenchmarkError) -> Callable[[], Figures]:
    """Return a contender with these figures in turn; an error is raised."""
    left = iter(results)

    def measure() -> Figures:
        result = next(left)
        if isinstance(result, BenchmarkError):
            raise result
        return result

    return measure


def test_figures_are_medians_and_ratios_are_medians_of_the_rounds_ratios() -> None:
    rates = Turns(PEER)
    contenders = {
        OURS: scripted(*({"rate": rate} for rate in (99.0, 2.0, 3.0, 8.0))),
        PEER: scripted(*({"rate": rate} for rate in (99.0, 1.0, 2.0, 2.0))),
    }
    rates.measure(contenders, 3, title="mixed: ")
    rates.add("MB", OURS, 1234.5)
    assert str(rates) == (
        f"|  | {OURS} | {PEER} |\n| --- | --: | --: |\n"
        "| mixed: rate | 3 (2.00) | 2 |\n| MB | 1,234 | - |"
    )


def test_contenders_may_be_rows_and_have_other_references() -> None:
    rates = Turns(PEER, contenders_in_rows=True)
    rates.references[PEER] = OURS
    for name, rate, seconds in ((OURS, 3.0, 2000.0), (PEER, 1.5, 7.0)):
        rates.add("rate", name, rate)
        rates.add("s", name, seconds)
    rates.add("MB", OURS, 1234.5)
    assert str(rates) == (
        f"|  | rate | s | MB |\n| --- | --: | --: | --: |\n"
        f"| {OURS} | 3 (2.00) | 2,000 (285.71) | 1,234 |\n| {PEER} | 1.5 (0.50) | 7 (0.0035) | - |"
    )


def test_each_round_begins_with_the_next_contender() -> None:
    order: list[str] = []

    def contender(name: str) -> Callable[[], Figures]:
        def measure() -> Figures:
            order.append(name)
            return {}

        return measure

    Turns("a").measure({name: contender(name) for name in "abc"}, 3)
    assert order == list("cababcbcacab")
    order.clear()
    Turns("a").measure({name: contender(name) for name in "ab"}, 1, warm_up=False)
    assert order == ["a", "b"]


def test_contender_that_fails_is_named_and_the_others_are_measured() -> None:
    good, gone = {"rate": 2.0}, BenchmarkError("failed 3 requests")
    rates = Turns(PEER)
    contenders = {
        OURS: scripted(good, {"rate": 4.0}, {"rate": 6.0}),
        PEER: scripted(good, good, good),
        "first": scripted(gone),
        "late": scripted(good, good, gone),
    }
    rates.measure(contenders, 2, title="mixed: ")
    assert rates.figures == {"mixed: rate": {OURS: [4.0, 6.0], PEER: [2.0, 2.0]}}
    assert sorted(rates.problems) == [
        "mixed: first: failed 3 requests",
        "mixed: late: failed 3 requests",
    ]
    assert str(rates).endswith("| mixed: rate | 5 (2.50) | 2 | - | - |")


def test_figures_without_those_of_the_reference_have_no_ratios() -> None:
    rates = Turns(PEER)
    rates.measure(
        {OURS: scripted({"rate": 15.0}), PEER: scripted(BenchmarkError())}, 1, warm_up=False
    )
    assert str(rates).endswith("| rate | 15 | - |")


@pytest.mark.parametrize(
    ("done", "failed", "message"),
    [(0, 0, "completed no request in 1 s; raise --seconds"), (7, 3, "failed 3 requests")],
)
def test_load_with_failures_is_no_figure(
    done: int, failed: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"requests": done, "seconds": 1, "p50_ms": 1, "p99_ms": 2, "failed": failed}
    wrk = argparse.Namespace(stdout=f"Running\nRESULT {json.dumps(result)}\n")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: wrk)
    with in_thread(FakePeer(*SHAPES["tei"])) as server:
        peer = Client(server.url, Api("/embed"))
        with pytest.raises(BenchmarkError, match=message):
            peer.load(WORKLOADS["short"], 1)


def test_report_is_written_and_names_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison, "_OUT", tmp_path / "bench")
    monkeypatch.setattr(sys, "argv", ["/path/bench_servers.py", "--rounds", "2"])
    report("| a table |")
    incomplete = Turns()
    incomplete.problems.append("'tei' is gone")
    with pytest.raises(SystemExit, match="the report is incomplete: 'tei' is gone"):
        report("| a table |", incomplete)
    written = (tmp_path / "bench/servers.md").read_text()
    assert "`python -m tests.benchmarks.bench_servers --rounds 2`\n\n| a table |" in written
    assert written.endswith("- 'tei' is gone\n")
    assert written in capsys.readouterr().out


def test_server_is_suspended_unless_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "import http.server, sys\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_POST(self):\n"
        "        self.rfile.read(int(self.headers['Content-Length']))\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "        self.wfile.write(b'[[1.0]]')\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()\n"
    )
    with ServerProcess(
        ServerKind((sys.executable, str(tmp_path / "server.py"), "{port}"))
    ) as server:

        def is_suspended() -> bool:
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            return "State:\tT" in status

        eventually(is_suspended)
        assert server.encode(["a text"]).tolist() == [[1.0]]
        eventually(is_suspended)
        with server.awake():
            server.encode(["a text"])
            assert not is_suspended()
        eventually(is_suspended)
    assert server.process.returncode is not None


def test_cpu_class_names_the_instructions_that_matter() -> None:
    cpuinfo = "model name\t: A CPU\nflags\t\t: fpu avx2 avx512_vnni\n\nmodel name\t: A CPU\n"
    assert cpu(cpuinfo) == "A CPU with AVX2, AVX512-VNNI"
    assert cpu("").strip()
