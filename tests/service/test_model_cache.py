"""`vitrine-serve MODEL` exports what is not an artifact, once, and finds it in the cache later."""

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path

import httpx2
import numpy as np
import pytest
from huggingface_hub import snapshot_download
from sentence_transformers import SentenceTransformer

from models.artifact import Artifact
from models.engines import Precision
from models.export.__main__ import main as export
from models.export.sources import _PINNED, content_sha256
from models.manifest import ArtifactError
from service import commands, model_cache
from service.artifacts import with_artifacts
from service.bulk.command_line import main as bulk
from service.inference.model.opening import open_model
from service.model_cache import _export_options, artifact_of
from service.serve_command import main as serve
from service.settings import EngineSettings, ModelSettings, ModelsSettings, ServedModel, Settings
from tests.conftest import MINILM
from tests.eventually import eventually
from tests.hub import Hub, serving_hub
from tests.models.checkpoints import edit_json, save_checkpoint, save_tokenizer, write_json
from tests.service.bulk.conftest import rows_of
from tests.serving import PATIENCE_S, lines_until, outcome, process

ID = "someone/tiny"
# Bound of a test with several exports, each of which takes a minute on a busy machine.
_PATIENCE_S = 1800


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small embedding model."""
    save_checkpoint(tmp_path / "tiny", "bert", num_hidden_layers=1)
    save_tokenizer(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The arguments of the exports, which run in this process, which has imported torch."""
    calls: list[Sequence[str]] = []

    def run(arguments: Sequence[str], *_: object) -> None:
        calls.append(arguments)
        assert export(arguments) == 0

    monkeypatch.setattr(model_cache, "_run", run)
    return calls


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        # This process may have imported the library, which reads the variables then.
        here = partial(snapshot_download, endpoint=hub.url, cache_dir=tmp_path / "hf/hub")
        monkeypatch.setattr("huggingface_hub.snapshot_download", here)
        yield hub


def find(model: Path | str, cache: Path, *, refresh: bool = False, **engine: str) -> Path:
    """Return the path of the artifact that the service would open."""
    settings = Settings(
        model=ModelSettings(path=model),
        models=ModelsSettings(cache=cache),
        engine=EngineSettings(**engine),
    )
    return with_artifacts(settings, refresh=refresh).model.path


def test_artifact_is_served_from_where_it_is(small_artifact: Artifact, cache: Path) -> None:
    assert find(small_artifact.path, cache) == small_artifact.path
    assert not cache.exists()


def test_adapter_is_another_model_when_its_base_model_changes(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter" / "0_Transformer"
    write_json(adapter / "adapter_config.json", {"base_model_name_or_path": str(folder)})
    before = content_sha256(adapter.parent)
    weights = folder / "model.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(original[:-1] + b"x")
    changed = content_sha256(adapter.parent)
    weights.write_bytes(original)
    assert content_sha256(adapter.parent) == before != changed
    for base in (str(adapter), "..", "someone/tiny", "/none", "", 5, None):
        write_json(adapter / "adapter_config.json", {"base_model_name_or_path": base})
        assert len(content_sha256(adapter.parent)) == 64


def test_folder_may_have_files_whose_names_are_not_utf8(folder: Path) -> None:
    before = content_sha256(folder)
    (folder / os.fsdecode(b"\xe9.json")).touch()
    assert content_sha256(folder) != before


@pytest.mark.slow
def test_folder_is_exported_once_and_again_when_a_file_changes(
    folder: Path, cache: Path, exports: list[Sequence[str]]
) -> None:
    first = find(folder, cache)
    assert Artifact.load(first).manifest.name == "tiny"
    assert find(folder, cache) == find(folder, cache, precision="bfloat16") == first
    assert len(exports) == 1
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "w4 "}})
    second = find(folder, cache)
    assert Artifact.load(second).manifest.prompts["query"] == "w4 "
    assert second != first
    assert len(exports) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["mpnet", "xlm-roberta", "deberta-v2", "modernbert", "eurobert", "qwen3"]
)
async def test_folder_of_a_family_is_served_with_the_vectors_of_sentence_transformers(
    family: str, cache: Path, exports: list[Sequence[str]], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / family, family)
    save_tokenizer(tmp_path / family)
    texts = ["w4 w5 w6", "w7"]
    async with await open_model(find(tmp_path / family, cache)) as model:
        vectors = (await model.encode(texts)).vectors
    expected = SentenceTransformer(str(tmp_path / family), device="cpu").encode(texts)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert len(exports) == 1


