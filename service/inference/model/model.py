"""The Python API of a model: encode, classify, tag and score texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from models.quantization import OutputDtype
from service.inference.call_options import (
    CallArguments,
    Deadline,
    OnOverflow,
    Priority,
    call_options,
    with_instruction,
)
from service.inference.errors import InvalidInput
from service.inference.explain.options import TOP_N, Deletion, Explain, Terms
from service.inference.model import chunk_embeddings, encoding, scoring
from service.inference.model.arguments import (
    USERS,
    check_options,
    check_vector_options,
    entity_labels,
    explanation_of,
    explanation_of_scores,
    id_lists,
    input_list,
    pair_list,
    refuse_unused,
    refuse_with_space,
    text_list,
)
from service.inference.model.chunk_embeddings import ChunkEmbeddings
from service.inference.model.classification import Classification
from service.inference.model.explanations import explain_labels, explain_scores
from service.inference.model.pair_scores import PairScores
from service.inference.model.similarity import VectorsOfTexts, compare_all, similarity_of
from service.inference.model.zero_shot import CandidateLabels, classify_by_candidates, texts_for
from service.inference.results import tags
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.quantization import Quantizer, make_quantizer
from service.inference.results.scores import Scores
from service.inference.results.spans import EntityLabels, find_entities
from service.inference.results.tags import Aggregation, Tags
from service.inference.results.vectors import (
    Embeddings,
    Encoded,
    EncodeOutput,
    MultiEmbeddings,
    SparseEmbeddings,
    TokenEmbeddings,
    VectorOptions,
)
from service.inference.tokenizing.chunking import Chunking
from service.inference.tokenizing.pairs import NO_LIMITS
from service.inference.tokenizing.rows import Span

Inputs = str | Sequence[str | Sequence[int]]


@dataclass(frozen=True, repr=False)
class Model(LoadedModel):
    """An open model, as returned by `open_model`."""

    async def __aenter__(self) -> "Model":
        """Return the model."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the model."""
        await self.close()

    async def encode(
        self,
        inputs: Inputs,
        *,
        dimensions: int | None = None,
        truncate_dim: int | None = None,
        normalize: bool | None = None,
        space: str | None = None,
        **options: Unpack[CallArguments],
    ) -> Embeddings:
        """Encode texts or rows of token ids into one vector each.

        Concurrent calls share batches. Cancelling a call removes its inputs from the queue.

        Args:
            inputs: One text, or a list of texts and lists of token ids. Token ids get no prompt and
                no special tokens.
            dimensions: Number of leading dimensions to keep; None: all. Vectors are truncated
                before they are normalised, as by OpenAI.
            truncate_dim: Number of leading dimensions to keep; None: all. Vectors are truncated
                after the model's own normalisation, as by sentence-transformers, and normalised
                again if `normalize` is True.
            normalize: Whether to scale vectors to unit length; None: the model's own setting.
            space: Name of the space into which to map vectors of queries, in order to search an
                index of another model; None: that of the model itself. Mapped vectors have the
                other model's width and length, so it excludes the arguments above. Texts of queries
                without a prompt get that with which the map was measured.
            options: See `CallArguments`.

        Raises:
            InvalidInput: An argument or an input is invalid; `index` is the index of the input.
            TooLarge: A text has too many characters.
            Overloaded: The queue is full, or the call would miss its deadline.
            DeadlineExceeded: The deadline has passed.
            InferenceFailed: The engine failed on an input; `index` is the index of the input.
            NotReady: The model is closed, or its engine has stopped.
        """
        encoded = await self.encode_outputs(
            inputs,
            ("pooled",),
            dimensions=dimensions,
            truncate_dim=truncate_dim,
            normalize=normalize,
            space=space,
            with_offsets=False,
            **options,
        )
        return encoded["pooled"]

    async def encode_chunks(
        self,
        texts: str | Sequence[str],
        chunking: Chunking,
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_dim: int | None = None,
        normalize: bool | None = None,
        timeout_s: float | Deadline | None = None,
        priority: Priority = "interactive",
    ) -> ChunkEmbeddings:
        """Encode texts of up to `max_chars` characters into one vector per chunk.

        The vector of a chunk is that of its text, or with `chunking.late` the mean of the vectors
        that its tokens have in the whole text. No part of a text is dropped.

        Args:
            texts: One text, or a list of texts.
            chunking: How to divide the texts.
            prompt_name: Name of the prompt to prepend to each chunk, or to the text in late
                chunking; None: the model's default prompt.
            dimensions: See `encode`.
            truncate_dim: See `encode`.
            normalize: See `encode`.
            timeout_s: See `QueueArguments`.
            priority: See `QueueArguments`.

        Raises:
            InvalidInput: The texts have more than `max_chunks` chunks. A chunk of the requested
                size does not fit into the model's maximum length. Late chunking does not apply to
                the model, or its texts exceed `max_token_vectors` tokens in total.
            VitrineError: Any error of `encode`, under the same conditions.
        """
        options = call_options(prompt_name, timeout_s=timeout_s, priority=priority)
        check_options(chunking=chunking)
        chosen = VectorOptions(dimensions, truncate_dim, normalize)
        check_vector_options(self, chosen)
        return await chunk_embeddings.encode_chunks(
            self, text_list(texts), chunking, chosen, options
        )

    async def encode_tokens(
        self,
        inputs: Inputs,
        *,
        normalize: bool = False,
        with_offsets: bool = True,
        **options: Unpack[CallArguments],
    ) -> TokenEmbeddings:
        """Encode texts or rows of token ids into one vector per token.

        Args:
            inputs: See `encode`.
            normalize: Whether to scale each token vector to unit length.
            with_offsets: Whether the rows of the result have token offsets.
            options: See `CallArguments`.

        Raises:
            InvalidInput: The inputs exceed `max_token_vectors` tokens in total.
            VitrineError: Any error of `encode`, under the same conditions.
        """
        encoded = await self.encode_outputs(
            inputs,
            ("tokens",),
            normalize=normalize,
            with_offsets=with_offsets,
            **options,
        )
        return encoded["tokens"]

    async def encode_sparse(
        self,
        inputs: Inputs,
        **options: Unpack[CallArguments],
    ) -> SparseEmbeddings:
        """Encode texts or rows of token ids into one sparse vector each.

        An inference-free model looks up the weights of the tokens of queries, without the engine,
        as `encode_query` of sentence-transformers does; queries are the inputs with the prompt
        "query".

        Args:
            inputs: See `encode`.
            options: See `CallArguments`.

        Raises:
            VitrineError: Any error of `encode`, under the same conditions.
        """
        encoded = await self.encode_outputs(
            inputs,
            ("sparse",),
            with_offsets=False,
            **options,
        )
        return encoded["sparse"]

    async def encode_multi(
        self,
        inputs: Inputs,
        *,
        normalize: bool | None = None,
        with_offsets: bool = True,
        **options: Unpack[CallArguments],
    ) -> MultiEmbeddings:
        """Encode texts or rows of token ids into multi-vectors, one vector per token.

        The prompts "query" and "document" select the model's rules for queries and documents, as
        `encode_query` and `encode_document` of sentence-transformers do: lengths, tokens that
        expand a query, and tokens without a vector. Other prompts, and none, are those of `encode`.

        Args:
            inputs: See `encode`. The rules apply to token ids too, but not the prompt's text.
            normalize: Whether to scale each vector to unit length; None: the model's own setting.
                Vectors that are pooled are scaled before that too, if the model does.
            with_offsets: Whether the rows of the result have token offsets.
            options: See `CallArguments`.

        Raises:
            InvalidInput: The inputs exceed `max_token_vectors` tokens in total.
            VitrineError: Any error of `encode`, under the same conditions.
        """
        encoded = await self.encode_outputs(
            inputs,
            ("multi",),
            normalize=normalize,
            with_offsets=with_offsets,
            **options,
        )
        return encoded["multi"]

    async def encode_outputs(
        self,
        inputs: Inputs,
        outputs: Sequence[EncodeOutput],
        *,
        dimensions: int | None = None,
        truncate_dim: int | None = None,
        normalize: bool | None = None,
        space: str | None = None,
        with_offsets: bool = True,
        **options: Unpack[CallArguments],
    ) -> Encoded:
        """Encode texts or rows of token ids into several kinds of vectors, in one forward pass.

        Args:
            inputs: See `encode`.
            outputs: Keys of the result: "pooled", see `encode`; "tokens", see `encode_tokens`;
                "sparse", see `encode_sparse`; and "multi", see `encode_multi`.
            dimensions: See `encode`; for "pooled" alone.
            truncate_dim: See `encode`; for "pooled" alone.
            normalize: See `encode`; None: the model's own setting, but False for "tokens". Not for
                "sparse".
            space: See `encode`; for "pooled" alone.
            with_offsets: Whether the rows of the result have token offsets.
            options: See `CallArguments`.

        Raises:
            InvalidInput: An argument applies to none of the outputs.
            VitrineError: Any error of `encode` and `encode_tokens`, under the same conditions.
        """
        call = call_options(**options)
        check_options(outputs=outputs, space=space, with_offsets=with_offsets)
        chosen = VectorOptions(dimensions, truncate_dim, normalize)
        refuse_unused(USERS, outputs, chosen._asdict())
        check_vector_options(self, chosen)
        if space is not None:
            refuse_with_space(**chosen._asdict())
        mapping = None if space is None else self.space(space, outputs)
        kinds = tuple(dict.fromkeys(outputs))
        return await encoding.encode_outputs(
            self, input_list(inputs), kinds, chosen, mapping, with_offsets, call
        )

    def similarity(self, a: VectorsOfTexts, b: VectorsOfTexts) -> Scores:
        """Return the similarity of each text of `a` with each of `b`, `(N, M)`.

        The similarity is the model's own, as of `score`. That of `score` also has the prompts of
        queries and documents, which `encode` takes as `prompt_name`.

        Args:
            a: Result of `encode`, `encode_sparse` or `encode_multi`, or vectors `(N, W)`.
            b: The same for other texts.

        Raises:
            InvalidInput: The model has no vectors, or `a` and `b` are something else, or of
                different kinds or widths; `pointer` names one of them.
        """
        output, similarity = similarity_of(self)
        self.check_outputs((output,))
        return compare_all(similarity.kind, a, b)

    def quantizer(
        self,
        dtype: OutputDtype,
        *,
        dimensions: int | None = None,
        truncate_dim: int | None = None,
        normalize: bool | None = None,
    ) -> Quantizer:
        """Return the conversion to `dtype` of the vectors `(B, W)` that `encode` returns.

        Calling it with vectors returns their codes, `(B, W)`, or packed bits, `(B, W / 8)`. The
        other arguments must be those of the call of `encode`.

        Args:
            dtype: "int8" and "uint8" need the ranges that `vitrine-export --calibrate` exports;
                values outside them are clipped. "binary" and "ubinary" are the signs of 8
                dimensions in a byte, as int8 or uint8. "float32" leaves vectors as they are.
            dimensions: See `encode`. For "int8" and "uint8", if the model normalises vectors, one
                of the calibrated widths.
            truncate_dim: See `encode`.
            normalize: See `encode`. For "int8" and "uint8", None or the model's own setting.

        Raises:
            InvalidInput: The model has no pooled vectors, or no ranges for vectors of these
                arguments (code "not_calibrated"), or the bits of a vector do not fill whole bytes.
        """
        check_options(dtype=dtype)
        if dtype != "float32":
            self.check_outputs(("pooled",))
        chosen = VectorOptions(dimensions, truncate_dim, normalize)
        check_vector_options(self, chosen)
        return make_quantizer(dtype, self.artifact.manifest, self.calibration, chosen)

    async def classify(
        self,
        inputs: str | Sequence[str | tuple[str, str]],
        *,
        candidates: CandidateLabels | None = None,
        explain: bool | Deletion = False,
        **options: Unpack[CallArguments],
    ) -> Classification:
        """Return the score of each label for each text or pair of texts.

        Args:
            inputs: A text, or a list of texts and of pairs of texts, such as query and document.
            candidates: Labels to score texts with, in place of the model's, by a model of language
                inference; see `zero_shot.py`.
            explain: How to explain the score of a label; True: by `Deletion()`; False: not.
            options: See `CallArguments`.

        Raises:
            InvalidInput: The model is not a sequence classification model, or an input is invalid;
                `index` is the index of the input.
            VitrineError: Any error of `encode`, under the same conditions.
        """
        call = call_options(**options)
        items = pair_list(inputs)
        chosen = explanation_of(explain)
        if candidates is not None:
            items = texts = texts_for(candidates, items)
            if chosen is None:
                return await classify_by_candidates(self, texts, candidates, call)
        if chosen is None:
            return await scoring.classify(self, items, NO_LIMITS, call)
        if not isinstance(chosen, Deletion):
            raise InvalidInput("labels are explained by a Deletion", pointer="/explain")
        return await explain_labels(self, items, candidates, chosen, call)

    async def tag(
        self,
        inputs: str | Sequence[str],
        *,
        labels: Sequence[str] | None = None,
        threshold: float = EntityLabels.threshold,
        nested: bool = EntityLabels.nested,
        multi_label: bool = EntityLabels.multi_label,
        aggregation: Aggregation = "simple",
        on_overflow: OnOverflow = "truncate",
        timeout_s: float | Deadline | None = None,
        priority: Priority = "interactive",
    ) -> Tags:
        """Return the labelled spans of each text, such as named entities or parts of speech.

        A token classification model has labels of its own. Its strategies are those of
        transformers' token classification pipeline, with its numbers, and spans with the label "O"
        are left out. A GLiNER model finds entities with any labels, as `inference` of the package
        gliner does.

        Args:
            inputs: A text, or a list of texts.
            labels: Labels of the entities to find, which a GLiNER model requires and others refuse;
                duplicates are ignored.
            threshold: Score from 0 to 1 that entities exceed; with `labels`, as the next two.
            nested: Whether an entity can contain others.
            multi_label: Whether the same span can have several labels.
            aggregation: Without `labels`. "none" gives each token as a span. "simple" joins tokens
                of one entity, by the prefixes "B-" and "I-" of their labels. Before that, "first",
                "average" and "max" give all tokens of a word one label: that of its first token, of
                its mean scores, or of its token with the highest score.
            on_overflow: See `CallArguments`.
            timeout_s: See `QueueArguments`.
            priority: See `QueueArguments`.

        Raises:
            InvalidInput: The model is neither kind, or needs labels or has its own, or an input or
                a label is invalid; `index` is the index of the input.
            VitrineError: Any error of `encode_tokens`, under the same conditions.
        """
        options = call_options(None, on_overflow, timeout_s, priority)
        chosen = entity_labels(labels, threshold=threshold, nested=nested, multi_label=multi_label)
        texts = text_list(inputs)
        if chosen is None:
            if self.artifact.manifest.spans:
                raise InvalidInput(
                    f"the model {self.name} has no labels of its own; set labels",
                    pointer="/labels",
                )
            check_options(aggregation=aggregation)
            return await tags.tag(self, texts, aggregation, options)
        if aggregation != "simple":
            raise InvalidInput("aggregation does not apply to labels", pointer="/aggregation")
        return await find_entities(self, texts, chosen, options)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        max_tokens_per_query: int | None = None,
        max_tokens_per_doc: int | None = None,
        explain: Explain = False,
        chunking: Chunking | None = None,
        instruction: str | None = None,
        **options: Unpack[CallArguments],
    ) -> PairScores:
        """Return the score of each document for a query, in the order of the documents.

        `PairScores.ranking` returns the documents' indices, best first. The scores are those of
        `score`, so every kind of model can rerank.

        Args:
            query: Text of the query.
            documents: Text of each document.
            top_n: Number of best documents whose scores are explained; None: all. The result has
                the scores of all documents.
            max_tokens_per_query: Number of tokens to which the query is truncated before the pair
                is truncated to the model's limit; None: only the latter. Other models than
                rerankers refuse a number below their maximum length.
            max_tokens_per_doc: The same for each document.
            explain: How to explain the scores of the best documents, see `score`.
            chunking: See `score`; excludes `max_tokens_per_doc`.
            instruction: See `score`.
            options: See `score`.

        Raises:
            InvalidInput: The model has more than one label, its scores cannot be explained, or a
                text is invalid; `index` is the index of the document, or None for the query.
            VitrineError: Any error of `encode`, under the same conditions.
        """
        limits = (max_tokens_per_query, max_tokens_per_doc)
        numbers = dict(zip(scoring.LIMITS, limits, strict=True)) | {"top_n": top_n}
        call = with_instruction(call_options(**options), instruction)
        check_options(**numbers)
        chosen = explanation_of_scores(explain, chunking)
        if not isinstance(query, str):
            raise InvalidInput("query must be a text", pointer="/query")
        documents = text_list(documents, "documents", allows_one=False)
        if not documents:
            raise InvalidInput("documents must be a non-empty list of texts", pointer="/documents")
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise InvalidInput(f"{name} must be at least 1", pointer=f"/{name}")
        count = min(top_n or len(documents), len(documents))
        if isinstance(chosen, Deletion | Terms):
            default = TOP_N if isinstance(chosen, Deletion) else count
            count = min(chosen.top_n or default, count)
        terms = count if isinstance(chosen, Terms) else 0
        with scoring.point_to_inputs(1, "/query", "/documents/{}"):
            if chosen is None or isinstance(chosen, Terms):
                return await scoring.rerank(
                    self, query, documents, limits, call, explained=terms, chunking=chunking
                )
            return await explain_scores(self, [query], documents, count, chosen, limits, call)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        explain: Explain = False,
        chunking: Chunking | None = None,
        instruction: str | None = None,
        **options: Unpack[CallArguments],
    ) -> PairScores:
        """Return the relevance of documents to queries: one score per pair of query and document.

        A reranker reads query and document at once. Other models give the similarity of their
        vectors that they declare, as `similarity` of sentence-transformers does: the cosine, the
        dot product, a negative Euclidean or Manhattan distance, or for multi-vectors MaxSim: the
        sum, over the query's vectors, of the largest dot product with a vector of the document.
        These prepend their prompt for queries or for documents to each text, as `encode_query` and
        `encode_document` of sentence-transformers do.

        Args:
            queries: One query for all documents, or one query per document.
            documents: Text of each document.
            explain: How to explain scores: by what they are without parts of a text, with `True`
                and a `Deletion`; by the best sentences of each document, with `Highlights`; by the
                largest terms of a sum, with `Terms`; False: not.
            chunking: How to divide the documents; a document has the score of its best chunk. None:
                a document is one input. Chunks cannot be explained.
            instruction: Criterion of relevance, for rerankers that are language models with
                a template of pairs; None: the prompt, or else the instruction of the template.
            options: See `CallArguments`. Only rerankers take a prompt, that of queries; with a
                template of pairs it is the instruction. With `chunking`, a reranker refuses a query
                that leaves no room for a chunk.

        Raises:
            InvalidInput: The number of queries is neither 1 nor that of the documents, the model
                has more than one label, its scores cannot be explained, its documents cannot be
                divided (see `encode_chunks`), or a text is invalid; `pointer` names the text.
            VitrineError: Any error of `encode`, under the same conditions.
        """
        paths = [
            name if isinstance(texts, str) else f"{name}/{{}}"
            for name, texts in (("/queries", queries), ("/documents", documents))
        ]
        call = with_instruction(call_options(**options), instruction)
        chosen = explanation_of_scores(explain, chunking)
        queries = text_list(queries, "queries", has_index=False)
        documents = text_list(documents, "documents")
        if not documents or len(queries) not in (1, len(documents)):
            raise InvalidInput(
                f"{len(queries)} queries and {len(documents)} documents; the number of queries "
                "must be 1, or that of the documents",
                pointer="/queries",
            )
        top_n = chosen.top_n if isinstance(chosen, Deletion | Terms) else None
        terms = (top_n or len(documents)) if isinstance(chosen, Terms) else 0
        with scoring.point_to_inputs(len(queries), *paths):
            if chosen is None or isinstance(chosen, Terms):
                return await scoring.score(
                    self, queries, documents, NO_LIMITS, call, explained=terms, chunking=chunking
                )
            best = top_n if isinstance(chosen, Deletion) else len(documents)
            return await explain_scores(self, queries, documents, best, chosen, NO_LIMITS, call)

    async def tokenize(
        self,
        texts: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        add_special_tokens: bool = True,
    ) -> list[list[tuple[int, str, Span | None]]]:
        """Return the id, text and byte span of each token of each text.

        See `TextTokenizer.tokenize`.

        Raises:
            Overloaded: Concurrent calls are already tokenising too many characters.
            VitrineError: Any error of `TextTokenizer.tokenize`, under the same conditions.
        """
        call_options(prompt_name)
        check_options(add_special_tokens=add_special_tokens)
        texts = text_list(texts)
        work = partial(
            self.tokenizer.tokenize,
            texts,
            prompt_name,
            add_special_tokens,
            self.max_token_vectors,
        )
        return await self.run_tokenizer(work, texts, len(texts))

    async def decode(
        self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each list of token ids.

        Raises:
            InvalidInput: A list is empty, or an id is not in the vocabulary; `index` is its index.
            Overloaded: Concurrent calls are already tokenising too many characters or decoding too
                many token ids.
        """
        check_options(skip_special_tokens=skip_special_tokens)
        rows = id_lists(rows)
        work = partial(self.tokenizer.decode, rows, skip_special_tokens)
        return await self.run_tokenizer(work, rows, len(rows))
