"""`make bench-long`: long rows, long texts and large models, with random weights.

Everything that is compared takes turns. Each figure is the median of the rounds; rows of more than
8,192 tokens run once.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer

from models.artifact import TOKENIZER, Artifact
from models.engines import available_cpus, open_engine
from models.engines.with_onnxruntime import onnxruntime_session
from models.export.exporter import export
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.packing import pack
from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.benchmarks.bench_servers import ARTIFACT
from tests.benchmarks.servers import Kind, Server, need_wrk
from tests.benchmarks.workloads import WORKLOADS
from tests.models.checkpoints import edit_json, save_checkpoint, save_tokenizer

ROUNDS = 3
# A row of 32,768 tokens takes minutes on two cores.
_LONGEST_IN_ROUNDS = 8192
_PORTS = (8140, 8141)
_SMALL: dict[str, object] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
_QWEN3: dict[str, object] = {"num_key_value_heads": 12, "head_dim": 32, "layer_types": None}
_LARGE = {
    "vocab_size": 30_522,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_MODERNBERT = {
    "hidden_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "local_attention": 128,
    "layer_types": ["full_attention", "sliding_attention"],
}
# Serves with a graph that is compiled twice, whatever its size.
_TWICE = (
    "import models.engines.engine as engine; engine._MAX_BYTES_COMPILED_TWICE = 2**62; "
    "from service.__main__ import main; main()"
)


def exported(folder: Path, family: str, max_tokens: int, **config: object) -> Artifact:
    """Export a random model."""
    save_checkpoint(folder / "model", family, max_position_embeddings=max_tokens, **config)
    save_tokenizer(folder / "model")
    edit_json(folder / "model" / "tokenizer_config.json", model_max_length=max_tokens)
    overrides = Overrides(pooling=["mean"])
    source = resolve(str(folder / "model"))
    return export(source, folder / "artifact", overrides=overrides, copy_source=False)[0]


def line(title: str, *figures: str) -> None:
    """Print a line of the table."""
    print(f"| {' | '.join([title, *figures, '', ''][:4])} |", flush=True)


def median_s(functions: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median duration of each function; they take turns, after a first round.

    Without rounds, it is the duration in the first round.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[1:] or values) for name, values in times.items()}


def peak_mb(run: Callable[[], object]) -> float:
    """Return how far a run raises the resident memory of this process."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status_mb("VmRSS")
    run()
    return _status_mb("VmHWM") - before


def _status_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6


def bench_rows(folder: Path, family: str, lengths: Iterable[int]) -> None:
    """Compare one row in onnxruntime with transformers, whose attention PyTorch fuses."""
    config = _SMALL | (_QWEN3 if family == "qwen3" else {})
    artifact = exported(folder, family, max(lengths), **config)
    model = transformers.AutoModel.from_pretrained(folder / "model").eval()
    torch.set_num_threads(available_cpus())
    engine = open_engine(artifact, "onnxruntime")
    for length in lengths:
        row = [5] * length

        def run_torch(row: list[int] = row) -> None:
            with torch.no_grad():
                model(torch.tensor([row]))

        batch = pack([row])
        rounds = ROUNDS if length <= _LONGEST_IN_ROUNDS else 0
        seconds = median_s({"torch": run_torch, "engine": partial(engine.run, batch)}, rounds)
        peak = peak_mb(partial(engine.run, batch))
        ratio = seconds["engine"] / seconds["torch"]
        figures = f"{seconds['engine']:.2f}", f"{ratio:.2f}", f"{peak:.0f}"
        title = f"{family}, one row of {length:,} tokens: s, ratio to PyTorch's, MB above idle"
        line(title, *figures)


def bench_window(folder: Path) -> None:
    """Compare the attention of a layer with a window with that of a full layer."""
    artifact = exported(folder, "modernbert", 8192, **_MODERNBERT)
    graph = artifact.path / artifact.graph("onnxruntime").file
    session = onnxruntime_session(graph, available_cpus(), profile=str(folder / "times"))
    for _ in range(ROUNDS + 1):
        session.run(["pooled"], pack([[5] * 8192]).inputs())
    events = [
        event
        for event in json.loads(Path(session.end_profiling()).read_text())
        if event["name"].endswith("_kernel_time") and event["args"]["op_name"] == "If"
    ]
    outer: list[float] = []
    end = 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["ts"] >= end:  # not within another If
            outer.append(event["dur"])
            end = event["ts"] + event["dur"]
    ratios = [local / full for full, local in zip(outer[::2], outer[1::2], strict=True)][1:]
    ratio = f"{statistics.median(ratios):.3f}"
    line("window of 64 at 8,192 tokens: attention's time, ratio to full attention", ratio)


