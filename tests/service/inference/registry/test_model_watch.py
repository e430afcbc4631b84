"""Artifacts that change on disk while their models are served."""

import asyncio
import errno
import shutil
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.artifact import Artifact
from models.identity import identity_of
from models.manifest import SOURCE
from service.inference.errors import NotReady
from service.inference.model.model import Model
from service.inference.model.opening import ModelOptions, open_model
from service.inference.registry import memory
from service.inference.registry.model_watch import ModelWatch
from service.inference.registry.registry import ModelRegistry
from service.inference.registry.served_models import ModelSpec, specs_in
from tests.eventually import eventually_async
from tests.service.inference.registry.conftest import ONE_THREAD, HeldLoads, spec, watched


def served(
    folder: Path,
    **options: Any,  # noqa: ANN401
) -> AbstractAsyncContextManager[tuple[ModelRegistry, ModelWatch]]:
    """Serve the artifacts in a folder, which are watched."""
    return watched(lambda: specs_in(folder, ONE_THREAD), default="a", **options)


def replace_folder(folder: Path, artifact: Artifact) -> None:
    new = folder.with_name(f".new-{folder.name}")
    shutil.copytree(artifact.path, new)
    old = folder.rename(folder.with_name(f".old-{folder.name}"))
    new.rename(folder)
    shutil.rmtree(old)


@pytest.fixture
def two(small_artifact: Artifact, tmp_path: Path) -> Path:
    """A folder with the small model's artifact twice, of which the budget allows one."""
    for name in "ab":
        shutil.copytree(small_artifact.path, tmp_path / name)
    return tmp_path


async def test_all_models_of_a_replaced_artifact_are_loaded_again_with_their_own_options(
    two: Path, other_artifact: Artifact
) -> None:
    shared = two / "b"
    options = {
        "wide": replace(ONE_THREAD, name="wide", share=3.0),
        "slow": replace(ONE_THREAD, name="slow", share=0.5),
        None: ONE_THREAD,  # has the name of the artifact
    }
    specs = [
        ModelSpec(path=shared, aliases=(f"alias of {name}",), options=own)
        for name, own in options.items()
    ]
    async with watched(lambda: specs, default="wide") as (registry, watch):
        before = {status.name: status.aliases for status in registry.statuses()}
        replace_folder(shared, other_artifact)
        await watch.scan()
        assert {status.name: status.aliases for status in registry.statuses()} == before
        for name in before:
            own = registry.spec_of(name)
            assert own is not None
            assert own.options.share == options.get(name, ONE_THREAD).share
            identity = registry.current(name).identity
            assert identity == identity_of(other_artifact, "onnxruntime", "float32")


