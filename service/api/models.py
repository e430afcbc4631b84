"""Routes about the served models: list, description, load, replacement and deletion."""

import asyncio
import re
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Request, Response

from models.engines import Agreement, EngineError
from models.manifest import ArtifactError
from models.spaces import Space
from service.api.auth import require_scope
from service.api.body import read_body
from service.api.deadline import within
from service.api.model_schemas import (
    AgreementInfo,
    CalibrationInfo,
    CalibrationRanges,
    Limits,
    LoadedVersion,
    LoadRequest,
    LoadResponse,
    ModelList,
    ModelSummary,
    QualityInfo,
    ServiceInfo,
    SpaceDescription,
)
from service.api.openapi import error_responses, request_body
from service.api.schemas import VERSION
from service.api.state import AppState, State
from service.evaluation.gate import MeasureChange, check_evaluation
from service.inference.errors import InvalidInput, VitrineError
from service.inference.model.model import Model
from service.inference.registry.model_names import NameConflict, name_problem
from service.inference.registry.served_models import ModelSpec
from service.inference.registry.shadow import compare_versions

router = APIRouter()


@router.get(
    "/info",
    summary="Default model",
    dependencies=[require_scope("encode")],
    responses=error_responses(400, 401, 403, 422, 503),
)
async def info(request: Request, state: State) -> ServiceInfo:
    """Return the name, hashes, engine, precision, threads and limits of the default model."""
    return _info(await state.lease(request), state)


@router.get(
    "/models",
    name="list_models",
    summary="Served models",
    dependencies=[require_scope("encode")],
    responses=error_responses(401, 403, 503),
)
async def models(state: State) -> ModelList:
    """Return the names and the state of all served models."""
    state.registry.check_alive()
    return ModelList(
        models=[
            ModelSummary(
                name=status.name,
                aliases=list(status.aliases),
                default=status.is_default,
                loaded=status.model is not None,
                outputs=list(status.manifest.outputs),
                labels=list(status.manifest.labels),
                similarity=status.manifest.similarity,
                version=None if status.model is None else status.model.version,
                weight_bytes=status.weight_bytes,
            )
            for status in state.registry.statuses()
        ]
    )


@router.get(
    "/models/{name:path}/info",
    name="model_info",
    summary="A served model",
    dependencies=[require_scope("encode")],
    responses=error_responses(400, 401, 403, 404, 503),
)
async def model_info(name: str, request: Request, state: State) -> ServiceInfo:
    """Return the description of a served model; a model that is not in memory is loaded first."""
    return _info(await state.lease(request, name), state)


@router.get(
    "/models/{name:path}/calibration",
    name="model_calibration",
    summary="Ranges of a model's quantised vectors",
    dependencies=[require_scope("encode")],
    responses=error_responses(400, 401, 403, 404, 422, 503),
)
async def model_calibration(name: str, request: Request, state: State) -> CalibrationRanges:
    """Return the ranges with which clients dequantise int8 and uint8 vectors of a model."""
    model = await state.lease(request, name)
    if model.calibration is None:
        raise InvalidInput(
            "the model has no ranges; vitrine-export --calibrate exports them",
            code="not_calibrated",
        )
    ranges = {width: own.tolist() for width, own in model.calibration.ranges.items()}
    return CalibrationRanges(model=model.name, ranges=ranges)


@router.post(
    "/models/{name:path}",
    name="load_model",
    summary="Load a model, or replace it by another version",
    dependencies=[require_scope("admin")],
    response_model=LoadResponse,
    openapi_extra=request_body(LoadRequest),
    responses=error_responses(400, 401, 403, 408, 413, 415, 422, 503, 504),
)
async def load(name: str, request: Request, state: State) -> LoadResponse:
    """Load an artifact and serve it under the name, in place of the version that is served.

    The new version is loaded beside the old one and must pass the self-check. Then all later
    requests see the new version, and requests in flight finish on the old one. If anything fails,
    the old version stays in service. A version with other outputs, or of another width or
    similarity, needs `allow_incompatible`. With `texts`, the results of both versions are compared
    first; with `eval`, an evaluation must have found the new one no worse. Settings do not change:
    a restart serves the configured artifacts. A load that is not complete at the deadline of the
    request is cancelled.
    """
    body = await read_body(request, state, LoadRequest)
    if problem := name_problem(name):
        raise InvalidInput(f"a name {problem}")
    for index, alias in enumerate(body.aliases or ()):
        if problem := name_problem(alias):
            raise InvalidInput(f"an alias {problem}", pointer=f"/aliases/{index}")
    if "min_cosine" in body.model_fields_set and not body.texts:
        raise InvalidInput("min_cosine needs texts to compare", pointer="/min_cosine")
    served = _served_spec(name, state)
    for field, code in (("texts", "shadow"), ("eval", "eval")):
        if served is None and getattr(body, field):
            raise InvalidInput(
                f"there is no served version to compare with; omit {field}",
                code=code,
                pointer=f"/{field}",
            )
    options = state.settings.model_options() if served is None else served.options
    aliases = () if served is None else served.aliases
    spec = ModelSpec(
        path=Path(body.path),
        aliases=aliases if body.aliases is None else tuple(body.aliases),
        options=replace(
            options,
            name=name,
            precision=body.precision or options.precision,
            share=body.share or options.share,
        ),
    )
    compared = _Compared()
    check = partial(_compare, body, compared) if body.texts or body.eval else None
    deadline = state.deadline(request)
    try:
        loading = state.registry.load(spec, check, allow_incompatible=body.allow_incompatible)
        model, previous = await within(deadline, loading)
    # Error responses never repeat text of the request.
    except NameConflict as error:
        names = body.aliases or []
        raise InvalidInput(
            str(error).replace(repr(error.name), "of this request"),
            pointer=f"/aliases/{names.index(error.name)}" if error.name in names else None,
        ) from None
    except (ArtifactError, EngineError, ValueError, OSError) as error:
        detail = str(error).replace(f"the artifact {spec.path.name}".rstrip(), "the artifact")
        # At the start or quoted: elsewhere "." is not the path.
        detail = re.sub(rf"(^|['\"]){re.escape(str(spec.path))}", r"\1the path", detail)
        detail = detail.replace(repr(name), "of this request")
        raise InvalidInput(detail, code="invalid_artifact", pointer="/path") from None
    return LoadResponse(
        model=model.name,
        version=model.version,
        previous=previous and LoadedVersion(version=previous.version, path=previous.artifact.path),
        shadow=compared.shadow and AgreementInfo(**asdict(compared.shadow)),
        eval=compared.eval,
    )


