"""A model of each kind, what its explanations are compared with, and runs that are held."""

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from hypothesis import strategies as st
from sentence_transformers import MultiVectorEncoder, SparseEncoder

import vitrine
from models.artifact import Artifact
from models.manifest import MANIFEST
from service.inference.results.batch_run import BatchItem
from service.inference.results.vectors import RowResults
from tests.eventually import HANG_S
from tests.models.checkpoints import edit_json
from tests.service.api.conftest import (  # noqa: F401 - fixtures
    classifier,
    multi_encoder,
    reranker,
    sparse_encoder,
)

THREAD = vitrine.ModelOptions(threads=1)
KINDS = ("cosine", "dot", "euclidean", "sparse", "multi", "reranker")
# A row's results depend on its batch by up to 3.5e-6 (onnxruntime), those of a difference by twice.
BOUNDS = {"reranker": 1e-5, "multi": 5e-5, "dot": 5e-5, "euclidean": 1e-5, "sparse": 1e-5}
WORDS = ["w5", "w6", "w7", "w40", "not", "cat", "猫", "3.14", "!", ".", "w9. ", "\n\n"]
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map(" ".join)

Models = dict[str, vitrine.SyncModel]


@pytest.fixture(scope="package")
def models(
    small_artifact: Artifact,
    reranker: Artifact,  # noqa: F811
    sparse_encoder: tuple[SparseEncoder, Artifact],  # noqa: F811
    multi_encoder: tuple[MultiVectorEncoder, Artifact],  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Models]:
    """A model of each kind."""
    folder = tmp_path_factory.mktemp("similarities")
    paths = {
        "cosine": small_artifact.path,
        "sparse": sparse_encoder[1].path,
        "multi": multi_encoder[1].path,
        "reranker": reranker.path,
    }
    for name in ("dot", "euclidean"):
        paths[name] = folder / name
        shutil.copytree(small_artifact.path, paths[name])
        edit_json(paths[name] / MANIFEST, similarity=name, normalize=False)
    with ExitStack() as stack:
        yield {
            kind: stack.enter_context(vitrine.SyncModel(path, THREAD))
            for kind, path in paths.items()
        }


@pytest.fixture(scope="package")
def labeler(classifier: Artifact) -> Iterator[vitrine.SyncModel]:  # noqa: F811
    with vitrine.SyncModel(classifier.path, THREAD) as model:
        yield model


def score(model: vitrine.SyncModel, query: str, document: str, *, raw: bool = False) -> float:
    result = model.score(query, document)
    return float((result.raw_scores if raw else result.scores)[0])


def left(text: str, start: int, end: int) -> str:
    """The text without a unit, by the rule in the documentation."""
    before, after = text[:start], text[end:]
    opens, closes = before == "" or before[-1].isspace(), after == "" or after[0].isspace()
    if opens and closes and after:
        after = after.lstrip()
    elif opens and closes:
        before = before.rstrip()
    return "" if (before + after).isspace() else before + after


class HeldRuns:
    """Runs of a model, which wait until the gate is set.

    Attributes:
        gate: Lets all runs end.
        sizes: Number of rows of each run that has begun.
    """

    def __init__(self, model: vitrine.Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.sizes: list[int] = []
        self._run = model.batcher._runner._run
        monkeypatch.setattr(model.batcher._runner, "_run", self._held)

    def _held(self, items: Sequence[BatchItem]) -> Sequence[RowResults]:
        self.sizes.append(len(items))
        assert self.gate.wait(HANG_S)
        return self._run(items)
