"""`make bench-long`: long rows, long texts and large models, with random weights.

Everything that is compared takes turns; rows of more than 8,192 tokens run once.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from models.artifact import Artifact
from models.engines import available_cpus, open_engine
from models.engines.with_onnxruntime import onnxruntime_session
from models.export.exporter import export
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.manifest import TOKENIZER
from models.packing import pack
from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.benchmarks.bench_servers import ARTIFACT
from tests.benchmarks.comparison import Figures, Measure, Turns, parser, report
from tests.benchmarks.servers import ServerKind, ServerProcess, status_mb, vitrine
from tests.benchmarks.workloads import WORKLOADS
from tests.models.checkpoints import edit_json, save_checkpoint, save_tokenizer

# A row of 32,768 tokens takes minutes on two cores.
_LONGEST_IN_ROUNDS = 8192
SMALL: dict[str, object] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
_QWEN3: dict[str, object] = {"num_key_value_heads": 12, "head_dim": 32, "layer_types": None}
_LARGE: dict[str, object] = {
    "vocab_size": 30_522,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_MODERNBERT: dict[str, object] = {
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
    "from service.serve_command import main; main()"
)


def random_artifact(
    folder: Path, family: str, max_tokens: int, config: dict[str, object]
) -> Artifact:
    """Export a random model."""
    save_checkpoint(folder / "model", family, max_position_embeddings=max_tokens, **config)
    save_tokenizer(folder / "model")
    edit_json(folder / "model" / "tokenizer_config.json", model_max_length=max_tokens)
    overrides = Overrides(pooling=["mean"])
    source = resolve(str(folder / "model"))
    return export(source, folder / "artifact", overrides=overrides, copy_source=False)[0]


def _timed(run: Callable[[], object]) -> Measure:
    """Return a function that measures the duration of a run."""

    def measure() -> Figures:
        started = time.perf_counter()
        run()
        return {"s": time.perf_counter() - started}

    return measure


def _peak_mb(run: Callable[[], object]) -> float:
    """Return how far a run raises the resident memory of this process."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_mb("VmRSS")
    run()
    return status_mb("VmHWM") - before


def _rows(folder: Path, family: str, lengths: Sequence[int], rounds: int) -> Turns:
    """Compare one row in onnxruntime with transformers, whose attention PyTorch fuses."""
    comparison = Turns("PyTorch")
    artifact = random_artifact(
        folder, family, max(lengths), SMALL | (_QWEN3 if family == "qwen3" else {})
    )
    model = transformers.AutoModel.from_pretrained(folder / "model").eval()
    torch.set_num_threads(available_cpus())
    engine = open_engine(artifact, "onnxruntime")
    for length in lengths:
        ids, batch = torch.tensor([[5] * length]), pack([[5] * length])
        run = partial(engine.run, batch)
        contenders = {
            "onnxruntime": _timed(run),
            "PyTorch": _timed(torch.no_grad()(partial(model, ids))),
        }
        title, is_short = f"{family}, one row of {length:,} tokens: ", length <= _LONGEST_IN_ROUNDS
        comparison.measure(contenders, rounds if is_short else 1, title=title, warm_up=is_short)
        comparison.add(f"{title}MB above idle", "onnxruntime", _peak_mb(run))
    return comparison


def _window(folder: Path, rounds: int) -> Turns:
    """Compare the attention of a layer with a window with that of a full layer."""
    artifact = random_artifact(folder, "modernbert", 8192, _MODERNBERT)
    graph = artifact.path / artifact.graph("onnxruntime").file
    session = onnxruntime_session(graph, available_cpus(), profile=str(folder / "times"))
    for _ in range(rounds + 1):
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
    comparison = Turns("full attention")
    for name, times in (("full attention", outer[2::2]), ("window of 64", outer[3::2])):
        for us in times:
            comparison.add("8,192 tokens: attention, s", name, us / 1e6)
    return comparison


