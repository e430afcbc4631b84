"""The views of gradient flow, LayerNorm, parity and vector-Jacobian products."""

import json
import math
import re
import shutil
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.color import Color

from models.artifact import Artifact
from tests.service.page.browsing import (
    CAT,
    FELINE,
    Browser,
    Json,
    chip_scores,
    find,
    number,
    open_page,
    post,
    run,
    select,
    set_value,
    show,
    texts,
    type_text,
    until,
)
from tests.service.page.conftest import served

# A browser and torch may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def page(browser: Browser, url: str) -> Browser:
    """Return the newly opened page, which computes nothing by itself."""
    return open_page(browser, f"{url}/debug#tab=explain")


def test_flow_shows_gradient_sizes_and_the_first_non_finite_number(page: Browser) -> None:
    shown = run(page, "flow")
    assert "All numbers are finite in the forward and the backward pass." in shown
    until(lambda: "layers.0" in texts(page, "#flow .chart text"))
    find(page, "#flow summary").click()
    select(page, "emulate", "float16")
    type_text(page, "scale", str(2**32))
    shown = run(page, "flow")
    assert "non-finite number appears in the backward pass at objective" in shown
    assert "some numbers are NaN" in find(page, "#flow .lamps").text
    find(page, "#flow .result summary").click()
    assert "NaN" in texts(page, "#flow td")


def test_flow_names_the_token_of_the_first_non_finite_number(
    shared_page: Browser, url: str
) -> None:
    # The drawing alone: no text of the small model overflows in the forward pass.
    flow = post(url, "flow", texts=[CAT, FELINE], objective={"type": "cosine"})
    assert [t["token"] for t in flow["tokens"][1][1:3]] == ["a", "fe"]
    flow["first_nonfinite"] = {"phase": "forward", "step": "layers.0.sum1", "row": 1, "token": 2}
    sentence = shared_page.execute_script(
        "return import('./debug/assets/flow.js').then(({drawFlow}) => "
        "drawFlow([{result: arguments[0]}]).map((node) => node.textContent).join(' '))",
        flow,
    )
    assert "layers.0.sum1 (text 2, token 2: “fe”)." in sentence


def test_flow_has_a_chart_axis_for_values_and_one_for_gradients(page: Browser) -> None:
    run(page, "flow")
    chart = "document.querySelector('#flow .chart')"
    until(lambda: page.execute_script(f"return {chart}.data !== undefined"))
    axes = page.execute_script(f"return {chart}.data.map(({{name, yaxis}}) => [name, yaxis])")
    assert axes == [
        ["values, rms", "y"],
        ["gradient, l2", "y2"],
        ["gradient of weights, l2", "y2"],
    ]
    sizes = page.execute_script(
        f"return [...{chart}.querySelectorAll('text')].map((e) => parseFloat(getComputedStyle(e)"
        ".fontSize))"
    )
    assert min(sizes) >= 11


def test_flow_steps_are_shown_by_the_keyboard(page: Browser, url: str) -> None:
    run(page, "flow")
    steps = post(url, "flow", texts=[CAT, FELINE], objective={"type": "cosine"})["steps"]
    slider = find(page, ".inspector input")
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert slider.get_attribute("aria-valuetext") == steps[2]["name"]
    shown = find(page, ".inspector").text
    gradient = re.search(r"gradient, l2\n(\S+)", shown)
    assert gradient
    assert number(gradient[1]) == pytest.approx(steps[2]["gradient"]["l2"], rel=1e-2)
    slider.send_keys(Keys.END)
    assert slider.get_attribute("aria-valuetext") == steps[-1]["name"]


@pytest.mark.parametrize("objective", ["mnrl", "dot", "mse", "cotangent"])
def test_flow_has_every_objective_of_the_api(page: Browser, url: str, objective: str) -> None:
    labels = {
        "mnrl": "ranking of pairs",
        "dot": "dot product",
        "mse": "squared error",
        "cotangent": "cotangents",
    }
    show(page, "flow")
    select(page, "objective", labels[objective])
    more = ["A dog barks.", "A hound howls."]
    type_text(page, "more-texts", "\n".join(more))
    vector = [round(math.sin(index), 2) for index in range(32)]
    vectors = {"mnrl": [], "dot": [vector]}.get(objective, [vector] * 4)
    assert find(page, "[name=vectors]").is_displayed() == bool(vectors)
    set_value(page, "vectors", "\n".join(map(json.dumps, vectors)))
    shown = run(page, "flow")
    given: Json = {"dot": {"vector": vector}, "mnrl": {}}.get(objective, {"vectors": vectors})
    all_texts = [CAT, FELINE, *more]
    expected = post(url, "flow", texts=all_texts, objective={"type": objective, **given})
    figures = dict(re.findall(r"^(objective|steps)\n(\S+)$", shown, re.MULTILINE))
    assert int(figures["steps"]) == len(expected["steps"])
    assert number(figures["objective"]) == pytest.approx(expected["objective"], rel=1e-2)