async def test_artifact_that_could_not_be_loaded_is_tried_again_by_a_scan_that_is_not_patient(
    two: Path, other_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> Model:
        raise OSError(errno.EMFILE, "Too many open files")

    async with served(two) as (registry, watch):
        shutil.copytree(other_artifact.path, two / "c")
        with monkeypatch.context() as patch:
            patch.setattr(memory, "open_model", fail)
            await watch.scan(is_patient=True)
        await watch.scan(is_patient=True)
        assert registry.spec_of("c") is None
        await watch.scan()
        assert registry.current("c").name == "c"


async def test_new_artifact_that_is_gone_during_its_load_is_not_said_to_be_in_service(
    two: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def remove(path: Path, *_: object, **__: object) -> Model:
        shutil.rmtree(path)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    async with served(two) as (registry, watch):
        shutil.copytree(two / "b", two / "c")
        monkeypatch.setattr(memory, "open_model", remove)
        await watch.scan()
        assert registry.spec_of("c") is None
        assert f"the artifact {two / 'c'} is gone; it was not loaded" in caplog.text


async def test_artifact_is_loaded_once_the_last_file_of_its_folders_is_complete(
    two: Path, other_artifact: Artifact
) -> None:
    async with served(two) as (registry, watch):
        shutil.copytree(other_artifact.path, two / "c")
        nested = two / "c" / SOURCE / "1_Pooling" / "config.json"
        content = nested.read_bytes()
        nested.unlink()
        await watch.scan()
        assert [status.name for status in registry.statuses()] == ["a", "b"]
        nested.write_bytes(content)
        await watch.scan(is_patient=True)  # another scan tries failed artifacts in any case
        assert [status.name for status in registry.statuses()] == ["a", "b", "c"]


async def test_model_whose_artifact_cannot_be_read_stays_in_service(
    two: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(two) as (registry, watch):
        (two / "b").rename(two / ".b")
        (two / "b").symlink_to("b")  # reading it fails with ELOOP, for every user
        for _ in range(3):
            await watch.scan(is_patient=True)
        await watch.scan()
        assert [status.name for status in registry.statuses()] == ["a", "b"]
        assert f"{two / 'b'}: it cannot be read: Too many levels" in caplog.text
        (two / "b").unlink()
        await watch.scan()
        assert [status.name for status in registry.statuses()] == ["a"]


async def test_scans_before_the_models_are_open_load_nothing_twice(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = ModelRegistry(default="a")
    watch = ModelWatch(registry, lambda: specs_in(two, ONE_THREAD))
    loads = HeldLoads(monkeypatch)
    try:
        await watch.scan()
        await asyncio.gather(watch.open(), watch.scan())
        assert loads.started == ["a", "b"]
        assert registry.is_open
    finally:
        await registry.close()


@pytest.mark.parametrize("parent", [".", SOURCE])
async def test_broken_link_in_a_new_artifact_is_logged_by_its_name(
    two: Path, other_artifact: Artifact, caplog: pytest.LogCaptureFixture, parent: str
) -> None:
    async with served(two) as (registry, watch):
        shutil.copytree(other_artifact.path, two / "c")
        (two / "c" / parent / "link").symlink_to(two / "nowhere")
        await watch.scan()
        assert [status.name for status in registry.statuses()] == ["a", "b"]
        name = Path(parent, "link")
        assert f"{name} in the artifact c is a symbolic link" in caplog.text


async def test_artifact_replaced_while_a_request_loads_its_model_is_served(
    two: Path, other_artifact: Artifact, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, may_end = asyncio.Event(), asyncio.Event()

    async def hold(path: Path, options: ModelOptions, **arguments: Any) -> Model:  # noqa: ANN401 - those of `open_model`
        model = await open_model(path, options, **arguments)
        opened.set()
        await may_end.wait()
        return model

    async with served(two, max_bytes=size) as (registry, watch):
        monkeypatch.setattr(memory, "open_model", hold)
        waiting = asyncio.create_task(registry.lease("b"))
        await opened.wait()
        replace_folder(two / "b", other_artifact)
        scanning = asyncio.create_task(watch.scan())
        await asyncio.wait([scanning], timeout=0.1)  # it waits for the load
        may_end.set()
        with await waiting as old:
            pass
        await scanning
        with await registry.lease("b") as model:
            assert model.version != old.version


async def test_new_artifact_of_an_unloaded_model_has_its_own_size_and_is_tried_at_once(
    two: Path, other_artifact: Artifact, size: int
) -> None:
    (two / "b" / "model.onnx").write_bytes(b"not a graph")
    async with served(two, max_bytes=2 * size - 1) as (registry, watch):
        with pytest.raises(NotReady, match="cannot be loaded"):
            await registry.lease("b")
        replace_folder(two / "b", other_artifact)
        await watch.scan()
        with await registry.lease("b") as model:  # within the pause after a failed load
            assert model.artifact.path == two / "b"
        (await registry.lease("a")).release()
        weights = two / "b" / "model.weights"
        replace_folder(two / "b", other_artifact)
        with weights.open("ab") as file:
            file.write(bytes(100))
        await watch.scan()
        assert [status.weight_bytes for status in registry.statuses()] == [size, size + 100]


async def test_model_whose_artifact_is_gone_is_kept_if_it_has_another_one_by_now(
    two: Path, other_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = HeldLoads(monkeypatch)
    async with served(two) as (registry, watch):
        loads.may_end.clear()
        loading = asyncio.create_task(registry.load(spec(other_artifact, "b")))
        await eventually_async(lambda: len(loads.started) == 3)
        shutil.rmtree(two / "b")
        scanning = asyncio.create_task(watch.scan())
        await asyncio.sleep(0)
        loads.may_end.set()
        new, _ = await loading
        await scanning
        assert registry.current("b") is new
