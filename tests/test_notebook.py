"""The notebook in docs/ runs, and shows what it says; its outputs are not kept."""

import html
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from models.artifact import Artifact

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[1] / "docs/notebook.ipynb"


def read() -> Any:  # noqa: ANN401 - untyped
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def cells(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The code cells of the notebook, run in a folder beside the artifacts, as in a clone."""
    clone = tmp_path_factory.mktemp("clone")
    (clone / "docs").mkdir()
    (clone / "artifacts").mkdir()
    (clone / "artifacts/all-MiniLM-L6-v2").symlink_to(artifact.path)
    notebook = read()
    resources = {"metadata": {"path": str(clone / "docs")}}
    NotebookClient(notebook, timeout=None, resources=resources).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cells: list[Any], source: str, kind: str = "text/plain") -> str:
    """Return the output of the cell with a piece of source."""
    (cell,) = (cell for cell in cells if source in cell.source)
    (output,) = cell.outputs
    text: str = output.data[kind]
    return text


def test_no_cell_fails_or_warns(cells: list[Any]) -> None:
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"execute_result"}


def test_results_are_short(cells: list[Any]) -> None:
    texts = [output.data["text/plain"] for cell in cells for output in cell.outputs]
    assert max(map(len, texts)) < 500
    assert shown(cells, "embeddings = ").startswith("Embeddings(3 x 384 float32")
    assert "(3, 384)" in shown(cells, "np.asarray(embeddings)")


def test_ranking_is_shown_as_its_texts_with_the_best_first(cells: list[Any]) -> None:
    picture = shown(cells, "ranking = model.rerank", "text/html")
    text = " ".join(html.unescape(re.sub("<[^>]+>", " ", picture)).split())
    for word in ("cat", "sat", "mat", "It rained all day in Bergen.", "Dogs"):
        assert word in text
    assert re.search(r"1\. \[1\].*2\. \[0\].*3\. \[2\]", text)
    assert shown(cells, "in ranking.ranking()").count("mat") == 2


def test_number_in_the_picture_is_that_of_the_check(cells: list[Any]) -> None:
    picture = shown(cells, "ranking = model.rerank", "text/html")
    number = re.search(r">cat<br><span[^>]*>([\d.]+)<", picture)
    assert number is not None
    assert float(shown(cells, "A sat on the mat.")) == pytest.approx(float(number[1]), abs=1e-3)


def test_highlight_is_the_sentence_about_returns(cells: list[Any]) -> None:
    picture = shown(cells, "Highlights(1)", "text/html")
    (highlight,) = re.findall(r'title="[^"]*">([^<]+)<br>', picture)
    assert highlight.startswith("Shoes can be returned within thirty days")
    assert "We answer the phone on weekdays." in picture


def test_outputs_are_not_kept() -> None:
    notebook = read()
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