def test_layernorm_shows_its_steps_and_the_statistics_of_the_selected_one(page: Browser) -> None:
    shown = run(page, "layernorm")
    assert "All implementations are correct on these rows." in shown
    assert not texts(page, "#layernorm .step.wrong")
    assert len(texts(page, ".step")) == 11 + 13
    find(page, "[data-step=dxhat]").click()
    assert find(page, ".chosen").text.startswith("dxhat\npass\nbackward\nshape\n9 \u00d7 32")
    page.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert find(page, ".chosen h3").text != "dxhat"
    assert any(row.startswith("cpp backward passes") for row in texts(page, "#layernorm tr"))
    assert "no verdict" in shown


def test_layernorm_shows_values_of_a_row(page: Browser, url: str) -> None:
    show(page, "layernorm")
    find(page, "#layernorm summary").click()
    type_text(page, "row", "1")
    run(page, "layernorm")
    source = {"type": "text", "text": CAT, "norm": "embeddings.norm"}
    steps = post(url, "layernorm", source=source, row=1)["steps"]
    (out,) = (step for step in steps if step["name"] == "out")
    find(page, "[data-step=out]").click()
    values = [float(value) for value in find(page, ".values").text.split(", ")]
    assert values == pytest.approx(out["values"])


@pytest.mark.parametrize("result", ["out", "sum", "dx", "dresidual", "dgamma", "dbeta"])
def test_wrong_operator_is_named_with_its_place_and_error(page: Browser, result: str) -> None:
    """Own rows with a candidate that is right, except for one element of one result."""
    rng = np.random.default_rng(0)
    x, residual, dout = rng.normal(size=(3, 2, 4))
    added = x + residual
    centred = added - added.mean(1, keepdims=True)
    scale = 1 / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    normed = centred * scale
    mean = dout.mean(1, keepdims=True)
    dx = scale * (dout - mean - normed * (dout * normed).mean(1, keepdims=True))
    candidate = {
        "out": normed,
        "sum": added,
        "dx": dx,
        "dresidual": dx,
        "dgamma": (dout * normed).sum(0),
        "dbeta": dout.sum(0),
    }
    wrong = candidate[result].copy()
    wrong[(1, 2) if wrong.ndim == 2 else (2,)] += 0.125
    given = {name: value.tolist() for name, value in {**candidate, result: wrong}.items()}
    rows = {"x": x.tolist(), "residual": residual.tolist(), "dout": dout.tolist(), "eps": 1e-5}
    show(page, "layernorm")
    select(page, "rows", "own rows and results")
    find(page, "#layernorm summary").click()
    select(page, "dtype", "float64")
    set_value(page, "own", json.dumps({**rows, "candidate": given}))
    shown = run(page, "layernorm")
    assert "An implementation is wrong on these rows." in shown
    names = {"out": "out (y)", "dgamma": "dgamma (dweight)", "dbeta": "dbeta (dbias)"}
    index = (1, 2) if wrong.ndim == 2 else (2,)
    is_, should_be = wrong[index], candidate[result][index]
    place = f"candidate: {result}[{', '.join(map(str, index))}] is {is_:.9g}; it should be "
    assert place + f"{should_be:.9g}, so its error is " in shown
    first = texts(page, "#layernorm .result td")[:10]
    assert first[1] == names.get(result, result)
    assert first[3] == "0.1250"
    assert first[6] == str(list(index))
    assert first[-1].endswith("fails")
    step = {"sum": "x", "dresidual": "dx"}.get(result, result)
    assert "candidate" in find(page, f"[data-step={step}].wrong").text


def test_own_rows_that_are_not_json_are_a_problem_of_their_field(page: Browser) -> None:
    show(page, "layernorm")
    select(page, "rows", "own rows and results")
    type_text(page, "own", "[1")
    run(page, "layernorm")
    assert find(page, "#layernorm .problem").text.startswith("Own rows, as JSON: not JSON")
    assert find(page, "[name=own]").get_attribute("aria-invalid") == "true"


