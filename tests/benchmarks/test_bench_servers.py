"""Running peers, the comparison of vectors and the report of `make bench`; no speed is measured."""

import argparse
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.benchmarks.bench_servers import (
    OURS,
    PEER,
    about_peers,
    compare_vectors,
    measure,
    rate_ratios,
    row,
)
from tests.benchmarks.peers import ComparisonError, Peer, parse_peers
from tests.benchmarks.report import cpu, draw_ratios
from tests.benchmarks.servers import Load
from tests.benchmarks.workloads import Workload

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


@contextmanager
def serving(path: str, field: str, models: str | None) -> Iterator[FakePeer]:
    with FakePeer(path, field, models) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("shape", SHAPES)
def test_peer_shape_is_found_by_trying(shape: str) -> None:
    path, field, models = SHAPES[shape]
    with serving(path, field, models) as server:
        peer = Peer("other", server.url + "/")
        assert peer.route == server.url + path
        texts = ["x" * length for length in range(70)]
        vectors = peer.encode(texts)
        assert vectors.tolist() == [vector(text) for text in texts]
        (body,) = peer.bodies([["one", "two"]])
        model = {"model": "a/model"} if models else {}
        assert json.loads(body) == {field: ["one", "two"], **model}


def test_base_path_of_a_peer_is_kept() -> None:
    with serving("/v1/embeddings", "input", "/v1/models") as server:
        assert Peer("vllm", server.url + "/v1").route == server.url + "/v1/embeddings"


def test_unreachable_peer_is_named() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound, and not listening: connections are refused
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(
            ComparisonError, match=f"peer 'vllm' does not answer at {url}: .*refused"
        ):
            Peer("vllm", url)


def test_peer_without_known_route_is_named_with_what_was_tried() -> None:
    with (
        serving("/elsewhere", "texts", None) as server,
        pytest.raises(
            ComparisonError, match=r"'odd' at .* tried POST /embed: .*404; GET /v1/models"
        ),
    ):
        Peer("odd", server.url)


def test_peer_that_stops_answering_with_vectors_is_named() -> None:
    with serving(*SHAPES["tei"]) as server:
        peer = Peer("tei", server.url)
        server.path = "/moved"
        with pytest.raises(ComparisonError, match=r"'tei' did not return 1 vectors .* status 404"):
            peer.encode(["a text"])


def test_peer_that_drops_texts_is_named() -> None:
    with serving(*SHAPES["tei"]) as server:
        peer = Peer("tei", server.url)
        server.dropped = 1
        with pytest.raises(ComparisonError, match="'tei' did not return 2 vectors"):
            peer.encode(["one", "two"])


def test_peer_with_other_vectors_is_refused_by_name() -> None:
    texts = ["a", "longer", "the longest of all"]
    with serving(*SHAPES["openai"]) as server:
        theirs = Peer("vllm", server.url).encode(texts)
    other = theirs * [1, 1, -1]
    lines = compare_vectors({OURS: theirs, "vllm": theirs})
    assert lines[1] == "vllm: cosine to ours: mean 1.0000000, worst 1.0000000"
    with pytest.raises(ComparisonError, match="'vllm' returns other vectors: the worst cosine"):
        compare_vectors({OURS: other, "vllm": theirs})
    with pytest.raises(ComparisonError, match="'vllm' returns other vectors: 3 wide instead of 2"):
        compare_vectors({OURS: theirs[:, :2], "vllm": theirs})
    with pytest.raises(ComparisonError, match="'vllm' returns other vectors: the worst cosine"):
        compare_vectors({OURS: theirs, "vllm": theirs * np.nan})


def test_int8_has_a_lower_bound_than_other_precisions() -> None:
    ours = np.array([[1.0, 0.0]])
    rounded = np.array([[0.995, np.sqrt(1 - 0.995**2)]])
    compare_vectors({OURS: ours, "int8": rounded})
    with pytest.raises(ComparisonError, match=r"'bfloat16' .* 0\.9950, below 0\.999"):
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


