"""Evaluations: rankings and measures of each kind of model, and what is kept and refused."""

import asyncio
import fcntl
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from sentence_transformers.multi_vector_encoder.evaluation import (
    MultiVectorInformationRetrievalEvaluator,
)
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator

import vitrine
from models.artifact import Artifact
from models.quantization import OutputDtype, read_calibration
from service.bulk.options import BulkError, BulkOptions, OptionError
from service.bulk.progress import Progress
from service.evaluation.collection import CollectionFiles
from service.evaluation.command_line import main
from service.evaluation.evaluation import EvaluationOptions, _distinct, evaluate
from service.evaluation.measures import Measure
from service.inference.tokenizing.chunking import Chunking
from tests.service.evaluation.conftest import Evaluate, write_beir


def texts_of(folder: Path, name: str) -> dict[str, str]:
    """Return the texts of a collection's documents or queries, by id."""
    records = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
    return {own["_id"]: f"{own.get('title', '')} {own['text']}".strip() for own in records}


def judgements_of(folder: Path) -> dict[str, dict[str, int]]:
    judgements: dict[str, dict[str, int]] = {}
    for line in (folder / "qrels" / "test.tsv").read_text().splitlines()[1:]:
        query, document, grade = line.split("\t")
        judgements.setdefault(query, {})[document] = int(grade)
    return judgements


def rankings_of(output: Path) -> dict[str, dict[str, float]]:
    rankings: dict[str, dict[str, float]] = {}
    for line in (output / "run.trec").read_text().splitlines():
        query, _, document, _, score, _ = line.split(" ")
        rankings.setdefault(query, {})[document] = float(score)
    return rankings


def oracle_measures(kind: Callable[..., Any], model: object, folder: Path) -> dict[str, float]:
    """Return what sentence-transformers measures; it knows relevance 0 and 1 only."""
    judgements = judgements_of(folder)
    queries = texts_of(folder, "queries")
    evaluator = kind(
        {query: queries[query] for query in judgements},
        texts_of(folder, "corpus"),
        {query: set(own) for query, own in judgements.items()},
        mrr_at_k=[10],
        accuracy_at_k=[3],
        precision_recall_at_k=[5],
        map_at_k=[10],
        show_progress_bar=False,
    )
    found = evaluator(model)
    names = {"recall@5": "recall@5", "MRR@10": "mrr@10", "hits@3": "accuracy@3"}
    return {
        ours: next(value for name, value in found.items() if name.endswith(theirs))
        for ours, theirs in names.items()
    }


def test_measures_of_dense_vectors_equal_those_of_sentence_transformers(
    run: Evaluate, collection: Path, small_folder: Path
) -> None:
    results = run()
    model = SentenceTransformer(str(small_folder), device="cpu")
    expected = oracle_measures(InformationRetrievalEvaluator, model, collection)
    assert {name: results["measures"][name] for name in expected} == pytest.approx(expected)
    assert 0 < results["measures"]["nDCG@10"] < 1
    assert len(results["queries"]) == 40
    assert results["collection"] | {"sha256": ""} == {
        "sha256": "",
        "documents": 150,
        "queries": 40,
        "judgements": 120,
        "judgements_of_unknown_documents": 0,
    }


def test_measures_of_sparse_and_multi_vectors_equal_those_of_sentence_transformers(
    run: Evaluate,
    small_words: Path,
    sparse_encoder: tuple[SparseEncoder, Artifact],
    multi_encoder: tuple[MultiVectorEncoder, Artifact],
    tmp_path: Path,
) -> None:
    for name, evaluator, (model, artifact) in (
        ("sparse", SparseInformationRetrievalEvaluator, sparse_encoder),
        ("multi", MultiVectorInformationRetrievalEvaluator, multi_encoder),
    ):
        results = run(folder=small_words, model=artifact.path, output=tmp_path / name)
        expected = oracle_measures(evaluator, model, small_words)
        own = {measure: results["measures"][measure] for measure in expected}
        assert own == pytest.approx(expected), name


