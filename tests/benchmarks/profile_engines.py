"""`make profile`: an engine's time per operator, on one thread.

The batches group mixed texts by length.
"""

import json
import tempfile
from collections import Counter
from pathlib import Path

import openvino

from models.artifact import Artifact
from models.engines import ENGINES
from models.engines.with_onnxruntime import onnxruntime_session
from models.packing import PackedBatch, round_up
from tests.benchmarks.bench_engines import sorted_batches, token_ids
from tests.benchmarks.bench_servers import ARTIFACT
from tests.benchmarks.comparison import markdown, report
from tests.benchmarks.workloads import WORKLOADS

ROUNDS = 3


def onnxruntime_profile(graph: Path, batches: list[PackedBatch]) -> Counter[str]:
    """Return the microseconds of each operator, over all batches and rounds."""
    with tempfile.TemporaryDirectory() as folder:
        session = onnxruntime_session(graph, threads=1, profile=f"{folder}/times")
        for _ in range(ROUNDS + 1):
            for batch in batches:
                session.run(["pooled"], batch.inputs())
        events = json.loads(Path(session.end_profiling()).read_text())
    runs = [event["ts"] for event in events if event["name"] == "model_run"]
    warm = runs[len(batches)]  # the first round is the warm-up
    times: Counter[str] = Counter()
    for event in events:
        is_node = event["name"].endswith("_kernel_time") and event["ts"] >= warm
        # The time of an If is that of the nodes in it, which have events of their own.
        if is_node and event["args"]["op_name"] != "If":
            times[event["args"]["op_name"]] += event["dur"]
    return times


def openvino_profile(graph: Path, batches: list[PackedBatch], precision: str) -> Counter[str]:
    """Return the microseconds of each operator, over all batches and rounds."""
    core = openvino.Core()
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": 1,
        "PERF_COUNT": True,
    }
    request = core.compile_model(core.read_model(graph), "CPU", properties).create_infer_request()
    times: Counter[str] = Counter()
    for round_ in range(ROUNDS + 1):
        for batch in batches:
            request.infer(round_up(batch, tokens=16, length=16).inputs(), share_inputs=True)
            for node in request.profiling_info if round_ else ():
                times[node.node_type] += round(node.real_time.total_seconds() * 1e6)
    return times


def table(title: str, times: Counter[str], tokens: int) -> str:
    """Return a table of the slowest operators."""
    total = sum(times.values())
    rows = (
        [operator, f"{us / total:.1%}", f"{us / tokens:.2f}"]
        for operator, us in times.most_common()
        if us >= 0.005 * total
    )
    head = f"{title}: {total / tokens:.1f} us a token\n\n"
    return head + markdown(["operator", "share", "us a token"], rows)


def main() -> None:
    """Print a table per engine and precision that this machine supports."""
    texts = [text for request in WORKLOADS["mixed"].requests()[:200] for text in request]
    batches = sorted_batches(token_ids(texts))
    tokens = ROUNDS * sum(len(batch.input_ids) for batch in batches)
    artifact = Artifact.load(ARTIFACT)
    graphs = {graph.engine: artifact.path / graph.file for graph in artifact.manifest.graphs}
    times = onnxruntime_profile(graphs["onnxruntime"], batches)
    parts = [table("onnxruntime, float32", times, tokens)]
    for precision, name in (("f32", "float32"), ("bf16", "bfloat16")):
        if name == "float32" or ENGINES["openvino"].unusable("bfloat16") is None:
            times = openvino_profile(graphs["openvino"], batches, precision)
            parts.append(table(f"OpenVINO, {name}", times, tokens))
    report(*parts)


if __name__ == "__main__":
    main()
