"""Score pairs with sentence-transformers in a separate environment, on request.

python cross_encoder_worker.py MODEL BACKEND REQUESTS.json SCORES.json
REQUESTS.json has lists of pairs. For each line on standard input, it scores the pairs of all
requests, one request after the other, and prints the duration in seconds.
"""

import json
import sys
import time
from pathlib import Path

from sentence_transformers import CrossEncoder

# Backends and their arguments.
BACKENDS: dict[str, dict[str, object]] = {
    "torch": {},
    "onnx": {"provider": "CPUExecutionProvider"},
    "openvino": {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}},
}


def main() -> None:
    """Score once per line of standard input."""
    folder, backend, requests_file, scores_file = sys.argv[1:]
    model = CrossEncoder(folder, device="cpu", backend=backend, model_kwargs=BACKENDS[backend])
    requests = json.loads(Path(requests_file).read_text("utf-8"))

    def score() -> list[list[float]]:
        return [model.predict([tuple(pair) for pair in pairs]).tolist() for pairs in requests]

    Path(scores_file).write_text(json.dumps(score()))
    for _ in sys.stdin:
        started = time.perf_counter()
        score()
        print(f"SECONDS {time.perf_counter() - started}", flush=True)


if __name__ == "__main__":
    main()
