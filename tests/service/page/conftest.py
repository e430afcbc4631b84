"""Services with a model each, as processes of their own, and a browser."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from sentence_transformers import MultiVectorEncoder, SparseEncoder

from models.artifact import Artifact
from models.manifest import MANIFEST
from tests.models.checkpoints import edit_json
from tests.service.api.conftest import (  # noqa: F401 - fixtures
    classifier,
    cross_encoder,
    multi_encoder,
    reranker,
    sparse_encoder,
    tagger,
)
from tests.service.page.browsing import OPTIONS, Browser, open_page
from tests.serving import lines_until, process

# Chromium without a user interface takes two thirds of the CPU time. Debian's command of this name
# is a script, which chromedriver would end in place of the browser.
SHELL = Path("/usr/lib/chromium/chromium-headless-shell")


@pytest.fixture(scope="session")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file; while it exists, no gradient job runs."""
    return tmp_path_factory.mktemp("hold") / "hold"


def served(artifact: Artifact, hold: Path) -> Iterator[str]:
    yield from started_service(hold, VITRINE_MODEL__PATH=str(artifact.path))


def started_service(hold: Path, **models: str) -> Iterator[str]:
    settings = {
        **models,
        "VITRINE_DEBUG__ENABLED": "true",
        # No deadline is hit by accident on a slow machine.
        "VITRINE_DEBUG__DEADLINE_S": "300",
        "VITRINE_LIMITS__REQUEST_S": "300",
        "VITRINE_ENGINE__TIMEOUT_S": "300",
        "GRADIENT_HOLD": str(hold),
    }
    with process("-m", "tests.service.debug.held_worker", **settings) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        yield match[1]


@pytest.fixture(scope="session")
def url(small_artifact: Artifact, hold: Path) -> Iterator[str]:
    yield from served(small_artifact, hold)


@pytest.fixture(scope="session")
def minilm_url(artifact: Artifact) -> Iterator[str]:
    """A service with a trained model that reads 256 tokens."""
    settings = {"VITRINE_LIMITS__REQUEST_S": "300", "VITRINE_ENGINE__TIMEOUT_S": "300"}
    with process("-m", "service", VITRINE_MODEL__PATH=str(artifact.path), **settings) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        yield match[1]


@pytest.fixture(scope="session")
def reranker_url(reranker: Artifact, hold: Path) -> Iterator[str]:  # noqa: F811
    yield from served(reranker, hold)


@pytest.fixture(scope="session")
def classifier_url(classifier: Artifact, hold: Path) -> Iterator[str]:  # noqa: F811
    yield from served(classifier, hold)


@pytest.fixture(scope="session")
def multi_url(
    multi_encoder: tuple[MultiVectorEncoder, Artifact],  # noqa: F811
    hold: Path,
) -> Iterator[str]:
    yield from served(multi_encoder[1], hold)


@pytest.fixture(scope="session")
def sparse_url(
    sparse_encoder: tuple[SparseEncoder, Artifact],  # noqa: F811
    hold: Path,
) -> Iterator[str]:
    yield from served(sparse_encoder[1], hold)


def started_browser(*logs: str) -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("chromedriver is not installed: there is no browser to drive")
    options = webdriver.ChromeOptions()
    for option in OPTIONS:
        options.add_argument(option)
    if SHELL.exists():
        options.binary_location = str(SHELL)
    options.set_capability("goog:loggingPrefs", dict.fromkeys(logs, "ALL"))
    started = webdriver.Chrome(options=options, service=Service(executable_path=driver))
    yield started
    started.quit()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    yield from started_browser()


@pytest.fixture
def logging_browser() -> Iterator[Browser]:
    """A new browser that logs all requests and messages, see `events` and `check_console`."""
    yield from started_browser("browser", "performance")


@pytest.fixture
def page(browser: Browser, url: str) -> Browser:
    """Return the newly opened page."""
    return open_page(browser, f"{url}/debug#tab=explain&run=1")


@pytest.fixture(scope="session")
def url_of_both(small_artifact: Artifact, other_artifact: Artifact, hold: Path) -> Iterator[str]:
    """A service with the models "first" and "second", which has other word embeddings.

    "one" is an alias of "first".
    """
    models = [
        {"name": "first", "path": str(small_artifact.path), "aliases": ["one"]},
        {"name": "second", "path": str(other_artifact.path)},
    ]
    yield from started_service(hold, VITRINE_MODELS__SERVED=json.dumps(models))


@pytest.fixture(scope="session")
def url_of_similarities(
    small_artifact: Artifact, hold: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A service with models that compare vectors of any length: "dot" and "euclidean"."""
    folder = tmp_path_factory.mktemp("similarities")
    models = []
    for name in ("dot", "euclidean"):
        shutil.copytree(small_artifact.path, folder / name)
        edit_json(folder / name / MANIFEST, similarity=name, normalize=False)
        models.append({"name": name, "path": str(folder / name)})
    yield from started_service(hold, VITRINE_MODELS__SERVED=json.dumps(models))


# A serving process that can import neither PyTorch nor the chart library.
_WITHOUT_EXTRAS = (
    "import sys; sys.modules |= {'torch': None, 'plotly': None}; "
    "from service.serve_command import main; sys.exit(main())"
)


@pytest.fixture(scope="session")
def plain_url(
    small_artifact: Artifact,
    reranker: Artifact,  # noqa: F811
    classifier: Artifact,  # noqa: F811
    sparse_encoder: tuple[SparseEncoder, Artifact],  # noqa: F811
    multi_encoder: tuple[MultiVectorEncoder, Artifact],  # noqa: F811
    tagger: Artifact,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """A service without PyTorch and gradient routes, with a model of each kind by its name.

    The scores of "identity-reranker" and "identity-classifier" are their logits.
    """
    artifacts = {
        "embedding": small_artifact,
        "reranker": reranker,
        "classifier": classifier,
        "sparse": sparse_encoder[1],
        "multi": multi_encoder[1],
        "tags": tagger,
    }
    models = [{"name": name, "path": str(each.path)} for name, each in artifacts.items()]
    for kind in ("reranker", "classifier"):
        path = tmp_path_factory.mktemp("identity") / kind
        shutil.copytree(artifacts[kind].path, path)
        edit_json(path / MANIFEST, activation="identity")
        models.append({"name": f"identity-{kind}", "path": str(path)})
    settings = {
        "VITRINE_MODELS__SERVED": json.dumps(models),
        "VITRINE_MODELS__DEFAULT": "embedding",
        "VITRINE_LIMITS__REQUEST_S": "300",
        "VITRINE_ENGINE__TIMEOUT_S": "300",
    }
    with process("-c", _WITHOUT_EXTRAS, **settings) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        yield match[1]


@pytest.fixture
def shared_page(browser: Browser, plain_url: str) -> Browser:
    """Return the page with an explanation, which is opened once for tests that change nothing."""
    if not browser.execute_script("return window.isShared"):
        address = f"{plain_url}/debug?model=embedding#tab=explain&run=1"
        open_page(browser, address, has_gradients=False)
        browser.execute_script("window.isShared = true")
    return browser
