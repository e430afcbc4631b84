"""The requests of the service's READMEs succeed, with a model of the kind of each section."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from models.artifact import Artifact

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
READMES = ("service/api/README.md", "service/README.md")
PAGES = "".join((ROOT / page).read_text() for page in READMES)

# Fixture of the client, by section and route. Models are small and have random weights.
CLIENTS = {
    ("Vectors", "/encode"): "client",
    ("Explanations", "/rerank"): "client",
    ("Rerankers and classifiers", "/rerank"): "rerank_client",
    ("Rerankers and classifiers", "/classify"): "classify_client",
    ("Token classification", "/tag"): "tag_client",
    ("Entities with labels of the request", "/tag"): "entity_client",
    ("Sparse vectors", "/encode"): "sparse_client",
    ("Multi-vectors", "/encode"): "multi_client",
    ("Multi-vectors", "/score"): "multi_client",
    ("Quantised vectors", "/encode"): "calibrated_client",
    ("Long documents", "/encode"): "client",
}
# Sections whose examples need another service: the test with that service.
ELSEWHERE = {
    "Several outputs": "tests/service/api/test_hybrid.py",
    "New versions": "tests/service/api/models/test_changes.py",
}

REQUESTS = [
    (section.partition("\n")[0], path, json.loads(body))
    for section in re.split(r"^##+ ", PAGES, flags=re.MULTILINE)[1:]
    for path, body in re.findall(
        r"^\$ curl http://127\.0\.0\.1:8000(\S+) [^{]*?-d '(\{.*?\})'$",
        section,
        re.MULTILINE | re.DOTALL,
    )
]


def test_every_example_is_found() -> None:
    assert len(REQUESTS) == PAGES.count("$ curl ")
    paths = {(section, path) for section, path, _ in REQUESTS if section not in ELSEWHERE}
    assert paths == CLIENTS.keys()
    assert all((ROOT / test).exists() for test in ELSEWHERE.values())


@pytest.mark.parametrize(
    ("section", "path", "body"), [item for item in REQUESTS if item[0] not in ELSEWHERE]
)
def test_example_succeeds(
    section: str, path: str, body: dict[str, object], request: pytest.FixtureRequest
) -> None:
    client = request.getfixturevalue(CLIENTS[section, path])
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text


def test_python_runs(calibrated_artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts/calibrated").symlink_to(calibrated_artifact.path)
    (script,) = re.findall(r"^```python\n(.*?)^```$", PAGES, re.MULTILINE | re.DOTALL)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script + "assert vectors.shape == (1, 8)"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
