"""Tests of the fields of manifest.json and check.json: types, bounds and relations."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.artifact import Artifact
from models.manifest import CHECK, MANIFEST, TOKENIZER, ArtifactError
from models.network.pooling import POOLINGS
from tests.hostile_artifacts import edit, replace

GRAPH: dict[str, Any] = {"file": "model.onnx", "weights": "model.weights", "engine": "onnxruntime"}
GRAPH = {**GRAPH, "dtype": "float32", "opset": 20, "parity": None, "quality": None}
QUALITY: dict[str, Any] = {"is_generated": True, "calibration_texts": 9, "evaluated_texts": 9}
QUALITY = {**QUALITY, "measures": {}, "by_length": [], "check": {}, "costs": {}, "float_layers": []}
DEEP = json.loads("[" * 100 + "]" * 100)
FILES = {TOKENIZER: "0" * 64, CHECK: "0" * 64}
ROW = [2, 5, 3]
SPANS = {"label_marker": "<<ENT>>", "text_marker": "<<SEP>>", "max_words": 9, "max_width": 12}
TEMPLATE: dict[str, Any] = {
    **dict.fromkeys(("prefix", "before_query", "before_document", "suffix"), ""),
    **dict.fromkeys(("before_instruction", "after_instruction"), ""),
    "instruction": None,
    "splits_body": False,
}
RERANKER: dict[str, Any] = {"outputs": ["logits"], "labels": ["a"], "width": 1}
RERANKER = {**RERANKER, "matryoshka_dimensions": [], "pair_template": TEMPLATE}


def rules(**values: object) -> dict[str, object]:
    return {"": {"max_tokens": 32, **values}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": "x"}, "hidden_size must be an integer: 'x'"),
        ({"hidden_size": 0}, "hidden_size must be an integer from 1 to 16,777,216: 0"),
        ({"width": True}, "width must be an integer: True"),
        ({"vocab_size": 10**10}, "vocab_size must be an integer from 1 to 16,777,216"),
        ({"max_tokens": 10**9}, "max_tokens must be an integer from 1 to 1,048,576"),
        ({"windows": [0.5]}, r"windows\[0\] must be an integer: 0.5"),
        ({"windows": DEEP}, r"windows\[0\] must be an integer: a list of length 1"),
        ({"outputs": []}, "outputs must be a list or an object of length 1 to 7"),
        ({"outputs": ["x"]}, r"outputs\[0\] must be one of pooled, .*: 'x'"),
        ({"outputs": ["pooled", "pooled"]}, "outputs must be different"),
        ({"outputs": ["logits"], "labels": ["a"]}, "labels must have one label for each logit"),
        ({"pooling": ["x"]}, r"pooling\[0\] must be a text with the name of a pooling"),
        ({"activation": "x"}, "activation must be a text of sigmoid, softmax and identity"),
        ({"truncation_side": "x"}, "truncation_side must be a text of left and right"),
        ({"normalize": 1}, "normalize must be true or false: 1"),
        ({"matryoshka_dimensions": [33]}, "matryoshka_dimensions must not exceed width"),
        ({"matryoshka_dimensions": [-1]}, r"matryoshka_dimensions\[0\] must be an integer from 1"),
        ({"prompts": ["x"]}, "prompts must be an object"),
        ({"prompts": {"x": None}}, r"prompts\['x'\] must be a text: None"),
        ({"prompts": {"x": "a" * 70_000}}, "must be a text of length 0 to 65,536"),
        ({"default_prompt": "x"}, "default_prompt must be the name of a prompt"),
        ({**RERANKER, "prompts": {"x": "y"}}, "prompts must be empty if pair_template has no"),
        ({"adapters": ["a", "a"]}, "adapters must be different"),
        ({"prompt_adapters": {"query": "a"}}, "prompt_adapters must map names of prompts"),
        (
            {"prompt_adapters": {"other": "a"}, "adapters": ["a"]},
            "prompt_adapters must map names of prompts to names of adapters",
        ),
        (
            {"token_rules": rules(min_tokens=10**9)},
            r"token_rules\[''\].min_tokens must be .* 2,048",
        ),
        ({"token_rules": rules(min_tokens=33)}, "min_tokens must not exceed max_tokens"),
        ({"token_rules": rules(skipped=[30522])}, "token ids must be less than vocab_size"),
        ({"token_rules": rules(filler=30522)}, "token ids must be less than vocab_size"),
        ({"baseline_ids": {"pad": 30522}}, "baseline_ids must be less than vocab_size"),
        ({"baseline_ids": {"zero": 0}}, "a name in baseline_ids must be a text of pad and"),
        ({"token_rules": rules(kept=[-1])}, r"kept\[0\] must be an integer from 0"),
        (
            {"token_rules": rules(looks_up=True), "vocab_size": 32},
            "if token_rules look up, query_weights.npy",
        ),
        ({"files": {**FILES, "../x": "0" * 64}}, "files must be paths inside the artifact"),
        ({"files": {**FILES, "/x": "0" * 64}}, "files must be paths inside the artifact"),
        ({"files": {**FILES, "a//x": "0" * 64}}, "files must be paths inside the artifact"),
        ({"files": {TOKENIZER: "0" * 64}}, "files must have tokenizer.json, check.json"),
        ({"files": {TOKENIZER: "x"}}, "must be a text with a SHA-256 in hexadecimal: 'x'"),
        ({"graphs": [{**GRAPH, "weights": "x"}]}, "graphs must name files of the artifact"),
        ({"graphs": [{**GRAPH, "file": "x.xml"}]}, "file must be a text that ends with .onnx"),
        ({"graphs": [{**GRAPH, "dtype": "x"}]}, "dtype must be a text of float32"),
        ({"graphs": [{**GRAPH, "dtype": "int8"}]}, "quality must describe each output of an int8"),
        (
            {"graphs": [{**GRAPH, "dtype": "int8", "quality": QUALITY}]},
            "quality must describe each",
        ),
        (
            {"graphs": [{**GRAPH, "quality": {**QUALITY, "measures": {"a\r\nX-Evil: 1": 1}}}]},
            r"measures must be a text of letters, digits and _.-: 'a\\r\\nX-Evil: 1'",
        ),
        ({"graphs": [{**GRAPH, "quality": QUALITY}]}, "int8 graph, and no other graph"),
        ({"outputs": ["sparse"]}, "width must be vocab_size for sparse vectors"),
        ({"outputs": ["spans"]}, "spans must be the rules of the only output spans"),
        ({"spans": SPANS}, "spans must be the rules of the only output spans"),
        ({"outputs": ["pooled", "spans"], "spans": SPANS}, "the only output spans"),
        ({"outputs": ["spans"], "spans": {**SPANS, "max_width": 3}}, "width is their max_width"),
        ({"spans": {**SPANS, "max_words": 0}}, r"spans\.max_words must be an integer from 1"),
        ({"graphs": [{**GRAPH, "parity": {"x": "y"}}]}, r"parity\['x'\] must be a number"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_manifest_with_a_wrong_value_is_refused_with_the_field(
    copy: Path, values: dict[str, object], message: str
) -> None:
    edit(copy, MANIFEST, **values)
    with pytest.raises(ArtifactError, match=f"manifest.json is invalid: .*{message}"):
        Artifact.load(copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"format": 7, "name": NaN}', "NaN is not a JSON number"),
        (b'{"format": 7, "name": "\\ud800"}', "it has half of a surrogate pair"),
        (b"\xff", "can't decode byte"),
        (b" " * (4 * 2**20 + 1), "has more than 4194304 bytes, the limit"),
    ],
)
def test_manifest_that_is_no_bounded_json_is_refused(
    copy: Path, content: bytes, message: str
) -> None:
    replace(copy, MANIFEST, content)
    with pytest.raises(ArtifactError, match=f"manifest.json .*{message}"):
        Artifact.load(copy)


@pytest.mark.parametrize("name", POOLINGS)
def test_every_pooling_of_the_network_is_known(copy: Path, name: str) -> None:
    edit(copy, MANIFEST, pooling=[name])
    assert Artifact.load(copy).manifest.pooling == (name,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rows": []}, "rows must be a list or an object of length 1 to 1,024"),
        ({"rows": [[]]}, r"rows\[0\] must be a list or an object of length 1"),
        ({"rows": [[-1]]}, r"rows\[0\]\[0\] must be an integer from 0"),
        ({"rows": [[30522]]}, "token ids must be less than vocab_size"),
        ({"rows": [[1] * 16384] * 5}, "rows must have at most 65536 tokens in total"),
        ({"outputs": {}}, "outputs must be those of the manifest"),
        (
            {"outputs": {"pooled": [[1.0]], "tokens": [[1.0]]}},
            "must have the width in the manifest",
        ),
        (
            {"outputs": {"pooled": []}},
            r"outputs\['pooled'\] must be a list or an object of length 1",
        ),
        ({"outputs": {"pooled": [["x"]]}}, r"\['pooled'\]\[0\]\[0\] must be a number: 'x'"),
        ({"outputs": {"pooled": [[1e39]]}}, "must be a number from"),
        ({"adapters": [-1]}, "adapters and unattended must have one number for each row"),
        ({"adapters": [0]}, "adapters and unattended must have"),
        ({"token_types": [[0]]}, "token_types must be empty, or have one number for each token"),
        ({"texts": ["a"]}, "texts must be empty, or have one text for each row"),
        ({"words": [[0]], "labels": [[0]]}, "words and labels must have positions in each row"),
        ({"words": [[-2]]}, r"words\[0\]\[0\] must be an integer from -1"),
        ({"labels": [[]]}, r"labels\[0\] must be a list or an object of length 1"),
        ({"rows": "x"}, "rows must be a list: 'x'"),
        ({"extra": 1}, "unknown field 'extra'; fields: rows"),
    ],
)
def test_self_check_with_a_wrong_value_is_refused_with_the_field(
    copy: Path, values: dict[str, object], message: str
) -> None:
    edit(copy, CHECK, **values)
    with pytest.raises(ArtifactError, match=f"check.json is invalid: .*{message}"):
        Artifact.load(copy).check()


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("adapters", 0, "adapters must be indices of the adapters in the manifest, or -1"),
        ("adapters", -2, r"adapters\[0\] must be an integer from -1"),
        ("unattended", 9999, "unattended must leave a token of each row"),
        ("unattended", -1, r"unattended\[0\] must be an integer from 0"),
    ],
)
def test_numbers_of_the_rows_of_the_self_check_are_bounded(
    copy: Path, name: str, number: int, message: str
) -> None:
    rows = json.loads((copy / CHECK).read_text())["rows"]
    edit(copy, CHECK, **{name: [number] * len(rows)})
    with pytest.raises(ArtifactError, match=f"check.json is invalid: {message}"):
        Artifact.load(copy).check()


def test_self_check_is_parsed_once(small_artifact: Artifact) -> None:
    artifact = Artifact.load(small_artifact.path)
    assert artifact.check() is artifact.check()


@pytest.mark.parametrize("name", [TOKENIZER, CHECK])
def test_file_larger_than_its_limit_is_refused_before_it_is_read(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with (copy / name).open("wb") as file:
        file.truncate(2**40)  # a sparse file, which no machine could read into memory
    with pytest.raises(ArtifactError, match=rf"{name} has more than \d+ bytes, the limit"):
        Artifact.load(copy).read(name)
