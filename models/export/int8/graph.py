"""Export of an int8 graph with a measured quality."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import onnx
from tokenizers import Tokenizer

from models.artifact import Artifact, sha256, write_manifest
from models.engines import Engine, EngineError, measure_check, open_engine, self_check
from models.export.calibration import TextRows, run_rows
from models.export.int8.products import (
    Products,
    activations,
    find_products,
    per_token_values,
    write_int8,
)
from models.export.int8.quality import QualityBounds, broken_check, lowest, measure
from models.export.int8.rounding import Rounded, round_product
from models.export.int8.rows import (
    LengthRows,
    joined_rows,
    length_classes,
    longest_text,
    rows_by_length,
    within,
)
from models.export.int8.texts import Corpus, OwnTexts, VocabularyTexts
from models.export.onnx_graph import OPSET
from models.manifest import Graph, LengthQuality, Manifest, Quality
from models.quantization import Vectors

FILE, WEIGHTS = "model.int8.onnx", "model.int8.weights"
# Number of tokens that calibrate. Twice as many change neither cosines nor recall of
# all-MiniLM-L6-v2.
_CALIBRATION_TOKENS = 14_000
# Number of tokens of each class of lengths that measure the quality. Generated texts beside the
# user's own measure cosines alone, which need fewer.
_MEASURED_TOKENS, _FEWER_TOKENS = 48_000, 12_000
_BATCH_TOKENS = 512
# Shares of the layers that stay in float, tried in this order until the bounds hold.
_FLOAT_SHARES = (0.0, 1 / 12, 1 / 6, 1 / 4)


def add_int8_graph(
    artifact: Artifact,
    tokenizer: Tokenizer,
    texts: Sequence[str] | None,
    bounds: QualityBounds,
    report: Callable[[str], None],
) -> Artifact:
    """Add a graph in int8 to an artifact that is being written; return the artifact with it.

    Texts from the vocabulary calibrate it and, with an equal number of tokens, every second one of
    the user's texts. Other texts measure the quality. If it is below the bounds, the layers with
    the greatest cost stay in float, up to a quarter of all.

    Args:
        artifact: Artifact with float32 graphs.
        tokenizer: Tokenizer of the artifact.
        texts: Different texts of the user; None: there are none.
        bounds: Lowest acceptable quality.
        report: Called with a progress message at each step.

    Raises:
        CheckpointError: No texts can be generated from the vocabulary, or the user's texts have no
            tokens.
        EngineError: int8 is not usable on this machine, so that its quality cannot be measured; or
            the quality is below the bounds.
    """
    folder, manifest = artifact.path, artifact.manifest
    source = folder / artifact.graph("openvino", "float32").file
    calibrating = calibration_rows(manifest, tokenizer, texts)
    rounded = _round(source, calibrating)
    costly = sorted(rounded, key=lambda pair: -pair[1].cost)  # the greatest cost first
    costs = {products.name: own.cost for products, own in costly}
    float_graph = onnx.load(source)
    exact = open_engine(artifact)
    held_out = _held_out(manifest, tokenizer, texts)
    expected = [run_rows(exact, own.rows, manifest.outputs[0]) for own in held_out]
    exact.close()
    for share in _FLOAT_SHARES:
        kept = [*costs][: math.ceil(share * len(rounded))]
        own = [pair for pair in rounded if pair[0].name not in kept]
        for file in (FILE, WEIGHTS):
            (folder / file).unlink(missing_ok=True)
        write_int8(float_graph, own, folder / FILE, WEIGHTS)
        graph = Graph(
            file=FILE, weights=WEIGHTS, engine="openvino", dtype="int8", opset=OPSET, parity=None
        )
        added = _with_graph(artifact, graph)
        engine = open_engine(added, "openvino", "int8")
        by_length = _measure(engine, manifest, held_out, expected)
        check = measure_check(engine, added)
        broken = bounds.find_broken(by_length) + broken_check(check)
        measures = lowest(by_length)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in measures.items())
        report(f"int8 with {len(kept)} of {len(rounded)} layers in float: {shown}")
        if broken:
            engine.close()
            continue
        quality = Quality(
            is_generated=texts is None,
            calibration_texts=len(calibrating.ids),
            evaluated_texts=sum(own.texts for own in by_length),
            measures=measures,
            by_length=tuple(by_length),
            check={name: asdict(worst) for name, worst in check.items()},
            costs={name: float(f"{cost:.3g}") for name, cost in costs.items()},
            float_layers=tuple(kept),
        )
        added = _with_graph(artifact, replace(graph, quality=quality))
        self_check(engine, added)
        engine.close()
        write_manifest(folder, added.manifest)
        return added
    table = ", ".join(f"{name} {cost:.1e}" for name, cost in [*costs.items()][:8])
    raise EngineError(
        f"the int8 graph is below the bounds even with {len(kept)} of {len(rounded)} layers in "
        f"float: {'; '.join(broken)}. Relative errors of the costliest layers: {table}"
    )


def calibration_rows(
    manifest: Manifest, tokenizer: Tokenizer, texts: Sequence[str] | None
) -> TextRows:
    """Return the rows that calibrate: of all lengths, and in all scripts of the vocabulary.

    Every class of lengths has the same number of tokens. Half of them are those of the user's
    texts, if there are any.

    Args:
        manifest: Manifest of the model.
        tokenizer: Tokenizer of the artifact.
        texts: Different texts of the user; None: there are none.

    Raises:
        CheckpointError: No texts can be generated from the vocabulary, or the user's texts have no
            tokens.
    """
    tokenizer.no_truncation()
    corpora: list[Corpus] = [VocabularyTexts(tokenizer, seed=0)]
    if texts is not None:
        corpora.append(OwnTexts(tokenizer, texts[::2], longest_text(manifest, tokenizer)))
    classes = len(length_classes(manifest.max_tokens))
    tokens = _CALIBRATION_TOKENS // len(corpora) // classes
    return joined_rows(
        [
            within(own.rows, tokens)
            for corpus in corpora
            for own in rows_by_length(manifest, tokenizer, corpus, tokens)
        ]
    )


def _held_out(
    manifest: Manifest, tokenizer: Tokenizer, texts: Sequence[str] | None
) -> list[LengthRows]:
    """Return the rows that measure the quality; the user's texts come first."""
    tokenizer.no_truncation()
    generated = VocabularyTexts(tokenizer, seed=1)
    if texts is None:
        return rows_by_length(manifest, tokenizer, generated, _MEASURED_TOKENS)
    own = OwnTexts(tokenizer, texts[1::2], longest_text(manifest, tokenizer))
    return [
        *rows_by_length(manifest, tokenizer, own, _MEASURED_TOKENS),
        *rows_by_length(manifest, tokenizer, generated, _FEWER_TOKENS),
    ]


def _measure(
    engine: Engine, manifest: Manifest, rows: Sequence[LengthRows], expected: Sequence[Vectors]
) -> list[LengthQuality]:
    return [
        LengthQuality(
            source=own.source,
            min_tokens=own.lengths[0],
            max_tokens=own.lengths[-1],
            texts=len(own.rows.ids),
            measures=measure(manifest, vectors, run_rows(engine, own.rows, manifest.outputs[0])),
        )
        for own, vectors in zip(rows, expected, strict=True)
    ]


def _round(source: Path, rows: TextRows) -> list[tuple[Products, Rounded]]:
    """Return the products of the graph, quantised calibrated with the rows."""
    batches = [batch for _, batch in rows.batches(_BATCH_TOKENS)]
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
