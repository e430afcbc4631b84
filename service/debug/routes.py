"""The gradient routes. A handler checks, tokenises, sends a job and says what came of it."""

import asyncio
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel

from models.engines import cosines
from models.gradients.budget import COSTS, Settings, pair_token_steps, token_steps
from service.body import read_request
from service.debug import requests
from service.debug.access import debug_settings, from_no_other_site, switched_on
from service.debug.answers import (
    AttributeAnswer,
    Capabilities,
    Cost,
    FlowAnswer,
    Hashes,
    LayerNormAnswer,
    PairAnswer,
    Parity,
    ParityAnswer,
    Token,
    VjpAnswer,
)
from service.debug.frames import MOST_NONFINITE, Message
from service.debug.process import GradientProcess
from service.debug.requests import (
    AttributeRequest,
    Baseline,
    FlowRequest,
    LayerNormRequest,
    PairRequest,
    ParityRequest,
    Text,
    VjpRequest,
)
from service.errors import Forbidden, InvalidInput, TooLarge
from service.metrics import Metrics, telling_outcome
from service.routing import (
    DirectRoute,
    body_of,
    problems,
    runtime_of,
    scope,
    submit,
    while_connected,
)
from service.runtime import Runtime
from service.tokenizer import TokenizedText
from service.vectors import JSON

_MAX_BODY_BYTES = 2**20
# Below it the twin is not what is served, whatever precision that is in.
_MIN_PARITY = 0.999


router = APIRouter(
    prefix="/debug",
    route_class=DirectRoute,
    dependencies=[scope("debug"), Depends(switched_on), Depends(from_no_other_site)],
)


def _documented(asked: type[BaseModel], answer: type[BaseModel], summary: str) -> dict[str, Any]:
    """What the API's documentation says of a route that reads its own body."""
    return {
        "summary": summary,
        "response_model": answer,
        "openapi_extra": body_of(asked),
        "responses": problems(400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504),
    }


@router.post("/attribute", **_documented(AttributeRequest, AttributeAnswer, "Score the tokens"))
async def attribute(request: Request) -> Response:
    """Tell which tokens of a text made a number: a similarity, a dimension, a length."""
    runtime = runtime_of(request)
    asked = await read_request(request, AttributeRequest, _MAX_BODY_BYTES)
    text = await _tokenize(request, asked.text, "/text")
    target = await _target(request, asked.target)
    settings = Settings(
        asked.tolerance, asked.max_evaluations, asked.samples, asked.sigma, asked.seed
    )
    cost = _cost(request, token_steps(asked.method, len(text.row.ids), settings))
    if asked.dry_run:
        return _answer(AttributeAnswer(model=_hashes(runtime), cost=cost))

    job = {
        "kind": "attribute",
        "row": _row(text),
        "target": target,
        "method": asked.method,
        "point": asked.point,
        "baseline": _baseline(text, asked.baseline, "/text"),
        "settings": vars(settings),
    }
    found, about = await _run(request, job, [text])
    return _answer(AttributeAnswer(**about, cost=cost, tokens=_tokens(text), **found))


@router.post("/attribute/pair", **_documented(PairRequest, PairAnswer, "Score pairs of tokens"))
async def pair(request: Request) -> Response:
    """Tell which tokens of two texts made their similarity, as a matrix that adds up to it."""
    runtime = runtime_of(request)
    asked = await read_request(request, PairRequest, _MAX_BODY_BYTES)
    a, b = await _tokenize(request, asked.a, "/a"), await _tokenize(request, asked.b, "/b")
    steps = pair_token_steps(asked.point, len(a.row.ids), len(b.row.ids), asked.max_evaluations)
    cost = _cost(request, steps)
    if asked.dry_run:
        return _answer(PairAnswer(model=_hashes(runtime), cost=cost))

    job = {
        "kind": "pair",
        "a": {"row": _row(a), "baseline": _baseline(a, asked.baseline, "/a")},
        "b": {"row": _row(b), "baseline": _baseline(b, asked.baseline, "/b")},
        "point": asked.point,
        "tolerance": asked.tolerance,
        "max_evaluations": asked.max_evaluations,
    }
    found, about = await _run(request, job, [a, b])
    return _answer(
        PairAnswer(**about, cost=cost, tokens_a=_tokens(a), tokens_b=_tokens(b), **found)
    )


@router.post("/flow", **_documented(FlowRequest, FlowAnswer, "Follow a training gradient"))
async def flow(request: Request) -> Response:
    """Tell where the gradient of a training objective shrinks, grows or breaks."""
    asked = await read_request(request, FlowRequest, _MAX_BODY_BYTES)
    texts = await _tokenize_all(request, asked.texts)
    cost = _cost(request, sum(len(text.row.ids) for text in texts))
    match asked.objective:
        case requests.Product(vector=vector):
            vectors = [vector]
        case requests.SquaredError(vectors=vectors) | requests.Cotangent(vectors=vectors):
            pass
        case _:
            vectors = []
    job = {
        "kind": "flow",
        "rows": [_row(text) for text in texts],
        "objective": asked.objective.type,
        "vectors": vectors,
        "emulate": asked.emulate,
        "loss_scale": asked.loss_scale,
    }
    found, about = await _run(request, job, texts)
    return _answer(FlowAnswer(**about, cost=cost, **found))


