"""A service that requires signatures: its start, swaps, gradients and exports."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
from httpx2 import Response
from pydantic import SecretStr
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.engines import weight_bytes
from models.manifest import MANIFEST, SIGNATURE, ArtifactError
from models.signing import key_hint, read_private_key, read_public_key
from service import commands
from service.app import create_app
from service.artifacts import with_artifacts
from service.check import check
from service.inference.errors import NotReady
from service.inference.model.opening import ModelOptions, open_model
from service.inference.registry.registry import ModelRegistry
from service.inference.registry.served_models import ModelSpec, specs_in
from service.model_cache import required_signer
from service.serve_command import main
from service.settings import (
    ApiKey,
    AuthSettings,
    DebugSettings,
    EngineSettings,
    ModelSettings,
    ModelsSettings,
    Scope,
    Settings,
)
from tests.hostile_artifacts import copy_of, edit, replace
from tests.service.inference.registry.conftest import opened, watched
from tests.serving import serving, state_of
from tests.signing_keys import new_key

KEY = "admin-key-0123456789"
# Files that no start reads without a signature.
UNREAD = ("source/model.safetensors", "source/config.json", "model.openvino.onnx")


@pytest.fixture(autouse=True)
def _ordinary_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("service.serve_command", "service.explain_command"):
        monkeypatch.setattr(f"{module}.configure", lambda _: None)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return new_key(tmp_path_factory.mktemp("keys"), "key")


def signed_copy(artifact: Artifact, target: Path, key: tuple[Path, Path]) -> Path:
    copy_of(artifact.path, target)
    Artifact.load(target).sign(read_private_key(key[0]), target.name)
    return target


@pytest.fixture
def signed(small_artifact: Artifact, key: tuple[Path, Path], tmp_path: Path) -> Path:
    return signed_copy(small_artifact, tmp_path / "models" / "signed", key)


def settings_of(path: Path, key: tuple[Path, Path]) -> Settings:
    return Settings(
        model=ModelSettings(path=path),
        models=ModelsSettings(verify=key[1]),
        engine=EngineSettings(name="onnxruntime", threads=2),
        auth=AuthSettings(keys=(ApiKey(name="admin", key=SecretStr(KEY), scopes=get_args(Scope)),)),
        # A process of its own for each gradient job.
        debug=DebugSettings(enabled=True, hosts=("testserver",), max_jobs=1),
    )


def options_of(key: tuple[Path, Path], name: str | None = None) -> ModelOptions:
    return ModelOptions(name=name, engine="onnxruntime", threads=1, verify=str(key[1]))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()  # other artifacts have hard links to it
    file.write_bytes(content)


def unsign(folder: Path) -> str:
    (folder / SIGNATURE).unlink()
    return f"the artifact {folder.name} has no signature model.sig, which vitrine sign writes"


def swap_weights(folder: Path) -> str:
    flip(folder / "model.weights")
    return f"model.weights in the artifact {folder.name} is not the exported file"


def edit_manifest(folder: Path) -> str:
    edit(folder, MANIFEST, max_tokens=9)
    return f"manifest.json in the artifact {folder.name} is not the signed file"


def add_file(folder: Path) -> str:
    replace(folder, "extra.bin", b"")
    return f"manifest.json in the artifact {folder.name} is not the signed file"


TAMPER = (unsign, swap_weights, edit_manifest, add_file)


@pytest.fixture(scope="module")
def client(
    small_artifact: Artifact, key: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    """A client of a service that requires signatures."""
    path = signed_copy(small_artifact, tmp_path_factory.mktemp("served") / "signed", key)
    with serving(create_app(settings_of(path, key), on_fatal=pytest.fail)) as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


def test_info_names_the_key_license_and_versions(
    client: TestClient, key: tuple[Path, Path], small_artifact: Artifact
) -> None:
    info = client.get("/info").json()
    assert info["signature"] == key_hint(read_public_key(key[1]))
    assert info["license"] == small_artifact.manifest.license
    assert info["versions"] == small_artifact.manifest.versions
    assert {"vitrine", "torch", "onnxruntime"} <= info["versions"].keys()


def test_info_names_no_key_where_none_is_required(settings: Settings, signed: Path) -> None:
    update = {"model": ModelSettings(path=signed)}
    with serving(create_app(settings.model_copy(update=update), on_fatal=pytest.fail)) as client:
        assert client.get("/info").json()["signature"] is None


@pytest.mark.parametrize("tamper", TAMPER)
async def test_tampered_artifact_is_not_opened(
    signed: Path, key: tuple[Path, Path], tamper: Callable[[Path], str]
) -> None:
    problem = tamper(signed)
    with pytest.raises(ArtifactError, match=problem):
        await open_model(signed, options_of(key))


@pytest.mark.parametrize("name", UNREAD)
async def test_files_that_no_start_reads_are_verified_too(
    signed: Path, key: tuple[Path, Path], name: str
) -> None:
    async with await open_model(signed, options_of(key)) as model:
        assert model.artifact.signed_by == key_hint(read_public_key(key[1]))
    flip(signed / name)
    with pytest.raises(ArtifactError, match=f"{name} in the artifact signed is not the exported"):
        await open_model(signed, options_of(key))


async def test_weights_are_hashed_once(
    signed: Path, key: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    verify = Artifact.verify

    def recorded(artifact: Artifact, name: str) -> Path:
        hashed.append(name)
        return verify(artifact, name)

    monkeypatch.setattr(Artifact, "verify", recorded)
    async with await open_model(signed, options_of(key)):
        pass
    assert {"model.weights", "source/model.safetensors"} <= {*hashed}
    assert len({*hashed}) == len(hashed)


@pytest.mark.parametrize("tamper", TAMPER)
def test_admin_route_refuses_a_tampered_version_and_serves_the_old_one(
    client: TestClient,
    other_artifact: Artifact,
    key: tuple[Path, Path],
    tamper: Callable[[Path], str],
    tmp_path: Path,
) -> None:
    name, version = (client.get("/info").json()[field] for field in ("model", "identity"))
    path = signed_copy(other_artifact, tmp_path / "other", key)
    problem = tamper(path)
    response = client.post(f"/models/{name}", json={"path": str(path)})
    assert response.status_code == 422
    assert response.json()["code"] == "invalid_artifact"
    assert problem.replace(" other", "") in response.json()["detail"]
    assert client.get("/info").json()["identity"] == version


def test_admin_route_serves_a_signed_version(
    client: TestClient, other_artifact: Artifact, key: tuple[Path, Path], tmp_path: Path
) -> None:
    path = signed_copy(other_artifact, tmp_path / "other", key)
    assert client.post("/models/new", json={"path": str(path)}).status_code == 200
    info = client.get("/models/new/info").json()
    assert info["signature"] == key_hint(read_public_key(key[1]))
    assert client.delete("/models/new").status_code == 204


@pytest.mark.parametrize("tamper", TAMPER)
async def test_watch_serves_signed_versions_alone(
    signed: Path,
    other_artifact: Artifact,
    key: tuple[Path, Path],
    tamper: Callable[[Path], str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    folder = signed.parent
    async with watched(lambda: specs_in(folder, options_of(key))) as (registry, watch):
        old = registry.current("signed").version
        new = signed_copy(other_artifact, tmp_path / "signed", key)
        intact = copy_of(new, tmp_path / "intact")
        problem = tamper(new)
        for path, expected in ((new, problem), (intact, "serving version")):
            shutil.rmtree(signed)
            path.rename(signed)
            caplog.clear()
            with caplog.at_level(logging.INFO, "vitrine"):
                await watch.scan()
            assert expected in caplog.text
            assert (registry.current("signed").version == old) is (path is new)


async def test_model_on_demand_is_verified_when_it_is_loaded(
    small_artifact: Artifact, key: tuple[Path, Path], tmp_path: Path
) -> None:
    paths = [signed_copy(small_artifact, tmp_path / name, key) for name in "ab"]
    specs = [ModelSpec(path=path, options=options_of(key, path.name)) for path in paths]
    async with opened(*specs, max_bytes=weight_bytes(small_artifact)) as registry:
        flip(tmp_path / "b" / "source/config.json")
        with pytest.raises(NotReady, match="cannot be loaded; see the log"):
            await registry.lease("b")
        (await registry.lease("a")).release()


async def test_models_on_demand_must_have_signed_manifests_at_the_start(
    small_artifact: Artifact, key: tuple[Path, Path], tmp_path: Path
) -> None:
    first = signed_copy(small_artifact, tmp_path / "a", key)
    second = signed_copy(small_artifact, tmp_path / "b", key)
    problem = edit_manifest(second)
    specs = [ModelSpec(path=path, options=options_of(key, path.name)) for path in (first, second)]
    registry = ModelRegistry(max_bytes=weight_bytes(small_artifact))
    with pytest.raises(ArtifactError, match=problem):
        await registry.open(specs)


@pytest.mark.slow
def test_gradient_process_verifies_the_signature_for_itself(client: TestClient) -> None:
    def ask() -> Response:
        return client.post("/debug/attribute/pair", json={"a": "A cat.", "b": "A dog."})

    path = state_of(client).registry.current().artifact.path
    signed = (path / MANIFEST).read_bytes()
    assert ask().status_code == 200
    edit(path, MANIFEST, name="another")  # the next process would load it
    response = ask()
    replace(path, MANIFEST, signed)
    assert (response.status_code, response.json()["code"]) == (503, "gradients_unavailable")


def test_start_and_check_stop_at_an_unsigned_artifact(
    signed: Path, key: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(signed, key)
    assert check(settings)
    hint = key_hint(read_public_key(key[1]))
    assert f"files are as exported, and signed by the key {hint}" in capsys.readouterr().out
    problem = unsign(signed)
    assert not check(settings)
    assert capsys.readouterr().err.splitlines() == [f"vitrine-serve: {problem}"]
    reasons: list[str] = []
    with TestClient(create_app(settings, on_fatal=reasons.append)) as started:
        while not reasons:
            started.get("/healthz")
    assert reasons == [f"cannot start: {problem}"]


@pytest.mark.parametrize("arguments", [("--model",), ()])
def test_explain_requires_the_signature_too(
    signed: Path,
    key: tuple[Path, Path],
    arguments: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = unsign(signed)
    monkeypatch.setenv("VITRINE_MODELS__VERIFY", str(key[1]))
    monkeypatch.setenv("VITRINE_MODEL__PATH", str(signed))
    given = [*arguments, str(signed)] if arguments else []
    assert commands.main(["explain", "a", "b", *given]) == 2
    assert capsys.readouterr().err == f"vitrine explain: {problem}\n"


def swap_source(folder: Path) -> str:
    flip(folder / "source/config.json")  # no command reads it
    return f"source/config.json in the artifact {folder.name} is not the exported file"


@pytest.mark.parametrize(
    "command",
    [
        ("encode", "texts.jsonl", "output", "--threads=2", "--model"),
        ("eval", "output", "--corpus=texts.jsonl", "--known-items=2", "--threads=2", "--model"),
        ("bom",),
    ],
    ids=lambda command: command[0],
)
def test_commands_open_signed_artifacts_alone(
    signed: Path,
    key: tuple[Path, Path],
    command: tuple[str, ...],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [
        {"id": name, "text": f"{name} cat sat on a mat. A dog ran to the {name}."} for name in "ab"
    ]
    Path("texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    monkeypatch.setenv("VITRINE_MODELS__VERIFY", os.path.relpath(key[1]))
    assert commands.main([*command, str(signed)]) == 0
    for tamper in (swap_source, unsign):
        shutil.rmtree("output", ignore_errors=True)
        problem = tamper(signed)
        capfd.readouterr()
        assert commands.main([*command, str(signed)]) in (1, 2)
        assert problem in capfd.readouterr().err
        assert not list(tmp_path.glob("output/**/part-*"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VITRINE_MODELS__VERIFY", "signer.pem"),
        ("vitrine_models__verify", "signer.pem"),
        ("VITRINE_MODELS", '{"verify": "signer.pem", "watch_s": 5}'),
    ],
)
def test_commands_require_the_signer_that_the_service_requires(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert Settings().models.verify == Path("signer.pem")
    assert required_signer() == Path("signer.pem").absolute()


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("VITRINE_MODELS__VERIFY", "", "VITRINE_MODELS__VERIFY is empty"),
        ("VITRINE_MODELS", "signer.pem", "VITRINE_MODELS, or a variable that it begins, is"),
        ("VITRINE_MODELS__VERIFI", "signer.pem", "did you mean VITRINE_MODELS__VERIFY?"),
        ("VITRINE_MODEL__VERIFY", "signer.pem", "did you mean VITRINE_MODELS__VERIFY?"),
    ],
)
def test_commands_refuse_a_variable_of_the_signer_that_names_no_file(
    variable: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ArtifactError, match=problem):
        required_signer()


def test_encode_exports_no_model_if_signatures_are_required(
    key: tuple[Path, Path],
    small_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VITRINE_MODELS__VERIFY", str(key[1]))
    monkeypatch.setenv("VITRINE_MODELS__CACHE", str(tmp_path))
    arguments = ["texts.txt", str(tmp_path / "output"), "--model", str(small_folder)]
    assert commands.main(["encode", *arguments]) == 2
    assert "no signed artifact, which models.verify requires" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"x", "is not one public key or one certificate in PEM"), (None, "cannot be read: No such")],
)
def test_start_ends_with_a_sentence_about_a_file_without_key(
    signed: Path,
    content: bytes | None,
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    assert main([str(signed), "--models.verify", str(file), "--server.port", "0"]) == 2
    assert f"vitrine-serve: {file} {problem}" in capsys.readouterr().err


def test_model_that_is_no_artifact_is_exported_only_without_required_signatures(
    small_artifact: Artifact,
    key: tuple[Path, Path],
    small_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def export(arguments: list[str], *_: object) -> None:
        copy_of(small_artifact.path, Path(arguments[arguments.index("--out") + 1]))

    monkeypatch.setattr("service.model_cache._run", export)
    cache = tmp_path / "cache"
    required = Settings(
        model=ModelSettings(path=small_folder), models=ModelsSettings(cache=cache, verify=key[1])
    )
    for settings, refresh in ((required, False), (required, True)):
        with pytest.raises(
            ArtifactError, match=r"no signed artifact, which models.verify requires"
        ):
            with_artifacts(settings, refresh=refresh)
    free = required.model_copy(update={"models": ModelsSettings(cache=cache)})
    path = with_artifacts(free).model.path
    # What is in the cache can be signed there.
    assert with_artifacts(required).model.path == path
    Artifact.load(path).sign(read_private_key(key[0]), path.name)
    assert Artifact.load(path, key[1]).signed_by


@pytest.mark.slow
def test_service_without_required_signatures_imports_no_cryptography(
    small_artifact: Artifact,
) -> None:
    script = (
        "import sys, service.serve_command; from pathlib import Path; from models.artifact import "
        "Artifact; Artifact.load(Path(sys.argv[1])); assert 'cryptography' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, small_artifact.path], check=True)
