"""Maps of a new model's queries into the vectors of an old model, whose index is still searched.

Two evaluations of the same collection, one with each model, have all that a map is fitted with: the
vectors of the same documents and queries. Half of the queries choose the form of the map, and the
other half measure it.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from models.artifact import Artifact
from models.identity import identity_of
from models.manifest import ArtifactError, SimilarityName
from service.bulk.options import ERROR, ROW, OptionError
from service.bulk.parts import native_file
from service.evaluation.comparison import Evaluated
from service.evaluation.maps import Map, Matrix, fit_maps
from service.evaluation.measures import means, measure, parse_measures
from service.evaluation.ranking import Rankings, VectorFiles, VectorSpace, matrix_of, rank
from service.model_cache import required_signer

# Settings of the jobs whose vectors are not those that a service returns by default.
_DEFAULTS = {"--dtype": "float32", "--dimensions": None}
_DEPTH = 10
_RECALL = parse_measures(f"recall@{_DEPTH}")
_MIN_PAIRS, _MIN_QUERIES = 100, 20
# Maximum number of pairs; the source has as many.
_MAX_PAIRS = 20_000


@dataclass(frozen=True)
class Migration:
    """The best map, and how search with it compares.

    Attributes:
        artifact: Artifact of the new model.
        model: Name of the old model.
        version: Identity of the old model.
        similarity: Similarity of the old model's vectors.
        normalizes: Whether the old model's vectors have unit length.
        prompt_name: Name of the prompt of the new model's queries; None: the default prompt.
        form: Name of the form of the map.
        map: The map.
        pairs: Number of documents with whose vectors it was fitted.
        queries: Number of queries that measured it.
        recalls: recall@10 of these queries, by what was searched.
        overlaps: Mean share of the first 10 documents of full re-embedding, by the same.
    """

    artifact: Artifact
    model: str
    version: str
    similarity: SimilarityName
    normalizes: bool
    prompt_name: str | None
    form: str
    map: Map
    pairs: int
    queries: int
    recalls: Mapping[str, float]
    overlaps: Mapping[str, float]

    @property
    def recall_ratio(self) -> float:
        """recall@10 of mapped queries in the old index, relative to full re-embedding."""
        full = self.recalls[FULL]
        return self.recalls[self.form] / full if full else 0.0


FULL = "new queries, new index"
OLD = "old queries, old index"
UNMAPPED = "new queries unmapped, old index"


def fit(old: Evaluated, new: Evaluated) -> Migration:
    """Fit maps from the new model's vectors to the old one's, and return the best.

    Args:
        old: Evaluation of the old model.
        new: Evaluation of the new model, on the same collection.

    Raises:
        OptionError: The evaluations are of other collections, were made by a server or with other
            settings than a service's own, have no judgements, or too few texts.
        ArtifactError: The artifact of a model is not there, or is another one by now.
    """
    if old.collection != new.collection:
        raise OptionError(f"{old.folder} is of another collection than {new.folder}")
    if old.results["ignores_identical_ids"] or new.results["ignores_identical_ids"]:
        raise OptionError("a map is not measured with --ignore-identical-ids; evaluate without it")
    judgements = {query: own["relevant"] for query, own in new.results["queries"].items()}
    judged = [query for query, own in judgements.items() if own]
    if len(judged) < 2 * _MIN_QUERIES:
        raise OptionError(
            f"{len(judged)} queries have judgements, and a map needs {2 * _MIN_QUERIES}; "
            "vitrine eval --known-items makes them"
        )
    old_artifact, new_artifact = _artifact(old), _artifact(new)
    old_space, new_space = _space(old_artifact), _space(new_artifact)
    old_documents, new_documents = _files(old, "documents"), _files(new, "documents")
    old_vectors, new_vectors = _pairs(old_documents, new_documents)
    pairs = len(old_vectors)
    if pairs < _MIN_PAIRS:
        raise OptionError(f"{pairs} documents have both vectors; a map needs {_MIN_PAIRS}")
    maps = fit_maps(new_vectors, old_vectors)
    # Queries take turns, so that both halves are of all parts of the collection.
    choosing, measuring = judged[::2], judged[1::2]

    def search_old(queries: VectorFiles) -> Rankings:
        return rank(queries, old_documents, old_space, _DEPTH)

    old_queries, new_queries = _files(old, "queries"), _files(new, "queries")
    rankings = {
        FULL: rank(new_queries, new_documents, new_space, _DEPTH),
        OLD: search_old(old_queries),
    }
    if old_vectors.shape[1] == new_vectors.shape[1]:
        rankings[UNMAPPED] = search_old(new_queries)
    normalizes = old_artifact.manifest.normalize
    with tempfile.TemporaryDirectory() as name:
        for form, map_ in maps.items():
            mapped = replace(new_queries, folder=Path(name) / form)
            _write_mapped(new_queries.folder, mapped.folder, map_, normalizes)
            rankings[form] = search_old(mapped)

    def recalls(half: Sequence[str]) -> dict[str, float]:
        some = {query: judgements[query] for query in half}
        return {
            name: means(measure(_RECALL, some, _select(half, ranking)))[str(_RECALL[0])]
            for name, ranking in rankings.items()
        }

    chosen = recalls(choosing)
    best = max(maps, key=lambda form: chosen[form])
    return Migration(
        artifact=new_artifact,
        model=old_artifact.manifest.name,
        version=old.results["jobs"]["documents"]["model version"],
        similarity=old_space.kind,
        normalizes=normalizes,
        prompt_name=new.results["jobs"]["queries"]["--prompt-name"],
        form=best,
        map=maps[best],
        pairs=pairs,
        queries=len(measuring),
        recalls=recalls(measuring),
        overlaps={name: _overlap(rankings[FULL], own, measuring) for name, own in rankings.items()},
    )


def _artifact(own: Evaluated) -> Artifact:
    """Return the artifact of the model of an evaluation.

    Raises:
        OptionError: The vectors are those of a server, or not as a service returns them.
        ArtifactError: The artifact is not there, is another one by now, or lacks a required
            signature.
    """
    jobs = [own.results["jobs"][name] for name in ("documents", "queries")]
    if "artifact" not in jobs[0]:
        raise OptionError(f"the vectors of {own.folder} are those of a server; use --model")
    for job in jobs:
        if job["--kind"] != "dense":
            raise OptionError(
                f"{own.folder} has results of the kind {job['--kind']}; a map needs dense vectors, "
                "without --chunking"
            )
        for name, default in _DEFAULTS.items():
            if job[name] != default:
                raise OptionError(
                    f"{own.folder} has vectors with {name} {job[name]}; evaluate without it"
                )
    artifact = Artifact.load(Path(jobs[0]["artifact"]), required_signer())
    engine, precision = jobs[0]["--engine"], jobs[0]["--precision"]
    identity = identity_of(artifact, engine, precision)
    if any(job["model version"] != identity for job in jobs):
        raise ArtifactError(f"{artifact.path} has another version than {own.folder} by now")
    return artifact


def _space(artifact: Artifact) -> VectorSpace:
    similarity = artifact.manifest.similarity
    assert similarity is not None  # noqa: S101 - dense vectors have one
    return VectorSpace(similarity, artifact.manifest.vocab_size)


def _files(own: Evaluated, name: str) -> VectorFiles:
    """Return the vectors of the documents or the queries of an evaluation."""
    texts = pq.ParquetFile(native_file(own.folder / f"{name}.parquet"))
    return VectorFiles(own.folder / name, texts.read(["id"])[0].to_pylist(), "dense")


def _pairs(old: VectorFiles, new: VectorFiles) -> tuple[Matrix, Matrix]:
    """Return the vectors of documents by both models, `(N, W')` and `(N, W)`.

    Of more than `_MAX_PAIRS` documents, it takes one in `step`, because neighbours in a collection
    are often of one subject.
    """
    step = -(-len(new.ids) // _MAX_PAIRS)
    tables = []
    for own in (old, new):
        blocks = [
            block.filter(pa.array(block.column(ROW).to_numpy() % step == 0))
            for block in own.blocks(4096)
        ]
        if not blocks:
            raise OptionError(f"no document of {own.folder.parent} has a vector")
        table = pa.Table.from_batches(blocks)
        tables.append((table[ROW].to_numpy(), matrix_of(table["embedding"].combine_chunks())))
    (old_rows, old_vectors), (new_rows, new_vectors) = tables
    _, a, b = np.intersect1d(old_rows, new_rows, return_indices=True)
    return old_vectors[a].astype(np.float64), new_vectors[b].astype(np.float64)


def _write_mapped(source: Path, folder: Path, map_: Map, normalizes: bool) -> None:
    """Write the vectors of queries in the other space, as a bulk job writes vectors."""
    folder.mkdir()
    for path in sorted(source.glob("part-*.parquet")):
        table = pq.ParquetFile(native_file(path)).read([ROW, "embedding", ERROR]).combine_chunks()
        valid = table.filter(table[ERROR].is_null())
        mapped = map_(matrix_of(valid["embedding"].combine_chunks()))
        if normalizes:
            mapped /= np.maximum(np.linalg.norm(mapped, axis=1), np.finfo(float).tiny)[:, None]
        flat = pa.array(mapped.astype(np.float32).reshape(-1))
        own = pa.FixedSizeListArray.from_arrays(flat, mapped.shape[1])
        written = pa.table({ROW: valid[ROW], "embedding": own, ERROR: valid[ERROR]})
        with native_file(folder / path.name, "wb") as file:
            pq.write_table(written, file)


def _select(queries: Sequence[str], rankings: Rankings) -> Rankings:
    return {query: rankings[query] for query in queries if query in rankings}


def _overlap(full: Rankings, own: Rankings, queries: Sequence[str]) -> float:
    shares = [
        len(full.get(query, {}).keys() & own.get(query, {}).keys())
        / max(len(full.get(query, {})), 1)
        for query in queries
    ]
    return sum(shares) / len(shares)
