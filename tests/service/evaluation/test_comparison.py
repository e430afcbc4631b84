"""Comparisons of two evaluations, and their report."""

import ast
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from models.artifact import Artifact
from service.bulk.options import OptionError
from service.evaluation.collection import CollectionFiles, read_collection
from service.evaluation.command_line import main
from service.evaluation.comparison import Evaluated, compare, read_evaluation
from tests.service.evaluation.conftest import Evaluate


def evaluated(values: list[float], rankings: dict[str, list[str]]) -> Evaluated:
    """Return an evaluation with a measure of each query, and rankings."""
    queries = {
        f"q{index}": {"measures": {"MRR@10": value}, "relevant": {"d1": 2}}
        for index, value in enumerate(values)
    }
    results = {
        "measures": {"MRR@10": sum(values) / len(values)},
        "queries": queries,
        "jobs": {"documents": {}, "queries": {}},
        "known_items": False,
        "rerank_top": None,
        "ignores_identical_ids": False,
    }
    scores = {
        query: {document: float(-place) for place, document in enumerate(own)}
        for query, own in rankings.items()
    }
    return Evaluated(Path("folder"), results, "same", scores)


def test_mean_differences_have_the_interval_of_a_normal_distribution() -> None:
    draw = np.random.default_rng(1)
    old = draw.uniform(size=400)
    new = old + draw.normal(0.02, 0.1, 400)
    own = compare(evaluated(old.tolist(), {}), evaluated(new.tolist(), {}))["measures"]["MRR@10"]
    differences = new - old
    error = 1.96 * differences.std(ddof=1) / math.sqrt(400)
    assert own["difference"] == pytest.approx(differences.mean())
    bounds = [differences.mean() - error, differences.mean() + error]
    assert own["interval"] == pytest.approx(bounds, abs=0.05 * error * 2)
    assert (own["better"], own["worse"]) == ((differences > 0).sum(), (differences < 0).sum())
    equal = compare(evaluated(old.tolist(), {}), evaluated(old.tolist(), {}))["measures"]["MRR@10"]
    assert equal["interval"] == [0.0, 0.0]


def test_rankings_are_read_as_utf8_in_any_locale(tmp_path: Path) -> None:
    results = {**evaluated([1.0], {}).results, "collection": {"sha256": "0"}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "run.trec").write_text("q\u00e9 Q0 \u732b 1 0.5 vitrine\n", "utf-8")
    code = (
        "import sys; from pathlib import Path\n"
        "from service.evaluation.comparison import read_evaluation\n"
        "print(ascii(read_evaluation(Path(sys.argv[1])).rankings))"
    )
    # Python would take the locale "C" for UTF-8.
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    read = subprocess.check_output(command, env=os.environ | locale, text=True)
    assert ast.literal_eval(read) == {"q\u00e9": {"\u732b": 0.5}}


def test_queries_are_in_the_order_of_how_much_they_changed() -> None:
    old = evaluated([0.5, 1.0, 0.25], {"q0": ["d1", "d2"], "q1": ["d1", "d2", "d3"], "q2": ["d1"]})
    new = evaluated([0.5, 0.5, 1.0], {"q0": ["d1", "d2"], "q1": ["d3", "d2", "d4"], "q2": []})
    result = compare(old, new)
    assert [own["query"] for own in result["queries"]] == ["q2", "q1", "q0"]
    lost, changed, same = result["queries"]
    assert changed["documents"] == [
        {"id": "d1", "relevance": 2, "old_rank": 1, "new_rank": None},
        {"id": "d2", "relevance": 0, "old_rank": 2, "new_rank": 2},
        {"id": "d3", "relevance": 0, "old_rank": 3, "new_rank": 1},
        {"id": "d4", "relevance": 0, "old_rank": None, "new_rank": 3},
    ]
    assert (lost["overlap"], lost["rank_correlation"]) == (0.0, None)
    assert changed["overlap"] == pytest.approx(2 / 3)
    assert changed["rank_correlation"] == pytest.approx(-1.0)
    assert (same["overlap"], same["rank_correlation"], same["is_equal"]) == (1.0, 1.0, True)
    assert result["overlap@10"] == pytest.approx((0 + 2 / 3 + 1) / 3)
    assert result["unchanged_queries"] == 1


