"""Vectors of a running server, in place of those of a bulk job.

The output has the columns of a bulk job for dense vectors, in parts that are kept when the
evaluation is interrupted. A text that the server refuses is a row with an error.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import httpx2
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from service.bulk.options import ERROR, ROW, BulkError, OptionError
from service.bulk.parts import METADATA, native_file
from service.bulk.sources import reading_errors
from service.evaluation.collection import CONTENT, write_table

ContractName = Literal["vitrine", "openai", "tei"]
CONTRACTS: tuple[ContractName, ...] = get_args(ContractName)

_PART_ROWS = 1024
# Number of texts of a request, which all servers accept, and of requests at a time.
_REQUEST_TEXTS, _REQUESTS = 32, 4
_TIMEOUT_S = 300.0
# Seconds before a request that the server could not answer is sent again.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
# Headers with which servers of Vitrine tell what determines their vectors.
_VERSION_HEADERS = ("X-Model-Version", "X-Engine")
# Number of characters of a server's answer in a message.
_SHOWN_CHARS = 300

Vector = NDArray[np.float32]
Version = Mapping[str, Any]


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
        """Settings of the job, which determine the vectors with the server's model."""
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
    vectors: Callable[[Any], object]


def _openai_vectors(response: Any) -> object:  # noqa: ANN401 - JSON
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
    file = pq.ParquetFile(native_file(texts))
    content = {**job.settings, "texts": file.schema_arrow.metadata[CONTENT].decode()}
    await asyncio.to_thread(output.mkdir, parents=True, exist_ok=True)
    if not re.fullmatch("[!-~]*", job.key):  # errors about invalid headers would show the key
        raise OptionError("the API key must have printable ASCII characters and no spaces")
    headers = {"Authorization": f"Bearer {job.key}"} if job.key else {}
    first, total = 0, int(file.metadata.num_rows)
    async with httpx2.AsyncClient(headers=headers, timeout=_TIMEOUT_S) as client:
        server = _Server(client, job)
        for number, batch in enumerate(file.iter_batches(_PART_ROWS, columns=["text"])):
            part = output / f"part-{number:05}.parquet"
            if not await asyncio.to_thread(part.exists):
                rows = await server.encode(batch.column(0).to_pylist(), first)
                description = orjson.dumps({**content, "version": server.version})
                schema = rows.schema.with_metadata({METADATA: description})
                await asyncio.to_thread(write_table, part, schema, [rows.columns])
            with reading_errors(str(part)):  # a file of an earlier run
                metadata = pq.read_schema(native_file(part)).metadata or {}
            known = orjson.loads(metadata.get(METADATA, b"{}"))
            server.check(known.pop("version", None), part)
            if known != content:
                raise OptionError(f"{output} has vectors of another server or of other texts")
            first += len(batch)
            if stop.is_set():
                return first >= total
    return True


class _Server:
    """A server that encodes texts.

    Args:
        client: HTTP client.
        job: The job.

    Attributes:
        version: Width of the vectors, and the headers with which the server names its model; None:
            there was no response yet.
    """

    def __init__(self, client: httpx2.AsyncClient, job: ServerJob) -> None:
        self._client = client
        self._job = job
        self._contract = _CONTRACTS[job.contract]
        self._url = job.url.rstrip("/") + self._contract.path
        self._requests = asyncio.Semaphore(_REQUESTS)
        self.version: Version | None = None

    def check(self, version: Version | None, place: object) -> None:
        """Compare the version of the model with that of vectors in another place.

        Raises:
            BulkError: They differ.
        """
        self.version = self.version or version
        if version != self.version:
            raise BulkError(
                f"{place} has vectors of {version}, but others are of {self.version}: the server "
                "has another model by now; choose another folder"
            )

    async def encode(self, texts: Sequence[str], first: int) -> pa.RecordBatch:
        """Return the vector or the error of each text.

        Args:
            texts: Texts.
            first: Number of the row of the first.
        """
        starts = range(0, len(texts), _REQUEST_TEXTS)
        parts = await asyncio.gather(
            *(self._encode(texts[start : start + _REQUEST_TEXTS]) for start in starts)
        )
        results = [result for part in parts for result in part]
        vectors = [None if isinstance(result, str) else result for result in results]
        is_full = len(texts) == _PART_ROWS  # the last part may be of a few texts
        if self.version is None or (is_full and all(vector is None for vector in vectors)):
            raise BulkError(
                f"{self._url} refuses all of {len(texts)} texts, the first: {results[0]}"
            )
        kind = pa.list_(pa.float32(), self.version["width"])
        return pa.record_batch(
            {
                ROW: pa.array(range(first, first + len(texts)), pa.int64()),
                "embedding": pa.array(vectors, kind),
                ERROR: pa.array(
                    [result if isinstance(result, str) else None for result in results], pa.string()
                ),
            }
        )

    async def _encode(self, texts: Sequence[str]) -> Sequence[Vector | str]:
        """Return the vector of each text, or why the server refuses it."""
        response = await self._response(texts)
        if response.is_success:
            return self._vectors(response, len(texts))
        if len(texts) == 1:
            return [f"{response.status_code}: {response.text[:_SHOWN_CHARS]}"]
        middle = len(texts) // 2  # one of the texts may be the reason
        return [
            *await self._encode(texts[:middle]),
            *await self._encode(texts[middle:]),
        ]

    def _vectors(self, response: httpx2.Response, count: int) -> Sequence[Vector]:
        """Return the vectors in a response.

        Raises:
            BulkError: There is something else, or they are of another model than others.
        """
        try:
            answer = self._contract.vectors(orjson.loads(response.content))
            vectors = np.asarray(answer, np.float32)
        except (ValueError, KeyError, TypeError):
            vectors = np.empty((0, 0), np.float32)
        if vectors.ndim != 2 or len(vectors) != count or not np.isfinite(vectors).all():
            raise BulkError(f"{self._url} answers something else than one vector for each text")
        headers = {name: response.headers.get(name) for name in _VERSION_HEADERS}
        self.check({"width": vectors.shape[1], **headers}, self._url)
        return list(vectors)

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
            except (httpx2.InvalidURL, UnicodeError) as error:
                raise OptionError(f"{self._url} cannot be requested: {error}") from error
            except httpx2.HTTPError as error:
                problem = str(error) or type(error).__name__
            else:
                if response.status_code in (401, 403, 404, 405):  # of no text
                    problem = f"{response.status_code}: {response.text[:_SHOWN_CHARS]}"
                    raise BulkError(f"{self._url} answers {problem}")
                if response.status_code not in _TRY_AGAIN:
                    return response
                problem = f"it answers {response.status_code}"
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        raise BulkError(
            f"{self._url} cannot be used: {problem}; start again when the cause is gone"
        )
