"""Encode texts with sentence-transformers in a separate environment, on request.

python sentence_transformers_worker.py MODEL DEVICE BACKEND PRECISION BATCH TEXTS.json VECTORS.npy
For each line on standard input it encodes all texts once and prints the duration in seconds.
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
    """Encode once per line of standard input."""
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
