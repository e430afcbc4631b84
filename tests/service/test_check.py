"""`vitrine-serve --check`, as a user runs it before a start."""

import json
import os
import shutil
import socket
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from models.artifact import Artifact, sha256
from models.manifest import ArtifactError
from service.check import check
from service.inference.model.opening import ModelOptions, open_model
from service.serve_command import main, parse
from service.settings import (
    DebugSettings,
    EngineSettings,
    ModelSettings,
    ServerSettings,
    Settings,
    table,
    variable,
)

KEY = "a-key-of-some-length"


def run(*options: str, **environment: str) -> tuple[int, str, str]:
    """Return the exit status and the output on stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "service", "--check", *options],
        env={**os.environ, "VITRINE_ENGINE__THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def settings(small_artifact: Artifact) -> Settings:
    return Settings(model=ModelSettings(path=small_artifact.path), engine=EngineSettings(threads=1))


@pytest.mark.slow
def test_check_of_a_valid_installation_prints_what_was_checked(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"name": "the app", "key": KEY}]))
    with socket.create_server(("127.0.0.1", 0)) as other:  # the check needs no free port
        status, out, errors = run(
            *("--model.path", str(small_artifact.path), "--auth.keys_file", str(keys)),
            VITRINE_SERVER__PORT=str(other.getsockname()[1]),
        )
    assert status == 0, errors
    assert errors == ""
    assert out.splitlines() == [
        "vitrine-serve: API keys are valid: the app",
        "vitrine-serve: no traces are exported",
        "vitrine-serve: served models: small; default: small",
        f"vitrine-serve: {small_artifact.path} passes the self-check: "
        f"{small_artifact.manifest.name}, engine onnxruntime in float32; all "
        f"{len(small_artifact.manifest.files)} files are as exported",
    ]


@pytest.mark.slow
def test_check_names_every_problem_and_exits_with_status_2(tmp_path: Path) -> None:
    status, out, errors = run(
        *("--model.path", str(tmp_path)),
        VITRINE_AUTH__KEYS_FILE="/nowhere",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4317",
        OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
    )
    assert status == 2
    assert out == ""
    keys, traces, model = errors.splitlines()
    assert keys == (
        "vitrine-serve: auth.keys_file: /nowhere cannot be read: No such file or directory"
    )
    assert "OTEL_EXPORTER_OTLP_PROTOCOL: the only supported value is http/protobuf" in traces
    assert model.startswith(f"vitrine-serve: {tmp_path} is no model folder: it has no config.json")


@pytest.mark.slow
def test_empty_value_of_any_setting_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for group, name, _ in table():
        with monkeypatch.context() as patch:
            patch.setenv(variable(group, name), "")
            assert main(["--check"]) == 2
        expected = f"vitrine-serve: {group}.{name}: must not be empty; to have the default, do not "
        assert capsys.readouterr().err.startswith(expected)


def test_empty_name_of_a_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--server.hosts", '["a", "", "b"]']) == 2
    assert capsys.readouterr().err.startswith("vitrine-serve: server.hosts.1: String should have")


@pytest.mark.parametrize("word", ["None", "null", "none"])
def test_word_for_nothing_is_a_word_like_others(word: str) -> None:
    names = ("model.name", "models.default", "models.verify", "auth.keys_file")
    settings, _ = parse([f"--{name}={word}" for name in names])
    assert [attrgetter(name)(settings) for name in names] == [word, word, Path(word), Path(word)]


def test_check_names_an_invalid_setting(small_artifact: Artifact) -> None:
    path = str(small_artifact.path)
    status, out, errors = run("--model.path", path, VITRINE_SERVER__PORT="http")
    assert (status, out) == (2, "")
    assert errors.startswith("vitrine-serve: server.port: Input should be a valid integer")


def change_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_check_verifies_every_file_of_the_artifact(
    settings: Settings, small_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    changed = settings.model_copy(update={"model": ModelSettings(path=damaged)})
    shutil.copytree(settings.model.path, damaged)
    for name in small_artifact.manifest.files:
        change_byte(damaged / name)
        assert not check(changed)
        assert f"{name} in the artifact damaged is not the exported file" in capsys.readouterr().err
        shutil.copyfile(small_artifact.path / name, damaged / name)
    assert check(changed)


async def test_start_verifies_all_files_but_the_reference_model_and_unused_weights(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(small_artifact.path, damaged)
    # The weights of an engine that does not run, and a file that no engine reads.
    for name in ("model.cuda.onnx", "model.cuda.weights", "notes.txt"):
        (damaged / name).write_bytes(name.encode() * 10)
    manifest = json.loads((damaged / "manifest.json").read_text())
    [graph] = [each for each in manifest["graphs"] if each["engine"] == "onnxruntime"]
    cuda = {"engine": "cuda", "file": "model.cuda.onnx", "weights": "model.cuda.weights"}
    manifest["graphs"].append({**graph, **cuda})
    manifest["files"] |= {
        file.name: sha256(file)
        for file in damaged.iterdir()
        if file.suffix != ".json" and file.is_file()
    }
    (damaged / "manifest.json").write_text(json.dumps(manifest))
    options = ModelOptions(threads=1, engine="onnxruntime")
    for name in manifest["files"]:
        content = (damaged / name).read_bytes()
        change_byte(damaged / name)
        if name.startswith("source/") or name == "model.cuda.weights":
            async with await open_model(damaged, options):
                pass
        else:
            with pytest.raises(ArtifactError, match=f"{name} in the artifact damaged is not the"):
                await open_model(damaged, options)
        (damaged / name).write_bytes(content)


def test_check_refuses_a_name_that_is_a_route(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    model = settings.model.model_copy(update={"name": "rerank"})
    assert not check(settings.model_copy(update={"model": model}))
    assert "the name 'rerank' is ambiguous in paths under /tei" in capsys.readouterr().err


def test_check_opens_the_engine(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    engine = EngineSettings(name="tensorrt")
    assert not check(settings.model_copy(update={"engine": engine}))
    assert "unknown engine 'tensorrt'" in capsys.readouterr().err


def test_check_runs_the_self_check(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("service.inference.model.opening.self_check", fail)
    assert not check(settings)
    assert "passes the self-check" not in capsys.readouterr().out


@pytest.mark.parametrize(("enabled", "expected"), [(True, False), (False, True)])
def test_gradients_open_to_other_machines_fail_the_check(
    settings: Settings, capsys: pytest.CaptureFixture[str], enabled: bool, expected: bool
) -> None:
    changes = {
        "server": ServerSettings(host="0.0.0.0"),  # noqa: S104 - nothing is bound
        "debug": DebugSettings(enabled=enabled),
    }
    assert check(settings.model_copy(update=changes)) == expected
    output = capsys.readouterr()
    assert "is reachable from other machines" in (output.out if expected else output.err)
