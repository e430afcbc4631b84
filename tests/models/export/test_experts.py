"""Exported NomicBERT with experts against its published formulas: vectors, costs and refusals."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import vitrine
from models.artifact import Artifact
from models.engines import ENGINES, Engine, EngineError, open_engine
from models.engines.with_onnxruntime import onnxruntime_session
from models.export.exporter import export
from models.export.int8.quality import QualityBounds
from models.export.model_folder import CheckpointError
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.network.experts import Experts, ExpertsConfig
from models.packing import pack
from tests.models.checkpoints import save_sentencepiece, save_tokenizer, write_json, write_modules
from tests.models.nomic_moe import NomicMoe, save_nomic_moe

Vectors = NDArray[np.float32]
NO_BIASES = {"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False}
# Changes of the config, and the pooling. With "cls", the last layer computes first tokens alone.
MODELS: dict[str, tuple[dict[str, object], str]] = {
    "nomic-v2": ({}, "mean"),
    "no-biases": (
        {"num_experts": 5, "moe_top_k": 3, "moe_every_n_layers": 3, "n_inner": 20, **NO_BIASES},
        "mean",
    ),
    "one-expert": (
        {"num_experts": 6, "moe_top_k": 1, "n_layer": 2, "n_head": 2, "n_embd": 48},
        "cls",
    ),
}
PROMPTS = {"query": "search_query: ", "document": "search_document: "}
TEXTS = ["the cat", "a", "the cat, 5 cats and w5 " * 9, "zebras quickly jump", "日本 é"]
MAX_TOKENS = 24
UNUSABLE = ENGINES["openvino"].unusable("int8")
needs_int8 = pytest.mark.skipif(UNUSABLE is not None, reason=str(UNUSABLE))
float32_engines = pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])


class Exported(NamedTuple):
    """A saved model, its published formulas, and its artifact."""

    folder: Path
    pooling: str
    reference: NomicMoe
    artifact: Artifact

    def size(self, name: str) -> int:
        """Return a number of the config."""
        return int(str(self.reference.config[name]))

    def choices(self, row: list[int]) -> list[Tensor]:
        """Return the experts of each computed token `(L, K)`, by layer with experts."""
        self.vectors([row])
        chosen = self.reference.used
        if self.pooling == "cls" and self.reference.has_experts(self.size("n_layer") - 1):
            chosen[-1] = chosen[-1][:1]
        return chosen

    def vectors(self, rows: list[list[int]]) -> Vectors:
        """Return the published model's vectors, with unit length."""
        tokens = [
            self.reference(torch.tensor([row]), torch.ones(1, len(row))).last_hidden_state[0]
            for row in rows
        ]
        pooled = [own[0] if self.pooling == "cls" else own.mean(0) for own in tokens]
        return F.normalize(torch.stack(pooled), dim=-1).numpy()