@pytest.mark.parametrize("dtype", ["float16", "int8", "uint8", "binary", "ubinary"])
def test_codes_of_documents_are_compared_with_queries_in_float32(
    run: Evaluate,
    calibrated_artifact: Artifact,
    collection: Path,
    tmp_path: Path,
    dtype: OutputDtype | Literal["float16"],
) -> None:
    run(model=calibrated_artifact.path, documents={"dtype": dtype})
    queries, documents = texts_of(collection, "queries"), texts_of(collection, "corpus")
    with vitrine.SyncModel(calibrated_artifact.path) as model:
        own = model.encode(list(queries.values()), prompt_name="query").vectors
        vectors = model.encode(list(documents.values()), prompt_name="document").vectors
        if dtype == "float16":
            others = vectors.astype(np.float16)
        elif dtype.endswith("binary"):
            others = np.where(vectors > 0, 1.0, -1.0)
        else:
            calibration = read_calibration(calibrated_artifact)
            assert calibration is not None
            ranges = calibration.ranges[32].astype(np.float64)
            codes = model.quantizer(dtype)(vectors).astype(np.float64)
            codes += 128 if dtype == "int8" else 0
            others = ranges[0] + codes * (ranges[1] - ranges[0]) / 255
    others = others.astype(np.float64)
    if not dtype.endswith("binary"):
        others /= np.linalg.norm(others, axis=1, keepdims=True)
    scores = own.astype(np.float64) @ others.T
    rankings = rankings_of(tmp_path / "output")
    names = list(documents)
    assert len(rankings) == 40
    for index, query in enumerate(queries):
        if query in rankings:
            best = np.argsort(-scores[index])[:10]
            found = list(rankings[query].values())
            np.testing.assert_allclose(found, scores[index, best], rtol=1e-5, atol=1e-6)
            for document, score in rankings[query].items():
                assert score == pytest.approx(scores[index, names.index(document)], abs=1e-5)


def test_document_has_the_score_of_its_best_chunk(
    run: Evaluate, small_artifact: Artifact, collection: Path, tmp_path: Path
) -> None:
    chunking = Chunking(strategy="tokens", size=5)
    run(documents={"chunking": chunking, "kind": "chunks"})
    rankings = rankings_of(tmp_path / "output")
    queries, documents = texts_of(collection, "queries"), texts_of(collection, "corpus")
    with vitrine.SyncModel(small_artifact.path) as model:
        for query in ("q0", "q7"):
            names = list(rankings[query])
            own = [documents[name] for name in names]
            scores = model.score(queries[query], own, chunking=chunking).scores
            np.testing.assert_allclose(list(rankings[query].values()), scores, atol=1e-6)


def test_reranker_orders_the_best_documents_and_the_others_follow(
    run: Evaluate,
    reranker: Artifact,
    cross_encoder: CrossEncoder,
    small_words: Path,
    sparse_encoder: tuple[SparseEncoder, Artifact],
    tmp_path: Path,
) -> None:
    _, artifact = sparse_encoder
    run(folder=small_words, model=artifact.path, output=tmp_path / "first")
    first = rankings_of(tmp_path / "first")
    results = run(folder=small_words, model=artifact.path, rerank_with=reranker.path, rerank_top=6)
    second = rankings_of(tmp_path / "output")
    queries, documents = texts_of(small_words, "queries"), texts_of(small_words, "corpus")
    for query, ranking in first.items():
        best = list(ranking)[:6]
        scores = cross_encoder.predict([(queries[query], documents[own]) for own in best])
        expected = dict(zip(best, scores.tolist(), strict=True))
        assert set(list(second[query])[:6]) == set(best)
        assert {own: second[query][own] for own in best} == pytest.approx(expected, abs=1e-6)
        assert list(second[query])[6:] == list(ranking)[6:10]
        assert list(second[query].values()) == sorted(second[query].values(), reverse=True)
    assert results["jobs"]["pairs"]["--kind"] == "scores"


