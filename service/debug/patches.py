"""Patches of a request: which token vectors of the inputs are replaced by which of the sources."""

from collections.abc import Sequence

from service.debug.model_inputs import ModelInput
from service.debug.request_models.taps import Positions
from service.inference.errors import InvalidInput


def patches_of(
    positions: Positions, inputs: Sequence[ModelInput], sources: Sequence[ModelInput]
) -> list[list[tuple[int, int]]]:
    """Return the patches of a request, each a list of pairs of positions.

    Args:
        positions: Field of the request.
        inputs: Model inputs whose token vectors are replaced.
        sources: As many model inputs, from which the token vectors are.

    Raises:
        InvalidInput: Positions are missing, and two texts have different numbers of tokens. A
            position does not exist or occurs twice, or a pair belongs to different model inputs.
    """
    if isinstance(positions, list):
        return [_checked_pairs(positions, inputs, sources)]
    for own, other in zip(inputs, sources, strict=True):
        count, source_count = len(own.row.ids), len(other.row.ids)
        if count != source_count:
            raise InvalidInput(
                f"{own.name} has {count} tokens and {other.name} has {source_count}; "
                "without a list of positions, both must have as many. Set positions to pairs: an "
                "index in tokens, and the index in source_tokens of its replacement",
                code="token_counts",
                pointer="/positions",
            )
    everything = [(index, index) for index in range(sum(len(each.row.ids) for each in inputs))]
    return [[pair] for pair in everything] if positions == "each" else [everything]


def _checked_pairs(
    positions: Sequence[Sequence[int]],
    inputs: Sequence[ModelInput],
    sources: Sequence[ModelInput],
) -> list[tuple[int, int]]:
    owners, source_owners = (
        [number for number, each in enumerate(own) for _ in each.row.ids]
        for own in (inputs, sources)
    )
    pairs: dict[int, int] = {}
    for index, (position, source) in enumerate(positions):
        problem = None
        if position >= len(owners) or source >= len(source_owners):
            problem = f"the texts have {len(owners)} tokens and the sources {len(source_owners)}"
        elif owners[position] != source_owners[source]:
            problem = "the two tokens belong to different inputs of the model"
        elif position in pairs:
            problem = f"position {position} occurs twice"
        if problem is not None:
            raise InvalidInput(
                f"{problem}; a pair is an index in tokens and an index in source_tokens",
                code="position",
                pointer=f"/positions/{index}",
            )
        pairs[position] = source
    return list(pairs.items())