def test_parity_shows_a_lamp_for_each_comparison(page: Browser) -> None:
    shown = run(page, "parity")
    lamps = [lamp.split()[0] for lamp in texts(page, "#parity .result .lamp.good")]
    assert lamps == ["Files", "Tokenizer", "Weights", "Layers", "Vectors", "LayerNorm"]
    assert "The served model agrees with the reference model." in shown
    until(lambda: "layers.0" in texts(page, "#parity .chart text"))


def test_parity_lists_the_files_that_changed_first(
    browser: Browser, small_artifact: Artifact, hold: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "artifact"
    shutil.copytree(small_artifact.path, copied)
    for url in served(Artifact.load(copied), hold):
        page = open_page(browser, f"{url}/debug#tab=parity")
        run(page, "parity")
        (copied / "prompts.txt").write_text("a new file is no change")
        tokenizer = copied / "tokenizer.json"
        tokenizer.write_text(tokenizer.read_text() + " ")
        shown = run(page, "parity")
        assert texts(page, ".causes li")[0].startswith("Tokenizer.json was changed")
        assert "1 of " in find(page, "#parity .result .lamp.bad").text
        assert "tokenizer.json" in texts(page, "#parity .result td")[0]
        assert "1 of" in shown


def test_parity_names_one_wrong_weight(browser: Browser, url: str) -> None:
    """The drawing of a response in which one weight differs."""
    page = open_page(browser, f"{url}/debug#tab=explain&run=1")
    parity = post(url, "parity")
    weight = parity["weights"][3]
    weight.update(max_abs=0.25, status="differs")
    parity.update(passes=False, failures=[f"{weight['name']} differs by 2.5e-01"])
    page.execute_script(
        "return import('./debug/assets/parity.js').then(({drawParity}) => "
        "document.querySelector('#explain .result').replaceChildren("
        "...drawParity([{result: arguments[0]}])))",
        parity,
    )
    bad = [text.replace("\n", " ") for text in texts(page, "#explain .result .lamp.bad")]
    assert bad == [f"Weights 1 of {len(parity['weights'])} tensors differs"]
    row = page.find_element(By.XPATH, f"//td[text()='{weight['name']}']/..").text
    assert row.endswith("differs 0.2500")


def test_vector_jacobian_product_has_the_numbers_of_the_api(page: Browser, url: str) -> None:
    cotangent = [round(math.sin(index), 2) for index in range(32)]
    show(page, "vjp")
    set_value(page, "cotangent", json.dumps(cotangent))
    run(page, "vjp")
    result = post(url, "vjp", text=CAT, cotangent=cotangent)
    assert chip_scores(page, "vjp") == pytest.approx(result["gradient"], rel=1e-4)
    set_value(page, "cotangent", "1 2")
    run(page, "vjp")
    assert find(page, "#vjp .problem").text.startswith("Cotangent: the vector has 2 numbers")


def test_sizes_that_are_not_finite_have_the_colour_of_problems(page: Browser) -> None:
    problem = page.execute_script(
        "return import('./debug/assets/colours.js').then(({ colour }) => colour('bad'))"
    )
    show(page, "vjp")
    set_value(page, "cotangent", " ".join(["3e38"] * 32))
    run(page, "vjp")
    chips = page.find_elements(By.CSS_SELECTOR, "#vjp .chip")
    assert {chip.get_attribute("data-score") for chip in chips} == {"Infinity"}
    for chip in chips:
        assert Color.from_string(chip.value_of_css_property("color")).hex == problem
        background = Color.from_string(chip.value_of_css_property("background-color"))
        assert background.rgba == "rgba(0, 0, 0, 0)"


def test_numbers_that_are_not_finite_are_shown_beyond_the_listed_ones(
    browser: Browser, url: str
) -> None:
    fields = {"tab": "attribute", "run": "1", "method": "saliency", "target": "dot"}
    fields |= {"a": "cat " * 80, "vector": "3e38 " * 32}
    page = open_page(browser, f"{url}/debug#{urlencode(fields)}")
    until(lambda: texts(page, "#attribute .chip"))
    # The response lists 64 numbers with their kinds.
    scores = texts(page, "#attribute .chip .score")
    assert (scores[:64], scores[64:]) == (["∞"] * 64, ["NaN"] * 18)
