"""Small random GLiNER models, and their results by the formulas of the package gliner 0.2.29.

The package itself requires an older transformers. `tests.benchmarks.gliner_parity` compares with
it.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.models.checkpoints import CONFIGS, save_sentencepiece, save_wordpiece, write_json

# Tokenizer and settings of a model of each supported encoder.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta-v2": ("DebertaV2Tokenizer", {"hidden_size": 24}),
    "bert": ("BertTokenizer", {"hidden_size": 32, "num_rnn_layers": 2, "max_width": 3}),
    "xlm-roberta": ("XLMRobertaTokenizer", {"hidden_size": 48, "num_rnn_layers": 0}),
    "distilbert": ("BertTokenizer", {"hidden_size": 24, "sep_token": "[TEXT]"}),
    "modernbert": ("BertTokenizer", {"hidden_size": 32, "max_width": 1, "ent_token": "<<E>>"}),
}
# (start, end, label, score), with the end exclusive.
Entities = list[tuple[int, int, str, float]]


class Gliner(nn.Module):
    """Uni-encoder that scores spans, with the package's names of tensors."""

    def __init__(self, encoder: nn.Module, tokenizer: Any, config: dict[str, Any]) -> None:  # noqa: ANN401
        super().__init__()
        self.tokenizer, self.config = tokenizer, config
        width, own = config["hidden_size"], config["encoder_config"]
        token_width = own.get("hidden_size", own.get("dim"))
        self.token_rep_layer: Any = nn.ModuleDict({"bert_layer": nn.ModuleDict({"model": encoder})})
        if token_width != width:
            self.token_rep_layer["projection"] = nn.Linear(token_width, width)
        if count := config["num_rnn_layers"]:
            lstm = nn.LSTM(width, width // 2, count, batch_first=True, bidirectional=True)
            self.rnn: Any = nn.ModuleDict({"lstm": lstm})
        projections = {
            "project_start": _projection(width, width),
            "project_end": _projection(width, width),
            "out_project": _projection(2 * width, width),
        }
        self.span_rep_layer: Any = nn.ModuleDict({"span_rep_layer": nn.ModuleDict(projections)})
        self.prompt_rep_layer = _projection(width, width)

    @torch.no_grad()
    def logits(self, text: str, labels: Sequence[str]) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return the logits `(words, max_width, labels)` of a text, and the spans of its words.

        Words that have no tokens are zero vectors, after all others. They have no span.
        """
        config = self.config
        words = list(re.finditer(r"\w+(?:[-_]\w+)*|\S", text))[: config["max_len"]]
        prompt = [word for label in labels for word in (config["ent_token"], label)]
        prompt.append(config["sep_token"])
        encoded = self.tokenizer(
            [*prompt, *(word.group() for word in words)],
            is_split_into_words=True,
            truncation=True,
            return_tensors="pt",
        )
        ids, of_tokens = encoded["input_ids"], encoded.word_ids()
        x = self.token_rep_layer["bert_layer"]["model"](input_ids=ids).last_hidden_state
        if "projection" in self.token_rep_layer:
            x = self.token_rep_layer["projection"](x)
        at = [i for i, own in enumerate(of_tokens) if own is not None and own != of_tokens[i - 1]]
        at = [i for i in at if of_tokens[i] >= len(prompt)]
        h = torch.zeros(1, len(words), x.shape[-1], dtype=x.dtype)
        h[0, : len(at)] = x[0, at]
        if config["num_rnn_layers"]:
            h = self.rnn["lstm"](h)[0]
        layers = self.span_rep_layer["span_rep_layer"]
        start, end = layers["project_start"](h)[0], layers["project_end"](h)[0]
        label = self.prompt_rep_layer(x[0, ids[0] == config["class_token_index"]])
        scores = x.new_full((len(words), config["max_width"], len(label)), float("-inf"))
        for i in range(len(words)):
            for j in range(i, min(i + config["max_width"], len(words))):
                span = layers["out_project"](torch.cat([start[i], end[j]]).relu())
                scores[i, j - i] = label @ span
        return scores, [words[of_tokens[i] - len(prompt)].span() for i in at]


def entities(
    scores: Tensor,
    spans: Sequence[tuple[int, int]],
    labels: Sequence[str],
    threshold: float,
    *,
    nested: bool,
    multi_label: bool,
) -> Entities:
    """Return the entities of a text by the package's greedy search, in words that have tokens."""
    probabilities = scores[: len(spans)].sigmoid()
    candidates = [
        (i, i + k, c, float(probabilities[i, k, c]))
        for i, k, c in torch.nonzero(probabilities > threshold).tolist()
        if i + k < len(spans)
    ]
    kept: list[tuple[int, int, int, float]] = []
    for candidate in sorted(candidates, key=lambda own: -own[3]):
        if not any(_clash(candidate[:2], own[:2], nested, multi_label) for own in kept):
            kept.append(candidate)
    return [
        (spans[i][0], spans[j][1], labels[c], score)
        for i, j, c, score in sorted(kept, key=lambda own: own[0])
    ]


def _clash(a: tuple[int, int], b: tuple[int, int], nested: bool, multi_label: bool) -> bool:
    if a == b:
        return not multi_label
    if a[0] > b[1] or b[0] > a[1]:
        return False
    is_inside = (a[0] <= b[0] and a[1] >= b[1]) or (b[0] <= a[0] and b[1] >= a[1])
    return not (nested and is_inside)


def _projection(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 4 * out), nn.ReLU(), nn.Dropout(0.4), nn.Linear(4 * out, out)
    )


def save_gliner(folder: Path, kind: str, layers: int = 2, **changes: object) -> Gliner:
    """Save a random GLiNER model with an encoder of a kind in `KINDS`; return it.

    Args:
        folder: Folder to write.
        kind: `model_type` of the encoder.
        layers: Number of layers of the encoder, if it names them as BERT does.
        changes: Changes of its settings.
    """
    name, settings = KINDS[kind]
    config: dict[str, Any] = {"max_width": 5, "max_len": 40, "num_rnn_layers": 1}
    config |= {"ent_token": "<<ENT>>", "sep_token": "<<SEP>>", "model_name": "base", **settings}
    config |= changes
    (save_wordpiece if name == "BertTokenizer" else save_sentencepiece)(folder, name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    markers = ["[FLERT]", config["ent_token"], config["sep_token"]]
    tokenizer.add_tokens(markers, special_tokens=True)
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 200}
    if kind not in ("distilbert", "modernbert"):
        sizes["num_hidden_layers"] = layers
    encoder_config = type(CONFIGS[kind]()).from_dict({**CONFIGS[kind]().to_dict(), **sizes})
    config["encoder_config"] = encoder_config.to_dict()
    config["vocab_size"] = len(tokenizer)
    config["class_token_index"] = tokenizer.convert_tokens_to_ids(config["ent_token"])
    torch.manual_seed(0)
    encoder = transformers.AutoModel.from_config(encoder_config)
    model = Gliner(encoder, tokenizer, config).eval()
    for key, parameter in model.named_parameters():
        mean = 1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0
        is_matrix = parameter.dim() == 2 and "bert_layer" not in key
        # Logits of 1 to 10, so that few entities are within rounding of each other.
        gain = 1.3 if config["num_rnn_layers"] else 0.9
        std = gain * parameter.shape[-1] ** -0.5 if is_matrix else 0.15
        nn.init.normal_(parameter, mean=mean, std=std)
    save_file(model.state_dict(), folder / "model.safetensors")
    write_json(folder / "gliner_config.json", config)
    return model
