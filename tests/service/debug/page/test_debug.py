"""The views of gradient flow, LayerNorm, parity and vector-Jacobian products."""

# A browser and torch may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_flow_shows_gradient_sizes_and_the_first_non_finite_number(page: Browser) -> None:
    shown = run(page, "flow")
    assert "All numbers are finite in the forward and the backward pass." in shown
    until(lambda: "layers.0" in texts(page, "#flow .chart text"))
    select(page, "emulate", "float16")
    type_text(page, "scale", str(2**32))
    shown = run(page, "flow")
    assert "non-finite number appears in the backward pass at objective" in shown
    assert "some are NaN" in find(page, "#lamps").text
    find(page, "#flow summary").click()
    assert "NaN" in texts(page, "#flow td")


@pytest.mark.parametrize("objective", ["mnrl", "dot", "mse", "cotangent"])
def test_flow_has_every_objective_of_the_api(page: Browser, url: str, objective: str) -> None:
    labels = {
        "mnrl": "ranking of pairs",
        "dot": "dot product",
        "mse": "squared error",
        "cotangent": "cotangents",
    }
    find(page, "#tab-flow").click()
    select(page, "objective", labels[objective])
    more = ["A dog barks.", "A hound howls."]
    type_text(page, "more-texts", "\n".join(more))
    vector = [round(math.sin(index), 2) for index in range(32)]
    vectors = {"mnrl": [], "dot": [vector]}.get(objective, [vector] * 4)
    assert find(page, "[name=vectors]").is_displayed() == bool(vectors)
    field = "document.querySelector('[name=vectors]')"
    page.execute_script(f"{field}.value = arguments[0]", "\n".join(map(json.dumps, vectors)))
    shown = run(page, "flow")
    given: Json = {"dot": {"vector": vector}, "mnrl": {}}.get(objective, {"vectors": vectors})
    texts = [CAT, FELINE, *more]
    expected = post(url, "flow", texts=texts, objective={"type": objective, **given})
    figures = dict(re.findall(r"^(objective|steps)\n(\S+)$", shown, re.MULTILINE))
    assert int(figures["steps"]) == len(expected["steps"])
    value = float(figures["objective"].replace("\N{MINUS SIGN}", "-"))
    assert value == pytest.approx(expected["objective"], rel=1e-2)


def test_layernorm_shows_its_steps_and_the_statistics_of_the_selected_one(page: Browser) -> None:
    shown = run(page, "layernorm")
    assert "All implementations are correct on these rows." in shown
    assert len(texts(page, ".step")) == 11 + 13
    find(page, "[data-step=dxhat]").click()
    assert find(page, ".chosen").text.startswith("dxhat\npass\nbackward\nshape\n9 \u00d7 32")
    assert any(row.startswith("cpp backward passes") for row in texts(page, "#layernorm tr"))
    assert "no verdict" in shown


def test_parity_shows_a_lamp_for_each_comparison(page: Browser) -> None:
    shown = run(page, "parity")
    lamps = [lamp.split()[0] for lamp in texts(page, "#parity .lamp.good")]
    assert lamps == ["Files", "Tokenizer", "Vectors", "Weights", "Tokens", "LayerNorm"]
    assert "The served model agrees with the reference model." in shown
    until(lambda: "layers.0" in texts(page, "#parity .chart text"))
