"""Libraries under measurement: each in an environment and a process of its own, working on request.

`library` starts this file with the Python of the environment:

    python libraries.py FUNCTION ARGUMENTS.json RESULT.npy

It does the work once, writes the result, and repeats the work for each line on standard input.
After each it prints the duration in seconds, without the load of the model.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

# Arguments of a model in sentence-transformers, by backend and precision.
SENTENCE_TRANSFORMERS: dict[tuple[str, str], dict[str, object]] = {
    ("torch", "float32"): {},
    ("torch", "bfloat16"): {"torch_dtype": "bfloat16"},
    ("onnx", "float32"): {"provider": "CPUExecutionProvider"},
    ("openvino", "float32"): {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}},
    ("openvino", "bfloat16"): {"ov_config": {"INFERENCE_PRECISION_HINT": "bf16"}},
}
Work = Callable[[], Any]


@contextmanager
def library(
    environment: Path, function: Callable[..., Work], **arguments: object
) -> Iterator[tuple[Callable[[], float], Any]]:
    """Yield a function that does the work once and returns its duration, and the first result.

    Args:
        environment: Virtual environment of the library.
        function: One of the functions of this module that return work.
        arguments: Its arguments, which JSON can express.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs, output = Path(folder) / "arguments.json", Path(folder) / "result.npy"
        inputs.write_text(json.dumps(arguments), "utf-8")
        python = environment.absolute() / "bin/python"
        with subprocess.Popen(
            [python, __file__, function.__name__, inputs, output],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            text=True,
        ) as process:
            assert process.stdin
            assert process.stdout
            requests, responses = process.stdin, process.stdout

            def seconds() -> float:
                print(file=requests, flush=True)
                for line in responses:
                    if line.startswith("SECONDS "):
                        return float(line.split()[1])
                raise RuntimeError(f"{function.__name__} in {environment} has ended")

            seconds()
            yield seconds, np.load(output)


def sentence_transformers(model: str, backend: str, precision: str, texts: list[str]) -> Work:
    """Encode texts with `SentenceTransformer`."""
    encoder = _sentence_transformer(model, backend, precision)
    return lambda: encoder.encode(texts)


def sentence_transformers_file(model: str, backend: str, precision: str, file: str) -> Work:
    """Read and encode a file of texts with `SentenceTransformer`, on all cores.

    The backend torch runs in one process per core. Models of the others cannot be sent to
    processes, and run in one process on all cores.
    """
    encoder = _sentence_transformer(model, backend, precision)
    devices = ["cpu"] * len(os.sched_getaffinity(0))
    pool = encoder.start_multi_process_pool(devices) if backend == "torch" else None

    def encode() -> np.ndarray:
        lines = Path(file).read_text("utf-8").splitlines()
        vectors: np.ndarray = encoder.encode(
            [json.loads(line)["text"] for line in lines], pool=pool
        )
        return vectors

    return encode


def _sentence_transformer(model: str, backend: str, precision: str) -> Any:  # noqa: ANN401
    from sentence_transformers import SentenceTransformer

    arguments = SENTENCE_TRANSFORMERS[backend, precision]
    return SentenceTransformer(model, device="cpu", backend=backend, model_kwargs=arguments)


def cross_encoder(model: str, backend: str, requests: list[list[tuple[str, str]]]) -> Work:
    """Score the pairs of each request with `CrossEncoder`, one request after the other."""
    from sentence_transformers import CrossEncoder

    arguments = SENTENCE_TRANSFORMERS[backend, "float32"]
    encoder = CrossEncoder(model, device="cpu", backend=backend, model_kwargs=arguments)
    return lambda: np.stack([encoder.predict([tuple(pair) for pair in own]) for own in requests])


def fastembed(folder: str, batch_size: int, max_tokens: int, texts: list[str]) -> Work:
    """Encode texts with fastembed, from a folder with an ONNX graph of token vectors."""
    # Only the library's own environment has the package.
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        "local",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(url="unused"),
        dim=384,
        model_file="model.onnx",
    )
    encoder = TextEmbedding("local", specific_model_path=folder)
    encoder.model.tokenizer.enable_truncation(max_tokens)
    return lambda: np.stack(list(encoder.embed(texts, batch_size)))


def ctranslate2(model: str, converted: str, precision: str, batches: list[list[list[int]]]) -> Work:
    """Encode batches of token ids with CTranslate2, one batch per core at a time.

    Converts the folder of a BERT checkpoint to the folder `converted` if that is missing.
    """
    # Only the library's own environment has the package.
    from ctranslate2 import Encoder
    from ctranslate2.converters import TransformersConverter

    if not Path(converted).exists():
        TransformersConverter(model).convert(converted)
    cores = os.cpu_count() or 1
    encoder = Encoder(converted, compute_type=precision, inter_threads=cores, intra_threads=1)
    streams = ThreadPoolExecutor(cores)

    def mean_pooled(batch: list[list[int]]) -> np.ndarray:
        output = encoder.forward_batch(batch).last_hidden_state
        tokens = np.asarray(output)  # (B, L, D), without a copy
        return np.stack([row[: len(ids)].mean(0) for row, ids in zip(tokens, batch, strict=True)])

    return lambda: np.concatenate(list(streams.map(mean_pooled, batches)))


def main() -> None:
    """Do the work once, and once more per line of standard input."""
    function, inputs, output = sys.argv[1:]
    work = globals()[function](**json.loads(Path(inputs).read_text("utf-8")))
    np.save(output, work())
    for _ in sys.stdin:
        started = time.perf_counter()
        work()
        print(f"SECONDS {time.perf_counter() - started}", flush=True)


if __name__ == "__main__":
    main()