def test_row_has_a_dash_where_a_peer_has_no_figure() -> None:
    figures = {OURS: [2.0, 3.0, 8.0], PEER: [1.0, 2.0, 2.0]}
    assert row("ready", figures, ".1f", [OURS, PEER, "tei"]) == "| ready | 3.0 (2.00) | 2.0 | - |"
    assert "CPU time" in about_peers(["tei"])


def load(requests: int, failed: int = 0) -> Load:
    return Load(requests=requests, seconds=2.0, p50_ms=1.0, p99_ms=2.0, failed=failed, cpu_s=0.5)


class Scripted(Peer):
    """Peer whose loads are given; an error is raised."""

    def __init__(self, *loads: Load | ComparisonError) -> None:
        self.left = list(loads)

    def load(self, _workload: Workload, _seconds: int) -> Load:
        result = self.left.pop(0)
        if isinstance(result, ComparisonError):
            raise result
        return result


def test_server_without_a_figure_is_named_and_the_others_are_measured() -> None:
    contenders = {
        OURS: Scripted(*map(load, (1, 30, 50))),
        PEER: Scripted(*map(load, (1, 10, 20))),
        "slow": Scripted(load(0)),
        "late": Scripted(load(1), load(9), load(0)),
        "failing": Scripted(load(1), load(7, failed=3)),
        "gone": Scripted(load(1), ComparisonError("'gone' did not return 1 vectors")),
    }
    loads, problems = measure(contenders, "mixed", 2, 8)
    assert loads == {
        OURS: [load(30), load(50)],
        PEER: [load(10), load(20)],
        **{name: [] for name in ("slow", "late", "failing", "gone")},
    }
    assert sorted(problems) == [
        "'failing' failed 3 requests of 'mixed'",
        "'gone' did not return 1 vectors, after the load of 'mixed'",
        "'late' completed no request of 'mixed' in 8 s; raise --seconds",
        "'slow' completed no request of 'mixed' in 8 s; raise --seconds",
    ]
    assert not any(contender.left for contender in contenders.values())
    rates = {name: [one.requests / one.seconds for one in own] for name, own in loads.items()}
    assert row("rates", rates, ".1f", list(loads)) == (
        "| rates | 20.0 (2.75) | 7.5 | - | - | - | - |"
    )
    assert rate_ratios({"mixed": loads})["mixed"] == {
        OURS: 2.75,
        PEER: 1.0,
        **dict.fromkeys(("slow", "late", "failing", "gone"), 0.0),
    }


def test_figures_without_those_of_the_peer_have_no_ratios() -> None:
    loads, _ = measure({OURS: Scripted(load(1), load(30)), PEER: Scripted(load(0))}, "mixed", 1, 8)
    rates = {OURS: [15.0], PEER: []}
    assert row("rates", rates, ".1f", [OURS, PEER]) == "| rates | 15.0 | - |"
    assert rate_ratios({"mixed": loads}) == {}


def test_picture_has_a_bar_for_each_ratio(tmp_path: Path) -> None:
    by_server = {
        OURS: [load(30), load(50)],
        PEER: [load(10), load(20)],
        "tei": [load(15), load(30)],
    }
    ratios = rate_ratios({"short": by_server, "mixed": by_server})
    assert ratios["short"] == {OURS: 2.75, PEER: 1.0, "tei": 1.5}
    draw_ratios(ratios, "requests/s", tmp_path / "ratios.svg")
    texts = [
        element.text
        for element in ElementTree.parse(tmp_path / "ratios.svg").iter()  # noqa: S314 - our own
        if element.tag.endswith("}text")
    ]
    assert texts.count("2.75") == 2
    assert {"short", "mixed", "requests/s", OURS, PEER, "tei"} <= set(texts)


def test_cpu_class_names_the_instructions_that_matter() -> None:
    cpuinfo = "model name\t: A CPU\nflags\t\t: fpu avx2 avx512_vnni\n\nmodel name\t: A CPU\n"
    assert cpu(cpuinfo) == "A CPU with AVX2, AVX512-VNNI"
    assert cpu("").strip()