def _served_spec(name: str, state: AppState) -> ModelSpec | None:
    """Return the specification of a served model to change; None: no model has the name.

    Raises:
        InvalidInput: The name is an alias.
    """
    served = state.registry.spec_of(name)
    if served is not None and served.options.name != name:
        raise InvalidInput(
            f"the name is an alias of the model {served.options.name}; use the name of the model"
        )
    return served


@dataclass
class _Compared:
    """How two versions differ: in their results for texts, and in an evaluation."""

    shadow: Agreement | None = None
    eval: MeasureChange | None = None


async def _compare(body: LoadRequest, compared: _Compared, served: Model, new: Model) -> None:
    """Compare two versions by the evaluation and the texts of the request; see `load`."""
    if (condition := body.eval) is not None:
        compared.eval = await asyncio.to_thread(
            check_evaluation,
            *(Path(condition.folder), served.identity, new.identity),
            *(condition.measure, condition.max_drop),
        )
    if not body.texts:
        return
    try:
        agreement = await compare_versions(served, new, body.texts)
    except VitrineError as error:
        if error.index is not None:
            error.pointer = f"/texts/{error.index}"
        raise
    if not agreement.cosine >= body.min_cosine:  # NaN is not
        raise InvalidInput(
            f"the results of the new version differ: the worst cosine is {agreement.cosine:.6f}; "
            f"min_cosine is {body.min_cosine:g}",
            code="shadow",
            pointer="/min_cosine",
        )
    compared.shadow = agreement


@router.delete(
    "/models/{name:path}",
    name="delete_model",
    status_code=204,
    summary="Stop serving a model",
    dependencies=[require_scope("admin")],
    responses=error_responses(400, 401, 403, 404, 422, 503),
)
async def delete(name: str, state: State) -> Response:
    """Stop serving a model and free its memory; requests in flight finish."""
    _served_spec(name, state)
    await state.registry.unload(name)
    return Response(status_code=204)


def _info(model: Model, state: AppState) -> ServiceInfo:
    manifest, engine = model.artifact.manifest, model.engine
    return ServiceInfo(
        model=model.name,
        source=manifest.source,
        revision=manifest.revision,
        license=manifest.license,
        family=manifest.family,
        outputs=list(model.outputs),
        labels=list(manifest.labels),
        activation=manifest.activation if "logits" in manifest.outputs else None,
        dimensions=manifest.width if {"pooled", "multi"} & {*manifest.outputs} else None,
        pooling=list(manifest.pooling),
        normalize=manifest.normalize,
        similarity=manifest.similarity,
        matryoshka_dimensions=list(manifest.matryoshka_dimensions),
        calibration=_calibration(model),
        spaces={name: _space(own) for name, own in model.spaces.items()},
        truncation_side=manifest.truncation_side,
        prompts=sorted(manifest.prompts),
        default_prompt=manifest.default_prompt,
        instruction=manifest.pair_template and manifest.pair_template.instruction,
        max_tokens_by_prompt={n: r.max_tokens for n, r in manifest.token_rules.items() if n},
        looked_up_prompts=[n for n, rules in manifest.token_rules.items() if rules.looks_up],
        adapters=list(manifest.adapters),
        weights_sha256=dict(manifest.weights_sha256),
        versions=dict(manifest.versions),
        signature=model.artifact.signed_by,
        identity=model.identity,
        graph_sha256=model.graph_sha256,
        tokenizer_sha256=manifest.files["tokenizer.json"],
        engine=engine.name,
        precision=engine.precision,
        quality=model.quality and QualityInfo.model_validate(model.quality),
        threads=engine.threads,
        self_check={
            output: AgreementInfo(**asdict(agreement))
            for output, agreement in zip(model.outputs, model.self_check.values(), strict=True)
        },
        limits=Limits(**state.settings.limits.model_dump(), max_tokens=manifest.max_tokens),
        version=VERSION,
    )


def _space(own: Space) -> SpaceDescription:
    known = asdict(own.info)
    del known["normalizes"]
    return SpaceDescription(**known, version=own.version, dimensions=own.width, sha256=own.sha256)


def _calibration(model: Model) -> CalibrationInfo | None:
    calibration = model.calibration
    if calibration is None:
        return None
    return CalibrationInfo(
        widths=list(calibration.ranges),
        texts=calibration.texts,
        evaluated_texts=calibration.evaluated_texts,
        recall_at_10=dict(calibration.recall),
    )
