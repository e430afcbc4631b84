"""`python -m tests.benchmarks.bench_experts`: NomicBERT with experts beside the same without them.

Layers have the sizes of nomic-embed-text-v2-moe, random weights, and 2 of 8 experts per token in
every second layer. In the time of one feed-forward layer, experts of the same width would take 2.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from models.engines import Engine, open_engine
from models.export.exporter import export
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.packing import PackedBatch, pack
from tests.benchmarks.comparison import Figures, Measure, Turns, parser, report
from tests.models.checkpoints import save_checkpoint, save_tokenizer

_VOCABULARY = 1000
_SIZES = {
    "vocab_size": _VOCABULARY,
    "n_embd": 768,
    "n_layer": 4,
    "n_head": 12,
    "n_inner": 3072,
    "n_positions": 512,
}
_MODELS: dict[str, dict[str, object]] = {
    "no experts": {"num_experts": 0, "moe_every_n_layers": 0},
    "experts": {},
}
# Lengths of the rows of a batch.
_BATCHES = {"1 row of 32 tokens": [32], "16 rows of 32": [32] * 16}
_RUNS = 10


def _spread(file: Path) -> None:
    """Scale random weights so that tokens stay different, and choose all experts about equally."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "embeddings" not in name:
            tensor *= (2 if "router" in name else 0.5) / tensor.shape[1] ** 0.5 / tensor.std()
        elif name.endswith("bias"):
            tensor *= 0.1
    save_file(tensors, file, metadata={"format": "pt"})


def _median(run: Callable[[PackedBatch], object], batches: list[PackedBatch]) -> Figures:
    times = []
    for batch in batches:
        started = time.perf_counter()
        run(batch)
        times.append(time.perf_counter() - started)
    return {"ms": 1e3 * float(np.median(times))}


def _batches(lengths: list[int]) -> list[PackedBatch]:
    draw = np.random.default_rng(0)
    return [
        pack([draw.integers(4, _VOCABULARY, length).tolist() for length in lengths])
        for _ in range(_RUNS)
    ]


def main() -> None:
    """Run the benchmark and print its table."""
    rounds = parser(__doc__, rounds=5).parse_args().rounds
    comparison = Turns("no experts")
    with tempfile.TemporaryDirectory() as folder:
        artifacts = {}
        for name, changes in _MODELS.items():
            model = Path(folder) / name
            save_checkpoint(model, "nomic_moe", **_SIZES, **changes)
            save_tokenizer(model)
            _spread(model / "model.safetensors")
            overrides = Overrides(pooling=["mean"])
            out = Path(folder) / f"{name} artifact"
            artifacts[name], _ = export(
                resolve(str(model)), out, overrides=overrides, copy_source=False
            )
        for engine in ("onnxruntime", "openvino"):
            engines: dict[str, Engine] = {
                name: open_engine(artifact, engine) for name, artifact in artifacts.items()
            }
            for title, lengths in _BATCHES.items():
                contenders: dict[str, Measure] = {
                    name: partial(_median, own.run, _batches(lengths))
                    for name, own in engines.items()
                }
                comparison.measure(contenders, rounds, title=f"{engine}, {title}: ")
            for own in engines.values():
                own.close()
    report(comparison)


if __name__ == "__main__":
    main()