@pytest.mark.slow
def test_other_version_of_the_export_exports_again(
    folder: Path, cache: Path, exports: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = find(folder, cache)
    monkeypatch.setattr(model_cache, "version", lambda _: "0.2.0")
    assert find(folder, cache) != first
    assert len(exports) == 2


@pytest.mark.slow
def test_refresh_exports_again(folder: Path, cache: Path, exports: list[Sequence[str]]) -> None:
    path = find(folder, cache)
    (path / "model.weights").write_bytes(b"damaged")
    assert find(folder, cache, refresh=True) == path
    Artifact.load(path).verify("model.weights")
    assert len(exports) == 2
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, "lock"]


@pytest.mark.slow
def test_artifact_of_an_interrupted_refresh_is_back_after_the_next_export(
    folder: Path, cache: Path, exports: list[Sequence[str]]
) -> None:
    path = find(folder, cache)
    path.rename(path.with_name(f".old-{path.name}"))  # as if killed before the second rename
    other = find(folder, cache, precision="int8")
    assert {path, other} == {file for file in path.parent.iterdir() if file.is_dir()}
    assert find(folder, cache) == path
    assert len(exports) == 2


@pytest.mark.slow
def test_hub_id_is_exported_once_and_then_needs_no_hub(
    folder: Path, cache: Path, hub: Hub, exports: list[Sequence[str]], tmp_path: Path
) -> None:
    commit = hub.add(ID, folder)
    first = find(ID, cache)
    manifest = Artifact.load(first).manifest
    assert (manifest.source, manifest.revision) == (ID, commit)
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    edit_json(changed / "tokenizer_config.json", model_max_length=20)
    newer = hub.add(ID, changed)
    hub.requests.clear()
    assert find(ID, cache) == first
    assert hub.requests == []
    second = find(ID, cache, refresh=True)
    assert Artifact.load(second).manifest.revision == newer
    assert find(ID, cache) == second
    assert find(f"{ID}@{commit}", cache) == first
    assert len(exports) == 3


