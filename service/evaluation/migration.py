"""Maps of a new model's queries into the vectors of an old model, whose index is still searched.

Two evaluations of the same collection, one with each model, have all that a map is fitted with: the
vectors of the same documents and queries. Half of the queries choose the form of the map, and the
other half measure it.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from models.artifact import Artifact
from models.identity import identity_of
from models.manifest import ArtifactError, SimilarityName
from service.bulk.options import ERROR, ROW, OptionError
from service.bulk.parts import native_file
from service.evaluation.comparison import Evaluated
from service.evaluation.maps import Map, Matrix, fit_maps
from service.evaluation.measures import means, measure, parse_measures
from service.evaluation.ranking import Rankings, VectorFiles, VectorSpace, rank
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
    artifacts = [_artifact(own) for own in (old, new)]
    spaces = [VectorSpace(_similarity(a), a.manifest.vocab_size) for a in artifacts]
    pairs = _pairs(old, new)
    if len(pairs[0]) < _MIN_PAIRS:
        raise OptionError(f"{len(pairs[0])} documents have both vectors; a map needs {_MIN_PAIRS}")
    maps = fit_maps(pairs[1], pairs[0])
    # Queries take turns, so that both halves are of all parts of the collection.
    choosing, measuring = judged[::2], judged[1::2]

    def search(queries: VectorFiles, index: Evaluated, similarity: VectorSpace) -> Rankings:
        documents = VectorFiles(index.folder / "documents", _ids(index, "documents"), "dense")
        return rank(queries, documents, similarity, _DEPTH)

    queries = [VectorFiles(e.folder / "queries", _ids(e, "queries"), "dense") for e in (old, new)]
    rankings = {FULL: search(queries[1], new, spaces[1]), OLD: search(queries[0], old, spaces[0])}
    if pairs[0].shape[1] == pairs[1].shape[1]:
        rankings[UNMAPPED] = search(queries[1], old, spaces[0])
    with tempfile.TemporaryDirectory() as name:
        for form, map_ in maps.items():
            folder = Path(name) / form
            _write_mapped(new.folder / "queries", folder, map_, artifacts[0].manifest.normalize)
            rankings[form] = search(VectorFiles(folder, queries[1].ids, "dense"), old, spaces[0])

    def recalls(half: Sequence[str]) -> dict[str, float]:
        some = {query: judgements[query] for query in half}
        return {
            name: means(measure(_RECALL, some, _select(half, ranking)))[str(_RECALL[0])]
            for name, ranking in rankings.items()
        }

    chosen = recalls(choosing)
    best = max(maps, key=lambda form: chosen[form])
    job = old.results["jobs"]["documents"]
    return Migration(
        artifact=artifacts[1],
        model=artifacts[0].manifest.name,
        version=job["model version"],
        similarity=spaces[0].kind,
        normalizes=artifacts[0].manifest.normalize,
        prompt_name=new.results["jobs"]["queries"]["--prompt-name"],
        form=best,
        map=maps[best],
        pairs=len(pairs[0]),
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


def _similarity(artifact: Artifact) -> SimilarityName:
    similarity = artifact.manifest.similarity
    assert similarity is not None  # noqa: S101 - dense vectors have one
    return similarity


def _ids(own: Evaluated, name: str) -> list[str]:
    file = pq.ParquetFile(native_file(own.folder / f"{name}.parquet"))
    ids: list[str] = file.read(["id"])[0].to_pylist()
    return ids


def _pairs(old: Evaluated, new: Evaluated) -> tuple[Matrix, Matrix]:
    """Return the vectors of documents by both models, `(N, W')` and `(N, W)`.

    Of more than `_MAX_PAIRS` documents, it takes one in `step`, because neighbours in a collection
    are often of one subject.
    """
    step = -(-len(_ids(new, "documents")) // _MAX_PAIRS)
    tables = []
    for own in (old, new):
        blocks = VectorFiles(own.folder / "documents", (), "dense").blocks(4096)
        rows: list[NDArray[np.int64]] = []
        vectors: list[NDArray[np.float32]] = []
        for block in blocks:
            own_rows = block.column(ROW).to_numpy()
            kept = own_rows % step == 0
            column = block.column("embedding")
            rows.append(own_rows[kept])
            width = column.type.list_size
            vectors.append(column.flatten().to_numpy().reshape(len(block), width)[kept])
        if not rows:
            raise OptionError(f"no document of {own.folder} has a vector")
        tables.append((np.concatenate(rows), np.concatenate(vectors)))
    (old_rows, old_vectors), (new_rows, new_vectors) = tables
    _, a, b = np.intersect1d(old_rows, new_rows, return_indices=True)
    return old_vectors[a].astype(np.float64), new_vectors[b].astype(np.float64)


def _write_mapped(source: Path, folder: Path, map_: Map, normalizes: bool) -> None:
    """Write the vectors of queries in the other space, as a bulk job writes vectors."""
    folder.mkdir()
    for path in sorted(source.glob("part-*.parquet")):
        table = pq.ParquetFile(native_file(path)).read([ROW, "embedding", ERROR]).combine_chunks()
        valid = table.filter(table[ERROR].is_null())
        column = valid["embedding"].combine_chunks()
        mapped = map_(column.flatten().to_numpy().reshape(len(valid), column.type.list_size))
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
