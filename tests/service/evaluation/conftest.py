"""Collections, and evaluations of the small models."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from models.artifact import Artifact
from service.bulk.options import BulkOptions
from service.evaluation.collection import CollectionFiles
from service.evaluation.command_line import main
from service.evaluation.evaluation import EvaluationOptions, evaluate
from service.evaluation.measures import parse_measures
from tests.service.api.conftest import (  # noqa: F401 - fixtures
    cross_encoder,
    multi_encoder,
    reranker,
    sparse_encoder,
)

MEASURES = "nDCG@10,recall@5,MRR@10,hits@3"
# Runs an evaluation with the settings of its jobs and its own, and returns its results.
Evaluate = Callable[..., dict[str, Any]]


def write_beir(
    folder: Path,
    documents: Sequence[dict[str, Any]],
    queries: Sequence[dict[str, Any]],
    judgements: str,
    name: str = "test.tsv",
) -> Path:
    """Write the files of a collection in BEIR's layout."""
    (folder / "qrels").mkdir(parents=True)
    for file, records in (("corpus", documents), ("queries", queries)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(own) + "\n" for own in records))
    (folder / "qrels" / name).write_text(judgements)
    return folder


def write_collection(folder: Path, words: str) -> Path:
    """Write 150 documents of random words, and 40 queries of some of their words."""
    chance = random.Random(5)  # noqa: S311
    vocabulary = words.split()
    documents = [
        {"_id": f"d{i}", "title": f"T{i}", "text": " ".join(chance.choices(vocabulary, k=12))}
        for i in range(150)
    ]
    queries, judgements = [], "query-id\tcorpus-id\tscore\n"
    for i in range(40):
        relevant = chance.sample(documents, 3)
        text = " ".join(chance.sample(relevant[0]["text"].split(), 4))
        queries.append({"_id": f"q{i}", "text": text})
        for grade, own in enumerate(relevant, 1):
            judgements += f"q{i}\t{own['_id']}\t{grade}\n"
    queries.append({"_id": "without judgements", "text": "x"})
    return write_beir(folder, documents, queries, judgements)


@pytest.fixture(scope="session")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection in BEIR's layout, with the words of the default model's tokenizer."""
    words = "cat dog house river tree stone water fire light night road city king queen ship star"
    return write_collection(tmp_path_factory.mktemp("collection") / "beir", words)


@pytest.fixture(scope="session")
def small_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the words of the small tokenizer."""
    words = " ".join(f"w{number}" for number in range(5, 60))
    return write_collection(tmp_path_factory.mktemp("collection") / "words", words)


@pytest.fixture(scope="session")
def finished(
    collection: Path, small_artifact: Artifact, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of an evaluation of the small model on the collection."""
    folder = tmp_path_factory.mktemp("finished") / "old"
    arguments = [str(folder), "--beir", str(collection), "--model", str(small_artifact.path)]
    assert main([*arguments, "--measures", MEASURES, "--threads", "2"]) == 0
    return folder


@pytest.fixture
def run(collection: Path, small_artifact: Artifact, tmp_path: Path) -> Evaluate:
    """Runs an evaluation of the small model on the collection, unless it is told otherwise."""

    def own(
        folder: Path = collection,
        model: Path = small_artifact.path,
        files: CollectionFiles | None = None,
        rerank_with: Path | None = None,
        queries: dict[str, Any] | None = None,
        documents: dict[str, Any] | None = None,
        **others: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        output = others.pop("output", tmp_path / "output")
        settings: dict[str, Any] = {"inputs": (), "output": output, "threads": 2}
        settings |= others.pop("settings", {})
        vectors = {**settings, "model": model, "id_column": "id"}
        jobs: dict[str, Any] = {
            "documents": BulkOptions(**vectors, prompt_name="document", **documents or {}),
            "queries": BulkOptions(**vectors, prompt_name="query", **queries or {}),
        }
        if rerank_with is not None:
            columns = ("query_id", "document_id")
            jobs["reranker"] = BulkOptions(
                **settings, model=rerank_with, columns=columns, kind="scores"
            )
        options = EvaluationOptions(
            files=files or CollectionFiles.in_folder(folder, "test"),
            folder=output,
            measures=tuple(parse_measures(MEASURES)),
            **jobs,
            **others,
        )
        results = asyncio.run(evaluate(options, lambda _: None, asyncio.Event()))
        assert results is not None
        return results

    return own
