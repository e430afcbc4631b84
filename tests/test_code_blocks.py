"""Commands and Python on the pages `PAGES` run, and print what the pages say.

They run in a folder with the default model's artifact. Commands that need Docker, a cluster or the
network have their own tests, which `ELSEWHERE` names.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.artifact import Artifact
from models.export import __main__ as export
from tests.serving import PATIENCE_S, process, url_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "models/add_layer_norm/README.md",
    "service/bulk/README.md",
    "service/evaluation/README.md",
    *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md"))),
]
CLIENTS_PAGE = "docs/how-to/use-clients.md"
# Pages whose Python is that of clients, and the number of their scripts.
CLIENTS_PAGES = {CLIENTS_PAGE: 5, "service/api/compat/README.md": 3}
URL = "http://127.0.0.1:8000"
# Made by the Makefile: the clients do not agree on versions with what the service is tested with.
INSTALLED = ROOT / ".venv-bench"

# Beginning of a command: the test that runs it.
ELSEWHERE = {
    "docker compose": "tests/deploy/test_compose.py",
    "docker run": "tests/deploy/test_compose.py",
    "kubectl": "tests/deploy/test_kubernetes.py",
    "serve run": "tests/deploy/test_ray_serve.py",
}
# Beginning of a command that no test runs: this one installs everything again.
NOT_RUN = ("make serve",)
# Models on the hub, in place of which the reader's own model is exported.
HUB_MODELS = ("intfloat/multilingual-e5-small",)
# Models of the pages' clients, in place of which the default model ranks.
SERVED = "sentence-transformers/all-MiniLM-L6-v2"
OTHER_SERVED = ("cross-encoder/ms-marco-MiniLM-L6-v2",)
KEY = "key-of-the-reader"


@dataclass(frozen=True)
class Command:
    """A command of a page, with the lines of its output on the page."""

    text: str
    output: str


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a language on a page."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(block: str) -> Iterator[Command]:
    """The commands of a block, which begin with a dollar sign."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        end = next(i for i in range(len(lines)) if is_complete("\n".join(lines[: i + 1])))
        yield Command("\n".join(lines[: end + 1]), "\n".join(lines[end + 1 :]))


def is_complete(text: str) -> bool:
    """Whether the command ends with this text."""
    try:
        shlex.split(text)
    except ValueError:  # an open quotation, or a backslash at the end
        return False
    return not text.endswith("\\")


@pytest.fixture
def folder(artifact: Artifact, small_folder: Path, tmp_path: Path) -> Path:
    """A folder as `make serve` leaves it, with a model and texts of the reader's own."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts/all-MiniLM-L6-v2").symlink_to(artifact.path)
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/model").symlink_to(small_folder)
    (tmp_path / "texts").mkdir()
    (tmp_path / "bin").mkdir()
    # DuckDB's command line is no Python package.
    duckdb = tmp_path / "bin/duckdb"
    duckdb.write_text(f"#!{sys.executable}\nimport duckdb, sys\nduckdb.sql(sys.argv[2]).show()\n")
    duckdb.chmod(0o755)
    pq.write_table(
        pa.table({"id": ["a1", "a2"], "text": ["The cat sat.", "It rained."]}),
        tmp_path / "texts/texts.parquet",
    )
    return tmp_path


@pytest.fixture(scope="module")
def url(artifact: Artifact) -> Iterator[str]:
    settings = {
        "VITRINE_MODEL__PATH": str(artifact.path),
        "VITRINE_DEBUG__ENABLED": "true",
        # No deadline is hit by accident on a slow machine.
        "VITRINE_DEBUG__DEADLINE_S": "300",
        "VITRINE_LIMITS__REQUEST_S": "300",
    }
    # At its own priority, the gradient process hardly runs beside busy processes.
    with process("-m", "tests.service.debug.held_worker", **settings) as started:
        yield url_of(started)


@pytest.fixture(scope="module")
def admin_url(small_artifact: Artifact) -> Iterator[str]:
    """A service of the reader's own model with an API key."""
    key = {"name": "reader", "key": KEY, "scopes": ["admin", "encode"]}
    settings = {
        "VITRINE_MODEL__PATH": str(small_artifact.path),
        "VITRINE_AUTH__KEYS": json.dumps([key]),
    }
    with process(**settings) as started:
        yield url_of(started)


def run(text: str, folder: Path) -> str:
    """Run a command in the reader's folder, and return its output."""
    return run_completed(text, folder).stdout


def run_completed(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{folder}/bin:{sys.prefix}/bin:{os.environ['PATH']}"
    settings = {"VITRINE_ENGINE__THREADS": "2", "XDG_CACHE_HOME": f"{folder}/.cache"}
    environment = {**os.environ, **settings, "PATH": path, "KEY": KEY}
    # As installed by pip, also before this version of the package is.
    text = text.replace(".venv/bin/vitrine ", f"{sys.executable} -m service.commands ")
    ran = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 5,
        check=False,
    )
    assert ran.returncode == 0, f"{text}\n{ran.stderr}"
    return ran


def check_output(actual: str, shown: str) -> None:
    """Compare the output of a command with that on the page; numbers may be rounded differently."""
    if not shown.startswith("{"):
        words = actual.split(), shown.split()
        assert len(words[0]) == len(words[1])
        for left, right in zip(*words, strict=True):
            is_decimal = re.fullmatch(r"\d+\.\d+", right)
            assert float(left) == pytest.approx(float(right)) if is_decimal else left == right
        return

    def compare(left: Any, right: Any) -> None:  # noqa: ANN401 - any JSON value
        if isinstance(right, float):
            assert left == pytest.approx(right, abs=1e-5)
        elif isinstance(right, list):
            assert len(left) == len(right)
            for pair in zip(left, right, strict=True):
                compare(*pair)
        elif isinstance(right, dict):
            assert left.keys() == right.keys()
            for name, value in right.items():
                compare(left[name], value)
        else:
            assert left == right

    compare(json.loads(actual), json.loads(shown))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "console")])