def test_documents_with_equal_texts_are_ranked_by_the_greater_id(
    run: Evaluate, tmp_path: Path
) -> None:
    ids = [f"d{number:02}" for number in range(30)]
    documents = [{"id": own, "text": "the same text"} for own in (*ids[10:], *ids[:10])]
    queries, judgements = [{"id": 7, "text": "a text"}], "7 0 d25 1\n7 0 d99 1\n"
    results = run(folder=write_beir(tmp_path / "own", documents, queries, judgements))
    assert list(rankings_of(tmp_path / "output")["7"]) == ids[:19:-1]
    assert results["measures"]["MRR@10"] == pytest.approx(1 / 5)
    assert results["collection"]["judgements_of_unknown_documents"] == 1


def test_scores_of_a_reranker_that_differ_keep_their_order_in_float32() -> None:
    scores = [1 - 1e-9, 1 - 2e-9, 1 - 3e-9, 0.5, 0.5]
    distinct = np.array(list(_distinct(scores)))
    assert (np.diff(distinct.astype(np.float32)) < 0).all()
    np.testing.assert_allclose(distinct, scores, atol=2e-7)


def test_negative_relevance_is_that_of_no_relevance(run: Evaluate, tmp_path: Path) -> None:
    texts = [{"id": own, "text": f"text {own}"} for own in ("a", "b", "2020-01-01")]
    names = ("query-id", "corpus-id", "score")
    rows = [("a", "b", -2), ("a", "a", 2), ("2020-01-01", "2020-01-01", 1)]
    judgements = "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)
    results = run(folder=write_beir(tmp_path / "own", texts, texts, judgements, "test.jsonl"))
    assert results["queries"]["a"]["relevant"] == {"a": 2}
    assert results["queries"]["2020-01-01"]["measures"]["hits@3"] == 1


def test_documents_with_the_id_of_the_query_can_be_left_out(run: Evaluate, tmp_path: Path) -> None:
    texts = [{"_id": own, "text": f"text {own}"} for own in "abc"]
    folder = write_beir(tmp_path / "own", texts, texts, "a 0 b 1\nb 0 c 1\n")
    run(folder=folder, output=tmp_path / "all")
    assert next(iter(rankings_of(tmp_path / "all")["a"])) == "a"
    run(folder=folder, ignores_identical_ids=True)
    assert {q: set(own) for q, own in rankings_of(tmp_path / "output").items()} == {
        "a": {"b", "c"},
        "b": {"a", "c"},
    }


def test_formats_of_files_give_the_same_results(
    run: Evaluate, collection: Path, tmp_path: Path
) -> None:
    judgements = judgements_of(collection)
    rows = [(query, own, grade) for query, of in judgements.items() for own, grade in of.items()]
    columns = ("query-id", "corpus-id", "score")
    lines = [f"{q} 0  {d}\t{g}\n" for q, d, g in rows]
    (tmp_path / "trec.txt").write_text("\ufeff" + "".join(lines) + lines[0])
    lines = [json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows]
    (tmp_path / "qrels.jsonl").write_text("\ufeff" + "\n".join(lines))  # and blank lines
    table = pa.table(dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True)))
    pq.write_table(table, tmp_path / "qrels.parquet")
    for name, copy in (("qrels.jsonl", "qrels.NDJSON"), ("qrels.parquet", "qrels.pq")):
        shutil.copy(tmp_path / name, tmp_path / copy)
    documents = texts_of(collection, "corpus")
    table = pa.table({"id": list(documents), "text": list(documents.values())})
    pq.write_table(table, tmp_path / "corpus.parquet")
    expected = run(output=tmp_path / "expected")["queries"]
    for name in ("trec.txt", "qrels.jsonl", "qrels.parquet", "qrels.NDJSON", "qrels.pq"):
        files = CollectionFiles(
            tmp_path / "corpus.parquet", collection / "queries.jsonl", tmp_path / name
        )
        assert run(files=files, output=tmp_path / f"output {name}")["queries"] == expected