@router.post("/layernorm", **_documented(LayerNormRequest, LayerNormAnswer, "Check the op"))
async def layer_norm(request: Request) -> Response:
    """Tell whether add + LayerNorm is right, step by step, on a text's rows or any others."""
    asked = await read_request(request, LayerNormRequest, _MAX_BODY_BYTES)
    source, texts = asked.source.model_dump(exclude={"text"}), []
    if isinstance(asked.source, requests.NormOfText):
        texts = [await _tokenize(request, asked.source.text, "/source/text")]
        source["row"] = _row(texts[0])
    cost = _cost(request, sum(len(text.row.ids) for text in texts))
    job = {"kind": "layer_norm", **asked.model_dump(), "source": source}
    found, about = await _run(request, job, texts)
    return _answer(LayerNormAnswer(**about, cost=cost, **found))


@router.post("/parity", **_documented(ParityRequest, ParityAnswer, "Compare graph and twin"))
async def parity(request: Request) -> Response:
    """Tell whether the graph for CPUs still is the model of the twin, and name what differs."""
    asked = await read_request(request, ParityRequest, _MAX_BODY_BYTES)
    texts = await _tokenize_all(request, asked.texts)
    if texts:
        tokens = sum(len(text.row.ids) for text in texts)
    else:
        check = await asyncio.to_thread(runtime_of(request).artifact.check)
        tokens = sum(map(len, check.rows))
    cost = _cost(request, tokens)
    job = {"kind": "parity", "rows": [_row(text) for text in texts]}
    found, about = await _run(request, job, texts)
    return _answer(ParityAnswer(**about, cost=cost, **found))


@router.post("/vjp", **_documented(VjpRequest, VjpAnswer, "Take a gradient back"))
async def vjp(request: Request) -> Response:
    """Take the caller's gradient by the vector back to the tokens."""
    asked = await read_request(request, VjpRequest, _MAX_BODY_BYTES)
    if asked.reduce == "full" and not debug_settings(request).full_gradients:
        raise Forbidden(
            "full gradients are switched off; VITRINE_DEBUG__FULL_GRADIENTS=true",
            code="full_gradients",
            pointer="/reduce",
        )
    text = await _tokenize(request, asked.text, "/text")
    _check_width(request, asked.cotangent, "/cotangent")
    if not any(asked.cotangent):
        raise InvalidInput("the cotangent is zero", code="zero_cotangent", pointer="/cotangent")
    cost = _cost(request, len(text.row.ids))
    job = {"kind": "vjp", "row": _row(text), **asked.model_dump(exclude={"text"})}
    found, about = await _run(request, job, [text])
    return _answer(VjpAnswer(**about, cost=cost, tokens=_tokens(text), **found))


@router.get(
    "/capabilities",
    summary="What can be asked for",
    response_model=Capabilities,
    responses=problems(401, 403, 404, 503),
)
async def capabilities(request: Request) -> Response:
    """Tell what can be asked for here, within which limits, and on what device it runs."""
    runtime, settings = runtime_of(request), debug_settings(request)
    opened = await while_connected(request, _process(request).start())
    return _answer(
        Capabilities(
            model=_hashes(runtime),
            points=opened["points"],
            norms=opened["norms"],
            methods=list(COSTS),
            targets=[
                get_args(target.model_fields["type"].annotation)[0]
                for target in get_args(get_args(requests.Target)[0])
            ],
            baselines=list(get_args(Baseline)),
            device=opened["device"],
            torch=opened["torch"],
            op=opened["op"],
            limits=settings.model_dump(include={"max_tokens", "max_token_steps", "deadline_s"}),
        )
    )


def _process(request: Request) -> GradientProcess:
    process: GradientProcess = request.app.state.gradients
    return process


async def _run(
    request: Request, job: Message, texts: Sequence[TokenizedText]
) -> tuple[Message, Message]:
    """Return the answer of a job, and what every answer tells: model, parity, time, warnings."""
    job["compare"] = [_row(text) for text in texts]
    metrics: Metrics = request.app.state.metrics
    with telling_outcome(lambda outcome: metrics.debug_jobs.labels(job["kind"], outcome).inc()):
        reply = await while_connected(request, _process(request).run(job))
    parity = await _compare(request, texts, reply["vectors"]) if texts else None
    answer, warnings = reply["answer"], []
    if parity is not None and not parity.cosine >= _MIN_PARITY:
        warnings.append("the served vectors are not the twin's: see parity")
    integrals = answer.get("completeness") or []
    if not all(i["converged"] for i in (integrals if isinstance(integrals, list) else [integrals])):
        warnings.append("the integral has not converged: allow more evaluations")
    if len(reply["nonfinite"]) == MOST_NONFINITE:
        warnings.append("more numbers may not be finite than are listed")
    about = {
        "model": _hashes(runtime_of(request)),
        "parity": parity,
        "wall_ms": reply["wall_ms"],
        "warnings": warnings,
        "nonfinite": reply["nonfinite"],
    }
    return answer, about


