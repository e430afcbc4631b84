"""The examples of the README, run against a service."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from tests.serving import PATIENCE_S, lines_until, process

pytestmark = pytest.mark.slow

README = (Path(__file__).parents[3] / "service/debug/README.md").read_text()
_HOST = "http://127.0.0.1:8000"
# Path and JSON body of every curl example.
REQUESTS = [
    (path, json.loads(body))
    for path, body in re.findall(r"curl [^{]*?(/debug/\S+)[^{]*?-d '({.*?})'\n", README, re.DOTALL)
]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def url(small_artifact: Artifact) -> Iterator[str]:
    settings = {
        "VITRINE_MODEL__PATH": str(small_artifact.path),
        "VITRINE_DEBUG__ENABLED": "true",
        # No deadline is hit by accident on a slow machine.
        "VITRINE_DEBUG__DEADLINE_S": "300",
        "VITRINE_LIMITS__REQUEST_S": "300",
    }
    with process("-m", "tests.service.debug.held_worker", **settings) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        yield match[1]


def test_every_route_that_reads_or_changes_activations_has_two_examples() -> None:
    paths = [path for path, _ in REQUESTS]
    assert {"/debug/attribute", "/debug/activations", "/debug/patch"} <= set(paths)
    assert len(REQUESTS) == README.count("curl ")
    for path in ("/debug/activations", "/debug/patch"):
        assert sum(path in code for code in PYTHON) == 1


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_curl_examples_are_valid_requests(
    path: str, body: dict[str, object], url: str, ranker: TestClient
) -> None:
    if "text_pair" in body:
        assert ranker.post(path, json=body).status_code == 200
        return
    response = httpx2.post(f"{url}{path}", json=body, timeout=PATIENCE_S * 5)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("code", PYTHON)
def test_python_examples_run(
    code: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed: list[tuple[object, ...]] = []
    assert _HOST in code
    source = code.replace(_HOST, url)
    exec(source, {"print": lambda *values: printed.append(values)})  # noqa: S102 - our own README
    assert [values[0] for values in printed] == ["embeddings", "layers.0", "output"]
