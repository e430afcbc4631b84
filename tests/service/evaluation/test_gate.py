"""A new version replaces the served one if an evaluation found it no worse."""

import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from safetensors.torch import load_file
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.export.exporter import export
from models.export.sources import resolve
from service.app import create_app
from service.evaluation.command_line import main
from service.settings import ApiKey, AuthSettings, ModelSettings, Settings
from tests.eventually import eventually
from tests.models.checkpoints import edit_tensors
from tests.service.api.models.conftest import Checked
from tests.serving import serving

pytestmark = pytest.mark.slow

KEY = "admin-key-0123456789"
AUTH = AuthSettings(
    keys=(ApiKey(name="admin", key=SecretStr(KEY), scopes=("encode", "admin")),),
)


@pytest.fixture(scope="module")
def worse_artifact(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The small model, to which all words are the same."""
    folder = tmp_path_factory.mktemp("worse")
    shutil.copytree(small_folder, folder / "model")
    name = "embeddings.word_embeddings.weight"
    words = load_file(folder / "model" / "model.safetensors")[name]
    edit_tensors(folder / "model", **{name: words * 0 + words[7]})
    export(resolve(str(folder / "model")), folder / "artifact")
    return Artifact.load(folder / "artifact")


@pytest.fixture(scope="module")
def compared(
    small_artifact: Artifact,
    worse_artifact: Artifact,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Evaluations of both models, each compared with the other: the folders `worse`, `better`.

    Each document is to be found by its own text.
    """
    folder = tmp_path_factory.mktemp("compared")
    chance = random.Random(3)  # noqa: S311
    words = [f"w{number}" for number in range(5, 60)]
    records = [{"id": f"d{i}", "text": " ".join(chance.sample(words, 6))} for i in range(60)]
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "qrels.txt").write_text("".join(f"d{i} 0 d{i} 1\n" for i in range(60)))
    shared = ["--corpus", str(texts), "--queries", str(texts), "--qrels", str(folder / "qrels.txt")]
    shared += ["--measures", "nDCG@10,hits@1"]

    def run(name: str, artifact: Artifact, *options: str) -> None:
        arguments = [str(folder / name), *shared, "--model", str(artifact.path), *options]
        assert main(arguments) == 0

    run("better", small_artifact)
    run("worse", worse_artifact, "--against", str(folder / "better"))
    run("better", small_artifact, "--against", str(folder / "worse"))
    return folder


@pytest.fixture
def serve(small_artifact: Artifact) -> Iterator[Callable[[Artifact], TestClient]]:
    """Serves a model under the name `small`, with the admin's key."""
    with serving(
        create_app(Settings(model=ModelSettings(path=small_artifact.path, name="small"), auth=AUTH))
    ) as client:
        client.headers.update({"Authorization": f"Bearer {KEY}"})

        def own(artifact: Artifact) -> TestClient:
            if artifact is not small_artifact:
                client.post("/models/small", json={"path": str(artifact.path)})
            return client

        yield own


def post(client: TestClient, artifact: Artifact, folder: Path, **others: Any) -> Any:  # noqa: ANN401
    body = {"path": str(artifact.path), "eval": {"folder": str(folder), **others}}
    return client.post("/models/small", json=body)


def test_worse_version_is_refused_and_a_better_one_served_under_load(
    serve: Callable[[Artifact], TestClient],
    small_artifact: Artifact,
    worse_artifact: Artifact,
    compared: Path,
    request: pytest.FixtureRequest,
) -> None:
    client = serve(small_artifact)
    is_done, sent = threading.Event(), []

    def send() -> None:
        while not is_done.is_set():
            response = client.post("/encode", json={"inputs": "w7 w8 w9"})
            assert response.status_code == 200, response.text
            sent.append(response.headers["X-Model-Version"])

    thread = Checked(send)
    request.addfinalizer(is_done.set)
    thread.start()
    eventually(lambda: sent or thread.error)
    good = client.get("/info").json()["identity"]
    refused = post(client, worse_artifact, compared / "worse", max_drop=0.01)
    assert (refused.status_code, refused.json()["code"]) == (422, "eval")
    assert refused.json()["pointer"] == "/eval/max_drop"
    assert (
        "the new version is not good enough: the measure changes by -" in refused.json()["detail"]
    )
    assert client.get("/info").json()["identity"] == good
    allowed = post(client, worse_artifact, compared / "worse", max_drop=1)
    assert allowed.status_code == 200, allowed.text
    better = post(client, small_artifact, compared / "better")
    assert better.status_code == 200, better.text
    measures = json.loads((compared / "better" / "comparison.json").read_text())["measures"]
    own = measures["nDCG@10"]
    assert better.json()["eval"] == {name: own[name] for name in better.json()["eval"]}
    assert own["difference"] > 0.2
    assert client.get("/info").json()["identity"] == good
    count = len(sent)
    eventually(lambda: len(sent) > count or thread.error)
    is_done.set()
    thread.join()
    assert thread.error is None
    assert sent[0] == sent[-1] == good[:12]


def test_other_measures_are_named(
    serve: Callable[[Artifact], TestClient],
    small_artifact: Artifact,
    worse_artifact: Artifact,
    compared: Path,
) -> None:
    client = serve(worse_artifact)
    taken = post(client, small_artifact, compared / "better", measure="hits@1", max_drop=-0.1)
    assert taken.status_code == 200
    client = serve(worse_artifact)
    refused = post(client, small_artifact, compared / "better", measure="MRR@3")
    assert refused.json()["pointer"] == "/eval/measure"
    assert refused.json()["detail"] == "the comparison lacks the measure; it has nDCG@10, hits@1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "the comparison is of no two versions of --model; it must be of the served version"),
        ({"documents: model version": ["a", "b"]}, " a and b; "),
        ({"queries: model version": ["served", "b"]}, "it must be of the served version"),
        (
            {"queries: --prompt-name": [None, "query"]},
            "in more than the version: queries: --prompt",
        ),
        ({"ranking: rerank_top": [None, 10]}, "in more than the version: ranking: rerank_top"),
        ([], "the folder has no valid comparison.json"),
        (None, "the folder has no valid comparison.json"),
    ],
)
def test_comparison_of_other_versions_or_settings_does_not_decide(
    serve: Callable[[Artifact], TestClient],
    small_artifact: Artifact,
    worse_artifact: Artifact,
    compared: Path,
    tmp_path: Path,
    settings: Any,  # noqa: ANN401
    message: str,
) -> None:
    comparison = json.loads((compared / "better" / "comparison.json").read_text())
    if isinstance(settings, dict) and settings:
        settings = comparison["settings"] | settings
    if settings is not None:
        (tmp_path / "comparison.json").write_text(json.dumps(comparison | {"settings": settings}))
    refused = post(serve(worse_artifact), small_artifact, tmp_path)
    assert (refused.status_code, refused.json()["code"]) == (422, "eval")
    assert refused.json()["pointer"] == "/eval/folder"
    assert message in refused.json()["detail"]


def test_new_model_has_nothing_to_compare_with(
    serve: Callable[[Artifact], TestClient], small_artifact: Artifact, compared: Path
) -> None:
    body = {"path": str(small_artifact.path), "eval": {"folder": str(compared / "better")}}
    refused = serve(small_artifact).post("/models/another", json=body)
    assert (refused.status_code, refused.json()["pointer"]) == (422, "/eval")
    assert "there is no served version to compare with; omit eval" in refused.json()["detail"]
