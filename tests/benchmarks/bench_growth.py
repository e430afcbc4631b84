"""`make bench-growth`: how rates, latencies and memory grow with what users send and serve.

One quantity grows in each table: the length of texts, texts per request, clients, served models and
cores. All-MiniLM-L6-v2 is beside infinity's onnxruntime engine where that can take part; rows of up
to 8,192 tokens are those of a random model with ModernBERT's windows.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.benchmarks.bench_long import SMALL, random_artifact
from tests.benchmarks.bench_servers import ARTIFACT, infinity, infinity_folder, tokens_per_request
from tests.benchmarks.comparison import Figures, Turns, parser, report
from tests.benchmarks.servers import Api, Load, ServerKind, ServerProcess, vitrine
from tests.benchmarks.workloads import WORKLOADS, Workload

_OURS, _PEER = "Vitrine", "infinity"
_WORDS = (4, 12, 60, 200)  # most words are one token
_TEXTS = (1, 8, 64, 512)
_CLIENTS = (1, 4, 16, 64, 512)
_LONG = (128, 512, 2048, 8192)
_MODELS = (1, 4, 16)
_WINDOWS: Mapping[str, object] = {
    "local_attention": 128,
    "layer_types": ["full_attention", *["sliding_attention"] * 2] * 2,
}


def main() -> None:
    """Run the benchmark and print a table for each quantity."""
    options = parser(__doc__, rounds=3, seconds=4)
    arguments = options.parse_args()
    rounds, seconds = arguments.rounds, arguments.seconds
    ours = vitrine(f"--model.path={ARTIFACT}")
    folder = infinity_folder(arguments.environments)
    route = Api("/embeddings", "input")
    peer = infinity(
        arguments.environments, folder, route, "--pooling-method=mean", "--engine=optimum"
    )
    beside = {_OURS: ours, _PEER: peer}
    parts: list[str | Turns] = [
        "One text per request, 16 clients, by words:",
        _grown(beside, _WORDS, lambda words: _workload(16, 1, words), rounds, seconds),
        "Texts of 12 words, two clients, by texts per request:",
        _grown(beside, _TEXTS, lambda texts: _workload(2, texts, 12), rounds, seconds),
        "Short texts, by clients:",
        _grown(beside, _CLIENTS, lambda clients: _workload(clients, 1, 8), rounds, seconds),
        "One text, one client, ModernBERT's windows, 6 layers, 384 wide, by tokens:",
        _long_texts(rounds, seconds),
        "Short texts of 16 clients to each model in turn, by served models:",
        _models(rounds, seconds),
        "Mixed lengths, by cores:",
        _cores(rounds, seconds),
    ]
    report(*parts)


def _workload(clients: int, texts: int, words: int) -> Workload:
    return Workload(clients, texts, lambda _: words)


def _grown(
    kinds: Mapping[str, ServerKind],
    values: Sequence[int],
    workload: Callable[[int], Workload],
    rounds: int,
    seconds: int,
) -> Turns:
    """Compare servers, with the workload of each value."""
    comparison = Turns(_PEER)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(ServerProcess(kind)) for name, kind in kinds.items()}
        for value in values:
            load = _load_of(workload(value), seconds)
            contenders = {name: partial(load, server) for name, server in servers.items()}
            comparison.measure(contenders, rounds, title=f"{value}: ")
    return comparison


def _load_of(workload: Workload, seconds: int) -> Callable[[ServerProcess], Figures]:
    """Return the function that loads a server with a workload."""
    tokens = tokens_per_request(workload)

    def load(server: ServerProcess) -> Figures:
        return _figures(server, server.load(workload, seconds), tokens)

    return load


def _figures(server: ServerProcess, load: Load, tokens: float) -> Figures:
    resident_mb = server.resident_mb()
    return {"tokens/s": load.rate * tokens, "p50, ms": load.p50_ms, "resident, MB": resident_mb}


def _long_texts(rounds: int, seconds: int) -> Turns:
    comparison = Turns()
    with tempfile.TemporaryDirectory() as folder:
        artifact = random_artifact(Path(folder), "modernbert", max(_LONG), {**SMALL, **_WINDOWS})
        with ServerProcess(vitrine(f"--model.path={artifact.path}")) as server:
            for tokens in _LONG:
                text = " ".join(["w5"] * (tokens - 2))  # two special tokens
                measure = partial(_long_text, server, text, tokens, 2 * seconds)
                comparison.measure({_OURS: measure}, rounds, title=f"{tokens}: ")
    return comparison


def _long_text(server: ServerProcess, text: str, tokens: int, seconds: int) -> Figures:
    return _figures(server, server.load_bodies([{"inputs": text}], 1, seconds), tokens)


def _models(rounds: int, seconds: int) -> Turns:
    comparison = Turns()
    texts = [text for texts in WORKLOADS["short"].requests() for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        for count in _MODELS:
            names = [f"model{index}" for index in range(count)]
            for name in names:
                shutil.copytree(ARTIFACT, Path(folder) / name, dirs_exist_ok=True)
            bodies = [
                {"inputs": text, "model": names[index % count]} for index, text in enumerate(texts)
            ]
            with ServerProcess(
                vitrine(f"--models.folder={folder}", f"--models.default={names[0]}")
            ) as server:
                measure = partial(_in_turn, server, bodies, seconds)
                comparison.measure({_OURS: measure}, rounds, title=f"{count}: ")
                comparison.add(f"{count}: ready after, s", _OURS, server.ready_s)
    return comparison


def _in_turn(
    server: ServerProcess, bodies: Sequence[Mapping[str, object]], seconds: int
) -> Figures:
    load = server.load_bodies(bodies, WORKLOADS["short"].clients, seconds)
    return {**load.figures(), "resident, MB": server.resident_mb()}


def _cores(rounds: int, seconds: int) -> Turns:
    comparison = Turns("one core")
    kind = vitrine(f"--model.path={ARTIFACT}")
    one = ServerKind(("taskset", "--cpu-list", "0", *kind.command), kind.api, kind.environment)
    with ServerProcess(one) as one_core, ServerProcess(kind) as all_cores:
        load = _load_of(WORKLOADS["mixed"], seconds)
        contenders = {"one core": partial(load, one_core), "all cores": partial(load, all_cores)}
        comparison.measure(contenders, rounds)
    return comparison


if __name__ == "__main__":
    main()
