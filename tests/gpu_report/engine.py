"""Steps d and e: results and throughput of the engine `cuda`; in a dry run, of `onnxruntime`."""

import json
import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import onnxruntime
import torch
import transformers

from models.artifact import Artifact
from models.engines import ENGINES, OUTPUTS, Engine, Precision, cosines, measure_check, open_engine
from models.export.exporter import export
from models.export.sources import resolve
from models.manifest import Output
from models.packing import PackedBatch, pack
from service.inference.model.opening import ModelOptions
from service.inference.model.sync_model import SyncModel
from tests.gpu_report.rates import batches_of, mixed_length, random_rows, rate_of_process
from tests.gpu_report.results import Row
from tests.gpu_report.step import Run
from tests.models.checkpoints import (
    edit_json,
    save_checkpoint,
    save_classifier,
    save_masked_lm,
    save_multi_vector,
    save_token_classifier,
    save_tokenizer,
    write_json,
    write_modules,
)

_BERT = {"num_attention_heads": 12, "vocab_size": 30_522, "max_position_embeddings": 512}
# Shapes of well-known models, with random weights.
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "MiniLM": (
        "bert",
        {**_BERT, "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    ),
    "BERT-base": (
        "bert",
        {**_BERT, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
    ),
    "ModernBERT-base": (
        "modernbert",
        {"vocab_size": 50_368, "hidden_size": 768, "num_hidden_layers": 22, "pad_token_id": 1},
    ),
}
_TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 60,
}
_MAX_TOKENS = 256
_ARTIFACTS = Path(__file__).parents[2] / "artifacts"
# Costs of a batch that are tried, in tokens.
_COSTS = (4096, 8192, 16_384, 32_768, 65_536)
_STREAMS = (1, 2, 4)
# Ratio to sentence-transformers that the engine should reach on mixed lengths.
_RATIO = 2.0


def check(run: Run) -> None:
    """Compare the engine with PyTorch for each shape and output, and list its nodes."""
    _check_usable(run)
    engine, precision = engine_of(run)
    graph = engine, ENGINES[engine].precisions[precision]
    for manifest in sorted(_ARTIFACTS.glob("*/manifest.json")):  # real weights, if there are any
        artifact = Artifact.load(manifest.parent)
        graphs = {(own.engine, own.dtype) for own in artifact.manifest.graphs}
        if graph in graphs and run.has_time(f"results of {artifact.path.name}", 20):
            _compare(run, artifact.path.name, artifact)
    for name in ("MiniLM",) if run.is_dry else _SHAPES:
        if run.has_time(f"results of {name}", 20):
            artifact = artifact_of(run, name)
            _compare(run, name, artifact)
            _batches(run, name, artifact)
            _nodes(run, name, artifact)
    for kind in ("SPLADE", "ColBERT") if run.is_dry else _KINDS:
        if run.has_time(f"results of {kind}", 10):
            _compare(run, kind, _of_kind(run, kind))


def engine_of(run: Run) -> tuple[str, Precision]:
    return ("onnxruntime", "float32") if run.is_dry else ("cuda", "float16")


def _check_usable(run: Run) -> None:
    """Raise an error if the engine is not usable here."""
    name, precision = engine_of(run)
    if reason := ENGINES[name].unusable(precision):
        raise RuntimeError(f"{name} in {precision} is not usable: {reason}")


def _opened(run: Run, artifact: Artifact) -> Engine:
    name, precision = engine_of(run)
    return open_engine(artifact, name, precision, gpu=_gpu(run))


def _gpu(run: Run) -> int:
    return 0 if run.is_dry else torch.device(run.device).index or 0


def artifact_of(run: Run, name: str) -> Artifact:
    """Return an artifact of a shape, which other steps find in the folder."""
    folder = run.folder / "models" / name
    if (folder / "artifact").exists():
        return Artifact.load(folder / "artifact")
    family, changes = _SHAPES[name]
    if run.is_dry:
        changes = {**changes, **_TINY}
    config = transformers.AutoConfig.for_model(family, **changes)
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    edit_json(folder / "tokenizer_config.json", model_max_length=_MAX_TOKENS)
    write_modules(folder, ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2"))
    (folder / "2").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    return _exported(run, folder)


def _exported(run: Run, folder: Path) -> Artifact:
    """Return the artifact of a checkpoint.

    The export itself does not run the engine: it would stop at the first difference, which is
    measured afterwards.
    """
    target, dtype = ("cpu", "float32") if run.is_dry else ("cuda", "float16")
    cuda = replace(ENGINES["cuda"], unusable=lambda _precision: "it is measured afterwards")
    with patch.dict(ENGINES, cuda=cuda):
        source = resolve(str(folder))
        return export(source, folder / "artifact", target=target, dtype=dtype)[0]  # type: ignore[arg-type]


def _compare(run: Run, name: str, artifact: Artifact) -> None:
    """Compare the engine with the reference vectors of PyTorch in the artifact."""
    engine = _opened(run, artifact)
    try:
        for output, agreement in measure_check(engine, artifact).items():
            bounds = OUTPUTS[output].bounds[engine.precision]
            passes = agreement.is_within(bounds)
            row: Row = {
                "model": name,
                "output": output,
                "1 - cosine": 1 - agreement.cosine,
                "bound": 1 - bounds.cosine,
                "norm": agreement.norm,
                "bound of norm": bounds.norm,
            }
            cause = "" if passes else f"{name}, {output}: {_cause(run, artifact, output)}"
            run.recorder.add("Beside PyTorch", row, passes=passes, cause=cause)
    finally:
        engine.close()


def _cause(run: Run, artifact: Artifact, output: Output) -> str:
    """Return how the graph agrees with and without onnxruntime's optimisations."""
    worst: dict[bool, float] = {}
    for optimized in (True, False):
        session = _session(run, artifact, optimized=optimized)
        names = [port.name for port in session.get_inputs()]
        graph = partial(_run_session, session, names)
        plain = SimpleNamespace(name=engine_of(run)[0], runs=(graph,))
        worst[optimized] = measure_check(cast(Engine, plain), artifact)[output].cosine
    return (
        f"onnxruntime alone has a worst cosine of {worst[True]:.6f}, and of {worst[False]:.6f} "
        "without optimisations of the graph"
    )


def _run_session(
    session: onnxruntime.InferenceSession,
    names: Sequence[str],
    batch: PackedBatch,
    outputs: Sequence[Output],
) -> Any:  # noqa: ANN401 - arrays of onnxruntime
    return session.run(list(outputs), batch.inputs(names))


def _batches(run: Run, name: str, artifact: Artifact) -> None:
    """Compare rows in one batch with the same rows alone."""
    engine = _opened(run, artifact)
    rows = random_rows([1, 2, 7, 16, 33, 64, 128, 255, 3, 256])
    alone = np.concatenate([engine.run(pack([row])) for row in rows])
    worst = float(cosines(engine.run(pack(rows)), alone).min())
    engine.close()
    bound = OUTPUTS["pooled"].bounds[engine.precision].cosine
    row: Row = {"model": name, "1 - cosine": 1 - worst, "bound": 1 - bound}
    run.recorder.add("One batch beside each row alone", row, passes=worst >= bound)


def _nodes(run: Run, name: str, artifact: Artifact) -> None:
    """List the operators of a run by their time, and those that stay on the CPU."""
    session = _session(run, artifact, profile=str(run.folder / f"profile-{name}"))
    names = [port.name for port in session.get_inputs()]
    batch = pack(random_rows([64] * (2 if run.is_dry else 128)))
    for _ in range(3):
        session.run(["pooled"], batch.inputs(names))
    events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
    times: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for event in events:
        provider = event.get("args", {}).get("provider")
        if event.get("cat") == "Node" and provider:
            key = (event["args"]["op_name"], provider.removesuffix("ExecutionProvider"))
            times[key] += event["dur"]
            counts[key] += 1
    total = sum(times.values()) or 1
    for (operator, provider), duration in times.most_common(12):
        row: Row = {"model": name, "operator": operator, "on": provider}
        row |= {"of the time": duration / total, "runs": counts[operator, provider]}
        run.recorder.add("Operators by time", row)
    if not run.is_dry:
        on_cpu = sorted({operator for operator, provider in times if provider == "CPU"})
        run.recorder.add("Operators on the CPU", {"model": name, "operators": ", ".join(on_cpu)})


def _session(
    run: Run, artifact: Artifact, *, profile: str = "", optimized: bool = True
) -> onnxruntime.InferenceSession:
    """Return a session with the graph of the engine."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_profiling, options.profile_file_prefix = bool(profile), profile
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    name, precision = engine_of(run)
    graph = artifact.path / artifact.graph(name, precision).file
    if run.is_dry:
        return onnxruntime.InferenceSession(str(graph), options, ["CPUExecutionProvider"])
    onnxruntime.preload_dlls()
    cuda = ("CUDAExecutionProvider", {"device_id": _gpu(run), "use_tf32": 0})
    return onnxruntime.InferenceSession(str(graph), options, [cuda])


def _save_multi_vector(folder: Path) -> None:
    encoder = folder.with_name("encoder")
    save_checkpoint(encoder, "bert")
    save_tokenizer(encoder)
    save_multi_vector(folder, encoder)


# Small models with outputs of every kind.
_KINDS: dict[str, Callable[[Path], object]] = {
    "reranker": lambda folder: save_classifier(folder, "bert", 1),
    "classifier": lambda folder: save_classifier(folder, "modernbert", 3),
    "tagger": lambda folder: save_token_classifier(folder, "bert", 3),
    "SPLADE": lambda folder: save_masked_lm(folder, "bert"),
    "ColBERT": _save_multi_vector,
    "Gemma": lambda folder: save_checkpoint(folder, "gemma3_text"),
}


def _of_kind(run: Run, kind: str) -> Artifact:
    folder = run.folder / "models" / kind
    if (folder / "artifact").exists():
        return Artifact.load(folder / "artifact")
    _KINDS[kind](folder)
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(folder)
    if kind == "SPLADE":
        write_modules(folder, ("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling"))
        write_json(folder / "1_SpladePooling" / "config.json", {"pooling_strategy": "max"})
        write_json(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    return _exported(run, folder)


def throughput(run: Run) -> None:
    """Measure whole texts beside sentence-transformers, then batch costs, streams and processes."""
    _check_usable(run)
    names = ("MiniLM",) if run.is_dry else ("MiniLM", "BERT-base")
    for name in names:
        _beside_sentence_transformers(run, name, artifact_of(run, name))
    for name in names:
        _costs(run, name, artifact_of(run, name))
        _processes(run, name, artifact_of(run, name))


def _processes(run: Run, name: str, artifact: Artifact) -> None:
    """Measure the total rate of several processes that share the device."""
    context = multiprocessing.get_context("spawn")
    seconds = 0.5 if run.is_dry else 4.0
    for count in (2,) if run.is_dry else (1, 2, 3, 4):
        if not run.has_time(f"{name}: {count} processes", 15 + 2 * seconds):
            return
        with context.Manager() as manager, context.Pool(count) as pool:
            arguments = (artifact.path, *engine_of(run), _gpu(run), manager.Barrier(count), seconds)
            rates = pool.starmap(rate_of_process, [arguments] * count)
        row: Row = {"model": name, "processes": count, "tokens/s of all": sum(rates)}
        run.recorder.add("Processes on one device", row)


def _costs(run: Run, name: str, artifact: Artifact) -> None:
    """Measure the rate of batches by length of the rows, cost and number of streams."""
    engine = _opened(run, artifact)
    tokens = 2_000 if run.is_dry else 400_000
    draw = random.Random(0)  # noqa: S311 - not for secrets
    lengths = {str(length): [length] * (tokens // length) for length in (16, 64, 256)}
    mixed = [mixed_length(draw) for _ in range(tokens // 60)]
    for kind, own in {**lengths, "mixed": sorted(mixed)}.items():
        for cost in _COSTS[:1] if run.is_dry else _COSTS:
            batches = batches_of(random_rows(own), cost)
            for streams in (1, 2) if run.is_dry else _STREAMS:
                if not run.has_time(f"{name}: length {kind}, cost {cost}, {streams} streams"):
                    return
                rate = sum(own) / _median_seconds(engine, batches, streams)
                row: Row = {"model": name, "length": kind, "cost": cost, "streams": streams}
                run.recorder.add("Tokens per second", {**row, "tokens/s": rate})
    engine.close()


def _median_seconds(engine: Engine, batches: Sequence[PackedBatch], streams: int) -> float:
    """Return the median time of the batches on some streams, after a run that prepares shapes."""
    times: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        with ThreadPoolExecutor(streams) as threads:
            list(threads.map(engine.run, batches))
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _beside_sentence_transformers(run: Run, name: str, artifact: Artifact) -> None:
    """Encode the same texts of mixed lengths with both, in turns."""
    from sentence_transformers import SentenceTransformer

    draw = random.Random(1)  # noqa: S311 - not for secrets
    count = 20 if run.is_dry else 8_000
    texts = [
        " ".join(f"w{draw.randint(4, 59)}" for _ in range(mixed_length(draw))) for _ in range(count)
    ]
    engine, precision = engine_of(run)
    theirs = SentenceTransformer(str(artifact.path.parent), device=run.device)
    if not run.is_dry:
        theirs.half()
    sizes = (32,) if run.is_dry else (32, 256)
    times: dict[str, list[float]] = {}
    vectors: dict[str, Any] = {}
    options = ModelOptions(engine=engine, precision=precision, gpu=_gpu(run))
    with SyncModel(artifact.path, options) as ours:
        contenders: dict[str, Callable[[], Any]] = {"vitrine": lambda: ours.encode(texts).vectors}
        for size in sizes:
            contenders[f"sentence-transformers, {size} a batch"] = partial(
                theirs.encode, texts, batch_size=size, normalize_embeddings=True
            )
        for turn in range(2 if run.is_dry else 4):
            if turn > 1 and not run.has_time(f"{name}: turn {turn}", 10):
                break
            for contender, encode in contenders.items():
                started = time.perf_counter()
                vectors[contender] = encode()
                times.setdefault(contender, []).append(time.perf_counter() - started)
    # The first round prepares shapes.
    seconds = {contender: statistics.median(own[1:]) for contender, own in times.items()}
    best = min(value for contender, value in seconds.items() if contender != "vitrine")
    for contender, value in seconds.items():
        row: Row = {
            "model": name,
            "implementation": contender,
            "texts/s": count / value,
            "of the best of sentence-transformers": best / value,
            "worst cosine": float(cosines(vectors[contender], vectors["vitrine"]).min()),
        }
        judged = contender == "vitrine" and not run.is_dry
        passes = best / value >= _RATIO if judged else None
        run.recorder.add("Texts of mixed lengths", row, passes=passes)
