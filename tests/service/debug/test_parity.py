"""Parity of the served model with the reference model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.export.exporter import export
from models.export.sources import resolve
from models.manifest import TOKENIZER
from tests.hostile_artifacts import copy_of, replace
from tests.models.jina_v3 import TASKS, save_with_tokenizer
from tests.service.debug.conftest import CAT, COSINE, Json, ask, problem_of, service_of


def test_parity_of_the_served_graph_and_the_reference_model_passes(client: TestClient) -> None:
    result = ask(client, "parity")
    assert (result["passes"], result["failures"]) == (True, [])
    assert len(result["weights"]) == 37
    assert {weight["max_abs"] for weight in result["weights"]} == {0.0}
    assert [layer["layer"] for layer in result["curve"]][-1] == "output"
    assert len(result["vectors"]) == 8
    one = ask(client, "parity", texts=[CAT])
    assert len(one["vectors"]) == 1
    assert one["parity"]["cosine"] >= 1 - 1e-6


@pytest.mark.slow
def test_parity_names_files_that_are_changed_under_the_service(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    copy, moved = tmp_path / "artifact", tmp_path / "moved"
    shutil.copytree(small_artifact.path, copy)
    with service_of(Artifact.load(copy)) as client:
        created = client.get("/v1/models").json()
        ask(client, "parity", texts=[CAT])
        copy.rename(moved)
        assert client.get("/v1/models").json() == created
        for body in ({}, {"texts": [CAT]}):
            gone = ask(client, "parity", **body)
            assert "tokenizer.json was removed since the service started" in gone["failures"]
            assert all(vector["relative"] < 1e-4 for vector in gone["vectors"])
            assert str(tmp_path) not in str(gone)
        ask(client, "attribute", text=CAT, target=COSINE)
        moved.rename(copy)
        assert ask(client, "parity", texts=[CAT])["passes"]
        (copy / "tokenizer.json").write_text("{}")
        changed = "tokenizer.json was changed or replaced since the service started"
        assert ask(client, "parity")["failures"] == [changed]
        (copy / "manifest.json").write_text("{}")
        assert "manifest.json" in ask(client, "parity")["failures"][1]


def tampered(artifact: Artifact, folder: Path, edit: Callable[[Json], None]) -> Path:
    """Return a copy of the artifact with another tokenizer, and a manifest that has its hash."""
    content = json.loads(artifact.read(TOKENIZER))
    edit(content)
    replace(copy_of(artifact.path, folder), TOKENIZER, json.dumps(content).encode())
    return folder


def swap_words(tokenizer: Json) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["cat"], vocabulary["dog"] = vocabulary["dog"], vocabulary["cat"]


def lose_lowercase(tokenizer: Json) -> None:
    tokenizer["normalizer"]["lowercase"] = False


@pytest.mark.slow
def test_gradients_are_never_those_of_an_artifact_that_has_replaced_the_served_one(
    small_artifact: Artifact, other_artifact: Artifact, tmp_path: Path
) -> None:
    folder, moved = tmp_path / "artifact", tmp_path / "moved"
    shutil.copytree(small_artifact.path, folder)
    with service_of(Artifact.load(folder)) as client:
        folder.rename(moved)
        shutil.copytree(other_artifact.path, folder)
        for path in ("attribute", "parity"):
            body = {"text": CAT, "target": COSINE} if path == "attribute" else {}
            problem = problem_of(client, path, body, 503)
            assert problem["code"] == "gradients_unavailable"
            assert "the folder of the served version has another artifact" in problem["detail"]
        assert client.get("/debug/capabilities").status_code == 503
        shutil.rmtree(folder)
        moved.rename(folder)
        result = ask(client, "attribute", text=CAT, target=COSINE)
        assert result["parity"]["agrees"]
        folder.rename(moved)  # the running process has the reference model in memory
        shutil.copytree(other_artifact.path, folder)
        assert ask(client, "attribute", text=CAT, target=COSINE)["scores"] == result["scores"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "first_tokens"),
    [(swap_words, {CAT: 2, "my dog": 2}), (lose_lowercase, {CAT: 1, "A DOG": 1})],
)
def test_parity_names_texts_that_another_tokenizer_would_tokenize_differently(
    small_artifact: Artifact,
    tmp_path: Path,
    edit: Callable[[Json], None],
    first_tokens: dict[str, int],
) -> None:
    path = tampered(small_artifact, tmp_path / "artifact", edit)
    with service_of(Artifact.load(path)) as client:
        results = {text: ask(client, "parity", texts=[text]) for text in first_tokens}
    for text, result in results.items():
        assert not result["passes"]
        assert all(line.startswith("token ") for line in result["failures"])
        first = f"token {first_tokens[text]} of {text!r} is id "
        assert any(line.startswith(first) for line in result["failures"])


@pytest.mark.slow
def test_gradients_use_the_adapter_of_the_prompt(tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path / "model")
    artifact, _ = export(resolve(str(tmp_path / "model")), tmp_path / "artifact")
    with service_of(artifact) as client:
        assert ask(client, "parity")["failures"] == []
        texts = [{"text": "w7 w9 w21", "prompt_name": task} for task in (None, *TASKS)]
        assert ask(client, "parity", texts=texts)["failures"] == []
        results = [ask(client, "attribute", text=text, target=COSINE) for text in texts]
    assert all(result["completeness"]["converged"] for result in results)
    assert len({result["value"] for result in results}) == len(texts)
