"""`GET /debug/capabilities`: which questions, field values and limits does a model have?"""

from typing import get_args

from fastapi import Request, Response
from pydantic import BaseModel, Field

from models.gradients.inputs import Distribution, Method, ObjectiveName
from models.manifest import SimilarityName
from service.api.openapi import error_responses
from service.debug.pipeline.call import Call, json_response
from service.debug.pipeline.model_kinds import ALL_KINDS, TAKES_PAIRS, ModelKind, kind_for
from service.debug.pipeline.response import Hashes, hashes_of
from service.debug.pipeline.route import gradient_router
from service.debug.pipeline.state import State
from service.debug.routes import ROUTES
from service.debug.target import targets_of
from service.debug.target_inputs import ReplacedTexts

router = gradient_router()


class DebugLimits(BaseModel):
    """Limits of the gradient routes."""

    max_tokens: int = Field(description="Maximum number of tokens per text or pair of texts")
    max_token_steps: int = Field(description="Maximum cost per request, in token steps")
    max_activation_bytes: int = Field(
        description="Maximum size of the tensors of a request for activations, in bytes"
    )
    deadline_s: float = Field(description="Maximum duration of a job, in seconds")


class Capabilities(BaseModel):
    """Allowed field values, limits and device of the gradient routes."""

    model: Hashes
    kind: ModelKind
    similarity: SimilarityName | None = Field(
        description="Similarity of the model's vectors; null: it has no vectors"
    )
    routes: list[str] = Field(description="Gradient routes for this kind of model")
    layers: list[str]
    norms: list[str]
    taps: list[str] = Field(
        description="Steps of the forward pass whose outputs are activations, in order"
    )
    methods: list[str]
    targets: list[str] = Field(description="Targets of attributions for this kind of model")
    labels: list[str] = Field(description="Label of each logit; empty for models without labels")
    text_pairs: bool = Field(description="Whether `text_pair` applies to the model")
    baselines: list[str]
    of: list[str] = Field(
        description="Values of `of` in an attribution: the texts that a baseline replaces"
    )
    objectives: list[str]
    distributions: list[str]
    device: str
    torch: str
    op: dict[str, str] = Field(
        description="Implementation of add + LayerNorm in the reference model, by pass: `forward` "
        "and `backward`"
    )
    limits: DebugLimits


@router.get(
    "/capabilities",
    summary="Capabilities of the gradient routes",
    response_model=Capabilities,
    responses=error_responses(401, 403, 404, 422, 429, 503),
)
async def capabilities(request: Request, state: State) -> Response:
    """Return the allowed field values, limits and device of the gradient routes."""
    model = await state.lease(request, request.query_params.get("model"))
    manifest = model.artifact.manifest
    kind = kind_for("/debug/capabilities", ALL_KINDS, manifest)
    opened = await Call(request, state, model, kind).open_process()
    return json_response(
        Capabilities(
            model=hashes_of(model),
            kind=kind,
            similarity=manifest.similarity,
            routes=[*(route.name for route in ROUTES if route.is_for(manifest)), "capabilities"],
            layers=list(opened.layers),
            norms=list(opened.norms),
            taps=[point.name for point in opened.taps],
            methods=list(get_args(Method)),
            targets=targets_of(kind, manifest),
            labels=list(manifest.labels),
            text_pairs=kind in TAKES_PAIRS,
            baselines=[*model.tokenizer.baseline_ids, "zero"],
            of=list(get_args(ReplacedTexts)) if kind in TAKES_PAIRS else ["both"],
            objectives=list(get_args(ObjectiveName)),
            distributions=list(get_args(Distribution)),
            device=opened.device,
            torch=opened.torch,
            op=opened.op,
            limits=DebugLimits.model_validate(state.settings.debug, from_attributes=True),
        )
    )
