"""`make bench-explain-price`: what an explanation costs, and what it costs other clients.

One client sends a plain request, the same with an explanation, and one for the same texts as the
explanation scores, in turns. Then a load of `/encode` runs alone and beside a client that asks for
one explanation after the other.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from models.engines import ENGINES
from models.export.exporter import export
from models.export.sources import resolve
from service.inference.explain.deletion import unit_spans, without
from service.inference.explain.options import TextUnit
from tests.benchmarks.bench_rerank import RERANK, save_model
from tests.benchmarks.comparison import Figures, Turns, parser, report
from tests.benchmarks.servers import ServerProcess, vitrine
from tests.benchmarks.workloads import WORKLOADS

Body = Mapping[str, object]

_QUERY = "Where did the cat sit?"
_SENTENCE = (
    "The small grey cat that we found last week sat quietly on the old red mat near the door."
)
_TOWNS = ("Asta", "Bern", "Cork", "Dorf", "Elba", "Faro", "Gent", "Hamm", "Ivry", "Jena")
_PASSAGE = " ".join(
    f"The river town of {town} has an old mill, a bridge and a market where people sell bread."
    for town in _TOWNS
)
_REQUESTS = 5


def main() -> None:
    """Run the benchmark and print its tables."""
    options = parser(__doc__, rounds=5, seconds=6).parse_args()
    price, beside = Turns("plain"), Turns("alone")
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        export(resolve(str(save_model(Path(temporary)))), Path(temporary) / "artifact")
        reranker = vitrine(f"--model.path={temporary}/artifact", api=RERANK)
        kinds = {"embedder": vitrine(), "reranker": reranker}
        if ENGINES["openvino"].unusable("bfloat16") is None:
            kinds["embedder, bfloat16"] = vitrine("--engine.precision=bfloat16")
        servers = {name: stack.enter_context(ServerProcess(kind)) for name, kind in kinds.items()}
        for model, server in servers.items():
            for name, bodies in _requests().items():
                contenders = {
                    contender: partial(_p50, server, body) for contender, body in bodies.items()
                }
                price.measure(contenders, options.rounds, title=f"{model}, {name}: ")
        load = (servers["embedder"], options.seconds)
        contenders = {
            "alone": partial(_alone, *load),
            "beside explanations": partial(_beside, *load),
        }
        beside.measure(contenders, options.rounds, title="short: ")
    report(price, beside)


def _requests() -> dict[str, dict[str, Body]]:
    """Return requests to `/score`: by text and explanation, and by contender."""
    requests: dict[str, dict[str, Body]] = {}
    units: tuple[tuple[str, str, TextUnit], ...] = (
        ("20 words", _SENTENCE, "words"),
        ("10 sentences", _PASSAGE, "sentences"),
    )
    for name, text, by in units:
        spans = unit_spans(text, by)
        variants = ["", *(without(text, unit) for unit in spans), *(text[a:b] for a, b in spans)]
        plain = {"queries": _QUERY, "documents": [text]}
        requests[f"{name}, by {by}"] = {
            "plain": plain,
            "explained": {**plain, "explain": {"by": by}},
            "by hand": {**plain, "documents": [text, *variants]},
        }
        requests[f"{name}, default"] = {"plain": plain, "explained": {**plain, "explain": True}}
    plain = {"queries": _QUERY, "documents": [_PASSAGE.replace("mill", town) for town in _TOWNS]}
    highlights: dict[str, Body] = {"plain": plain, "explained": {**plain, "highlight": 2}}
    return requests | {"10 documents of 10 sentences, highlights": highlights}


def _p50(server: ServerProcess, body: Body) -> Figures:
    """Return the median time of requests that follow each other, and the tokens they cost."""
    times = []
    with server.awake():
        response = server.post(body, "/score")
        for _ in range(_REQUESTS):
            start = time.perf_counter()
            response = server.post(body, "/score")
            times.append(time.perf_counter() - start)
    tokens = sum(response["tokens"]) + response.get("explanation_tokens", 0)
    return {"p50, ms": statistics.median(times) * 1e3, "tokens": tokens}


def _alone(server: ServerProcess, seconds: int) -> Figures:
    return server.load(WORKLOADS["short"], seconds).figures()


def _beside(server: ServerProcess, seconds: int) -> Figures:
    body = {"queries": _QUERY, "documents": _PASSAGE, "explain": {"by": "sentences"}}
    with server.busy_client(body, "/score", seconds) as count:
        figures = _alone(server, seconds)
    return {**figures, "explanations": count()}


if __name__ == "__main__":
    main()
