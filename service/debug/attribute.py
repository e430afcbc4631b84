"""`POST /debug/attribute`: which tokens and words of a text make a scalar what it is?"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Response
from pydantic import Field

from models.gradients.budget import faithfulness_token_steps, token_steps
from models.gradients.inputs import (
    BASELINE_METHODS,
    BaselineName,
    Method,
    MethodOptions,
    UnitKind,
    Units,
)
from models.gradients.results.attribution import Attribution
from service.debug.pipeline.call import Call
from service.debug.pipeline.messages import Job
from service.debug.pipeline.request_fields import ModelRequest, Text
from service.debug.pipeline.response import (
    CostResponse,
    TextWord,
    Token,
    response_model,
)
from service.debug.pipeline.route import GradientRoute
from service.debug.pipeline.texts import baseline_of
from service.debug.target import (
    ResolvedTarget,
    Target,
    TargetResponse,
    check_target,
    resolve_target,
)
from service.debug.target_inputs import (
    ReplacedTexts,
    kept_tokens,
    model_inputs,
    tokens_of_inputs,
    units_of_inputs,
    words_of_inputs,
)
from service.inference.errors import InvalidInput


class AttributeRequest(ModelRequest):
    """Attribution of a scalar to the tokens and words of a text, or of a pair of texts."""

    text: Text
    text_pair: str | None = Field(
        None,
        description="Second text: the document of a query, or the text that a reranker or "
        "classifier reads together with `text`; null: `text` alone",
    )
    target: Target = Field(
        description="Scalar to attribute; /debug/capabilities lists those of the model"
    )
    method: Method = "integrated_gradients"
    layer: str = Field(
        "words",
        max_length=64,
        description="Layer whose tokens are scored; /debug/capabilities lists all layers",
    )
    baseline: BaselineName = Field(
        "pad",
        description="Baseline of integrated gradients and occlusion: padding tokens, mask tokens "
        "or zero vectors",
    )
    of: ReplacedTexts = Field(
        "both",
        description="Texts that the baseline replaces. With `text`, or with `text_pair` and "
        "the target's `versus`, all other tokens are the same in the baseline, special tokens "
        "included: their scores are 0, and `faithfulness` removes none of them. For requests with "
        "`text_pair`, and the methods `integrated_gradients` and `occlusion`",
    )
    tolerance: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Tolerance of integrated gradients: the maximum error of the sum of the "
        "scores, relative to the scalar's change from baseline to text, and the maximum error of "
        "each score, relative to the largest score",
    )
    max_evaluations: int = Field(
        256,
        ge=17,
        le=4096,
        description="Maximum number of evaluations of the model for integrated gradients",
    )
    samples: int = Field(25, ge=1, le=1024, description="Number of noisy copies in SmoothGrad")
    sigma: float = Field(
        0.1,
        ge=0,
        le=10,
        description="Standard deviation of SmoothGrad's noise, relative to the root mean square of "
        "the token vectors",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Random seed of SmoothGrad, and of the random orders in `faithfulness`",
    )
    faithfulness: UnitKind | None = Field(
        None,
        description="Units whose removal measures the faithfulness of the scores; null: it is not "
        "measured",
    )
    dry_run: bool = Field(False, description="Return only the cost, without running the method")

    @property
    def options(self) -> MethodOptions:
        """Options of the attribution methods."""
        return MethodOptions(
            self.tolerance, self.max_evaluations, self.samples, self.sigma, self.seed
        )


@dataclass(frozen=True, kw_only=True)
class AttributeJob(Job):
    """Job: attribute a scalar to the tokens and words of one or several model inputs.

    Several are: for "maxsim", the query and each document; for "score", the pair of a query and a
    document, and the pair with the document whose score is subtracted.

    Attributes:
        baselines: Token ids of the baseline of each row; None: zero vectors.
        kept: Positions of the tokens of each row that its baseline keeps.
        words: Words of the texts.
        target: Scalar to attribute.
        units: Units of the faithfulness; None: faithfulness is not measured.
    """

    kind: Literal["attribute"] = "attribute"
    request: AttributeRequest
    baselines: Sequence[Sequence[int] | None]
    kept: Sequence[Sequence[int]]
    words: Sequence[TextWord]
    target: ResolvedTarget
    units: Units | None


@dataclass(frozen=True)
class Word(TextWord):
    """A word of a text, and its score."""

    score: Annotated[float | None, Field(description="Sum of the scores of the word's tokens")]


AttributeResponse = response_model(
    "AttributeResponse", Attribution, TargetResponse, tokens=Token, words=Word
)


async def attribute(body: AttributeRequest, call: Call) -> Response:
    """Attribute a scalar, such as a similarity or a logit, to the tokens and words of a text."""
    check_target(call, body.target)
    inputs = await model_inputs(call, body.target, body.text, body.text_pair)
    _check_of(body)
    rows = [each.row for each in inputs]
    target = await resolve_target(call, body.target, rows[0])
    kept = kept_tokens(inputs, body.of)
    baseline = body.baseline if body.method in BASELINE_METHODS else "zero"
    baselines = [
        baseline_of(each.text, baseline, each.pointer, own)
        for each, own in zip(inputs, kept, strict=True)
    ]
    length = sum(len(row.ids) for row in rows)
    steps = token_steps(body.method, length, body.options)
    words = await asyncio.to_thread(words_of_inputs, inputs)
    units = None
    if body.faithfulness is not None:
        units = units_of_inputs(inputs, words, body.faithfulness, body.of)
        steps += faithfulness_token_steps(length, units)
    cost = call.cost_of(steps)
    if body.dry_run:
        return call.cost_response(cost)

    job = AttributeJob(
        request=body,
        rows=rows,
        baselines=baselines,
        kept=kept,
        words=words,
        target=target,
        units=units,
    )
    tokens = tokens_of_inputs(inputs)
    return await call.answer(job, cost, AttributeResponse, tokens=tokens, label=target.label)


def _check_of(body: AttributeRequest) -> None:
    """Check that the request has a second text, and a method with a baseline, if it has `of`.

    Raises:
        InvalidInput: It has not.
    """
    if body.of == "both":
        return
    if body.text_pair is None:
        raise InvalidInput(
            "of applies to rerankers, classifiers and multi-vector models, with text_pair",
            pointer="/of",
        )
    if body.method not in BASELINE_METHODS:
        raise InvalidInput(
            f"{body.method} has no baseline; omit of, or use one of the methods "
            f"{', '.join(BASELINE_METHODS)}",
            pointer="/of",
        )


ROUTE = GradientRoute(
    "attribute",
    "Attribution to tokens",
    attribute,
    AttributeRequest,
    AttributeResponse | CostResponse,
)