def bench_tokenizer() -> None:
    """Compare tokenising a megabyte in part and whole."""
    artifact = Artifact.load(ARTIFACT)
    served = TextTokenizer(artifact, max_chars=10**7)
    whole = Tokenizer.from_buffer(artifact.read(TOKENIZER))
    whole.enable_truncation(artifact.manifest.max_tokens)
    text = ("The quick brown fox, jumps over 12 lazy dogs! " * 30_000)[:1_000_000]
    seconds = median_s(
        {
            "part": lambda: served.rows_of_texts([text], None, "truncate"),
            "whole": lambda: whole.encode_batch_fast([text]),
        }
    )
    figures = f"{1000 * seconds['part']:.1f}", f"{seconds['part'] / seconds['whole']:.4f}"
    line("tokenising 1 MB for 256 tokens: ms, ratio to tokenising it whole", *figures)


def bench_beside(folder: Path, seconds: float) -> None:
    """Measure short texts beside texts of 8,192 tokens."""
    artifact = exported(folder, "bert", 8192, **_SMALL)
    server = Server(_vitrine(artifact, _PORTS[0]), _PORTS[0])
    try:
        long = " ".join(["w5"] * 8190)
        alone_s = median_s({"long": lambda: server.encode([long])})["long"]
        for clients in (2, 6):
            end = time.monotonic() + seconds
            long_s = [_client(server, long, end) for _ in range(clients)]
            short_s = [_client(server, "w7 w8 w9", end) for _ in range(8)]
            short = sorted(value for client in short_s for value in client())
            for client in long_s:
                client()
            p99 = short[int(0.99 * (len(short) - 1))]
            figures = f"{1000 * statistics.median(short):.0f}", f"{1000 * p99:.0f}"
            title = f"short texts beside {clients} clients with texts of {alone_s:.1f} s: "
            line(f"{title} p50, p99 in ms", *figures)
    finally:
        server.stop()


def _client(server: Server, text: str, end: float) -> Callable[[], list[float]]:
    """Send a text again and again in a thread; the returned function waits for its latencies."""
    latencies: list[float] = []

    def send() -> None:
        while time.monotonic() < end:
            started = time.perf_counter()
            if not server.encode([text]):
                raise RuntimeError("a request failed")
            latencies.append(time.perf_counter() - started)

    thread = threading.Thread(target=send)
    thread.start()

    def joined() -> list[float]:
        thread.join()
        return latencies

    return joined


def bench_large(folder: Path, seconds: int) -> None:
    """Compare a large model that is compiled once with one that is compiled twice."""
    artifact = exported(folder, "bert", 512, **_LARGE)
    twice = (sys.executable, "-c", _TWICE, "--model.path", str(artifact.path))
    kinds = {
        "once": _vitrine(artifact, _PORTS[0]),
        "twice": Kind((*twice, f"--server.port={_PORTS[1]}"), "/encode", "inputs", Path()),
    }
    servers = {
        name: Server(kind, port) for (name, kind), port in zip(kinds.items(), _PORTS, strict=True)
    }
    try:
        memory = {name: server.resident_mb() for name, server in servers.items()}
        p50: dict[str, list[float]] = {name: [] for name in servers}
        rate: dict[str, list[float]] = {name: [] for name in servers}
        for server in servers.values():
            server.pause()
        for _ in range(ROUNDS):
            for name, server in servers.items():
                p50[name].append(server.load(WORKLOADS["one client"], seconds).p50_ms)
                mixed = server.load(WORKLOADS["mixed"], 2 * seconds)
                rate[name].append(mixed.requests / mixed.seconds)
    finally:
        for server in servers.values():
            server.stop()
    weights = (artifact.path / artifact.graph("onnxruntime").weights).stat().st_size / 1e6
    figures = f"{memory['once']:,.0f}", f"{memory['twice']:,.0f}"
    line(f"BERT-large, {weights:,.0f} MB: resident MB compiled once, twice", *figures)
    ratios = [
        f"{statistics.median(times['once']) / statistics.median(times['twice']):.2f}"
        for times in (rate, p50)
    ]
    line("compiled once: ratio of mixed requests/s, of one client's p50", *ratios)


def _vitrine(artifact: Artifact, port: int) -> Kind:
    serve = str(Path(sys.executable).with_name("vitrine-serve"))
    options = ("--model.path", str(artifact.path), f"--server.port={port}")
    return Kind((serve, *options), "/encode", "inputs", Path())


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--seconds", type=int, default=30, help="duration of one measurement")
    options = parser.parse_args()
    need_wrk()
    print("| | | | |\n|---|--:|--:|--:|")
    bench_tokenizer()
    for bench in (
        lambda folder: bench_rows(folder, "bert", options.lengths),
        lambda folder: bench_rows(folder, "qwen3", options.lengths),
        bench_window,
        lambda folder: bench_beside(folder, options.seconds),
        lambda folder: bench_large(folder, options.seconds // 3),
    ):
        with tempfile.TemporaryDirectory() as folder:
            bench(Path(folder))


if __name__ == "__main__":
    main()
