"""Calibration of an artifact: ranges for quantised vectors, their measured quality, and the mean.

Every second text gives the minimum and maximum of each dimension, and the mean vector, from which
the service measures the distance of its inputs. With the other texts, recall@10 is measured: up to
1,000 of them are queries to all of them, and recall is the share of the 10 nearest texts by float32
vectors that quantised documents find. Queries are float32, as in
https://huggingface.co/blog/embedding-quantization. By method:

    int8          nearest by dequantised int8 codes
    ubinary       the 40 nearest by Hamming distance, rescored with the bits of the documents as ±1
    ubinary_int8  the same 40, rescored with dequantised int8 codes
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.artifact import Artifact
from models.engines import Engine, open_engine
from models.manifest import ArtifactError, Manifest, Output, TokenRules
from models.packing import NO_ADAPTER, PackedBatch, pack_some, prompt_length
from models.quantization import Calibration, Vectors, dequantize, quantize

Indices = NDArray[np.intp]

# Half of these calibrate: of 500 texts, the ranges leave out 2 of 501 further values, 0.4 %. The
# 40 candidates of `ubinary` are then less than a tenth of the other half.
MIN_TEXTS = 1000
NEAREST = 10
_CANDIDATES = 40
# Number of texts that are queries; the standard error of recall is then about 0.006.
_MAX_QUERIES = 1000
# Queries that are ranked at a time: their scores take 40 MB with 100,000 documents.
_QUERIES = 100


def distinct(texts: Sequence[str]) -> list[str]:
    """Return the texts without duplicates and empty texts, in order.

    Raises:
        ArtifactError: There are fewer than `MIN_TEXTS`.
    """
    own = [text for text in dict.fromkeys(texts) if text.strip()]
    _check_count(len(own))
    return own


def _check_count(texts: int) -> None:
    if texts < MIN_TEXTS:
        raise ArtifactError(
            f"--calibrate needs {MIN_TEXTS} different texts, one per line, and got {texts}: of "
            "fewer, the ranges leave out too many values of other texts"
        )


def calibrate(artifact: Artifact, tokenizer: Tokenizer, texts: Sequence[str]) -> Calibration:
    """Return the ranges and mean of the vectors of texts, and the recall of quantised vectors.

    Texts have the model's default prompt.

    Args:
        artifact: Artifact of a model with the output "pooled".
        tokenizer: Tokenizer of the artifact.
        texts: Different texts, from `distinct`.

    Raises:
        ArtifactError: Fewer than `MIN_TEXTS` texts have tokens.
        EngineError: No engine is usable on this machine.
    """
    manifest = artifact.manifest
    rows = text_rows(manifest, tokenizer, texts)
    _check_count(len(rows.ids))
    engine = open_engine(artifact)
    try:
        vectors = run_rows(engine, rows)
    finally:
        engine.close()
    calibrating, evaluated = vectors[::2], vectors[1::2]
    ranges = {
        width: _ranges(_truncate(calibrating, width, normalize=manifest.normalize))
        for width in sorted({*manifest.matryoshka_dimensions, manifest.width})
    }
    evaluated = _truncate(evaluated, manifest.width, normalize=manifest.normalize)
    recall = measure_recall(evaluated, ranges[manifest.width])
    mean = unit(calibrating).mean(axis=0)
    return Calibration(len(calibrating), len(evaluated), recall, ranges, mean)


def measure_recall(
    vectors: Vectors, ranges: Vectors, candidates: int = _CANDIDATES
) -> dict[str, float]:
    """Return the recall of quantised vectors by method; see the module docstring.

    A width that is not a multiple of 8 has no bits, and so no methods with bits.

    Args:
        vectors: Vectors `(N, W)` of texts that did not calibrate, with N above `candidates`.
        ranges: Minimum and maximum of each dimension, `(2, W)`.
        candidates: Number of the nearest texts by Hamming distance that are rescored.
    """
    documents = unit(vectors)
    restored = unit(dequantize(quantize(vectors, "int8", ranges), "int8", ranges))
    bits = None
    if vectors.shape[1] % 8 == 0:
        bits = dequantize(quantize(vectors, "ubinary"), "ubinary")
    queries = np.linspace(0, len(vectors) - 1, min(len(vectors), _MAX_QUERIES)).astype(np.intp)
    hits: dict[str, list[float]] = {}
    for start in range(0, len(queries), _QUERIES):
        chunk = queries[start : start + _QUERIES]
        expected = nearest(documents, documents, chunk, NEAREST)
        neighbours = {"int8": nearest(documents, restored, chunk, NEAREST)}
        if bits is not None:
            # W minus twice the Hamming distance is the dot product of bits as ±1, exact in float32.
            close = nearest(bits, bits, chunk, candidates)
            neighbours["ubinary"] = _rescore(documents[chunk], bits, close)
            neighbours["ubinary_int8"] = _rescore(documents[chunk], restored, close)
        for method, own in neighbours.items():
            hits.setdefault(method, []).extend(map(overlap, expected, own))
    return {method: round(float(np.mean(own)), 4) for method, own in hits.items()}


def nearest(
    queries: Vectors, documents: Vectors, indices: Indices, count: int = NEAREST
) -> Indices:
    """Return the documents with the highest dot products `(Q, count)` with the queries at indices.

    A text is not its own neighbour. Of equal scores, the document with the lower index is first.
    """
    scores = queries[indices] @ documents.T
    scores[np.arange(len(indices)), indices] = -np.inf
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def _rescore(queries: Vectors, documents: Vectors, candidates: Indices) -> Indices:
    """Return the candidates `(Q, C)` with the highest dot products `(Q, 10)` with the queries."""
    scores = np.einsum("qw,qcw->qc", queries, documents[candidates])
    best = np.argsort(-scores, axis=1, kind="stable")[:, :NEAREST]
    return np.take_along_axis(candidates, best, axis=1)


def overlap(expected: Indices, actual: Indices) -> float:
    """Return the share of the nearest documents of a query that are in `actual`."""
    return len({*expected.tolist()} & {*actual.tolist()}) / NEAREST


def _ranges(vectors: Vectors) -> Vectors:
    return np.stack([vectors.min(axis=0), vectors.max(axis=0)])


def _truncate(vectors: Vectors, width: int, *, normalize: bool) -> Vectors:
    kept = vectors[:, :width]
    return unit(kept) if normalize else kept


def unit(vectors: Vectors) -> Vectors:
    """Return the vectors `(N, W)`, scaled to unit length."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class TextRows:
    """Token ids of texts with the default prompt, or of pairs of texts.

    Attributes:
        ids: Token ids of each row.
        prompt_tokens: Number of leading tokens of each row that are not pooled.
        adapter: Index of the prompt's adapter, or `NO_ADAPTER`.
        types: Type of each token; None: type 0.
    """

    ids: Sequence[Sequence[int]]
    prompt_tokens: int = 0
    adapter: int = NO_ADAPTER
    types: Sequence[Sequence[int]] | None = None

    def batches(self, max_tokens: int) -> Iterator[tuple[list[int], PackedBatch]]:
        """Yield batches of rows of similar length, with the indices of the rows."""
        prompts, adapters = ([own] * len(self.ids) for own in (self.prompt_tokens, self.adapter))
        for batch in _batches(self.ids, max_tokens):
            yield batch, pack_some(batch, self.ids, prompts, adapters, self.types)


