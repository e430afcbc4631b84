"""Rerankers that are causal language models: the score is a difference of two tokens' logits.

The logits are those of the next token after a row, such as "yes" and "no". As in the module
`LogitScore` of sentence-transformers, whose default they are, there can be a single token.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from models.export.families import Family
from models.export.model_files import ModelFiles
from models.export.model_folder import (
    CheckpointError,
    ModelFolder,
    check_defaults,
    check_known,
    first_class,
    join,
)
from models.export.tokenizer_settings import MAX_TOKENIZER_BYTES, TOKENIZER
from models.export.weights import fill
from models.json_reader import parse_json
from models.network.heads import DenseHead

_FIELDS = {"true_token_id", "false_token_id", "module_input_name"}
_EMBEDDINGS = "embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The tokens whose logits make a score.

    Attributes:
        ids: Id of the token for relevant documents, and of the one whose logit is subtracted, if
            there is one.
        label: Text of the first token in the vocabulary.
        tied: Whether the model has the word embeddings in place of a matrix for the logits.
    """

    ids: tuple[int, ...]
    label: str
    tied: bool


def is_causal(config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes a causal language model."""
    return first_class(config).endswith("ForCausalLM")


def check_purpose(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse a causal language model whose folder does not say what it computes.

    Classes without a head save tensors without a prefix: these are embedding models.

    Args:
        config: Content of the network's config.json.
        names: Names of the checkpoint's tensors.

    Raises:
        CheckpointError: It can be a chat model, a reranker or an embedding model.
    """
    if is_causal(config) and any(name.startswith("model.") for name in names):
        raise CheckpointError(
            f"config.json names {config['architectures'][0]}, a chat model, a reranker or an "
            "embedding model: --pair-template qwen3-reranker exports a reranker that answers yes "
            "or no, and --pooling last exports embeddings"
        )


def read_answers(files: ModelFiles, answers: tuple[str, str]) -> Answers:
    """Return the tokens of a reranker: those of its module, or else those of its template.

    Args:
        files: Files of the model.
        answers: Tokens of the template.

    Raises:
        CheckpointError: The family's causal language models are not supported, a setting of the
            module is invalid, or the tokenizer does not have a token.
    """
    config, modules = files.config, files.modules
    if not files.family.causal_head or not is_causal(config):
        raise CheckpointError(
            f"a score of the logits of tokens needs a causal language model of a supported family; "
            f"config.json names {config.get('architectures')!r}"
        )
    vocabulary = _vocabulary(files.folder, files.transformer)
    spellings = {token: spelling for spelling, token in vocabulary.items()}
    if modules:
        name = join(modules[1][1], "config.json")
        fields = files.folder.json(name, dict)
        check_defaults(fields, {"module_input_name": "causal_logits"}, name)
        check_known(fields, _FIELDS, name)
        ids = [fields.get("true_token_id"), fields.get("false_token_id")]
    else:
        name, ids = TOKENIZER, [vocabulary.get(answer) for answer in answers]
    last = 1 if modules and ids[1] is None else 2
    known = [own for own in ids[:last] if _is_id(own) and own in spellings]
    if len(known) < last:
        raise CheckpointError(f"{name}: the tokenizer lacks the token of an answer; ids: {ids}")
    return Answers(
        ids=tuple(known),
        label=spellings[known[0]],
        tied=bool(config.get("tie_word_embeddings")),
    )


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _vocabulary(folder: ModelFolder, transformer: str) -> dict[str, int]:
    """Return the ids of the tokens in tokenizer.json, by their spelling."""
    name = join(transformer, TOKENIZER)
    file = folder.bytes(name, MAX_TOKENIZER_BYTES)
    try:
        content: Any = parse_json(file)
        words = content["model"]["vocab"]
        if isinstance(words, list):  # Unigram: pieces with their scores
            words = {piece: index for index, (piece, _) in enumerate(words)}
        return {**words, **{own["content"]: own["id"] for own in content.get("added_tokens", ())}}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is not a tokenizer: it has no vocabulary") from error


def take_head(
    family: Family,
    answers: Answers,
    tensors: dict[str, Tensor],
) -> DenseHead:
    """Return the layer from the last token's vector to the score, and remove the logits' matrix.

    Args:
        family: Family of the network.
        answers: Tokens of the score.
        tensors: Tensors of the checkpoint, by name.

    Raises:
        CheckpointError: The matrix is missing, has another shape than the word embeddings, is not
            equal to them although config.json says so, or does not have a row for each token.
    """
    own = tensors.pop(f"{family.causal_head}.weight", None)
    embeddings = tensors.get(_EMBEDDINGS)
    if answers.tied:
        if own is not None and embeddings is not None and not _are_equal(own, embeddings):
            raise CheckpointError(
                f"config.json: tie_word_embeddings is true, but {family.causal_head}.weight and "
                f"{_EMBEDDINGS} differ"
            )
        own = embeddings
    if own is None or own.dim() != 2 or embeddings is None or own.shape != embeddings.shape:
        name = _EMBEDDINGS if answers.tied else f"{family.causal_head}.weight"
        raise CheckpointError(
            f"the checkpoint lacks {name}, or its shape is not that of embeddings"
        )
    if (largest := max(answers.ids)) >= len(own):
        raise CheckpointError(f"the model has logits for {len(own)} tokens, and none for {largest}")
    row, *subtracted = (own[token].float() for token in answers.ids)
    for other in subtracted:
        row = row - other
    head = DenseHead(own.shape[1], 1, bias=False, activation="Identity")
    fill(head.linear, {"weight": row[None]})
    return head


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.is_meta or b.is_meta or torch.equal(a, b))