def _tokenizer(rounds: int) -> Turns:
    """Compare tokenising a megabyte in part and whole."""
    artifact = Artifact.load(ARTIFACT)
    served = TextTokenizer(artifact, max_chars=10**7)
    whole = Tokenizer.from_buffer(artifact.read(TOKENIZER))
    whole.enable_truncation(artifact.manifest.max_tokens)
    text = ("The quick brown fox, jumps over 12 lazy dogs! " * 30_000)[:1_000_000]
    contenders = {
        "in part": _timed(lambda: served.rows_of_texts([text], None, "truncate")),
        "whole": _timed(lambda: whole.encode_batch_fast([text])),
    }
    comparison = Turns("whole")
    comparison.measure(contenders, rounds, title="tokenising 1 MB for 256 tokens: ")
    return comparison


def _beside(folder: Path, seconds: int) -> Turns:
    """Measure short texts beside texts of 8,192 tokens."""
    artifact = random_artifact(folder, "bert", 8192, SMALL)
    comparison = Turns()
    with ServerProcess(vitrine(f"--model.path={artifact.path}")) as server, server.awake():
        long = " ".join(["w5"] * 8190)
        comparison.measure({"alone": _timed(lambda: server.encode([long]))}, 3, title="long text: ")
        for clients in (2, 6):
            end = time.monotonic() + seconds
            with ThreadPoolExecutor(clients + 8) as threads:
                texts = [long] * clients + ["w7 w8 w9"] * 8
                each = list(threads.map(lambda text, end=end: _latencies(server, text, end), texts))
            latencies = np.concatenate(each[clients:])
            for quantile in (50, 99):
                value = 1e3 * float(np.percentile(latencies, quantile))
                name = f"beside {clients} clients with long texts"
                comparison.add(f"short texts: p{quantile}, ms", name, value)
    return comparison


def _latencies(server: ServerProcess, text: str, end: float) -> list[float]:
    """Send a text again and again; return the latencies in seconds."""
    latencies: list[float] = []
    while time.monotonic() < end:
        started = time.perf_counter()
        server.encode([text])
        latencies.append(time.perf_counter() - started)
    return latencies


def _large(folder: Path, rounds: int, seconds: int) -> Turns:
    """Compare a large model that is compiled once with one that is compiled twice."""
    artifact = random_artifact(folder, "bert", 512, _LARGE)
    model = f"--model.path={artifact.path}"
    twice = ServerKind((sys.executable, "-c", _TWICE, model, "--server.port={port}"))
    comparison = Turns("compiled twice")
    with ServerProcess(vitrine(model)) as once, ServerProcess(twice) as other:
        servers = {"compiled once": once, "compiled twice": other}
        for name, server in servers.items():
            comparison.add("BERT-large: resident, MB", name, server.resident_mb())
        for name, length in (("one client", seconds), ("mixed", 2 * seconds)):
            load = partial(_load, workload=name, seconds=length)
            contenders = {name: partial(load, server) for name, server in servers.items()}
            comparison.measure(contenders, rounds, title=f"{name}: ", warm_up=False)
    return comparison


def _load(server: ServerProcess, workload: str, seconds: int) -> Figures:
    return server.load(WORKLOADS[workload], seconds).figures()


def main() -> None:
    """Run the benchmark and print its tables."""
    options = parser(__doc__, rounds=3, seconds=30)
    options.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    arguments = options.parse_args()
    rounds, seconds = arguments.rounds, arguments.seconds
    parts = [_tokenizer(rounds)]
    for bench in (
        partial(_rows, family="bert", lengths=arguments.lengths, rounds=rounds),
        partial(_rows, family="qwen3", lengths=arguments.lengths, rounds=rounds),
        partial(_window, rounds=rounds),
        partial(_beside, seconds=seconds),
        partial(_large, rounds=rounds, seconds=max(1, seconds // 3)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            parts.append(bench(Path(folder)))
    report(*parts)


if __name__ == "__main__":
    main()