@pytest.mark.slow
def test_new_version_of_the_export_keeps_the_commit_of_a_hub_id(
    folder: Path,
    cache: Path,
    hub: Hub,
    exports: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit = hub.add(ID, folder)
    find(ID, cache)
    hub.add(ID, folder)
    monkeypatch.setattr(model_cache, "version", lambda _: "0.2.0")
    assert Artifact.load(find(ID, cache)).manifest.revision == commit
    assert len(exports) == 2


@pytest.mark.slow
def test_download_goes_on_where_a_connection_was_cut(
    folder: Path,
    cache: Path,
    hub: Hub,
    exports: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The library keeps complete blocks, of 10 MB; the whole file has fewer bytes.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.add(ID, folder)
    hub.cut = "model.safetensors"
    copied = find(ID, cache) / "source/model.safetensors"
    weights = (folder / "model.safetensors").read_bytes()
    assert copied.read_bytes() == weights
    assert hub.ranges == [f"bytes={len(weights) // 2 // 1000 * 1000}-"]
    assert len(exports) == 1


def test_private_model_is_exported_with_the_token_of_the_environment(
    folder: Path,
    cache: Path,
    hub: Hub,
    exports: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.add(ID, folder)
    hub.token = "hf_secret"  # noqa: S105
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert Artifact.load(find(ID, cache)).manifest.source == ID
    assert len(exports) == 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError("9 requested and 8 written"),
    ],
)
def test_full_disk_is_named_with_a_remedy(
    error: OSError,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("models.export.exporter.export", fail)
    assert export([str(folder), "--out", str(tmp_path / "new")]) == 1
    assert f"no space is left on the disk of {tmp_path}, or" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fcntl.flock", "os.rename"])
def test_cache_that_cannot_be_written_is_named_with_a_remedy(
    name: str,
    small_artifact: Artifact,
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(arguments: Sequence[str], *_: object) -> None:
        shutil.copytree(small_artifact.path, arguments[arguments.index("--out") + 1])

    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(model_cache, "_run", run)
    monkeypatch.setattr(name, fail)
    problem = re.escape(f"the cache {cache}/tiny cannot be written (No locks available): set ")
    with pytest.raises(ArtifactError, match=problem):
        find(folder, cache)


def test_commit_of_a_hub_model_is_on_the_disk_before_it_has_its_name(
    small_artifact: Artifact, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(arguments: Sequence[str], *_: object) -> None:
        shutil.copytree(small_artifact.path, arguments[arguments.index("--out") + 1])

    synced: set[int] = set()
    monkeypatch.setattr(model_cache, "_run", run)
    monkeypatch.setattr("os.fsync", lambda file: synced.add(os.fstat(file).st_ino))
    assert find(ID, cache).is_dir()
    assert (cache / "someone--tiny/commits/main").stat().st_ino in synced


def test_export_that_cannot_be_started_is_named(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("subprocess.Popen", fail)
    problem = "tiny cannot be exported: vitrine-export cannot be started: Resource temporarily unav"
    with pytest.raises(ArtifactError, match=problem):
        find(folder, cache)


def test_several_models_have_the_same_names(
    folder: Path, small_artifact: Artifact, cache: Path, exports: list[Sequence[str]]
) -> None:
    paths = {"a": folder, "b": small_artifact.path, "c": folder}
    served = tuple(ServedModel(path=path, name=name) for name, path in paths.items())
    settings = Settings(models=ModelsSettings(cache=cache, served=served))
    specs = with_artifacts(settings, refresh=True).model_specs()
    exported = find(folder, cache)
    assert [spec.path for spec in specs] == [exported, small_artifact.path, exported]
    assert [spec.options.name for spec in specs] == ["a", "b", "c"]
    assert len(exports) == 1


def test_bulk_encoding_takes_names_from_the_same_cache(
    folder: Path,
    cache: Path,
    exports: list[Sequence[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VITRINE_MODELS__CACHE", str(cache))
    (tmp_path / "texts.txt").write_text("w1 w2\nw3\n")

    def encode(output: str, model: str, *options: str) -> int:
        arguments = (str(tmp_path / "texts.txt"), str(tmp_path / output), "--model", model)
        return bulk([*arguments, "--progress", "none", *options])

    assert encode("first", str(folder)) == 0
    monkeypatch.chdir(folder.parent)
    assert encode("second", "./tiny") == encode("third", str(find(folder, cache))) == 0
    assert len(exports) == 1
    tables = [rows_of(tmp_path / name) for name in ("first", "second", "third")]
    assert tables[0].num_rows == 2
    assert tables[0] == tables[1] == tables[2]
    assert encode("fourth", "./nowhere") == 2
    assert "nowhere does not exist; a model is a folder, an installed" in capsys.readouterr().err
    assert encode("fourth", "./tiny", "--engine", "tensorrt") == 2
    assert "unknown engine 'tensorrt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("vitrine_models__cache", "{cache}"),
        ("VITRINE_MODELS", '{{"cache": "{cache}", "watch_s": 5}}'),
    ],
)
def test_bulk_encoding_takes_the_cache_of_any_variable_of_the_setting(
    folder: Path,
    cache: Path,
    exports: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
) -> None:
    monkeypatch.delenv("VITRINE_MODELS__CACHE", raising=False)
    monkeypatch.setenv(variable, value.format(cache=cache))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "other"))
    expected = with_artifacts(Settings(model=ModelSettings(path=folder))).model.path
    assert expected.is_relative_to(cache)
    assert artifact_of(folder, "auto", "float32", None) == expected
    assert len(exports) == 1


@pytest.mark.slow
def test_folder_whose_name_is_not_utf8_is_refused_in_a_sentence(folder: Path, cache: Path) -> None:
    path = folder.rename(folder.with_name(os.fsdecode(b"\xe9")))
    with pytest.raises(ArtifactError, match=r"cannot be exported: .*is not valid UTF-8"):
        find(path, cache)
    assert [own.name for own in cache.iterdir()] == ["%E9"]


@pytest.mark.parametrize(
    ("engine", "precision", "options"),
    [
        ("auto", "float32", ()),
        ("openvino", "bfloat16", ()),
        ("auto", "int8", ("--precision", "int8")),
        ("cuda", "float32", ("--target", "cuda", "--dtype", "float32")),
        ("auto", "float16", ("--target", "cuda", "--dtype", "float16")),
    ],
)
def test_export_writes_the_graph_of_engine_and_precision(
    engine: str, precision: Precision, options: tuple[str, ...]
) -> None:
    assert _export_options(engine, precision) == options


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("XDG_CACHE_HOME", "/somewhere", "/somewhere/vitrine"),
        ("XDG_CACHE_HOME", "", "/home/me/.cache/vitrine"),
        ("XDG_CACHE_HOME", ".", "/home/me/.cache/vitrine"),
        ("VITRINE_MODELS__CACHE", "~/it", "/home/me/it"),
        ("VITRINE_MODELS__CACHE", ".", "."),
        ("VITRINE_MODELS__CACHE", "", "/home/me/.cache/vitrine"),
    ],
)
def test_default_cache_is_that_of_the_setting_or_of_xdg(
    variable: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, value)
    assert model_cache._default_cache() == Path(expected)


def test_user_without_a_home_directory_needs_the_setting(
    folder: Path, small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    for path in (small_artifact.path, folder):
        settings = Settings(model=ModelSettings(path=path))
        if path == folder:
            with pytest.raises(ArtifactError, match="set VITRINE_MODELS__CACHE to a folder"):
                with_artifacts(settings)
        else:
            assert with_artifacts(settings).model.path == path


@pytest.mark.parametrize(
    "name", ["models.folder", "models.cache", "models.verify", "auth.keys_file"]
)
def test_tilde_in_a_variable_is_the_home_directory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv(f"VITRINE_{name.upper().replace('.', '__')}", "~/it")
    assert attrgetter(name)(Settings()) == Path("/home/me/it")


@pytest.mark.parametrize(
    "words",
    [["serve", ""], ["explain", "a", "b", "--model", ""], ["encode", "a", "b", "--model", ""]],
)
def test_empty_name_of_a_model_is_named(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        commands.main(words)
    assert "model: the name of the model is empty" in capsys.readouterr().err.lower()


@pytest.mark.parametrize(
    "words",
    [
        "encode texts.txt out --model ./m",
        "eval out --corpus c --known-items 2 --model ./m",
        "explain a b --model ./m",
        "serve ./m",
    ],
)
def test_deleted_working_directory_is_named(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        status = commands.main(words.split())
    except SystemExit as error:
        status = int(str(error))
    assert status == 2
    assert "the working directory of ./m was deleted" in capsys.readouterr().err


def test_unknown_home_directory_is_named() -> None:
    with pytest.raises(ValueError, match="the home directory of ~nobody-here/model is unknown"):
        ModelSettings.model_validate({"path": "~nobody-here/model"})


def test_command_takes_a_name_and_refresh(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(settings: Settings, *, refresh: bool) -> Settings:
        raise ArtifactError(f"{settings.model.path}, {refresh}")

    monkeypatch.setattr("service.serve_command.with_artifacts", refuse)
    monkeypatch.setattr("service.serve_command.configure", lambda _: None)
    assert serve([f"{ID}@v1", "--refresh"]) == 2
    assert capsys.readouterr().err == f"vitrine-serve: {ID}@v1, True\n"


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "~/nowhere"])
def test_missing_folder_is_no_hub_id(name: str, cache: Path, hub: Hub) -> None:
    with pytest.raises(ArtifactError, match=r"nowhere does not exist; a model is a folder, an ins"):
        find(name, cache)
    assert hub.requests == []


def test_export_that_the_system_kills_ends_the_start_with_a_remedy(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ntouch "$TMPDIR/left"\nkill -KILL $$\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(ArtifactError, match="killed, as the system does when memory is short: run"):
        find(folder, cache)
    assert [path.name for path in cache.glob("*/*")] == ["lock"]
    assert not (tmp_path / "left").exists()


def cache_in(cache: Path) -> dict[str, str]:
    return {"VITRINE_MODELS__CACHE": str(cache)}


@pytest.mark.slow
def test_packaged_model_is_served_with_the_vectors_of_sentence_transformers(
    minilm_folder: Path, cache: Path
) -> None:
    texts = ["The cat sat on the mat.", "Ünïcödé, naïve café"]
    with process("-m", "service.commands", "serve", MINILM, **cache_in(cache)) as started:
        lines, match = lines_until(started, r"Serving (\S+) on (http://\S+)")
        assert match[1] == _PINNED[MINILM].name
        assert sum("exporting" in line for line in lines) == 1
        response = httpx2.post(f"{match[2]}/encode", json={"inputs": texts}, timeout=PATIENCE_S)
    expected = SentenceTransformer(str(minilm_folder), device="cpu").encode(texts)
    np.testing.assert_allclose(response.json()["embeddings"], expected, atol=1e-5)
    with process("-m", "service", MINILM, **cache_in(cache)) as again:
        lines, _ = lines_until(again, "Serving")
    assert not any("exporting" in line for line in lines)


def checking(folder: Path, cache: Path) -> subprocess.Popen[str]:
    """Return a check of the service, which exports the model first."""
    command = [sys.executable, "-m", "service", str(folder), "--check"]
    environment = {**os.environ, **cache_in(cache)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(_PATIENCE_S)
def test_two_starts_at_once_export_once(folder: Path, cache: Path) -> None:
    starts = [checking(folder, cache) for _ in range(2)]
    logs = [start.communicate()[1] for start in starts]
    assert [start.returncode for start in starts] == [0, 0], logs
    assert sum(log.count("INFO exporting ") for log in logs) == 1
    assert len(list(cache.glob("tiny/*/manifest.json"))) == 1


def child_of(pid: int) -> int:
    """Return the process id of the export that a start waits for."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    eventually(lambda: children.read_text())
    return int(children.read_text().split()[0])


def has_ended(pid: int) -> bool:
    with suppress(FileNotFoundError):
        # Without a parent that waits for it, the process may stay as a zombie.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.mark.slow
@pytest.mark.timeout(_PATIENCE_S)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux only: reads /proc")
def test_killed_exports_leave_nothing_that_a_later_start_takes(folder: Path, cache: Path) -> None:
    moments = random.Random(7)  # noqa: S311 - no secret
    for killed in ("both", "the start", "the export"):
        # Killed with so many files written, of the dozen of an artifact.
        count = moments.randrange(12)
        with process("-m", "service", str(folder), **cache_in(cache)) as started:
            lines_until(started, "INFO Reading")
            child = child_of(started.pid)

            def is_due(files: int = count, child: int = child) -> bool:
                # os.walk passes over folders that the export removes meanwhile.
                staged = sum(
                    len(names) for path, _, names in os.walk(cache / "tiny") if "/." in path
                )
                return staged >= files or has_ended(child)

            eventually(is_due)
            if killed != "the export":
                started.kill()
            if killed != "the start":
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
    start = checking(folder, cache)
    errors = start.communicate()[1]
    assert start.returncode == 0, errors
    names = [path.name for path in (cache / "tiny").iterdir()]
    assert len(names) == 2  # the artifact, and the lock
    assert not any(name.startswith(".") for name in names)


@pytest.mark.slow
def test_export_killed_before_any_change_of_a_file_leaves_nothing_that_a_later_start_takes(
    folder: Path, cache: Path, exports: list[Sequence[str]], tmp_path: Path
) -> None:
    artifact = shutil.copytree(find(folder, cache), tmp_path / "artifact")
    command = [sys.executable, "-m", "tests.service.killed_exports"]
    done = subprocess.run(
        [*command, folder, tmp_path / "caches", artifact], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert len(exports) == 1


@pytest.fixture
def sighup_not_ignored() -> Iterator[None]:
    """Undo what `nohup` does to the tests, and to the processes that they start."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.slow
@pytest.mark.usefixtures("sighup_not_ignored")
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux only: reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_start_ends_its_export(folder: Path, cache: Path, number: signal.Signals) -> None:
    with process("-m", "service", str(folder), **cache_in(cache)) as started:
        lines_until(started, "INFO Reading")
        child = child_of(started.pid)
        started.send_signal(number)
        status, errors = outcome(started)
    assert status == 128 + number
    assert has_ended(child)
    assert "ERROR" not in errors
