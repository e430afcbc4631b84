"""Rules for tokens of sparse vectors and multi-vectors, by the ids of a tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tokenizers import AddedToken, Tokenizer

from models.export import hybrid
from models.export.model_folder import CheckpointError
from models.export.multi_vector import KINDS, Expansion, MultiVectorConfig
from models.export.sentence_config import SentenceConfig
from models.export.tokenizer_settings import text_failures
from models.manifest import TokenRules
from models.network.config import EncoderConfig


def add_markers(tokenizer: Tokenizer, config: MultiVectorConfig) -> None:
    """Make the markers of queries and documents single tokens of the tokenizer, in place.

    Markers outside the vocabulary stay ordinary text.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    for marker in config.markers:
        for token in (marker, *marker.split(None, 1)[:1]):
            if token.strip() and token in vocabulary:
                if tokenizer.encode(token, add_special_tokens=False).tokens != [token]:
                    tokenizer.add_special_tokens([AddedToken(token, normalized=False)])
                break


def token_rules(
    config: MultiVectorConfig, tokenizer: Tokenizer, max_tokens: int, encoder: EncoderConfig
) -> dict[str, TokenRules]:
    """Return token rules by prompt name: "query", "document", and "" for all other texts.

    Args:
        config: Settings of the model.
        tokenizer: Tokenizer of the model.
        max_tokens: Maximum length of other texts, in tokens.
        encoder: Hyperparameters of the encoder.

    Raises:
        CheckpointError: A maximum length exceeds the encoder's, or the vocabulary lacks the token
            of query expansion. Or the config says that no token attends to the tokens of the
            expansion, and the encoder's attention does not support that.
    """
    skiplist = _ids(tokenizer, config.skiplist)
    skipped = {kind: skiplist if kind in config.skiplist_kinds else () for kind in KINDS}
    query = TokenRules(max_tokens=config.query_length or max_tokens, skipped=skipped["query"])
    if (expansion := config.expansion) is not None:
        _check_attention(expansion, encoder)
        filler = tokenizer.token_to_id(expansion.token)
        if filler is None:
            raise CheckpointError(
                f"the vocabulary lacks the token {expansion.token!r} of query_expansion"
            )
        query = replace(
            query,
            max_tokens=expansion.length if expansion.truncates else query.max_tokens,
            min_tokens=expansion.length,
            filler=filler,
            attends_to_filler=expansion.attends,
        )
    other = TokenRules(max_tokens=max_tokens, skipped=skipped["document"], kept=config.kept)
    document = replace(other, max_tokens=config.document_length or max_tokens)
    rules = {"query": query, "document": document, "": other}
    if (pooling := config.pooling) is not None:
        # As in sentence-transformers, other texts count as documents.
        rules = {
            kind: replace(
                rule,
                pool_factor=pooling.factor,
                protected=pooling.protected,
                normalizes_pooled=pooling.normalizes,
            )
            if (kind or "document") in pooling.kinds
            else rule
            for kind, rule in rules.items()
        }
    for kind, rule in rules.items():
        # The shortest useful row has one token between two special tokens.
        length = max(rule.max_tokens, rule.min_tokens)
        if not 3 <= length <= encoder.max_tokens:
            raise CheckpointError(
                f"the maximum length of a {kind} is {length} tokens; it must be between 3 and the "
                f"model's {encoder.max_tokens} positions"
            )
    return rules


def hybrid_rules(config: SentenceConfig, tokenizer: Tokenizer) -> TokenRules:
    """Return the rules for all tokens of a hybrid model; see `models.export.hybrid`."""
    return TokenRules(
        max_tokens=config.max_tokens,
        first=hybrid.FIRST_VECTOR,
        unweighted=_ids(tokenizer, config.unweighted),
    )


def check_room_for_texts(
    tokenizer: Tokenizer,
    prompts: Mapping[str, str],
    rules: Mapping[str, TokenRules],
    truncation_side: str,
) -> None:
    """Raise CheckpointError if a prompt leaves no room for a text.

    Args:
        tokenizer: Tokenizer of the model.
        prompts: Prompts of the model, by name.
        rules: Rules for tokens by prompt name; "": those of other prompts.
        truncation_side: Side on which rows are truncated; on the left, they lose the prompt first.
    """
    for name, prompt in prompts.items():
        rule = rules.get(name, rules[""])
        with text_failures(f"the tokenizer fails on the prompt {name!r}"):
            ids = tokenizer.encode(prompt, add_special_tokens=not rule.looks_up).ids
        if prompt and truncation_side == "right" and len(ids) >= rule.max_tokens:
            raise CheckpointError(
                f"the prompt {name!r} leaves no room for a text within {rule.max_tokens} tokens"
            )


def _ids(tokenizer: Tokenizer, tokens: Sequence[str]) -> tuple[int, ...]:
    """Return the sorted ids of tokens, without those that the vocabulary lacks."""
    ids = map(tokenizer.token_to_id, tokens)
    return tuple(sorted({token for token in ids if token is not None}))


def _check_attention(expansion: Expansion, encoder: EncoderConfig) -> None:
    if expansion.attends:
        return
    if encoder.distances is not None:
        # Here the added tokens of transformers' DeBERTa have no embedding.
        raise CheckpointError("query_expansion without attend is not supported for DeBERTa")
    window = min((window for window in encoder.windows if window is not None), default=None)
    if window is not None and expansion.length > window + 1:
        raise CheckpointError(
            f"query_expansion without attend has the length {expansion.length}; the model's "
            f"attention window supports up to {window + 1}, because beyond it the last tokens "
            "would attend to none"
        )
