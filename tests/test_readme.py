"""The README says what is so."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from service.app import create_app
from service.compat import openai
from service.metrics import Metrics
from service.settings import Settings, table, variable
from tests.serving import flat_routes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    README,
    *((ROOT / f"service{part}/README.md").read_text() for part in ("", "/debug", "/compat")),
]


def rows(header: str) -> list[list[str]]:
    """The cells of the tables under a header line, of all READMEs that have one."""
    bodies = [page.split(header, 1)[1].split("\n\n", 1)[0] for page in PAGES if header in page]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in "\n".join(bodies).splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]


def test_it_can_be_read_at_a_sitting() -> None:
    assert len(README.splitlines()) < 200


def test_the_table_of_settings_is_that_of_the_code() -> None:
    def shown(value: object) -> str:
        return "none" if value in ((), None) else f"`{value}`"

    defaults = Settings()
    assert [row[:3] for row in rows("| variable | default | |")] == [
        [f"`{variable(group, name)}`", shown(getattr(getattr(defaults, group), name)), text]
        for group, name, text in table()
    ]


def test_the_table_of_routes_is_that_of_the_code(settings: Settings) -> None:
    app = create_app(settings)
    documented: dict[str, str] = {}
    for cells in rows("| route | scope of its key | |"):
        method = cells[0].strip("`").split()[0]
        documented |= {
            f"{method} {path}": cells[1] for path in re.findall(r"/[a-z0-9_./{}]+", cells[0])
        }
    found: dict[str, str] = {}
    for route in flat_routes(app.routes):
        dependencies = route.dependencies if isinstance(route, APIRoute) else []
        names = [getattr(d.dependency, "__name__", "") for d in dependencies]
        scopes = [name.removeprefix("require_") for name in names if name.startswith("require_")]
        path = route.path.replace(":path}", "}")
        for method in (getattr(route, "methods", None) or {"GET"}) - {"HEAD"}:
            found[f"{method} {path}"] = scopes[0] if scopes else "none"
    for behind_the_page in ("/", "/docs/oauth2-redirect", "/static-offline-docs"):
        found.pop(f"GET {behind_the_page}")
    assert documented == found


def test_the_table_of_errors_has_every_code() -> None:
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


def test_the_table_of_metrics_is_that_of_the_code() -> None:
    documented = {
        name
        for row in rows("| metric | |")
        for name in re.findall(r"`((?:vitrine|process)_\w+)", row[0])
    }
    described = re.findall(r"^# TYPE (\w+) ", Metrics().exposition().decode(), re.MULTILINE)
    assert documented == {name for name in described if not name.endswith("_created")}


def test_the_answer_that_it_shows_is_real(client: TestClient) -> None:
    match = re.search(r"-d '(\{.*\})'\n(\{.*\})", README)
    assert match is not None
    found = client.post("/encode", json=json.loads(match[1])).json()
    shown = json.loads(match[2])
    np.testing.assert_allclose(found.pop("embeddings"), shown.pop("embeddings"), rtol=0, atol=1e-5)
    assert found == shown


def test_the_tree_names_files_that_are_there_and_all_of_them() -> None:
    tree = README.split("## The tree", 1)[1].split("```")[1]
    named: set[str] = set()
    folder = ""
    for line in tree.strip().splitlines():
        if not line.startswith(" "):
            folder = line.split()[0]
        named |= {folder + name for name in re.findall(r"\b[a-z_]+\.py\b", line)}
    present = {
        str(path.relative_to(ROOT))
        for package in ("models", "service", "deploy")
        for path in (ROOT / package).glob("*.py")
        if not path.name.startswith("__")
    }
    assert named == present


@pytest.mark.parametrize("path", re.findall(r"^  ((?:service|models)/\S+)", README, re.MULTILINE))
def test_the_path_of_a_request_names_files_that_are_there(path: str) -> None:
    assert (ROOT / path).is_file()
