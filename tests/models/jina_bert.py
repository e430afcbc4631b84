"""JinaBERT v2 and its code variant as published, in plain torch: transformers has neither.

Tensor names are those of the checkpoints.
Sources: Günther et al. 2023, arXiv:2310.19923; Press et al. 2021, arXiv:2108.12409 (ALiBi).
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

CODE_OF = {
    "jina_bert": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel",
    "jina_bert_code": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel",
}
CONFIG: dict[str, object] = {
    "model_type": "bert",
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-3,
    "hidden_act": "gelu",
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
}


class JinaOutput(NamedTuple):
    """Output of the model, named as in transformers."""

    last_hidden_state: Tensor


class JinaBert:
    """The published model on its checkpoint tensors."""

    def __init__(self, config: dict[str, object], is_code: bool) -> None:
        self.is_code = is_code
        self.heads = int(str(config["num_attention_heads"]))
        self.layers = int(str(config["num_hidden_layers"]))
        self.eps = float(str(config["layer_norm_eps"]))
        self.activate: Callable[[Tensor], Tensor]
        self.activate = F.relu if config["feed_forward_type"] == "reglu" else F.gelu
        width, inner = (int(str(config[name])) for name in ("hidden_size", "intermediate_size"))
        torch.manual_seed(0)
        self.tensors = {
            name: (1.0 if name.lower().count("norm") and name.endswith("weight") else 0.0)
            + 0.15 * torch.randn(shape)
            for name, shape in self._shapes(int(str(config["vocab_size"])), width, inner)
        }

    def _shapes(self, words: int, width: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "embeddings.word_embeddings.weight", (words, width)
        yield "embeddings.token_type_embeddings.weight", (2, width)
        square, norm = (width, width), (width,)
        up, down = ("up_gated_layer", "down_layer") if self.is_code else ("gated_layers", "wo")
        yield from self._parameters("embeddings.LayerNorm", norm)
        for i in range(self.layers):
            layer = f"encoder.layer.{i}."
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                yield from self._parameters(f"{layer}attention.{name}", square)
            yield from self._parameters(f"{layer}attention.output.LayerNorm", norm)
            yield f"{layer}mlp.{up}.weight", (2 * inner, width)
            yield from self._parameters(f"{layer}mlp.{down}", (width, inner))
            of_code = [f"attention.self.layer_norm_{x}" for x in "qk"]
            of_code += ["layer_norm_1", "layer_norm_2"]
            for name in of_code if self.is_code else ["mlp.layernorm"]:
                yield from self._parameters(f"{layer}{name}", norm)

    @staticmethod
    def _parameters(module: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{module}.weight", shape
        yield f"{module}.bias", shape[:1]

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> JinaOutput:
        """Return the token vectors `(1, L, D)` of a row without padding."""
        assert attention_mask.all()
        types = self.tensors["embeddings.token_type_embeddings.weight"]
        x = self.tensors["embeddings.word_embeddings.weight"][input_ids] + types[0]
        x = self._norm("embeddings.LayerNorm", x)
        for i in range(self.layers):
            x = self._layer(f"encoder.layer.{i}.", x)
        return JinaOutput(x)

    def _layer(self, layer: str, x: Tensor) -> Tensor:
        attended = self._linear(f"{layer}attention.output.dense", self._attention(layer, x))
        hidden = self._norm(f"{layer}attention.output.LayerNorm", attended + x)
        if not self.is_code:
            first, second = self._linear(f"{layer}mlp.gated_layers", hidden).chunk(2, -1)
            fed = self._linear(f"{layer}mlp.wo", self.activate(first) * second)
            return self._norm(f"{layer}mlp.layernorm", fed + hidden)
        hidden = self._norm(f"{layer}layer_norm_1", hidden + x)
        first, second = self._linear(f"{layer}mlp.up_gated_layer", hidden).chunk(2, -1)
        fed = self._linear(f"{layer}mlp.down_layer", first * self.activate(second))
        return self._norm(f"{layer}layer_norm_2", fed + hidden)

    def _attention(self, layer: str, x: Tensor) -> Tensor:
        q, k, v = (
            self._linear(f"{layer}attention.self.{name}", x) for name in ("query", "key", "value")
        )
        if self.is_code:
            q = self._norm(f"{layer}attention.self.layer_norm_q", q)
            k = self._norm(f"{layer}attention.self.layer_norm_k", k)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        positions = torch.arange(x.shape[1])
        distance = (positions[None] - positions[:, None]).abs()  # (L, L)
        slopes = torch.tensor(published_slopes(self.heads))[:, None, None]
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) - slopes * distance
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def _linear(self, module: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{module}.weight"], self.tensors.get(f"{module}.bias"))

    def _norm(self, module: str, x: Tensor) -> Tensor:
        weight, bias = (self.tensors[f"{module}.{name}"] for name in ("weight", "bias"))
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def published_slopes(heads: int) -> list[float]:
    """Return the slopes of ALiBi by the recursion of its paper."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start ** (i + 1) for i in range(heads)]
    power = 2 ** math.floor(math.log2(heads))
    return published_slopes(power) + published_slopes(2 * power)[0::2][: heads - power]


def save_jina_bert(folder: Path, kind: str, **changes: object) -> JinaBert:
    """Save a random model, "jina_bert" or "jina_bert_code", and return it."""
    config = {**CONFIG, **changes}
    model = JinaBert(config, kind == "jina_bert_code")
    folder.mkdir(exist_ok=True)
    code = CODE_OF[kind]
    auto_map = {"AutoModel": code, "AutoConfig": code.replace("Model", "Config")}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    save_file(model.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model
