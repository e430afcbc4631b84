"""A start that cannot succeed ends with one sentence: the problem, and the limit or the remedy.

The service first reads its settings, then its models, and opens them while its port is open.
"""

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.export.sources import SourceError, resolve
from service.app import create_app
from service.serve_command import main, parse
from tests.eventually import eventually
from tests.hub import Hub, serving_hub
from tests.models.checkpoints import edit_json, save_checkpoint, save_tokenizer
from tests.serving import outcome, process

ID = "someone/tiny"
# Files of folders without a checkpoint.
FOLDERS = {
    "empty": (),
    "gguf": ("config.json", "model-q4.gguf"),
    "onnx": ("config.json", "onnx/model.onnx"),
    "pickle": ("config.json", "pytorch_model.bin", "onnx/model.onnx"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, small_artifact: Artifact) -> Path:
    """The current directory of the starts."""
    folder = tmp_path_factory.mktemp("models")
    save_checkpoint(folder / "tiny", "bert", num_hidden_layers=1)
    save_tokenizer(folder / "tiny")
    copied = shutil.copytree(folder / "tiny", folder / "gpt2")
    edit_json(copied / "config.json", model_type="gpt2")
    for name, files in FOLDERS.items():
        (folder / name).mkdir()
        for file in files:
            (folder / name / file).parent.mkdir(exist_ok=True)
            (folder / name / file).write_bytes(b"{}")
    for name in ("artifact", "damaged", "newer", "incomplete"):
        shutil.copytree(small_artifact.path, folder / name)
    with (folder / "damaged/model.weights").open("r+b") as weights:
        weights.write(b"damaged")
    edit_json(folder / "newer/manifest.json", format=99)
    (folder / "incomplete/model.onnx").unlink()
    (folder / "keys.json").write_text("[]")
    (folder / "keys.json").chmod(0o666)
    (folder / "hooks").mkdir()
    (folder / "hooks/sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")
    return folder


@pytest.fixture(scope="module")
def hub(models: Path) -> Iterator[Hub]:
    with serving_hub() as hub:
        hub.add(ID, models / "tiny")
        hub.add("someone/gguf", models / "gguf")
        hub.refusals["someone/gated"] = (403, {"X-Error-Code": "GatedRepo"})
        invalid = "Invalid credentials in Authorization header"
        hub.refusals["someone/private"] = (401, {"X-Error-Message": invalid})
        hub.refusals["someone/broken"] = (500, {})
        yield hub


@pytest.fixture
def used_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield str(other.getsockname()[1])


def keys(*values: str) -> dict[str, str]:
    return {"VITRINE_AUTH__KEYS": json.dumps([{"name": "app", "key": key} for key in values])}


def served(*names: str) -> dict[str, str]:
    return {"VITRINE_MODELS__SERVED": json.dumps([{"path": name} for name in names])}


# Options, environment variables, and a part of the sentence.
Start = tuple[str, dict[str, str], str]
SETTINGS: dict[str, Start] = {
    "option": ("tiny --server.prot 1", {}, "did you mean --server.port?"),
    "precision": ("tiny --engine.precision int4", {}, "should be 'float32', 'float16', 'bfloat16'"),
    "engine": ("tiny --engine.name tensorrt", {}, "engines: auto, cuda, onnxruntime, openvino"),
    "threads": ("tiny --engine.threads 99999", {}, "engine.threads: Input should be less than or"),
    "no GPU": ("tiny --engine.name cuda", {}, "CPUs only; uninstall it and install Vitrine with"),
    "half": ("tiny --engine.precision float16", {}, "openvino in float16 is not usable: it suppor"),
    "used port": ("tiny --server.port USED", {}, "already in use; choose another with --server.po"),
    "port": ("tiny --server.port 80000", {}, "server.port: Input should be less than or equal to"),
    "host": ("tiny --server.host 192.0.2.1", {}, "requested address; choose another with --server"),
    "host name": (
        "tiny --server.host a..b",
        {},
        "port 0 of a..b cannot be opened: Invalid host name",
    ),
    "no keys": (
        "tiny --auth.keys_file no.json",
        {},
        "auth.keys_file: no.json cannot be read: No s",
    ),
    "open keys": ("tiny --auth.keys_file keys.json", {}, "writable by others; run chmod o-w on it"),
    "short key": ("tiny", keys("short"), "auth.keys.0.key: a key must have at least 16 printable"),
    "duplicate key": (
        "",
        {"VITRINE_MODELS__SERVED": '[{"path": "tiny", "name": "a", "name": "b"}]'},
        "models.served: invalid JSON (an object has a duplicate key)",
    ),
    "group": (
        'tiny --server={"port":1,"port":2}',
        {},
        "--server is not a setting; those of its group are --server.host, --server.port, ",
    ),
    "large number": ("tiny --limits.max_inputs=9223372036854775808", {}, "must be less than 2**63"),
    "no list": ("", {"VITRINE_MODELS__SERVED": "{}"}, "models.served: Input should be a list"),
    "no object": (
        "",
        {"VITRINE_MODELS__SERVED": "tiny"},
        "models.served.0: Input should be an obj",
    ),
    "no path": (
        "",
        {"VITRINE_MODELS__SERVED": '[{"path": 5}]'},
        "models.served.0.path: Input should be a path",
    ),
    "equal keys": ("tiny", keys("k" * 16, "k" * 16), "are equal; every key must be unique"),
    "gradients": (
        "tiny --server.host 0.0.0.0 --debug.enabled true",
        {},
        "set API keys, or set debug.enabled to false",
    ),
    "device": ("tiny --debug.device gpu", {}, "debug.device: must be auto, or a device of PyTorch"),
    "route": ("tiny --model.name rerank", {}, "is ambiguous in paths under /tei: the last part"),
    "traces": (
        "tiny",
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[::1]", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        "OTEL_EXPORTER_OTLP_PROTOCOL: the only supported value is http/protobuf",
    ),
    "any host": ("tiny --server.hosts *", {}, "server.hosts.0: must be a host as in the header Ho"),
    "URL": ("tiny --server.hosts http://a", {}, "server.hosts.0: must be a host as in the header"),
    "IPv6": ("tiny --server.hosts ::1", {}, "server.hosts.0: must be a host as in the header Host"),
    "debug hosts": ("tiny --debug.hosts *", {}, "debug.hosts.0: must be a host as in the header H"),
    "origin": (
        "tiny",
        {"VITRINE_SERVER__CORS_ORIGINS": '["https://app.example/"]'},
        "server.cors_origins.0: must be an origin as browsers send it",
    ),
    **{
        f"origin {origin}": (
            f"tiny --server.cors_origins {origin}",
            {},
            "server.cors_origins.0: must be an origin as browsers send it",
        )
        for origin in ("https://*.app.example", "https://app.example:443", "https://App.example")
    },
    "one name": ("--models.folder . --model.name e5", {}, "model.name is the name of model.path"),
    "names": ("--model.name e5", served("artifact"), "model.name is the name of model.path alone"),
    "two settings": ("tiny --models.folder .", {}, "models.folder and models.served are exclusive"),
    "refresh": (
        "--models.folder . --refresh",
        {},
        "--refresh exports models again, and models.folder",
    ),
    "two models": ("tiny --model.path gpt2", {}, "MODEL and --model.path are the same option"),
    "no artifacts": ("--models.folder onnx", {}, "onnx has no folder with an artifact of vitrine-"),
}
MODELS: dict[str, Start] = {
    "none": (
        "",
        {},
        "no model is named, and artifacts/all-MiniLM-L6-v2 does not exist: run vitrine",
    ),
    "no folder": (
        "./none",
        {},
        "none does not exist; a model is a folder, an installed package or",
    ),
    "empty": (
        "empty",
        {},
        "has no config.json; save a model there with model.save_pretrained(folder)",
    ),
    "gguf": ("gguf", {}, "has weights as GGUF, and no safetensors; name the model that they were"),
    "onnx": ("onnx", {}, "has weights as ONNX, and no safetensors; name the model that they were"),
    "pickle": (
        "pickle",
        {},
        "loading a pickle can run code. Convert them to safetensors with model",
    ),
    "package": (
        "pytest",
        {},
        "has 0 folders with config.json and safetensors; one is required: name",
    ),
    "revision": ("tiny@v1", {}, "a revision is for hub models; tiny is a folder"),
    "cache": ("tiny --models.cache keys.json", {}, "set VITRINE_MODELS__CACHE to a folder that th"),
}
# Those that the export refuses, which is a process of its own.
EXPORTS: dict[str, Start] = {
    "causal": (
        "gpt2",
        {},
        "model_type 'gpt2' is not supported; supported: albert, bert, bidirectional_pplx",
    ),
    "no packages": (
        "tiny",
        {"PYTHONPATH": "hooks"},
        "PyTorch is not installed: run pip install '.[torch]' in the source folder, or run vitrine",
    ),
    "mistyped": ("someone/tinny", {}, "nor a model on the hub; a private model needs HF_TOKEN"),
}
# Hub ids that an export refuses.
HUB_IDS: dict[str, Start] = {
    "no network": (
        ID,
        {"HF_ENDPOINT": "http://127.0.0.1:1"},
        f"cannot be reached. Allow access to the hub, or run vitrine-export {ID} --out FOLDER wher",
    ),
    "offline": (
        ID,
        {"HF_HUB_OFFLINE": "1"},
        "cannot be reached (HF_HUB_OFFLINE is set). Allow acc",
    ),
    "no revision": (f"{ID}@v9", {}, f"{ID} has no revision v9"),
    "gated": ("someone/gated", {}, "is gated: accept its terms on the hub and set HF_TOKEN"),
    "token": ("someone/private", {}, "denies access to someone/private: set HF_TOKEN to a valid"),
    "broken hub": ("someone/broken", {}, "the hub fails with status 500: try again later"),
    "hub gguf": ("someone/gguf", {}, "has no safetensors on the hub; pickles (pytorch_model.bin)"),
}
# Those that are found while a model is loaded.
LOADS: dict[str, Start] = {
    "damaged": (
        "damaged",
        {},
        "model.weights in the artifact damaged is not the exported file: its",
    ),
    "newer": ("newer", {}, "manifest.json has format 99; format 8 is required: export again"),
    "incomplete": (
        "incomplete",
        {},
        "the artifact incomplete lacks file model.onnx: copy or export it",
    ),
    "names": ("", served("artifact", "artifact"), "the name 'small'; every name must be unique"),
    "default": ("artifact --models.default e5", {}, "the default model 'e5' is not a served model"),
    "budget": ("artifact --models.max_bytes 10", {}, "bytes of weights; the budget is 10 bytes"),
}


@pytest.mark.parametrize("case", SETTINGS | MODELS)
def test_start_is_refused_before_an_export(
    case: str,
    models: Path,
    used_port: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options, environment, sentence = (SETTINGS | MODELS)[case]
    monkeypatch.chdir(models)
    own = {"VITRINE_MODELS__CACHE": str(models / "cache"), "VITRINE_SERVER__PORT": "0"}
    for name, value in (own | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("service.serve_command.configure", lambda _: None)
    monkeypatch.setattr("service.model_cache._run", lambda *_: pytest.fail("a model is exported"))
    words = options.replace("USED", used_port).split()
    try:
        status = main(words)
    except SystemExit as ended:  # of the parser
        status = int(str(ended.code))
    assert status == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vitrine-serve: ")
    assert sentence in line


@pytest.mark.parametrize("case", HUB_IDS)
def test_export_of_a_hub_id_is_refused(
    case: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, environment, sentence = HUB_IDS[case]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    # The library has read the variables when it was imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", case == "offline")
    url = environment.get("HF_ENDPOINT", hub.url)
    here = partial(snapshot_download, endpoint=url, cache_dir=tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", here)
    with pytest.raises(SourceError, match=re.escape(sentence)):
        resolve(*name.split("@"))


def refused(
    case: Start, models: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """Start the service in vain, and return its exit status and what it says."""
    options, environment, _ = case
    monkeypatch.chdir(models)
    path = [environment.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(models / "hf"),
        "VITRINE_MODELS__CACHE": str(models / "cache"),
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    with process("-m", "service", *options.split(), **variables) as started:
        return outcome(started)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"OTEL_PROPAGATORS": "b4"}, "OTEL_PROPAGATORS: Propagator b4 not found"),
        ({"VITRINE_SERVER__PROT": "1"}, "did you mean VITRINE_SERVER__PORT?"),
    ],
)
def test_refused_start_ends_with_status_2_and_one_line(
    environment: dict[str, str],
    sentence: str,
    models: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, errors = refused(("tiny", environment, sentence), models, hub, monkeypatch)
    assert status == 2
    [line] = errors.splitlines()
    assert line.startswith("vitrine-serve: ")
    assert sentence in line


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPORTS)
def test_export_that_fails_ends_the_start(
    case: str, models: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, errors = refused(EXPORTS[case], models, hub, monkeypatch)
    name = EXPORTS[case][0].partition("@")[0]
    place = ", which is no folder or package here," if "/" in name else ""
    last = errors.splitlines()[-1]
    assert status == 2
    assert last.startswith(f"vitrine-serve: {name}{place} cannot be exported: ")
    assert EXPORTS[case][2] in last
    assert {path.name for path in (models / "cache").glob("*/*")} == {"lock"}


@pytest.mark.parametrize("case", LOADS)
def test_model_that_cannot_be_loaded_ends_the_start(
    case: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, environment, sentence = LOADS[case]
    monkeypatch.chdir(models)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings, _ = parse(options.split())
    reasons: list[str] = []
    with TestClient(create_app(settings, on_fatal=reasons.append)):
        eventually(lambda: reasons)
    [reason] = reasons
    assert reason.startswith("cannot start: ")
    assert sentence in reason


@pytest.mark.slow
def test_start_without_a_model_that_can_be_loaded_ends_with_status_1(
    models: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, errors = refused(LOADS["damaged"], models, hub, monkeypatch)
    assert status == 1
    [line] = errors.splitlines()
    assert " CRITICAL cannot start: " in line
    assert LOADS["damaged"][2] in line
