"""Export of an int8 graph with a measured quality."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import onnx
from tokenizers import Tokenizer

from models.artifact import Artifact, Graph, Quality, sha256, write_manifest
from models.engines import EngineError, measure_check, open_engine, self_check
from models.export.calibration import TextRows
from models.export.int8.products import (
    Products,
    activations,
    find_products,
    per_token_values,
    write_int8,
)
from models.export.int8.quality import MAX_TEXTS, QualityBounds, measure, quality_rows
from models.export.int8.rounding import Rounded, round_product
from models.export.onnx_graph import OPSET

FILE, WEIGHTS = "model.int8.onnx", "model.int8.weights"
# Number of tokens that calibrate. More change neither cosines nor recall of all-MiniLM-L6-v2.
_MAX_TOKENS = 14_000
_BATCH_TOKENS = 512
# Shares of the layers that stay in float, tried in this order until the bounds hold.
_FLOAT_SHARES = (0.0, 1 / 12, 1 / 6, 1 / 4)


def add_int8_graph(
    artifact: Artifact,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    bounds: QualityBounds,
    report: Callable[[str], None],
    *,
    is_generated: bool,
) -> Artifact:
    """Add a graph in int8 to an artifact that is being written; return the artifact with it.

    Every second text calibrates, and the others measure the quality. If it is below the bounds,
    the layers with the greatest cost stay in float, up to a quarter of all.

    Args:
        artifact: Artifact with float32 graphs.
        tokenizer: Tokenizer of the artifact.
        texts: Different texts.
        bounds: Lowest acceptable quality.
        report: Called with a progress message at each step.
        is_generated: Whether the texts were generated from the vocabulary.

    Raises:
        EngineError: int8 is not usable on this machine, so that its quality cannot be measured; or
            the quality is below the bounds.
    """
    folder, manifest = artifact.path, artifact.manifest
    source = folder / artifact.graph("openvino", "float32").file
    held_out = quality_rows(manifest, tokenizer, texts[1::2][:MAX_TEXTS])
    calibrating = quality_rows(manifest, tokenizer, texts[::2])
    rounded = _rounded(source, calibrating)
    costs = {products.name: own.cost for products, own in rounded}
    costly = sorted(rounded, key=lambda pair: -pair[1].cost)
    float_graph = onnx.load(source)
    broken: list[str] = []
    exact = open_engine(artifact)
    for share in _FLOAT_SHARES:
        kept = [products.name for products, _ in costly[: math.ceil(share * len(rounded))]]
        own = [pair for pair in rounded if pair[0].name not in kept]
        for file in (FILE, WEIGHTS):
            (folder / file).unlink(missing_ok=True)
        write_int8(float_graph, own, folder / FILE, WEIGHTS)
        graph = Graph(
            file=FILE, weights=WEIGHTS, engine="openvino", dtype="int8", opset=OPSET, parity=None
        )
        added = _with_graph(artifact, graph)
        engine = open_engine(added, "openvino", "int8")
        measures = measure(exact, engine, manifest, held_out)
        broken = bounds.broken(measures, is_generated=is_generated)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in measures.items())
        report(f"int8 with {len(kept)} of {len(rounded)} layers in float: {shown}")
        if broken:
            engine.close()
            continue
        quality = Quality(
            is_generated=is_generated,
            calibration_texts=len(texts[::2]),
            evaluated_texts=len(texts[1::2][:MAX_TEXTS]),
            measures=measures,
            check={name: asdict(worst) for name, worst in measure_check(engine, added).items()},
            costs={name: float(f"{cost:.3g}") for name, cost in _sorted(costs)},
            float_layers=tuple(kept),
        )
        added = _with_graph(artifact, replace(graph, quality=quality))
        self_check(engine, added)
        engine.close()
        exact.close()
        write_manifest(folder, added.manifest)
        return added
    exact.close()
    table = ", ".join(f"{name} {cost:.1e}" for name, cost in _sorted(costs)[:8])
    raise EngineError(
        f"the int8 graph is below the bounds even with {len(kept)} of {len(rounded)} layers in "
        f"float: {'; '.join(broken)}. Relative errors of the costliest layers: {table}"
    )


def _sorted(costs: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(costs.items(), key=lambda item: -item[1])


def _rounded(source: Path, rows: TextRows) -> list[tuple[Products, Rounded]]:
    """Return the products of the graph, quantised with the tokens of the rows."""
    every = max(1, sum(map(len, rows.ids)) // _MAX_TOKENS)
    some = replace(
        rows, ids=rows.ids[::every], types=None if rows.types is None else rows.types[::every]
    )
    batches = [batch for _, batch in some.batches(_BATCH_TOKENS)]
    products = find_products(onnx.load(source).graph, per_token_values(source, batches[-1]))
    return [
        (own, round_product(x, own.weights)) for own, x in activations(source, products, batches)
    ]


def _with_graph(artifact: Artifact, graph: Graph) -> Artifact:
    """Return the artifact with one more graph, whose files exist."""
    manifest = artifact.manifest
    files = {name: sha256(artifact.path / name) for name in (graph.file, graph.weights)}
    graphs = (*manifest.graphs, graph)
    return replace(
        artifact, manifest=replace(manifest, graphs=graphs, files={**manifest.files, **files})
    )
