"""The READMEs agree with the code."""

import json
import re
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import get_args

import numpy as np
import pytest
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from models.artifact import Artifact
from service.api.compat import openai
from service.app import create_app
from service.settings import EngineSettings, ModelSettings, Scope, Settings, table, variable
from tests.eventually import eventually
from tests.serving import flat_routes, serving

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    page.read_text()
    for folder in ("docs/reference", "service")
    for page in (ROOT / folder).rglob("*.md")
]


def rows(header: str) -> list[list[str]]:
    """The cells of the tables under a header line, of all pages that have one."""
    bodies = [page.split(header, 1)[1].split("\n\n", 1)[0] for page in PAGES if header in page]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in "\n".join(bodies).splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]


def test_settings_table_agrees_with_the_code() -> None:
    def shown(value: object) -> str:
        return "none" if value in ((), None) else f"`{value}`"

    defaults = Settings()
    documented = [row[:3] for row in rows("| variable | default | |")]
    assert [row for row in documented if row[0].startswith("`VITRINE_")] == [
        [f"`{variable(group, name)}`", shown(getattr(getattr(defaults, group), name)), text]
        for group, name, text in table()
    ]


def test_routes_table_agrees_with_the_code(settings: Settings) -> None:
    app = create_app(settings)
    documented: dict[str, str] = {}
    for cells in rows("| route | scope of its key | |"):
        methods = re.findall(r"`([A-Z]+)\b", cells[0])
        paths = re.findall(r"/[a-z0-9_./{}]+", cells[0])
        documented |= {f"{method} {path}": cells[1] for method in methods for path in paths}
    actual: dict[str, str] = {}
    for route in flat_routes(app.routes):
        dependencies = route.dependencies if isinstance(route, APIRoute) else []
        names = [getattr(d.dependency, "__name__", "") for d in dependencies]
        scopes = [scope for scope in get_args(Scope) if f"require_{scope}" in names]
        path = route.path.replace(":path}", "}")
        for method in (getattr(route, "methods", None) or {"GET"}) - {"HEAD"}:
            actual[f"{method} {path}"] = scopes[0] if scopes else "none"
    for internal in ("/", "/docs/oauth2-redirect", "/static-offline-docs"):
        actual.pop(f"GET {internal}")
    assert documented == actual


def test_errors_table_has_every_code() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "service").rglob("*.py"))
    codes = set(re.findall(r'\bcode(?:: str)? ?= ?"(\w+)"', sources)) | {
        "not_found",
        "method_not_allowed",
        *openai.CODES.values(),
    }
    documented = {
        code for row in rows("| status | code | when |") for code in re.findall(r"`(\w+)`", row[1])
    }
    assert documented == codes


def test_metrics_table_agrees_with_the_code(settings: Settings) -> None:
    documented = {
        name
        for row in rows("| metric | |")
        for name in re.findall(r"`((?:vitrine|process)_\w+)", row[0])
    }
    exposition = create_app(settings).state.vitrine.metrics.exposition()[0].decode()
    described = re.findall(r"^# TYPE (\w+) ", exposition, re.MULTILINE)
    assert documented == {name for name in described if not name.endswith("_created")}


def test_example_response_is_real(minilm_client: TestClient) -> None:
    page = (ROOT / "service/api/README.md").read_text()
    examples = re.findall(r"/encode .*\\\n    -d '(\{.*\})'\n(\{.*\})", page)
    # Others would need an artifact that is calibrated with the author's texts.
    examples = [example for example in examples if "output_dtype" not in example[0]]
    assert examples
    for body, response in examples:
        actual = minilm_client.post("/encode", json=json.loads(body)).json()
        shown = json.loads(response)
        vectors = actual.pop("embeddings"), shown.pop("embeddings")
        np.testing.assert_allclose(*vectors, rtol=0, atol=1e-5)
        assert actual == shown


def test_readme_has_at_most_900_words_beside_code_tables_and_pictures() -> None:
    text = re.sub(
        r"^```.*?^```$|<picture>.*?</picture>", "", README, flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    assert len(re.sub(r"\]\(.*?\)", "]", text).split()) <= 900


def test_layout_names_existing_packages_and_all_of_them() -> None:
    layout = (
        (ROOT / "CONTRIBUTING.md").read_text().split("## Where code lives", 1)[1].split("```")[1]
    )
    named = set(re.findall(r"\b((?:models|service)/\w+(?:\.py|/))", layout))
    assert all((ROOT / path).exists() for path in named)
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for path in (*ROOT.glob("models/*/__init__.py"), *ROOT.glob("service/*/__init__.py"))
    }
    assert packages <= named


def test_request_path_lists_the_files_of_a_real_request_in_order(
    artifact: Artifact,
) -> None:
    crossed: list[str] = []
    running: Counter[int] = Counter()  # own functions that run, by thread
    is_tracing = threading.Event()

    def trace(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event in ("call", "return") and path.is_relative_to(ROOT):
            name = str(path.relative_to(ROOT))
            if name.startswith(("models/", "service/")):
                running[threading.get_ident()] += 1 if event == "call" else -1
                if is_tracing.is_set() and name not in crossed:
                    crossed.append(name)

    settings = Settings(model=ModelSettings(path=artifact.path), engine=EngineSettings(threads=1))
    body = {"inputs": ["The cat sat on the mat."]}
    threading.setprofile(trace)  # for the threads that start from here on
    try:
        with serving(create_app(settings, on_fatal=pytest.fail)) as client:
            assert client.post("/encode", json=body).status_code == 200
            eventually(lambda: not any(running.values()))  # the engine's thread ends after it
            is_tracing.set()
            assert client.post("/encode", json=body).status_code == 200
            is_tracing.clear()
    finally:
        threading.setprofile(None)
    page = (ROOT / "service/README.md").read_text()
    path = page.split("A `POST /encode` passes these files", 1)[1].split("```")[1]
    listed = re.findall(r"^(\S+\.py) ", path, re.MULTILINE)
    assert crossed == listed
