"""`POST /debug/parity`: is the served model the reference model?"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Response
from pydantic import Field

from models.artifact import sha256
from models.engines import Precision
from models.gradients.budget import parity_token_steps
from models.gradients.inputs import InputRow
from models.gradients.results.parity import FileHash, ParityCheck
from service.debug.pipeline.call import Call
from service.debug.pipeline.messages import Job
from service.debug.pipeline.request_fields import ModelRequest, Text
from service.debug.pipeline.response import response_model
from service.debug.pipeline.route import GradientRoute
from service.debug.pipeline.served_vectors import encode
from service.debug.pipeline.texts import row_of, text_with_prompt, tokenize_all
from service.inference.model.model import Model


class ParityRequest(ModelRequest):
    """Comparison of the served graph with the reference model."""

    texts: Annotated[list[Text], Field(max_length=16)] = Field(
        [],
        description="Texts to encode with both the served model and the reference model; empty: "
        "the artifact's check inputs",
    )


@dataclass(frozen=True, kw_only=True)
class ParityJob(Job):
    """Job: compare the served model with the reference model.

    Attributes:
        vectors: Served vectors of `rows`, before normalisation, `(B, W)`.
        engine: Name of the engine that computed `vectors`.
        precision: Precision of the engine.
        files: Hashes of all files of the artifact.
        texts: Texts of the request, prompts included, and their token ids from the served
            tokenizer.
        check_texts: Texts of the self-check, their token ids from the served tokenizer, and those
            recorded at export.
    """

    kind: Literal["parity"] = "parity"
    request: ParityRequest
    vectors: Sequence[Sequence[float]]
    engine: str
    precision: Precision
    files: Sequence[FileHash]
    texts: Sequence[tuple[str, Sequence[int]]]
    check_texts: Sequence[tuple[str, Sequence[int], Sequence[int]]]


ParityResponse = response_model("ParityResponse", ParityCheck)


async def parity(body: ParityRequest, call: Call) -> Response:
    """Compare the served model with the reference model, and list the differences."""
    model = call.model
    tokenized = await tokenize_all(call, body.texts)
    rows = [row_of(text) for text in tokenized] or [
        InputRow(ids, adapter=adapter)
        for ids, adapter in zip(model.check.rows, model.check.adapters, strict=True)
    ]
    cost = call.cost_of(parity_token_steps(len(row.ids) for row in rows))
    check_ids = await asyncio.to_thread(model.tokenizer.ids, model.check.texts)
    check_rows = model.check.rows[: len(check_ids)]
    files = await asyncio.to_thread(_files, model)
    served = await call.within_deadline(encode(model, rows))
    job = ParityJob(
        request=body,
        rows=rows,
        vectors=served.tolist(),
        engine=model.engine.name,
        precision=model.engine.precision,
        files=files,
        texts=[
            (text_with_prompt(model, text), row.ids)
            for text, row in zip(body.texts, rows, strict=False)
        ],
        check_texts=list(zip(model.check.texts, check_ids, check_rows, strict=True)),
    )
    return await call.answer(job, cost, ParityResponse, served)


def _files(model: Model) -> list[FileHash]:
    """Return the hashes of all files of the artifact, at startup and now."""
    paths = {name: model.artifact.path / name for name in model.files}
    return [
        FileHash(name, at_start, sha256(paths[name]) if paths[name].is_file() else None)
        for name, at_start in model.files.items()
    ]


ROUTE = GradientRoute(
    "parity",
    "Parity with the reference model",
    parity,
    ParityRequest,
    ParityResponse,
    kinds=("embedding",),
)
