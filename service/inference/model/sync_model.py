"""A synchronous wrapper of `Model`, with an event loop in a background thread."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from models.quantization import OutputDtype
from service.inference.call_options import OnOverflow, Priority
from service.inference.errors import NotReady
from service.inference.model.chunk_embeddings import ChunkEmbeddings
from service.inference.model.model import Inputs, Model
from service.inference.model.opening import DEFAULT_OPTIONS, ModelOptions, open_model
from service.inference.model.pair_scores import PairScores
from service.inference.results.quantization import Quantizer
from service.inference.results.scores import Classification
from service.inference.results.tags import Aggregation, Tags
from service.inference.results.vectors import (
    Embeddings,
    Encoded,
    EncodeOutput,
    MultiEmbeddings,
    SparseEmbeddings,
    TokenEmbeddings,
)
from service.inference.tokenizing.chunking import Chunking

Result = TypeVar("Result")


class SyncModel:
    """An open model with synchronous methods, which may be called from any thread.

    Args:
        path: Folder of an artifact written by `vitrine-export`.
        options: Runtime options.

    Raises:
        ArtifactError: The artifact is incomplete or invalid, or was modified after its export.
        EngineError: The engine is unknown or unavailable on this machine, or fails the self-check.
    """

    def __init__(self, path: Path | str, options: ModelOptions = DEFAULT_OPTIONS) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.model: Model = self._run(open_model(path, options))
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> "SyncModel":
        """Return the model."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()

    def close(self) -> None:
        """Close the model and end the background thread."""
        self._run(self.model.close())
        self._stop_loop()

    def encode(
        self,
        inputs: Inputs,
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_dim: int | None = None,
        normalize: bool | None = None,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
        priority: Priority = "interactive",
    ) -> Embeddings:
        """Encode texts or rows of token ids into one vector each; see `Model.encode`."""
        return self._run(
            self.model.encode(
                inputs,
                prompt_name=prompt_name,
                dimensions=dimensions,
                truncate_dim=truncate_dim,
                normalize=normalize,
                on_overflow=on_overflow,
                timeout_s=timeout_s,
                priority=priority,
            )
        )

    def encode_chunks(
        self,
        texts: str | Sequence[str],
        chunking: Chunking,
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_dim: int | None = None,
        normalize: bool | None = None,
        timeout_s: float | None = None,
        priority: Priority = "interactive",
    ) -> ChunkEmbeddings:
        """Encode texts of any length into one vector per chunk; see `Model.encode_chunks`."""
        return self._run(
            self.model.encode_chunks(
                texts,
                chunking,
                prompt_name=prompt_name,
                dimensions=dimensions,
                truncate_dim=truncate_dim,
                normalize=normalize,
                timeout_s=timeout_s,
                priority=priority,
            )
        )

    def encode_tokens(
        self,
        inputs: Inputs,
        *,
        prompt_name: str | None = None,
        normalize: bool = False,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
        priority: Priority = "interactive",
    ) -> TokenEmbeddings:
        """Encode texts or rows of token ids into a vector per token; see `Model.encode_tokens`."""
        return self._run(
            self.model.encode_tokens(
                inputs,
                prompt_name=prompt_name,
                normalize=normalize,
                on_overflow=on_overflow,
                timeout_s=timeout_s,
                priority=priority,
            )
        )

    def encode_sparse(
        self,
        inputs: Inputs,
        *,
        prompt_name: str | None = None,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
        priority: Priority = "interactive",
    ) -> SparseEmbeddings:
        """Encode texts or rows of token ids into sparse vectors; see `Model.encode_sparse`."""
        return self._run(
            self.model.encode_sparse(
                inputs,
                prompt_name=prompt_name,
                on_overflow=on_overflow,
                timeout_s=timeout_s,
                priority=priority,
            )
        )

    def encode_multi(
        self,
        inputs: Inputs,
        *,
        prompt_name: str | None = None,
        normalize: bool | None = None,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
        priority: Priority = "interactive",
    ) -> MultiEmbeddings:
        """Encode texts or rows of token ids into multi-vectors; see `Model.encode_multi`."""
        return self._run(
            self.model.encode_multi(
                inputs,
                prompt_name=prompt_name,
                normalize=normalize,
                on_overflow=on_overflow,
                timeout_s=timeout_s,
                priority=priority,
            )
        )

    def encode_outputs(
        self,
        inputs: Inputs,
        outputs: Sequence[EncodeOutput],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_dim: int | None = None,
        normalize: bool | None = None,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
        priority: Priority = "interactive",
    ) -> Encoded:
        """Encode texts or rows of token ids in several ways; see `Model.encode_outputs`."""
        return self._run(
            self.model.encode_outputs(
                inputs,
                outputs,
                prompt_name=prompt_name,
                dimensions=dimensions,
                truncate_dim=truncate_dim,
                normalize=normalize,
                on_overflow=on_overflow,
                timeout_s=timeout_s,
                priority=priority,
            )
        )

    def quantizer(
        self,
        dtype: OutputDtype,
        *,
        dimensions: int | None = None,
        truncate_dim: int | None = None,
        normalize: bool | None = None,
    ) -> Quantizer:
        """Return the conversion to `dtype` of the vectors of `encode`; see `Model.quantizer`."""
        return self.model.quantizer(
            dtype, dimensions=dimensions, truncate_dim=truncate_dim, normalize=normalize
        )

    def classify(
        self,
        inputs: str | Sequence[str | tuple[str, str]],
        *,
        prompt_name: str | None = None,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
        priority: Priority = "interactive",
    ) -> Classification:
        """Return the score of each label for each text or pair of texts; see `Model.classify`."""
        return self._run(
            self.model.classify(
                inputs,
                prompt_name=prompt_name,
                on_overflow=on_overflow,
                timeout_s=timeout_s,
                priority=priority,
            )
        )

    def tag(
        self,
        inputs: str | Sequence[str],
        *,
        aggregation: Aggregation = "simple",
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
        priority: Priority = "interactive",
    ) -> Tags:
        """Return the labelled spans of each text, such as named entities; see `Model.tag`."""
        return self._run(
            self.model.tag(
                inputs,
                aggregation=aggregation,
                on_overflow=on_overflow,
                timeout_s=timeout_s,
                priority=priority,
            )
        )

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        prompt_name: str | None = None,
        max_tokens_per_query: int | None = None,
        max_tokens_per_doc: int | None = None,
        explain: bool = False,
        chunking: Chunking | None = None,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
        priority: Priority = "interactive",
    ) -> PairScores:
        """Return the score of each document for a query; see `Model.rerank`."""
        return self._run(
            self.model.rerank(
                query,
                documents,
                top_n=top_n,
                prompt_name=prompt_name,
                max_tokens_per_query=max_tokens_per_query,
                max_tokens_per_doc=max_tokens_per_doc,
                explain=explain,
                chunking=chunking,
                on_overflow=on_overflow,
                timeout_s=timeout_s,
                priority=priority,
            )
        )

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        explain: bool = False,
        chunking: Chunking | None = None,
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | None = None,
        priority: Priority = "interactive",
    ) -> PairScores:
        """Return one score per pair of a query and a document; see `Model.score`."""
        return self._run(
            self.model.score(
                queries,
                documents,
                prompt_name=prompt_name,
                explain=explain,
                chunking=chunking,
                on_overflow=on_overflow,
                timeout_s=timeout_s,
                priority=priority,
            )
        )

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._loop.is_closed():
            work.close()
            raise NotReady("the model is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