def test_other_collections_and_unfinished_evaluations_are_refused(tmp_path: Path) -> None:
    old, new = evaluated([1.0], {}), evaluated([1.0], {})
    other = Evaluated(old.folder, old.results, "other", {})
    with pytest.raises(OptionError, match="is of another collection"):
        compare(other, new)
    with pytest.raises(OptionError, match="has no finished evaluation"):
        read_evaluation(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("queries", [], "queries: Input should be a valid dictionary"),
        ("queries", {}, "an evaluation is damaged, repeat it: it lacks 'q"),
        ("queries", {"q0": 1}, "queries.q0: Input should be a valid"),
        ("measures", {"nDCG@10": "high"}, "measures.nDCG@10: Input should be a valid number"),
        ("jobs", {}, "jobs.documents: Field required"),
        ("collection", None, "collection: Input should be a valid"),
        (None, None, "it: Input should be a valid"),
    ],
)
def test_damaged_results_are_named(
    finished: Path,
    collection: Path,
    small_artifact: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    field: str | None,
    value: object,
    message: str,
) -> None:
    for name in ("old", "new"):
        shutil.copytree(finished, tmp_path / name)
    results = json.loads((finished / "results.json").read_text())
    damaged = [] if field is None else {**results, field: value}
    (tmp_path / "old" / "results.json").write_text(json.dumps(damaged))
    assert compared(tmp_path, collection, small_artifact) == 2
    assert message in capsys.readouterr().err


def compared(folder: Path, collection: Path, model: Artifact, *options: str) -> int:
    """Evaluate a model beside the evaluation in the folder `old`, and return the exit status."""
    arguments = [str(folder / "new"), "--beir", str(collection), "--model", str(model.path)]
    arguments += ["--threads", "2", "--against", str(folder / "old"), *options]
    return main(arguments)


def report_of(folder: Path, collection: Path, model: Artifact, *options: str) -> str:
    """Return the report of a model beside the evaluation in the folder `old`."""
    assert compared(folder, collection, model, *options) == 0
    return (folder / "new" / "comparison.html").read_text()