def text_rows(manifest: Manifest, tokenizer: Tokenizer, texts: Sequence[str]) -> TextRows:
    """Return the rows of texts with the default prompt; texts without tokens have none."""
    tokenizer.enable_truncation(manifest.max_tokens, direction=manifest.truncation_side)
    name = manifest.default_prompt
    prompt = "" if name is None else manifest.prompts[name]
    skipped = 0
    if prompt and not manifest.include_prompt:
        skipped = prompt_length(tokenizer.encode(prompt).ids, tokenizer.get_added_tokens_decoder())
    task = None if name is None else manifest.prompt_adapters.get(name, name)
    adapter = manifest.adapters.index(task) if task in manifest.adapters else NO_ADAPTER
    rules = manifest.token_rules.get("", TokenRules(max_tokens=manifest.max_tokens))
    encodings = tokenizer.encode_batch([(prompt + text)[: rules.max_chars] for text in texts])
    # The service refuses texts without tokens.
    rows = [
        own for encoding in encodings if len(own := rules.without_dropped(encoding.ids)) > skipped
    ]
    return TextRows(rows, skipped, adapter)


def run_rows(engine: Engine, rows: TextRows, output: Output = "pooled") -> Vectors:
    """Return the vectors or logits `(N, W)` of rows, before any normalisation."""
    batches = list(rows.batches(engine.batches.max_tokens))

    def run(batch: tuple[list[int], PackedBatch]) -> Mapping[int, Vectors]:
        return dict(zip(batch[0], engine.run(batch[1], output), strict=True))

    with ThreadPoolExecutor(engine.streams) as streams:
        vectors = {i: vector for part in streams.map(run, batches) for i, vector in part.items()}
    return np.stack([vectors[index] for index in range(len(rows.ids))])


def _batches(rows: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of rows in batches of similar length, of up to `max_tokens` or one row."""
    batch: list[int] = []
    tokens = 0
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
        if batch and tokens + len(rows[index]) > max_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += len(rows[index])
    yield batch
