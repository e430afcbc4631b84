"""Encodes texts with sentence-transformers in an environment of its own, whenever it is told to.

python sentence_transformers_worker.py MODEL DEVICE BACKEND PRECISION BATCH TEXTS.json VECTORS.npy
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
    ("torch", "float16"): {"torch_dtype": "float16"},
    ("torch", "bfloat16"): {"torch_dtype": "bfloat16"},
    ("onnx", "float32"): {"provider": "CPUExecutionProvider"},
    ("openvino", "float32"): {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}},
    ("openvino", "bfloat16"): {"ov_config": {"INFERENCE_PRECISION_HINT": "bf16"}},
}


def main() -> None:
    """Serve standard input."""
    folder, device, backend, precision, batch, texts_file, vectors_file = sys.argv[1:]
    model = SentenceTransformer(
        folder,
        device=device,
        backend=backend,
        model_kwargs=dict(OPTIONS[backend, precision]),
    )
    texts = json.loads(Path(texts_file).read_text("utf-8"))

    def encode() -> np.ndarray:
        return np.asarray(model.encode(texts, batch_size=int(batch), show_progress_bar=False))

    np.save(vectors_file, encode().astype(np.float32))
    for _ in sys.stdin:
        started = time.perf_counter()
        encode()
        print(f"SECONDS {time.perf_counter() - started}", flush=True)


if __name__ == "__main__":
    main()