async def _tokenize(request: Request, text: Text, pointer: str) -> TokenizedText:
    """Return the tokens of a text, which are few enough.

    Raises:
        InvalidInput: It has too many, or none, or is not a text that /encode would take.
        TooLarge: It has too many characters.
    """
    limit = debug_settings(request).max_tokens
    content, prompt = (text, None) if isinstance(text, str) else (text.text, text.prompt_name)
    try:
        tokenizer = runtime_of(request).tokenizer
        tokenized = await asyncio.to_thread(tokenizer.tokenized_text, content, prompt)
    except (InvalidInput, TooLarge) as error:
        error.index, error.pointer = None, pointer  # it is no element of `inputs`
        raise
    if len(tokenized.row.ids) > limit:
        raise InvalidInput(
            f"the text has {len(tokenized.row.ids)} tokens; {limit} are taken here",
            code="too_many_tokens",
            pointer=pointer,
        )
    return tokenized


async def _tokenize_all(request: Request, texts: Sequence[Text]) -> list[TokenizedText]:
    return [await _tokenize(request, text, f"/texts/{place}") for place, text in enumerate(texts)]


async def _target(request: Request, target: requests.Target) -> Message:
    """Return the target with texts as rows of ids.

    Raises:
        InvalidInput: A text or number does not suit the model.
    """
    width = runtime_of(request).artifact.manifest.width
    match target:
        case requests.Cosine():
            other = await _tokenize(request, target.text, "/target/text")
            return {"type": "cosine", "row": _row(other)}
        case requests.Margin():
            nearer = await _tokenize(request, target.positive, "/target/positive")
            farther = await _tokenize(request, target.negative, "/target/negative")
            return {"type": "margin", "positive": _row(nearer), "negative": _row(farther)}
        case requests.Dot():
            _check_width(request, target.vector, "/target/vector")
        case requests.Dim() if target.index >= width:
            raise InvalidInput(
                f"the model has dimensions 0 to {width - 1}",
                code="dimensions",
                pointer="/target/index",
            )
    return target.model_dump()


def _check_width(request: Request, vector: Sequence[float], pointer: str) -> None:
    width = runtime_of(request).artifact.manifest.width
    if len(vector) != width:
        raise InvalidInput(
            f"the vector has {len(vector)} numbers; the model's have {width}",
            code="vector_length",
            pointer=pointer,
        )


def _cost(request: Request, steps: int) -> Cost:
    limit = debug_settings(request).max_token_steps
    if steps > limit:
        raise InvalidInput(
            f"this may run {steps} tokens through the model; {limit} are taken: shorten the text, "
            "or allow fewer evaluations or samples",
            code="budget",
        )
    return Cost(token_steps=steps, limit=limit)


def _row(text: TokenizedText) -> Message:
    return {"ids": text.row.ids, "unpooled": text.row.unpooled}


def _baseline(text: TokenizedText, name: Baseline, pointer: str) -> Sequence[int] | None:
    """Return ids for the baseline, or None for zeros.

    Raises:
        InvalidInput: The tokenizer has no such token, or the text consists of it.
    """
    if name == "zero":
        return None
    if name not in text.baseline:
        raise InvalidInput(
            f"the model's tokenizer has no {name} token; take another baseline",
            code="no_baseline",
            pointer="/baseline",
        )
    if text.baseline[name] == text.row.ids:
        raise InvalidInput(
            "the text is its own baseline", code="baseline_equals_input", pointer=pointer
        )
    return text.baseline[name]


async def _compare(
    request: Request, texts: Sequence[TokenizedText], vectors: Sequence[Sequence[float]]
) -> Parity:
    """Return how far the twin's vectors are from the served ones."""
    runtime = runtime_of(request)
    outcome = await submit(runtime, [text.row for text in texts])
    served, ours = np.stack(outcome.results), np.array(vectors, np.float32)  # (B, W)
    return Parity(
        cosine=float(cosines(served, ours).min()),
        max_abs=float(np.abs(served - ours).max()),
        engine=f"{runtime.engine.name}; precision={runtime.engine.precision}",
    )


def _tokens(text: TokenizedText) -> list[Token]:
    return [
        Token(token=token, start=span and span[0], end=span and span[1])
        for token, span in zip(text.tokens, text.spans, strict=True)
    ]


def _hashes(runtime: Runtime) -> Hashes:
    manifest = runtime.artifact.manifest
    return Hashes(
        name=manifest.name,
        weights_sha256=dict(manifest.weights_sha256),
        graph_sha256=runtime.graph_sha256,
        tokenizer_sha256=manifest.files["tokenizer.json"],
    )


def _answer(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type=JSON)
