"""Two models on the same texts."""

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load, save
from selenium.webdriver.support.ui import Select

from tests.service.page.browsing import (
    Browser,
    cells,
    find,
    open_page,
    run,
    shows,
    texts,
    type_text,
    until,
)

# A browser and torch may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TEXTS = ["The cat sat.", "A feline rested.", "A dog ran.", "Rain fell on it."]


def cosines(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(unit @ unit.T, np.float64)


def encoded(url: str, model: str) -> NDArray[np.float64]:
    body = {"model": model, "inputs": TEXTS}
    return np.array(httpx2.post(f"{url}/encode", json=body, timeout=240).json()["embeddings"])


def test_neighbours_and_layers_of_two_models_are_compared(
    browser: Browser, url_of_both: str
) -> None:
    page = open_page(browser, f"{url_of_both}/debug?model=first#tab=compare")
    until(lambda: len(Select(find(page, "[name=other]")).options) == 1)
    type_text(page, "compare-texts", "\n".join(TEXTS))
    shown = run(page, "compare")
    tables = [cosines(encoded(url_of_both, name)) for name in ("first", "second")]
    nearest = []
    for similarity in tables:
        np.fill_diagonal(similarity, -2)
        nearest.append([TEXTS[index] for index in similarity.argmax(1)])
    rows = cells(page, "Nearest neighbour of each text")
    assert [row[1:3] for row in rows] == [list(pair) for pair in zip(*nearest, strict=True)]
    changed = sum(a != b for a, b in zip(*nearest, strict=True))
    assert texts(page, "#compare td:nth-child(4)")[: len(TEXTS)].count("changed") == changed
    for text, other, *values in cells(page, "Top 6 of 6 pairs"):
        i, j = TEXTS.index(text), TEXTS.index(other)
        expected = [tables[0][i, j], tables[1][i, j], tables[1][i, j] - tables[0][i, j]]
        assert [float(value) for value in values] == pytest.approx(expected, abs=1e-5)
    # The word embeddings are in another order: the layers differ from the first one on.
    assert "The first layer with another result is " in shown
    layers = {row[0]: row[1:] for row in cells(page, "Cosine of the mean token vectors")}
    body = {"texts": TEXTS, "taps": list(layers), "reduction": "mean"}
    first, second = (
        load(
            httpx2.post(
                f"{url_of_both}/debug/activations", json={**body, "model": name}, timeout=240
            ).content
        )
        for name in ("first", "second")
    )
    assert "output" in layers
    for layer, (mean, lowest) in layers.items():
        pairs = [(first[f"{i}/{layer}"], second[f"{i}/{layer}"]) for i in range(len(TEXTS))]
        similarities: list[float] = [
            (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
            for a, b in ((np.float64(x).ravel(), np.float64(y).ravel()) for x, y in pairs)
        ]
        assert float(mean) == pytest.approx(np.mean(similarities), abs=1e-5)
        assert float(lowest) == pytest.approx(min(similarities), abs=1e-5)


def test_safetensors_are_read_as_by_their_library(shared_page: Browser) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "0/a": rng.normal(size=(3, 2)).astype(np.float32),
        "1/b": np.array([np.inf, -0.0, 1e-42], np.float32),
    }
    read = shared_page.execute_script(
        "const bytes = new Uint8Array(arguments[0]).buffer;"
        "return import('./debug/assets/safetensors.js').then(({parseSafetensors}) => {"
        "const {tensors, metadata} = parseSafetensors(bytes);"
        "return [metadata, Object.fromEntries(Object.entries(tensors).map("
        "([name, {shape, values}]) => [name, [shape, [...values].map(String)]]))]; })",
        list(save(tensors, {"key": "value"})),
    )
    metadata, found = read
    assert metadata == {"key": "value"}
    for name, tensor in tensors.items():
        shape, values = found[name]
        assert shape == list(tensor.shape)
        numbers = [float(value.replace("Infinity", "inf")) for value in values]
        assert numbers == tensor.ravel().astype(float).tolist()


def test_service_with_one_model_has_nothing_to_compare(browser: Browser, url: str) -> None:
    page = open_page(browser, f"{url}/debug#tab=compare")
    until(lambda: find(page, "#one-model").is_displayed())
    assert "To compare two, serve both" in find(page, "#one-model").text
    assert not find(page, "#compare .go").is_enabled()
    assert not find(page, "[name=other]").is_displayed()


def test_only_embedding_models_are_offered_for_comparison(
    browser: Browser, plain_url: str, url_of_both: str
) -> None:
    # A link can name a model that was replaced by one of another kind.
    address = f"{plain_url}/debug?model=embedding#tab=compare&other=sparse"
    page = open_page(browser, address, has_gradients=False)
    until(lambda: shows(page, "#one-model", "no other embedding model"))
    assert not find(page, "#compare .go").is_enabled()
    for name in ("first", "one"):
        open_page(browser, f"{url_of_both}/debug?model={name}#tab=compare")
        until(lambda: find(browser, "#compare .go").is_enabled())
        assert texts(browser, "[name=other] option") == ["second"], name
        assert find(browser, "#models [aria-current=true]").text == "first", name
