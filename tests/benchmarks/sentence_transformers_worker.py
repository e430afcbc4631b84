"""Encodes texts with sentence-transformers in an environment of its own, whenever it is told to.

python sentence_transformers_worker.py MODEL BACKEND PRECISION TEXTS.json VECTORS.npy
Each line on standard input encodes all texts once; the answer is the seconds that it took.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

OPTIONS: dict[tuple[str, str], dict[str, object]] = {
    ("torch", "float32"): {},
    ("torch", "bfloat16"): {"torch_dtype": "bfloat16"},
    ("onnx", "float32"): {"provider": "CPUExecutionProvider"},
    ("openvino", "float32"): {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}},
    ("openvino", "bfloat16"): {"ov_config": {"INFERENCE_PRECISION_HINT": "bf16"}},
}


def main() -> None:
    """Serve standard input."""
    folder, backend, precision, texts_file, vectors_file = sys.argv[1:]
    model = SentenceTransformer(
        folder,
        device="cpu",
        backend=backend,
        model_kwargs=dict(OPTIONS[backend, precision]),
    )
    texts = json.loads(Path(texts_file).read_text("utf-8"))
    np.save(vectors_file, model.encode(texts, show_progress_bar=False))
    for _ in sys.stdin:
        started = time.perf_counter()
        model.encode(texts, show_progress_bar=False)
        print(f"SECONDS {time.perf_counter() - started}", flush=True)


if __name__ == "__main__":
    main()