def test_command_compares_and_explains_the_documents_that_moved(
    finished: Path,
    collection: Path,
    other_artifact: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(finished, tmp_path / "old")
    report = report_of(tmp_path, collection, other_artifact, "--measures", "nDCG@10")
    comparison = json.loads((tmp_path / "new" / "comparison.json").read_text())
    shown = capsys.readouterr().out
    own = comparison["measures"]["nDCG@10"]
    assert f"{own['old']:.4f}  {own['new']:.4f}  {own['difference']:+.4f}" in shown
    assert f"{comparison['overlap@10']:.1%} of the first 10 documents are the same" in shown
    assert report.count("The old model, by its scores") == 5
    assert report.count("The new model, by its scores") == 5
    assert "left out" in report
    assert "documents: model version" in report
    assert "http" not in report.replace("http://www.w3.org", "")
    # A model that is no longer there is no obstacle.
    results = json.loads((tmp_path / "old" / "results.json").read_text())
    results["jobs"]["documents"]["artifact"] = str(tmp_path / "gone")
    (tmp_path / "old" / "results.json").write_text(json.dumps(results))
    report = report_of(tmp_path, collection, other_artifact, "--measures", "nDCG@10")
    assert "The scores of the old model are not explained" in report
    assert report.count("The new model, by its scores") == 5


def test_report_names_folders_of_any_name(
    finished: Path,
    collection: Path,
    small_artifact: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(shutil.copytree(finished, tmp_path / os.fsdecode(b"\xe9")))
    report = report_of(tmp_path, collection, small_artifact, "--against", ".")
    assert "<title>\\udce9 and new</title>" in report


def test_name_of_a_folder_is_printed_without_its_line_breaks_and_escape_sequences(
    finished: Path,
    collection: Path,
    small_artifact: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "a\n\x1b[31m"
    own = ["--model", str(small_artifact.path), "--beir", str(collection), "--progress", "none"]
    assert main([str(output), *own, "--against", str(finished)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b[31m" not in printed
    for file in ("results.json", "comparison.html"):
        assert f"a\\n\\x1b[31m/{file}" in printed


def test_texts_of_any_direction_reorder_nothing_of_the_report(
    run: Evaluate, collection: Path, other_artifact: Artifact, tmp_path: Path
) -> None:
    shutil.copytree(collection, tmp_path / "beir")
    queries = tmp_path / "beir" / "queries.jsonl"
    hebrew = "\u05d7\u05ea\u05d5\u05dc"
    lines = [json.loads(line) for line in queries.read_text().splitlines()]
    texts = [{**line, "text": f"{hebrew} \u202e{line['text']}"} for line in lines]
    queries.write_text("\n".join(map(json.dumps, texts)))
    run(folder=tmp_path / "beir", output=tmp_path / "old")
    report = report_of(tmp_path, tmp_path / "beir", other_artifact)
    assert f": \u2068{hebrew} \\u202e" in report
    assert "<td dir=auto>" in report


@pytest.mark.parametrize("option", ["--query-prompt", "--document-prompt"])
def test_scores_of_other_prompts_than_those_of_scores_are_not_explained(
    run: Evaluate, collection: Path, calibrated_artifact: Artifact, tmp_path: Path, option: str
) -> None:
    run(output=tmp_path / "old", model=calibrated_artifact.path)
    other = {"--query-prompt": "document", "--document-prompt": "query"}[option]
    report = report_of(tmp_path, collection, calibrated_artifact, option, other)
    assert f"new model are not explained: they are of the prompt {other}" in report
    assert "The new model, by its scores" not in report


def known_items(folder: Path) -> Path:
    lines = [
        json.dumps(
            {"id": f"d{i}", "text": f"The number {i} is a part of this. It has another one too."}
        )
        for i in range(30)
    ]
    path = folder / "corpus.jsonl"
    path.write_text("\n".join([*lines, json.dumps({"id": "short", "text": "A few words."})]))
    return path


def test_sentences_of_documents_are_queries_if_there_are_no_others(
    small_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = known_items(tmp_path)
    arguments = ["--corpus", str(corpus), "--known-items", "20", "--threads", "2"]
    model = ["--model", str(small_artifact.path)]
    assert main([str(tmp_path / "output"), *arguments, *model]) == 0
    assert "The queries are synthetic" in capsys.readouterr().out
    results = json.loads((tmp_path / "output" / "results.json").read_text())
    queries: dict[str, Any] = results["queries"]
    assert len(queries) == 20
    assert "short" not in queries
    assert all(own["relevant"] == {query: 1} for query, own in queries.items())


def test_sentences_without_spaces_are_queries_too(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    texts = {
        "zh": "猫坐在垫子上。雨下了一整天。",
        "short": "是的。好的。",
        "marks": "!? !? !? !? !? - -.",
    }
    corpus.write_text("".join(json.dumps({"id": i, "text": texts[i]}) + "\n" for i in texts))
    (tmp_path / "output").mkdir()
    files = CollectionFiles(corpus, None, None, known_items=3)
    assert read_collection(files, tmp_path / "output").query_ids == ["zh"]
    query = pq.read_table(tmp_path / "output" / "queries.parquet")["text"][0].as_py()
    assert query in ("猫坐在垫子上。", "雨下了一整天。")


def test_queries_without_judgements_are_compared_by_their_rankings(
    collection: Path,
    small_artifact: Artifact,
    other_artifact: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    queries = tmp_path / "queries.jsonl"
    queries.write_text("\n".join(json.dumps({"id": i, "text": f"cat {i}"}) for i in range(5)))
    files = ["--corpus", str(collection / "corpus.jsonl"), "--queries", str(queries)]
    for name, artifact, against in (
        ("one", small_artifact, []),
        ("same", small_artifact, ["--against", str(tmp_path / "one")]),
        ("other", other_artifact, ["--against", str(tmp_path / "one")]),
    ):
        options = ["--model", str(artifact.path), "--threads", "2", *against]
        assert main([str(tmp_path / name), *files, *options]) == 0
    assert "nDCG" not in capsys.readouterr().out
    same, other = (
        json.loads((tmp_path / name / "comparison.json").read_text()) for name in ("same", "other")
    )
    assert (same["overlap@10"], same["rank_correlation"], same["unchanged_queries"]) == (1, 1, 5)
    assert other["overlap@10"] < 0.9
    assert other["measures"] == {}
