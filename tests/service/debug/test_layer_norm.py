"""Checks of the operator on rows of a text, or on given rows."""

import pytest
import torch
from starlette.testclient import TestClient

from models.add_layer_norm.reference import BackwardSteps, ForwardSteps
from service.debug.pipeline import messages
from tests.service.debug.conftest import CAT, Json, ask, problem_of


def steps_of(result: Json, phase: str) -> list[str]:
    return [step["name"] for step in result["steps"] if step["phase"] == phase]


def test_layernorm_lists_the_steps_of_the_op_on_the_rows_of_a_text(client: TestClient) -> None:
    source = {"type": "text", "text": CAT, "norm": "layers.1.norm2"}
    result = ask(client, "layernorm", source=source, row=1)
    assert result["passes"]
    assert tuple(steps_of(result, "forward")) == ForwardSteps._fields
    assert tuple(steps_of(result, "backward")) == BackwardSteps._fields
    assert all(step["error_float64"] < 1e-5 for step in result["steps"])
    assert len(result["steps"][0]["values"]) == 32
    assert len(result["invariants"]) >= 4
    assert all(invariant["passes"] for invariant in result["invariants"])
    verdicts = {(v["implementation"], v["phase"]): v for v in result["verdicts"]}
    assert verdicts["aten", "forward"]["passes"]
    assert verdicts["aten", "backward"]["passes"]
    assert verdicts["onnxruntime", "forward"]["passes"]
    assert verdicts["onnxruntime", "backward"]["passes"] is None
    assert "no backward pass" in verdicts["onnxruntime", "backward"]["no_verdict"]
    assert result["parity"]["cosine"] > 0.999999


