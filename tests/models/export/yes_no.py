"""Small rerankers that are causal language models, and their published formula."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.checkpoints import save_causal_lm, save_chatml

# Byte for byte as in the README of https://github.com/QwenLM/Qwen3-Embedding
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

# A chat template of sentence-transformers with the roles of a pair.
CHAT_TEMPLATE = (
    "{%- macro of(role, other) -%}{{ messages | selectattr('role', 'eq', role) "
    "| map(attribute='content') | first | default(other) }}{%- endmacro -%}"
    "<|im_start|>system\nJudge the document.<|im_end|>\n<|im_start|>user\n"
    "<Instruct>: {{ of('system', 'Find an answer.') }}\n<Query>: {{ of('query', '') }}\n"
    "<Document>: {{ of('document', '') }}<|im_end|>\n<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' }}"
)
# The same for contents in parts.
STRUCTURED = (
    "{%- set found = namespace(system='Find an answer.', query='', document='') -%}"
    "{%- for message in messages -%}{%- set text = message.content[0].text -%}"
    "{%- if message.role == 'system' -%}{%- set found.system = text -%}"
    "{%- elif message.role == 'query' -%}{%- set found.query = text -%}"
    "{%- else -%}{%- set found.document = text -%}{%- endif -%}{%- endfor -%}"
    "<|im_start|>system\nJudge the document.<|im_end|>\n<|im_start|>user\n"
    "<Instruct>: {{ found.system }}\n<Query>: {{ found.query }}\n"
    "<Document>: {{ found.document }}<|im_end|>\n<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' }}"
)

# Byte for byte as in the package mxbai-rerank.
MXBAI_PREFIX = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\n<|im_start|>user\n"
)
MXBAI_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
MXBAI_TASK = (
    "You are a search relevance expert who evaluates how well documents match search queries. For "
    "each query-document pair, carefully analyze the semantic relationship between them, then "
    "provide your binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
)

# Families and fields of configs.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "own matrix and biases": ("qwen3", {"attention_bias": True, "num_hidden_layers": 3}),
    "windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "Qwen2": ("qwen2", {}),
    "Llama": ("llama", {"tie_word_embeddings": True}),
    "Mistral": ("mistral", {"sliding_window": 120}),
}


def save_reranker(folder: Path, config: str, max_length: int = 400) -> Any:  # noqa: ANN401
    """Save a random reranker, as Qwen3-Reranker is published; return the language model."""
    size = save_chatml(folder, max_length=max_length)
    family, changes = CONFIGS[config]
    layers = {"layer_types": None} if family.startswith("qwen") else {}
    sizes = {"vocab_size": size, "max_position_embeddings": 512}
    return save_causal_lm(folder, family, **{**layers, **sizes, **changes})


def published_logits(
    folder: Path,
    model: Any,  # noqa: ANN401
    pairs: Sequence[tuple[str, str]],
    instruction: str = INSTRUCTION,
    max_length: int = 400,
) -> torch.Tensor:
    """Return the logit of "yes" less that of "no" for each pair, `(N,)`, by the published steps."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    prefix, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
    bodies = [
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        for query, document in pairs
    ]
    room = max_length - len(prefix) - len(suffix)
    cut = tokenizer(bodies, padding=False, truncation="longest_first", max_length=room)
    rows = [prefix + body + suffix for body in cut["input_ids"]]
    inputs = tokenizer.pad({"input_ids": rows}, padding=True, return_tensors="pt")
    yes, no = (tokenizer.convert_tokens_to_ids(answer) for answer in ("yes", "no"))
    with torch.no_grad():
        last = model(**inputs).logits[:, -1].float()
    difference: torch.Tensor = last[:, yes] - last[:, no]
    return difference


def mxbai_logits(
    folder: Path,
    model: Any,  # noqa: ANN401
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    max_length: int,
) -> tuple[torch.Tensor, int]:
    """Return the logits of mxbai-rerank-v2, `(N,)`, and the number of tokens of its template.

    The steps are those of the package mxbai-rerank: all texts are tokenised apart, the query has at
    most three quarters of `max_length`, and the document the rest.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def ids(text: str) -> list[int]:
        own: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return own

    separator = ids("\n")
    end = separator + ids(MXBAI_TASK) + ids(MXBAI_SUFFIX)
    logits = []
    for query, document in pairs:
        lines = [f"instruction: {instruction}"] if instruction else []
        first = ids("\n".join([*lines, f"query: {query}"]))[: max_length * 3 // 4]
        second = (separator + ids(f"document: {document}"))[: max_length - len(first)]
        row = ids(MXBAI_PREFIX) + first + second + end
        with torch.no_grad():
            last = model(torch.tensor([row])).logits[0, -1]
        logits.append(last[ids("1")[0]] - last[ids("0")[0]])
    return torch.stack(logits), len(ids(MXBAI_PREFIX)) + len(end)