def test_commands_run_and_print_what_the_page_shows(
    page: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    for command in (command for block in blocks(page, "console") for command in commands(block)):
        text = re.sub("|".join(HUB_MODELS), "path/to/model", command.text)
        if text.startswith((*ELSEWHERE, *NOT_RUN)):
            continue
        if text.startswith("cat "):
            (folder / text.split()[1]).write_text(f"{command.output}\n")
        elif text.startswith("curl "):
            url = request.getfixturevalue("admin_url" if "$KEY" in text else "url")
            assert URL in text
            text = text.replace("curl ", "curl -sS --fail-with-body ").replace(URL, url)
            # The service has another working directory than the reader.
            answer = run(text.replace('"artifacts/', f'"{folder}/artifacts/'), folder)
            if command.output:
                check_output(answer, command.output)
        elif "vitrine-export" in text or "vitrine export" in text:
            # In this process, which has imported torch. `tests.test_commands` finds the program.
            words = shlex.split(text)
            # Around the export alone: services that the page needs start in the tests' folder.
            with chdir(folder):
                assert export.main(words[2 if words[1] == "export" else 1 :]) == 0
            assert not command.output
        elif "vitrine-serve" in text or "vitrine serve" in text:
            run(f"{text} --check", folder)
        elif "vitrine-encode" in text or "vitrine encode" in text:
            # Times differ.
            assert command.output.partition(" in ")[0] in run_completed(text, folder).stderr
        else:
            output = run(text, folder)
            if command.output:
                check_output(output, command.output)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != CLIENTS_PAGE and blocks(page, "python")]
)
def test_python_runs(page: str, url: str, folder: Path) -> None:
    for block in blocks(page, "python"):
        script = block.replace(URL, url)
        run(f"PYTHONPATH={ROOT} {sys.executable} - <<'END'\n{script}\nEND", folder)


@pytest.mark.parametrize("page", CLIENTS_PAGES)
@pytest.mark.skipif(not (INSTALLED / "clients").exists(), reason="no clients: make test installs")
def test_python_clients_run(page: str, url: str, tmp_path: Path) -> None:
    scripts = blocks(page, "python")
    assert len(scripts) == CLIENTS_PAGES[page]
    for script in scripts:
        assert URL in script
        for name in OTHER_SERVED:
            script = script.replace(name, SERVED)
        (tmp_path / "script.py").write_text(script.replace(URL, url))
        run(f"DO_NOT_TRACK=1 {INSTALLED}/clients/bin/python script.py", tmp_path)


@pytest.mark.skipif(
    shutil.which("node") is None or not (INSTALLED / "node_modules").exists(),
    reason="no Node.js client: make test installs it, where there is npm",
)
def test_javascript_client_runs(url: str, tmp_path: Path) -> None:
    # A module is looked for beside the script that imports it.
    (tmp_path / "node_modules").symlink_to(INSTALLED / "node_modules")
    (script,) = blocks(CLIENTS_PAGE, "javascript")
    (tmp_path / "script.mjs").write_text(script.replace(URL, url))
    assert run("node script.mjs", tmp_path).startswith("[")


def test_parts_of_similarities_in_the_text_are_real(url: str) -> None:
    def answer(block: str, route: str) -> Any:  # noqa: ANN401 - any JSON value
        (body,) = re.findall(rf"{URL}{route} .*?-d '(.*?)'$", block, re.MULTILINE | re.DOTALL)
        return httpx2.post(f"{url}{route}", json=json.loads(body), timeout=300).json()

    text = (ROOT / "README.md").read_text()
    tutorial = (ROOT / "docs/tutorial.md").read_text()
    scored = answer(text, "/score")
    (document,) = re.findall(r'"documents": \["(.*?)"\]', text)
    units = scored["explanations"][0]["texts"][0]["units"]
    left_out = {document[unit["start"] : unit["end"]]: unit["left_out"] for unit in units}
    (paragraph,) = re.findall(r"has the cosine, .*?\n\n", text, re.DOTALL)
    shown = re.findall(r"`(\w+)`\s(?:it\sis\s)?(0\.\d+)(?:\s(lower|higher))?", paragraph)
    for word, number, direction in shown:
        sign = -1 if direction == "higher" else 1
        assert number == f"{sign * left_out[word]:.2f}"
    assert [word for word, *_ in shown] == ["cat", "sat", "mat"]
    assert f"the cosine, {scored['scores'][0]:.2f}." in paragraph
    attribution = answer(tutorial, "/debug/attribute")
    best = sorted(attribution["words"], key=lambda word: -float(word["score"]))[:2]
    (words,) = re.findall(r"`\w+` has 0\.\d+\sof\sthe\scosine\sand\s`\w+` 0\.\d+", tutorial)
    sentence = "The cat sat on the mat."
    first, second = ((sentence[w["start"] : w["end"]], w["score"]) for w in best)
    parts = f"`{first[0]}` has {first[1]:.2f} of the cosine and `{second[0]}` {second[1]:.2f}"
    assert " ".join(words.split()) == parts


def test_commands_that_do_not_run_here_have_a_test_of_their_own() -> None:
    shown = [c.text for page in PAGES for b in blocks(page, "console") for c in commands(b)]
    for command, test in ELSEWHERE.items():
        assert any(text.startswith(command) for text in shown), command
        assert (ROOT / test).exists()