def test_ids_are_integers_of_any_length(run: Evaluate, tmp_path: Path) -> None:
    ids = [2**80 + number for number in range(3)]
    texts = [{"_id": own, "text": f"text {own}"} for own in ids]
    judgements = "\n".join(
        json.dumps({"query-id": own, "corpus-id": own, "score": 1}) for own in ids
    )
    results = run(folder=write_beir(tmp_path / "own", texts, texts, judgements, "test.jsonl"))
    assert results["collection"]["judgements_of_unknown_documents"] == 0
    assert results["measures"]["hits@3"] == 1


@pytest.mark.parametrize("binary", ["corpus", "queries", "qrels"])
def test_binary_ids_of_parquet_are_texts(run: Evaluate, tmp_path: Path, binary: str) -> None:
    ids = ["a1", "é2", "a3"]
    own: dict[str, Any] = dict.fromkeys(("corpus", "queries", "qrels"), ids)
    own[binary] = pa.array([each.encode() for each in ids])
    texts = [f"text {each}" for each in ids]
    for name in ("corpus", "queries"):
        pq.write_table(pa.table({"id": own[name], "text": texts}), tmp_path / f"{name}.parquet")
    judgements = {"query-id": own["qrels"], "corpus-id": own["qrels"], "score": [1, 1, 1]}
    pq.write_table(pa.table(judgements), tmp_path / "qrels.parquet")
    corpus, queries, qrels = (tmp_path / f"{name}.parquet" for name in own)
    results = run(files=CollectionFiles(corpus, queries, qrels))
    assert results["collection"]["judgements_of_unknown_documents"] == 0
    assert results["measures"]["hits@3"] == 1
    assert {
        document for each in rankings_of(tmp_path / "output").values() for document in each
    } == {*ids}


def test_title_that_only_late_documents_have_is_put_before_their_text(
    run: Evaluate, collection: Path, tmp_path: Path
) -> None:
    first = [{"_id": f"x{number}", "text": "y", "url": "z" * 2**18} for number in range(5)]
    documents = (collection / "corpus.jsonl").read_text()
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(own) + "\n" for own in first) + documents)
    qrels = collection / "qrels" / "test.tsv"
    run(files=CollectionFiles(path, collection / "queries.jsonl", qrels))
    table = pq.read_table(tmp_path / "output" / "documents.parquet")[len(first) :]
    assert dict(zip(*table.to_pydict().values(), strict=True)) == texts_of(collection, "corpus")


