"""Rerank documents, one of which is empty the second time, by each client of another service.

`python rerank.py URL KEY MODEL QUERY TEXT...` prints JSON: by client, the `scores` of the documents
in their order, and its `error`. It runs in the clients' own environment; see the Makefile.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}

# Returns the index and score of each document, in any order.
Rerank = Callable[[str, Sequence[str]], Iterable[tuple[int, float]]]


def cohere_v2(url: str, key: str, model: str) -> Rerank:
    import cohere

    client = cohere.ClientV2(key, base_url=url)

    def rerank(query: str, documents: Sequence[str]) -> Iterable[tuple[int, float]]:
        response = client.rerank(
            model=model, query=query, documents=list(documents), max_tokens_per_doc=4096
        )
        return [(result.index, result.relevance_score) for result in response.results]

    return rerank


def cohere_v1(url: str, key: str, model: str) -> Rerank:
    import cohere

    client = cohere.Client(key, base_url=url)

    def rerank(query: str, documents: Sequence[str]) -> Iterable[tuple[int, float]]:
        response = client.rerank(
            model=model,
            query=query,
            documents=[{"text": text} for text in documents],
            rank_fields=["text"],
            return_documents=True,
        )
        for result in response.results:
            assert result.document.text == documents[result.index]
        return [(result.index, result.relevance_score) for result in response.results]

    return rerank


def langchain_cohere(url: str, key: str, model: str) -> Rerank:
    from langchain_cohere import CohereRerank

    reranker = CohereRerank(model=model, cohere_api_key=key, base_url=url, top_n=None)
    return lambda query, documents: _pairs(reranker.rerank(documents, query))


def langchain_jina(url: str, key: str, model: str) -> Rerank:
    from langchain_community.document_compressors import JinaRerank, jina_rerank

    jina_rerank.JINA_API_URL = f"{url}/v1/rerank"
    reranker = JinaRerank(model=model, jina_api_key=key, top_n=None)
    return lambda query, documents: _pairs(reranker.rerank(documents, query))


def llama_index_tei(url: str, key: str, model: str) -> Rerank:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    def rerank(query: str, documents: Sequence[str]) -> Iterable[tuple[int, float]]:
        reranker = TextEmbeddingInference(
            base_url=f"{url}/tei",
            auth_token=f"Bearer {key}",
            model_name=model,
            top_n=len(documents),
        )
        nodes = [
            NodeWithScore(node=TextNode(text=text, id_=str(index)), score=0.0)
            for index, text in enumerate(documents)
        ]
        ranked = reranker.postprocess_nodes(nodes, query_str=query)
        return [(int(node.node_id), node.score) for node in ranked]

    return rerank


def litellm_cohere(url: str, key: str, model: str) -> Rerank:
    return _litellm(f"cohere/{model}", url, key)


def litellm_jina(url: str, key: str, model: str) -> Rerank:
    return _litellm(f"jina_ai/{model}", url, key)


def litellm_vllm(url: str, key: str, model: str) -> Rerank:
    return _litellm(f"hosted_vllm/{model}", f"{url}/vllm", key)


def litellm_huggingface(url: str, key: str, model: str) -> Rerank:
    return _litellm(f"huggingface/{model}", f"{url}/tei", key)


def _litellm(model: str, api_base: str, key: str) -> Rerank:
    import litellm

    def rerank(query: str, documents: Sequence[str]) -> Iterable[tuple[int, float]]:
        response = litellm.rerank(
            model=model,
            query=query,
            documents=list(documents),
            top_n=len(documents),
            api_base=api_base,
            api_key=key,
        )
        return _pairs(response.results)

    return rerank


def _pairs(results: Iterable[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(result["index"], result["relevance_score"]) for result in results]


CLIENTS = {
    client.__name__: client
    for client in (
        cohere_v2,
        cohere_v1,
        langchain_cohere,
        langchain_jina,
        llama_index_tei,
        litellm_cohere,
        litellm_jina,
        litellm_vllm,
        litellm_huggingface,
    )
}


def main() -> None:
    url, key, model, query, *documents = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    results = {}
    for name, create in CLIENTS.items():
        rerank = create(url, key, model)
        scores = dict(rerank(query, documents))
        try:
            rerank(query, [*documents, "w5 " * 40_000])
            error = None
        except Exception as raised:  # noqa: BLE001 - each client has errors of its own
            error = f"{type(raised).__name__}: {raised}"
        results[name] = {"scores": [scores[i] for i in range(len(documents))], "error": error}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
