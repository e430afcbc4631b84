"""Vectors of a running server, in place of those of a bulk job.

The output has the columns of a bulk job for dense vectors, in parts that are kept when the
evaluation is interrupted. A text that the server refuses is a row with an error.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import httpx2
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from service.bulk.options import ERROR, ROW, BulkError, OptionError
from service.bulk.parts import METADATA
from service.evaluation.collection import CONTENT

ContractName = Literal["vitrine", "openai", "tei"]
CONTRACTS: tuple[ContractName, ...] = get_args(ContractName)

_PART_ROWS = 1024
# Number of texts of a request, which all servers accept, and of requests at a time.
_REQUEST_TEXTS, _REQUESTS = 32, 4
_TIMEOUT_S = 300.0
# Seconds before a request that the server could not answer is sent again.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}

Vector = Sequence[float]


@dataclass(frozen=True)
class ServerJob:
    """Texts that a server encodes.

    Attributes:
        url: URL of the server, below which it has the routes of the contract.
        contract: Contract of the server.
        model: Name of the model; "": the server has one.
        prefix: Text before each text.
        key: API key; "": none.
    """

    url: str
    contract: ContractName
    model: str = ""
    prefix: str = ""
    key: str = ""

    @property
    def settings(self) -> dict[str, str]:
        """What is known of what determines the vectors."""
        names = ("url", "contract", "model", "prefix")
        return {name: getattr(self, name) for name in names}


class _Contract(NamedTuple):
    """A server's route for vectors.

    Attributes:
        path: Path of the route.
        texts: Field with the texts.
        fields: Further fields of a request.
        vectors: Returns the vectors in a response, in the order of the texts.
    """

    path: str
    texts: str
    fields: Mapping[str, object]
    vectors: Callable[[Any], Sequence[Vector]]


def _openai_vectors(response: Any) -> Sequence[Vector]:  # noqa: ANN401 - JSON
    rows = sorted(response["data"], key=lambda row: row["index"])
    return [row["embedding"] for row in rows]


_CONTRACTS: Mapping[ContractName, _Contract] = {
    "vitrine": _Contract("/encode", "inputs", {}, lambda response: response["embeddings"]),
    "openai": _Contract("/v1/embeddings", "input", {"encoding_format": "float"}, _openai_vectors),
    "tei": _Contract("/embed", "inputs", {"truncate": True}, lambda response: response),
}


async def encode_on_server(job: ServerJob, texts: Path, output: Path, stop: asyncio.Event) -> bool:
    """Write the vectors of texts to a folder, or what is left of them.

    Args:
        job: How to encode them.
        texts: Parquet file of a collection.
        output: Folder for the parts.
        stop: Ends the job after the current part, if it is set.

    Returns:
        Whether all parts are there.

    Raises:
        OptionError: The folder has the output of another job.
        BulkError: The server does not answer, or answers something else than vectors.
    """
    column = pq.read_table(texts, columns=["text"]).column(0)
    content = {**job.settings, "texts": pq.read_schema(texts).metadata[CONTENT].decode()}
    await asyncio.to_thread(output.mkdir, parents=True, exist_ok=True)
    headers = {"Authorization": f"Bearer {job.key}"} if job.key else {}
    async with httpx2.AsyncClient(headers=headers, timeout=_TIMEOUT_S) as client:
        server = _Server(client, job)
        for start in range(0, len(column), _PART_ROWS):
            part = output / f"part-{start // _PART_ROWS:05}.parquet"
            if not await asyncio.to_thread(part.exists):
                rows = await server.encode(column.slice(start, _PART_ROWS).to_pylist(), start)
                schema = rows.schema.with_metadata({METADATA: orjson.dumps(content)})
                partial = part.with_name(f".{part.name}.partial")
                pq.write_table(pa.Table.from_batches([rows]).cast(schema), partial)
                await asyncio.to_thread(partial.rename, part)
            elif orjson.loads(pq.read_schema(part).metadata[METADATA]) != content:
                raise OptionError(f"{output} has vectors of another server or of other texts")
            if stop.is_set():
                return start + _PART_ROWS >= len(column)
    return True


class _Server:
    """A server that encodes texts.

    Args:
        client: HTTP client.
        job: The job.
    """

    def __init__(self, client: httpx2.AsyncClient, job: ServerJob) -> None:
        self._client = client
        self._job = job
        self._contract = _CONTRACTS[job.contract]
        self._url = job.url.rstrip("/") + self._contract.path
        self._requests = asyncio.Semaphore(_REQUESTS)

    async def encode(self, texts: Sequence[str], first: int) -> pa.RecordBatch:
        """Return the vector or the error of each text.

        Args:
            texts: Texts.
            first: Number of the row of the first.
        """
        starts = range(0, len(texts), _REQUEST_TEXTS)
        parts = await asyncio.gather(
            *(self._encoded(texts[start : start + _REQUEST_TEXTS]) for start in starts)
        )
        results = [result for part in parts for result in part]
        vectors = [None if isinstance(result, str) else result for result in results]
        if not any(vectors):
            raise BulkError(
                f"{self._url} refuses all of {len(texts)} texts, the first: {results[0]}"
            )
        width = next((len(vector) for vector in vectors if vector is not None), 1)
        return pa.record_batch(
            {
                ROW: pa.array(range(first, first + len(texts)), pa.int64()),
                "embedding": pa.array(vectors, pa.list_(pa.float32(), width)),
                ERROR: pa.array(
                    [result if isinstance(result, str) else None for result in results], pa.string()
                ),
            }
        )

    async def _encoded(self, texts: Sequence[str]) -> Sequence[Vector | str]:
        """Return the vector of each text, or why the server refuses it."""
        response = await self._response(texts)
        if response.is_success:
            return self._vectors(response, len(texts))
        if len(texts) == 1:
            return [f"{response.status_code}: {response.text[:500]}"]
        middle = len(texts) // 2  # one of the texts may be the reason
        return [
            *await self._encoded(texts[:middle]),
            *await self._encoded(texts[middle:]),
        ]

    def _vectors(self, response: httpx2.Response, count: int) -> Sequence[Vector]:
        try:
            vectors = self._contract.vectors(orjson.loads(response.content))
            if len(vectors) == count and all(isinstance(vector, list) for vector in vectors):
                return vectors
        except (ValueError, KeyError, TypeError):
            pass
        raise BulkError(f"{self._url} answers something else than one vector for each text")

    async def _response(self, texts: Sequence[str]) -> httpx2.Response:
        body = {
            **self._contract.fields,
            self._contract.texts: [self._job.prefix + text for text in texts],
        }
        if self._job.model:
            body["model"] = self._job.model
        problem = ""
        for pause_s in (*_PAUSES_S, None):
            try:
                async with self._requests:
                    response = await self._client.post(self._url, json=body)
            except httpx2.HTTPError as error:
                problem = str(error) or type(error).__name__
            else:
                if response.status_code in (401, 403, 404, 405):  # of no text
                    raise BulkError(f"{self._url} answers {response.status_code}")
                if response.status_code not in _TRY_AGAIN:
                    return response
                problem = f"it answers {response.status_code}"
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        raise BulkError(
            f"{self._url} cannot be used: {problem}; start again when the cause is gone"
        )
