"""Words of a text: groups of the tokens that the model reads.

A word is a maximal run of tokens without white space between them in the text, cut at the limits of
words that `service.inference.tokenizing.words` finds. A token that spans the boundary of two words
joins them. In scripts without spaces between words a word is a token.
"""

from collections.abc import Sequence

from service.debug.pipeline.response import TextWord
from service.inference.tokenizing.rows import Span, TokenizedText
from service.inference.tokenizing.words import spans_of_units, units_of_characters


def words_of(tokenized: TokenizedText) -> list[TextWord]:
    """Return the words of a text or of a pair of texts, in order.

    Every token with a span belongs to exactly one word, and the others to none. Tokens of white
    space belong to the next word, whose tokens start with it in Unigram and BPE vocabularies; at
    the end of a text, to the last word.
    """
    words: list[TextWord] = []
    for number, text in enumerate(tokenized.texts):
        spans = {
            index: span
            for index, span in enumerate(tokenized.spans)
            if span is not None and tokenized.sequence_ids[index] == number
        }
        units = units_of_characters(text)
        spans_of_own = spans_of_units(units)
        for tokens in _groups(units, spans):
            own = [
                spans_of_own[unit]
                for token in tokens
                for unit in set(units[slice(*spans[token])])
                if unit is not None
            ]
            # White space is not part of a word, unless the text has nothing else.
            own = own or [spans[token] for token in tokens]
            words.append(TextWord(min(own)[0], max(own)[1], tokens, number))
    return words


def _groups(units: Sequence[int | None], spans: dict[int, Span]) -> list[list[int]]:
    """Return the indices of the tokens of each word.

    Args:
        units: Unit of each character, see `units_of_characters`.
        spans: Span of each token of the text, by index of the token.
    """
    groups: list[list[int]] = []
    spaces: list[int] = []  # tokens of white space before the next word
    last = -1
    for token, (start, end) in spans.items():
        # The span of a token can be empty: it belongs to the character before it.
        characters = units[start:end] if start < end else units[max(0, start - 1) : start]
        own = [unit for unit in characters if unit is not None]
        if not own:
            spaces.append(token)
            continue
        if groups and min(own) <= last:
            groups[-1] += [*spaces, token]
        else:
            groups.append([*spaces, token])
        spaces, last = [], max(last, *own)
    if spaces and groups:
        groups[-1] += spaces
    elif spaces:
        groups.append(spaces)
    return groups