@pytest.fixture(scope="module", params=list(MODELS.values()), ids=list(MODELS))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Export a random model with the files of a published one."""
    folder = tmp_path_factory.mktemp("experts")
    model = folder / "model"
    model.mkdir()
    save_sentencepiece(model, "XLMRobertaTokenizer")
    changes, pooling = request.param
    reference = save_nomic_moe(model, **changes)
    write_modules(
        model, ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    )
    write_json(model / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS})
    modes = {
        "pooling_mode_cls_token": pooling == "cls",
        "pooling_mode_mean_tokens": pooling == "mean",
    }
    width = {"word_embedding_dimension": reference.config["n_embd"]}
    write_json(model / "1_Pooling" / "config.json", width | modes)
    write_json(model / "config_sentence_transformers.json", {"prompts": PROMPTS})
    artifact, parity = export(resolve(str(model)), folder / "artifact")
    assert {line.engine for line in parity} == {"onnxruntime", "openvino"}
    return Exported(model, pooling, reference, artifact)


def normalized(engine: Engine, rows: list[list[int]]) -> Vectors:
    vectors = engine.run(pack(rows))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.slow
@float32_engines
def test_served_vectors_equal_the_published_formulas(exported: Exported, engine: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported.folder)
    options = vitrine.ModelOptions(engine=engine)
    with vitrine.SyncModel(exported.artifact.path, options) as model:
        for name, prompt in PROMPTS.items():
            rows = [
                tokenizer(prompt + text, truncation=True, max_length=MAX_TOKENS)["input_ids"]
                for text in TEXTS
            ]
            assert max(map(len, rows)) == MAX_TOKENS
            expected = exported.vectors(rows)
            together = model.encode(TEXTS, prompt_name=name).vectors
            alone = np.concatenate([model.encode([t], prompt_name=name).vectors for t in TEXTS])
            for actual in (together, alone):
                np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@float32_engines
def test_experts_without_tokens_and_with_all_tokens_are_exact(
    exported: Exported, engine: str
) -> None:
    experts, per_token = exported.size("num_experts"), exported.size("moe_top_k")
    rows = [[7], [7] * 9, [7, 9]]
    assert per_token < experts
    for row in rows[:2]:  # equal tokens choose equal experts
        assert {len(ids.unique()) for ids in exported.choices(row)} == {per_token}
    opened = open_engine(exported.artifact, engine)
    for part in (rows[:1], rows):
        actual, expected = normalized(opened, part), exported.vectors(part)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    opened.close()


@pytest.mark.slow
def test_experts_compute_their_own_tokens_only(exported: Exported) -> None:
    """The first product of each expert has a row for each token that chose it, and no others."""
    rows = [[7, 9, 11, 30, 31, 5, 9], [4, 8]]
    graph = onnx.load(exported.artifact.path / "model.onnx")
    products = [node.input[0] for node in graph.graph.node if node.op_type == "Gelu"]
    graph.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in products
    )
    session = onnxruntime_session(graph.SerializeToString(), 1)
    inputs = pack(rows).inputs([port.name for port in session.get_inputs()])
    counts = [len(value) for value in session.run(products, inputs)]
    chosen = [torch.cat(own) for own in zip(*map(exported.choices, rows), strict=True)]
    expected: list[int] = []
    for layer in range(exported.size("n_layer")):
        if exported.reference.has_experts(layer):
            expected += chosen.pop(0).flatten().bincount(minlength=exported.size("num_experts"))
        else:
            expected.append(9)
    assert counts == expected
    assert 0 in counts


def test_products_in_torch_are_those_of_the_chosen_experts() -> None:
    layer = Experts(16, 24, ExpertsConfig(count=8, per_token=2, every=2))
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(3, 5, 16))
    router, chosen = 2 * 15 * 16 * 8, 2 * 15 * 2 * (2 * 16 * 24)
    assert counter.get_total_flops() == router + chosen


def test_gradients_of_the_layer_equal_those_of_the_formula_in_float64() -> None:
    torch.manual_seed(0)
    layer = Experts(6, 10, ExpertsConfig(count=4, per_token=2, every=2)).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    weights = x @ layer.router.weight.T
    p = weights.softmax(-1)
    p = p * (p >= p.topk(2)[0][..., -1:])
    every = [F.gelu(x @ w1.T) @ w2 for w1, w2 in layer.matrices()]
    expected = torch.stack(every, -1) @ p[..., None]
    expected = expected[..., 0] + layer.bias
    torch.testing.assert_close(layer(x), expected, atol=1e-12, rtol=0)
    inputs = [x, *layer.parameters()]
    g = torch.randn_like(expected)
    for actual, own in zip(
        torch.autograd.grad(layer(x), inputs, g),
        torch.autograd.grad(expected, inputs, g),
        strict=True,
    ):
        torch.testing.assert_close(actual, own, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        pytest.param({"int8": QualityBounds()}, "--precision int8", marks=needs_int8),
        ({"target": "cuda", "dtype": "float16"}, "--dtype float16"),
    ],
)
def test_export_in_another_precision_is_refused(
    options: dict[str, Any], option: str, tmp_path: Path
) -> None:
    save_nomic_moe(tmp_path)
    save_tokenizer(tmp_path)
    overrides = Overrides(pooling=["mean"])
    with pytest.raises(CheckpointError, match=rf"{option} is not for models with experts \(num_ex"):
        export(resolve(str(tmp_path)), tmp_path / "artifact", overrides=overrides, **options)
    assert not (tmp_path / "artifact").exists()


@pytest.mark.slow
def test_bfloat16_is_refused_on_every_cpu(exported: Exported) -> None:
    for engine in ("openvino", "auto"):
        with pytest.raises(EngineError, match=r"artifact has experts, .* choose the precision"):
            open_engine(exported.artifact, engine, "bfloat16")