@pytest.mark.parametrize(
    "distribution", ["normal", "constant_row", "large_mean", "tiny_var", "huge"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layernorm_judges_rows_of_every_distribution(
    client: TestClient, distribution: str, dtype: str
) -> None:
    source = {"type": "random", "shape": [4, 16], "distribution": distribution}
    result = ask(client, "layernorm", source=source, dtype=dtype)
    failed = {v["implementation"] for v in result["verdicts"] if v["passes"] is False}
    # onnxruntime subtracts a row's mean once.
    assert failed == (
        {"onnxruntime"} if (distribution, dtype) == ("large_mean", "float32") else set()
    )
    # Every norm of a constant row is beta.
    assert result["passes"] == (None if distribution == "constant_row" else not failed)
    (aten,) = [
        v for v in result["verdicts"] if (v["implementation"], v["phase"]) == ("aten", "backward")
    ]
    against = {comparison["against"] for comparison in aten["comparisons"]}
    assert ("finite differences" in against) == (dtype == "float64")


ROWS = {"type": "rows", "x": [[1.0, 2.0]]}


def candidate_of(x: list[float], residual: list[float], dout: list[float]) -> Json:
    """Return the results of torch's norm of one row, with gradients through both outputs."""
    leaves = [torch.tensor([row], dtype=torch.float64).requires_grad_() for row in (x, residual)]
    parameters = [torch.ones(len(x), dtype=torch.float64), torch.zeros(len(x), dtype=torch.float64)]
    leaves += [parameter.requires_grad_() for parameter in parameters]
    total = leaves[0] + leaves[1]
    out = torch.nn.functional.layer_norm(total, (len(x),), leaves[2], leaves[3], 1e-5)
    upstream = [torch.tensor([dout], dtype=torch.float64)] * 2
    gradients = torch.autograd.grad([out, total], leaves, upstream)
    names = ("dx", "dresidual", "dgamma", "dbeta")
    results = {"out": out, "sum": total, **dict(zip(names, gradients, strict=True))}
    return {name: result.detach().float().tolist() for name, result in results.items()}


def test_layernorm_judges_the_results_of_a_candidate(client: TestClient) -> None:
    x, residual, dout = [40000.0, 40001.0, 40002.0, 40003.0], [0.5, 0.0, 0.0, 0.0], [1.0, 0, 0, 2]
    right = candidate_of(x, residual, dout)
    source = {"type": "rows", "x": [x], "residual": [residual], "eps": 1e-5}
    source |= {"dout": [dout], "dsum": [dout]}
    result = ask(client, "layernorm", source={**source, "candidate": right})
    assert result["passes"] is True
    assert [(v["implementation"], v["phase"]) for v in result["verdicts"]] == [
        ("candidate", "forward"),
        ("candidate", "backward"),
    ]
    # A kernel that ignores the gradient with respect to the sum, and one that returns NaN.
    ignored = {"dx": candidate_of(x, residual, [1.0, 0, 0, 2])["dx"]}
    ignored["dx"] = [[d - g for d, g in zip(ignored["dx"][0], dout, strict=True)]]
    nan = {"out": [[None, *right["out"][0][1:]]]}
    for wrong, phase, index in ((ignored, "backward", [0, 3]), (nan, "forward", [0, 0])):
        result = ask(client, "layernorm", source={**source, "candidate": wrong})
        (verdict,) = result["verdicts"]
        assert (result["passes"], verdict["passes"], verdict["phase"]) == (False, False, phase)
        comparison = verdict["comparisons"][0]
        assert comparison["worst_index"] == index
        name, row, column = comparison["value"], *index
        assert comparison["expected"] == pytest.approx(right[name][row][column], rel=1e-6)
        assert comparison["actual"] == wrong[name][row][column]
        (failure,) = verdict["failures"]
        assert failure.startswith(f"{name}[{row}, {column}] is ")
        assert f"it should be {comparison['expected']:.9g}, so its error is " in failure


def test_layernorm_row_out_of_range_is_refused(client: TestClient) -> None:
    body = {"source": {"type": "random", "shape": [4, 16]}, "row": 4}
    problem = problem_of(client, "layernorm", body)
    assert (problem["code"], problem["pointer"]) == ("no_such_row", "/row")


def test_layernorm_overflow_returns_nulls_and_their_pointers(
    client: TestClient,
) -> None:
    source = {"type": "rows", "x": [[3e38, -3e38, 1.0, 2.0]], "residual": [[3e38, 0.0, 0.0, 0.0]]}
    result = ask(client, "layernorm", source=source, row=0)
    assert result["steps"][0]["inf"] == 1
    assert result["steps"][0]["first_nonfinite"] == [0, 0]
    assert result["steps"][0]["values"] == [None, pytest.approx(-3e38), 1.0, 2.0]
    assert {"pointer": "/steps/0/values/0", "kind": "inf"} in result["nonfinite"]


def test_more_non_finite_numbers_than_the_limit_add_a_warning(
    client: TestClient,
) -> None:
    source = {"type": "rows", "x": [[3e38, -3e38] * 40], "residual": [[3e38, -3e38] * 40]}
    result = ask(client, "layernorm", source=source, row=0)
    assert len(result["nonfinite"]) == messages.MAX_NONFINITE
    assert result["warnings"] == [
        "nonfinite lists only the first 64 non-finite numbers; there may be more"
    ]


@pytest.mark.parametrize(
    ("source", "code", "pointer"),
    [
        ({"type": "text", "text": CAT, "norm": "layers.9.norm1"}, "unknown_norm", "/source/norm"),
        ({"type": "rows", "x": [[1.0, 2.0], [3.0]]}, "source", "/source/x"),
        ({"type": "rows", "x": [[1.0, 2.0]], "gamma": [1.0]}, "source", "/source/gamma"),
        ({"type": "random", "shape": [65, 128]}, "source", "/source/shape"),
        ({"type": "random", "shape": [4]}, "invalid", "/source/shape"),
        ({"type": "rows", "x": [[1.0]], "residual": [[1.0], [2.0]]}, "source", "/source/residual"),
        ({"type": "rows", "x": [[1.0, 2.0]], "beta": [1.0]}, "source", "/source/beta"),
        ({"type": "rows", "x": [[1.0], ["a"]]}, "invalid", "/source/x/1/0"),
        ({"type": "text", "text": CAT}, "invalid", "/source/norm"),
        ({"type": "text", "text": CAT, "norm": 5}, "invalid", "/source/norm"),
        ({"type": "text", "text": 5, "norm": "n"}, "invalid", "/source/text"),
        ({"type": "text", "text": {"text": 5}, "norm": "n"}, "invalid", "/source/text/text"),
        ({"type": "text", "text": "", "norm": "layers.0.norm1"}, "empty", "/source/text"),
        ({"type": "other"}, "invalid", "/source"),
        ({**ROWS, "dout": [[1.0]]}, "source", "/source/dout"),
        ({**ROWS, "dsum": [[1.0, 2.0]]}, "source", "/source/dsum"),
        ({**ROWS, "dout": [[1.0, 2.0]], "dsum": [[1.0, 2.0]]}, "source", "/source/dsum"),
        ({**ROWS, "candidate": {}}, "source", "/source/candidate"),
        ({**ROWS, "candidate": {"y": [[1.0, 2.0]]}}, "invalid", "/source/candidate"),
        ({**ROWS, "candidate": {"out": [[1.0]]}}, "source", "/source/candidate/out"),
        ({**ROWS, "candidate": {"dbeta": [1.0]}}, "source", "/source/candidate/dbeta"),
        ({**ROWS, "candidate": {"sum": [[1.0, 2.0]]}}, "source", "/source/candidate/sum"),
        ({**ROWS, "candidate": {"dbeta": [1.0, 2.0]}}, "source", "/source/dout"),
    ],
)
def test_invalid_layernorm_source_has_code_and_pointer(
    client: TestClient, source: Json, code: str, pointer: str
) -> None:
    response = client.post("/debug/layernorm", json={"source": source})
    problem = response.json()
    assert (response.status_code, problem["code"]) == (422, code), problem
    assert problem["pointer"] == pointer
