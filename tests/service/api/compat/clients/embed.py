"""Embed two texts, and one that is empty, by each client of another service.

`python embed.py URL KEY TEXT TEXT` prints JSON: by client, `vectors`, and what it says of the
`error`. It runs in an environment of the clients' own; see the Makefile.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HAYSTACK_TELEMETRY_ENABLED": "False"}

MODEL = "sentence-transformers/all-MiniLM-L6-v2"

Embed = Callable[[Sequence[str]], list[list[float]]]


def llama_index_openai_like(url: str, key: str) -> Embed:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    model = OpenAILikeEmbedding(
        model_name=MODEL, api_base=f"{url}/v1", api_key=key, max_retries=0, reuse_client=False
    )
    return lambda texts: model.get_text_embedding_batch(list(texts))


def llama_index_tei(url: str, key: str) -> Embed:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    model = TextEmbeddingsInference(
        model_name=MODEL,
        base_url=f"{url}/tei",
        auth_token=key,
        query_instruction="",
        text_instruction="",
    )
    return lambda texts: model.get_text_embedding_batch(list(texts))


def haystack_openai(url: str, key: str) -> Embed:
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.utils import Secret

    embedder = OpenAITextEmbedder(
        model=MODEL, api_base_url=f"{url}/v1", api_key=Secret.from_token(key), max_retries=0
    )
    return lambda texts: [embedder.run(text)["embedding"] for text in texts]


def haystack_tei(url: str, key: str) -> Embed:
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.huggingface_api import (
        HuggingFaceAPITextEmbedder,
    )

    embedder = HuggingFaceAPITextEmbedder(
        api_type="text_embeddings_inference",
        api_params={"url": f"{url}/tei"},
        token=Secret.from_token(key),
        normalize=True,
    )
    return lambda texts: [embedder.run(text)["embedding"] for text in texts]


def litellm_openai(url: str, key: str) -> Embed:
    import litellm

    def embed(texts: Sequence[str]) -> list[list[float]]:
        answer = litellm.embedding(
            model=f"openai/{MODEL}",
            input=list(texts),
            api_base=f"{url}/v1",
            api_key=key,
            encoding_format="float",
            max_retries=0,
        )
        return [item["embedding"] for item in answer.data]

    return embed


def _litellm_of(provider: str, url: str, key: str) -> Embed:
    import litellm

    def embed(texts: Sequence[str]) -> list[list[float]]:
        model, inputs = f"{provider}/{MODEL}", list(texts)
        answer = litellm.embedding(model=model, input=inputs, api_base=url, api_key=key)
        return [item["embedding"] for item in answer.data]

    return embed


def litellm_vllm(url: str, key: str) -> Embed:
    return _litellm_of("hosted_vllm", f"{url}/v1", key)


def litellm_jina(url: str, key: str) -> Embed:
    return _litellm_of("jina_ai", f"{url}/v1", key)


def litellm_cohere(url: str, key: str) -> Embed:
    return _litellm_of("cohere", f"{url}/v2/embed", key)


def litellm_huggingface(url: str, key: str) -> Embed:
    import litellm

    def embed(texts: Sequence[str]) -> list[list[float]]:
        answer = litellm.embedding(
            model="huggingface/any",  # of a name with "sentence-transformers" it asks similarities
            input=list(texts),
            api_base=f"{url}/tei",
            api_key=key,
            input_type="embed",  # or it asks the hub
        )
        return [item["embedding"] for item in answer.data]

    return embed


def chromadb_openai(url: str, key: str) -> Embed:
    from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction

    os.environ["VITRINE_TEST_KEY"] = key
    function = OpenAIEmbeddingFunction(
        model_name=MODEL, api_base=f"{url}/v1", api_key_env_var="VITRINE_TEST_KEY"
    )
    return lambda texts: [vector.tolist() for vector in function(list(texts))]


def pydantic_ai(url: str, key: str) -> Embed:
    from pydantic_ai import Embedder
    from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    embedder = Embedder(OpenAIEmbeddingModel(MODEL, provider=provider))

    def embed(texts: Sequence[str]) -> list[list[float]]:
        answer = asyncio.run(embedder.embed_documents(list(texts)))
        return [list(vector) for vector in answer.embeddings]

    return embed


def cohere_v2(url: str, key: str) -> Embed:
    import cohere
    import numpy as np

    client = cohere.ClientV2(key, base_url=url)

    def embed(texts: Sequence[str]) -> list[list[float]]:
        embeddings = client.embed(
            model=MODEL,
            texts=list(texts),
            input_type="search_document",
            embedding_types=["float", "ubinary"],
            truncate="END",
        ).embeddings
        signs = np.array(embeddings.float_) > 0
        assert embeddings.ubinary == np.packbits(signs, axis=1).tolist()
        return list(embeddings.float_)

    return embed


def cohere_v1(url: str, key: str) -> Embed:
    import cohere

    client = cohere.Client(key, base_url=url)
    return lambda texts: list(client.embed(texts=list(texts), model=MODEL).embeddings)


def langchain_cohere(url: str, key: str) -> Embed:
    from langchain_cohere import CohereEmbeddings

    embedder = CohereEmbeddings(model=MODEL, cohere_api_key=key, base_url=url, max_retries=0)
    return lambda texts: list(embedder.embed_documents(list(texts)))


CLIENTS = {
    client.__name__: client
    for client in (
        llama_index_openai_like,
        llama_index_tei,
        haystack_openai,
        haystack_tei,
        litellm_openai,
        litellm_huggingface,
        litellm_vllm,
        litellm_jina,
        litellm_cohere,
        chromadb_openai,
        pydantic_ai,
        cohere_v2,
        cohere_v1,
        langchain_cohere,
    )
}


def main() -> None:
    url, key, *texts = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    results = {}
    for name, create in CLIENTS.items():
        embed = create(url, key)
        vectors = embed(texts)
        try:
            embed([""])
            error = None
        except Exception as raised:  # noqa: BLE001 - each client has errors of its own
            error = f"{type(raised).__name__}: {raised}"
        results[name] = {"vectors": vectors, "error": error}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