def test_documents_are_those_of_all_files_of_a_folder(
    run: Evaluate, collection: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = (collection / "corpus.jsonl").read_text().splitlines(keepends=True)
    for name, some in (("a", lines[:70]), ("b", lines[70:])):
        (folder / f"{name}.jsonl").write_text("".join(some))
    files = CollectionFiles(folder, collection / "queries.jsonl", collection / "qrels" / "test.tsv")
    assert run(files=files)["queries"] == run(output=tmp_path / "one file")["queries"]
    (folder / "b.jsonl").write_text("".join(lines[71:]))
    with pytest.raises(OptionError, match="has other texts than those given"):
        run(files=files)


def test_model_may_be_in_a_folder_of_any_name(
    run: Evaluate, small_artifact: Artifact, tmp_path: Path
) -> None:
    path = tmp_path / os.fsdecode(b"\xe9")
    shutil.copytree(small_artifact.path, path)
    expected = run(output=tmp_path / "expected", settings={"engine": "openvino"})
    actual = run(model=path, settings={"engine": "openvino"})
    assert actual["queries"] == expected["queries"]
    written = json.loads((tmp_path / "output" / "results.json").read_bytes())
    assert written["jobs"]["documents"]["artifact"] == f"{tmp_path}/\\xe9"


@pytest.mark.parametrize("name", ["run:2", "~", os.fsdecode(b"\xe9")])
def test_folder_may_have_any_name(
    run: Evaluate,
    small_words: Path,
    reranker: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """pyarrow takes the first for a URI and the second for a home directory."""
    monkeypatch.chdir(tmp_path)
    results = [
        run(folder=small_words, rerank_with=reranker.path, output=Path(output) / "vectors")
        for output in (name, name, "other")
    ]
    assert results[0] == results[1] == results[2]


def test_files_are_on_the_disk_before_they_have_their_names(
    run: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they can be empty after a power failure."""
    synced: set[int] = set()
    monkeypatch.setattr("os.fsync", lambda file: synced.add(os.fstat(file).st_ino))
    run()
    for name in ("documents.parquet", "queries.parquet", "run.trec", "results.json"):
        assert (tmp_path / "output" / name).stat().st_ino in synced


def test_second_run_keeps_what_the_first_has_written(run: Evaluate, tmp_path: Path) -> None:
    results = run()
    written = tmp_path / "output" / "documents" / "part-00000.parquet"
    before = written.stat()
    assert run() == results
    assert written.stat() == before


def test_evaluation_that_is_stopped_goes_on_where_it_was(
    collection: Path, small_artifact: Artifact, tmp_path: Path
) -> None:
    vectors: dict[str, Any] = {
        "inputs": (),
        "output": tmp_path,
        "model": small_artifact.path,
        "threads": 2,
        "part_rows": 30,
    }
    options = EvaluationOptions(
        files=CollectionFiles.in_folder(collection, "test"),
        folder=tmp_path / "output",
        measures=(Measure("ndcg", 10),),
        documents=BulkOptions(**vectors),
        queries=BulkOptions(**vectors),
    )

    async def stopped() -> dict[str, Any] | None:
        stop = asyncio.Event()
        return await evaluate(options, lambda _: stop.set(), stop)

    assert asyncio.run(stopped()) is None
    parts = tmp_path / "output" / "documents"
    finished = len(list(parts.glob("part-*.parquet")))
    assert 1 <= finished < 5
    reports: list[Progress] = []
    assert asyncio.run(evaluate(options, reports.append, asyncio.Event())) is not None
    assert len(list(parts.glob("part-*.parquet"))) == 5
    assert reports[0].kept + reports[0].rows == 150
    assert reports[0].kept == 30 * finished
    assert list(dict.fromkeys(own.stage for own in reports)) == ["encoding", "ranking"]
    assert (reports[-1].share, reports[-1].is_complete) == (1.0, True)


def test_damaged_file_of_an_earlier_run_is_named(
    run: Evaluate, tmp_path: Path, reranker: Artifact
) -> None:
    run(rerank_with=reranker.path)
    for name in ("pairs", "queries", "documents"):
        path = tmp_path / "output" / f"{name}.parquet"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(BulkError, match=rf"{name}.parquet cannot be read: Parquet magic"):
            run(rerank_with=reranker.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": {"dimensions": 8}}, "--dimensions"),
        ({"folder": "other"}, "documents.parquet has other texts"),
    ],
)
def test_folder_of_other_settings_or_texts_is_refused(
    run: Evaluate, collection: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run()
    if "folder" in change:
        change = {"folder": tmp_path / "other"}
        shutil.copytree(collection, change["folder"])
        with (change["folder"] / "corpus.jsonl").open("a") as file:
            file.write(json.dumps({"_id": "new", "title": "", "text": "new"}) + "\n")
    with pytest.raises(OptionError, match=message):
        run(**change)


@pytest.mark.parametrize("known_items", [0, 5])
def test_files_that_were_refused_may_be_corrected(
    run: Evaluate, collection: Path, tmp_path: Path, known_items: int
) -> None:
    folder = shutil.copytree(collection, tmp_path / "collection")
    text = "The cat sat on the mat. The dog lay by the fire."
    sentences = [json.dumps({"_id": f"d{number}", "text": text}) for number in range(9)]
    (folder / "corpus.jsonl").write_text('{"_id": "d0", "text": "too short"}\n')
    (folder / "queries.jsonl").write_text('{"_id": "q0", "text": null}\n')
    files = CollectionFiles.in_folder(folder, "test")
    if known_items:
        files = CollectionFiles(folder / "corpus.jsonl", None, None, known_items)
    with pytest.raises(BulkError, match=r"no document has two sentences|record 0: "):
        run(files=files)
    (folder / "corpus.jsonl").write_text("\n".join(sentences))
    shutil.copy(collection / "queries.jsonl", folder)
    results = run(files=files)
    assert results["collection"]["documents"] == 9
    assert run(files=files) == results


def test_file_of_the_user_in_the_folder_is_not_replaced(run: Evaluate, tmp_path: Path) -> None:
    corpus = tmp_path / "output" / "documents.parquet"
    corpus.parent.mkdir()
    pq.write_table(pa.table({"id": ["a"], "text": ["one"], "own": [1]}), corpus)
    before = corpus.read_bytes()
    with pytest.raises(OptionError, match=r"documents.parquet has other texts"):
        run(files=CollectionFiles(corpus, corpus, None))
    assert corpus.read_bytes() == before


def test_file_in_place_of_the_folder_is_named(run: Evaluate, tmp_path: Path) -> None:
    (tmp_path / "output").write_text("a text")
    with pytest.raises(OptionError, match="output is not a folder"):
        run()


def test_second_process_on_a_folder_is_refused(run: Evaluate, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    with (output / "_lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BulkError, match=r"another process writes to .*output; wait for it"):
            run()
        assert [path.name for path in output.iterdir()] == ["_lock"]
    assert run()["collection"]["documents"] == 150


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}', "the id 'a'"),
        (
            "corpus.jsonl",
            '{"_id": "a", "text": "x"}\n{"_id": null, "text": "y"}',
            "record 1: its id",
        ),
        ("corpus.jsonl", '{"_id": "a b", "text": "x"}', "id 'a b' is empty or has white space"),
        ("corpus.jsonl", '{"_id": "a ", "text": "x"}', "id 'a ' is empty or has white space"),
        (
            "corpus.jsonl",
            '{"_id": "a", "body": "x"}',
            "no column 'text'; its columns are: _id, body",
        ),
        ("corpus.jsonl", '{"name": "a", "text": "x"}', "no column 'id'"),
        (
            "queries.jsonl",
            '{"_id": "q0", "text": "x"}',
            "has no text of the query 'q1', which is judged",
        ),
        ("qrels/test.tsv", "q0\td1\tone\n", "line 1: a judgement has"),
        ("qrels/test.tsv", "q0\td1\t1\nq0 d1 1 2 3\n", "line 2: a judgement has"),
        ("qrels/test.tsv", "q0\td1\t0.5\n", "line 1: a judgement has"),
        ("qrels/test.tsv", "q0\td1\t1_0\n", "line 1: a judgement has"),
        (
            "qrels/test.tsv",
            '{"query-id": {"a": 1}, "corpus-id": "d1", "score": 1}\n',
            "line 1: a judgement has",
        ),
        ("qrels/test.tsv", "q0\td1\t1001\n", "line 1: a judgement has .* up to 1000"),
        ("qrels/test.tsv", "q0\td1\t1\nq0 0 d1 0\n", "line 2: the document 'd1' was judged differ"),
        ("corpus.jsonl", '{"_id": "a", "title": "t", "text": null}', "record 0: the column 'text'"),
        ("corpus.jsonl", '{"_id": "a", "title": 5, "text": "x"}', "record 0: the column 'title'"),
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n[1]', "record 1: "),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n", "has no judgements"),
        ("corpus.jsonl", "", "the input has no records"),
    ],
)
def test_invalid_files_are_refused_by_name_and_record(
    run: Evaluate, collection: Path, tmp_path: Path, file: str, content: str, message: str
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(collection, folder)
    (folder / file).write_text(content)
    with pytest.raises(BulkError, match=message) as error:
        run(folder=folder)
    assert str(folder / file) in str(error.value)


def test_vectors_that_cannot_be_read_are_named(
    run: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> None:
        raise OSError("ZSTD decompression failed")

    monkeypatch.setattr("service.evaluation.evaluation.rank", damaged)
    with pytest.raises(BulkError, match="cannot be read: ZSTD decompression failed") as error:
        run()
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("suffix", [".gz", ".ZST"])
def test_compressed_judgements_are_refused_in_a_sentence(
    run: Evaluate, collection: Path, tmp_path: Path, suffix: str
) -> None:
    qrels = tmp_path / f"test.tsv{suffix}"
    qrels.write_bytes(gzip.compress((collection / "qrels" / "test.tsv").read_bytes()))
    files = CollectionFiles(collection / "corpus.jsonl", collection / "queries.jsonl", qrels)
    with pytest.raises(OptionError, match=f"test.tsv{suffix} must not be compressed"):
        run(files=files)


def test_models_without_vectors_are_refused(run: Evaluate, reranker: Artifact) -> None:
    with pytest.raises(OptionError, match="has no vectors to search with; a reranker ranks"):
        run(model=reranker.path)


@pytest.mark.slow
def test_evaluation_without_a_comparison_imports_no_package_that_it_does_not_need(
    collection: Path, small_artifact: Artifact, tmp_path: Path
) -> None:
    """scipy takes 60 MB, and pyarrow.dataset 13 MB."""
    code = (
        "import sys; from service.evaluation.command_line import main; main(sys.argv[1:]); "
        "print(*{'scipy', 'pyarrow.dataset', 'torch'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, str(tmp_path), "--beir", str(collection)]
    command += ["--model", str(small_artifact.path), "--threads", "2"]
    shown = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert "results.json has each query's" in shown
    assert shown.splitlines()[-1] == ""


def test_command_prints_the_measures_and_says_what_is_wrong(
    collection: Path, small_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "output"), "--model", str(small_artifact.path), "--threads", "2"]
    assert main([*arguments, "--beir", str(collection), "--measures", "nDCG@3,recall@1"]) == 0
    shown = capsys.readouterr().out.split()
    results = json.loads((tmp_path / "output" / "results.json").read_text())
    assert shown[2:6] == [
        *("nDCG@3", f"{results['measures']['nDCG@3']:.4f}"),
        *("recall@1", f"{results['measures']['recall@1']:.4f}"),
    ]
    for wrong, message in (
        ([], "give documents: --beir or --corpus"),
        (
            ["--corpus", str(collection / "corpus.jsonl")],
            "give queries: --queries or --known-items",
        ),
        (["--beir", str(collection), "--qrels", "x"], "--beir excludes --corpus"),
        (["--beir", str(collection), "--known-items", "0"], "--known-items must be at least 1"),
        (["--beir", str(collection), "--known-items", "9", "--ignore-identical-ids"], "excludes"),
        (["--beir", str(collection), "--against", str(tmp_path)], "has no finished evaluation"),
        (["--beir", str(collection), "--split", "dev"], "must have one file dev.*; it has none"),
        (["--beir", str(collection), "--measures", "map@3"], "'map@3' is no measure"),
        (["--beir", str(collection), "--reranker", "x", "--rerank-top", "0"], "must be at least 1"),
        (["--beir", str(collection), "--late"], "need --chunking"),
        (["--beir", str(collection), "--split", "/dev"], "must have one file /dev.*; it has none"),
        (["--beir", str(tmp_path / "output" / ".")], "OUTPUT must be another folder than --beir"),
        (["--beir", str(collection), "--model", ""], "--model: the name of the model is empty"),
        (["--beir", str(collection), "--query-prompt", "x"], "unknown prompt"),
    ):
        assert main([*arguments[:-2], *wrong]) == 2, wrong
        assert message in capsys.readouterr().err
    for wrong in (["--beir", "x" * 300], ["--corpus", "x" * 300, "--queries", "x"]):
        assert main([*arguments, *wrong]) == 1
        assert f"vitrine eval: {'x' * 300} cannot be read: File name" in capsys.readouterr().err
