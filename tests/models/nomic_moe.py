"""NomicBERT with experts as published, in plain torch: transformers has none.

Tensor names are those of the checkpoints.
Sources: Nussbaum et al. 2024, arXiv:2402.01613; Nussbaum and Duderstadt 2025, arXiv:2502.07972.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

_CODE = "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"
CONFIG: dict[str, object] = {
    "model_type": "nomic_bert",
    "auto_map": {"AutoModel": _CODE, "AutoConfig": _CODE.replace("Model", "Config")},
    "vocab_size": 60,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 40,
    "type_vocab_size": 1,
    "activation_function": "gelu",
    "layer_norm_epsilon": 1e-3,
    "rotary_emb_base": 12,
    "qkv_proj_bias": True,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "num_experts": 8,
    "moe_top_k": 2,
    "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False,
    "expert_choice_router": False,
    "num_shared_experts": 0,
    "ffn_div": 1,
}


class NomicOutput(NamedTuple):
    """Output of the model, named as in transformers."""

    last_hidden_state: Tensor


class NomicMoe:
    """The published model on its checkpoint tensors.

    Attributes:
        used: Experts that tokens chose, in the order of the layers with experts, `(L, K)` each.
    """

    def __init__(self, config: dict[str, object]) -> None:
        self.config = config
        self.used: list[Tensor] = []
        torch.manual_seed(0)
        self.tensors = {name: _random(name, shape) for name, shape in self._shapes()}

    def _size(self, name: str) -> int:
        return int(str(self.config[name]))

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        every = self._size("moe_every_n_layers")
        return every > 0 and layer % every == 1

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        width, inner = self._size("n_embd"), self._size("n_inner")
        yield "embeddings.word_embeddings.weight", (self._size("vocab_size"), width)
        yield "embeddings.token_type_embeddings.weight", (self._size("type_vocab_size"), width)
        norms = ["emb_ln"]
        for i in range(self._size("n_layer")):
            layer = f"encoder.layers.{i}."
            norms += [f"{layer}norm1", f"{layer}norm2"]
            has_bias = bool(self.config["qkv_proj_bias"])
            yield from _linear(f"{layer}attn.Wqkv", 3 * width, width, has_bias)
            yield from _linear(f"{layer}attn.out_proj", width, width, has_bias)
            if self.has_experts(i):
                experts = self._size("num_experts")
                yield f"{layer}mlp.router.layer.weight", (experts, width)
                yield f"{layer}mlp.experts.mlp.w1", (experts * inner, width)
                yield f"{layer}mlp.experts.mlp.w2", (experts * inner, width)
                yield f"{layer}mlp.experts.bias", (width,)
            else:
                yield from _linear(
                    f"{layer}mlp.fc1", inner, width, bool(self.config["mlp_fc1_bias"])
                )
                yield from _linear(
                    f"{layer}mlp.fc2", width, inner, bool(self.config["mlp_fc2_bias"])
                )
        for norm in norms:
            yield f"{norm}.weight", (width,)
            yield f"{norm}.bias", (width,)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> NomicOutput:
        """Return the token vectors `(1, L, D)` of a row without padding."""
        assert attention_mask.all()
        self.used = []
        x = self.tensors["embeddings.word_embeddings.weight"][input_ids[0]]
        x = self._norm("emb_ln", x + self.tensors["embeddings.token_type_embeddings.weight"][0])
        for i in range(self._size("n_layer")):
            layer = f"encoder.layers.{i}."
            x = self._norm(f"{layer}norm1", self._attention(f"{layer}attn.", x) + x)
            if self.has_experts(i):
                fed = self._experts(f"{layer}mlp.", x)
            else:
                fed = self._product(f"{layer}mlp.fc2", F.gelu(self._product(f"{layer}mlp.fc1", x)))
            x = self._norm(f"{layer}norm2", fed + x)
        return NomicOutput(x[None])

    def _experts(self, mlp: str, x: Tensor) -> Tensor:
        """Return the sum over a token's experts, one token at a time."""
        stacked = self._size("num_experts"), self._size("n_inner"), -1
        w1, w2 = (self.tensors[f"{mlp}experts.mlp.{name}"].view(stacked) for name in ("w1", "w2"))
        probabilities = self._product(f"{mlp}router.layer", x).softmax(-1)
        ids = probabilities.argsort(descending=True)[:, : self._size("moe_top_k")]
        self.used.append(ids)
        rows = []
        for token, own, p in zip(x, ids.tolist(), probabilities, strict=True):
            rows.append(sum((p[e] * (F.gelu(w1[e] @ token) @ w2[e]) for e in own), torch.zeros(())))
        return torch.stack(rows) + self.tensors[f"{mlp}experts.bias"]

    def _attention(self, attention: str, x: Tensor) -> Tensor:
        heads = self._size("n_head")
        q, k, v = (
            y.unflatten(-1, (heads, -1)).transpose(0, 1)
            for y in self._product(f"{attention}Wqkv", x).chunk(3, -1)
        )  # (H, L, K)
        half = q.shape[-1] // 2
        frequencies = float(str(self.config["rotary_emb_base"])) ** (-torch.arange(half) / half)
        angles = torch.arange(len(x))[:, None] * frequencies  # (L, K / 2)

        def rotate(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            cos, sin = angles.cos(), angles.sin()
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        weights = (rotate(q) @ rotate(k).transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return self._product(f"{attention}out_proj", (weights @ v).transpose(0, 1).flatten(1))

    def _product(self, module: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{module}.weight"], self.tensors.get(f"{module}.bias"))

    def _norm(self, module: str, x: Tensor) -> Tensor:
        weight, bias = (self.tensors[f"{module}.{name}"] for name in ("weight", "bias"))
        eps = float(str(self.config["layer_norm_epsilon"]))
        return F.layer_norm(x, weight.shape, weight, bias, eps)


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    is_scale = name.endswith(("norm1.weight", "norm2.weight", "emb_ln.weight"))
    # Router probabilities far from 0 and 1.
    std = 0.4 if "router" in name else 0.15
    return is_scale + std * torch.randn(shape)


def _linear(
    module: str, rows: int, columns: int, has_bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{module}.weight", (rows, columns)
    if has_bias:
        yield f"{module}.bias", (rows,)


def save_nomic_moe(folder: Path, **changes: object) -> NomicMoe:
    """Save a random model, and return it."""
    config = {**CONFIG, **changes}
    model = NomicMoe(config)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(model.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model
