"""Jina v3's task adapters against transformers, with the updates of a task added to its weights."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import vitrine
from models.artifact import Artifact
from models.export.checkpoint import load
from models.export.exporter import export
from models.export.model_folder import CheckpointError
from models.export.sources import resolve
from models.network.encoder import Encoder
from models.packing import INPUT_NAMES, NO_ADAPTER, pack
from tests.models.checkpoints import edit_json, edit_tensors, write_json
from tests.models.jina_v3 import TASKS, save_jina_v3, save_with_tokenizer

ROWS = [[0, 7, 21, 4, 9, 2], [0, 33, 8, 15, 2], [0, 5, 2], [0, 50, 44, 6, 7, 8, 2]]
# The first row has no adapter, and the others have one each.
ADAPTERS = [NO_ADAPTER, 0, 1, 2]
INSTRUCTION = "w4 w5 "
# Task of each prompt; None: no prompt.
SELECTED: dict[str | None, str] = {
    None: "",
    "query": "retrieval.query",
    "document": "retrieval.passage",
    **{task: task for task in TASKS},
}


def expected_tokens(models: dict[str, Any], task: str, ids: list[int]) -> Tensor:
    with torch.no_grad():
        tokens: Tensor = models[task](torch.tensor([ids])).last_hidden_state[0]
    return tokens


def test_every_task_equals_a_model_with_the_updates_in_its_weights(tmp_path: Path) -> None:
    models = save_jina_v3(tmp_path)
    encoder = load(tmp_path)[0].encoder
    for row, (index, task) in product(ROWS, enumerate(["", *TASKS], start=NO_ADAPTER)):
        tokens = encoder(torch.tensor([row]), adapters=torch.tensor([index]))[0]
        torch.testing.assert_close(tokens, expected_tokens(models, task, row), rtol=1e-5, atol=1e-5)
    alone = encoder(torch.tensor([ROWS[0]]))[0]
    torch.testing.assert_close(alone, expected_tokens(models, "", ROWS[0]), rtol=1e-5, atol=1e-5)


def test_tasks_share_dense_and_packed_batches(tmp_path: Path) -> None:
    models = save_jina_v3(tmp_path)
    encoder = load(tmp_path)[0].encoder
    expected = torch.cat(
        [expected_tokens(models, task, row) for task, row in zip(["", *TASKS], ROWS, strict=True)]
    )
    longest = max(map(len, ROWS))
    ids = torch.tensor([row + [1] * (longest - len(row)) for row in ROWS])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ROWS])
    dense = encoder(ids, mask, adapters=torch.tensor(ADAPTERS))[mask.bool()]
    for tokens in (dense, packed_tokens(encoder)):
        torch.testing.assert_close(tokens, expected, rtol=1e-5, atol=1e-5)


def packed_tokens(encoder: Encoder) -> Tensor:
    batch = pack(ROWS, adapters=ADAPTERS).inputs((*INPUT_NAMES, "adapters"))
    arrays = {name: torch.from_numpy(array) for name, array in batch.items()}
    del arrays["pooling_mask"]
    return encoder.forward_packed(*arrays.values())


@pytest.mark.parametrize("model_type", ["xlm-roberta", None])
def test_files_are_recognised_by_their_code_alone(model_type: str | None, tmp_path: Path) -> None:
    models = save_jina_v3(tmp_path)
    edit_json(tmp_path / "config.json", model_type=model_type)
    tokens = load(tmp_path)[0].encoder(torch.tensor([ROWS[0]]))[0]
    torch.testing.assert_close(tokens, expected_tokens(models, "", ROWS[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_emb_base": None}, "config.json lacks rotary_emb_base"),
        ({"lora_adaptations": []}, r"lora_adaptations has the invalid value \[\]"),
        ({"lora_adaptations": [1]}, r"lora_adaptations has the invalid value \[1\]"),
        ({"lora_rank": 0}, "lora_rank has the invalid value 0"),
        ({"lora_alpha": "1"}, "lora_alpha has the invalid value '1'"),
        ({"lora_adaptations": [TASKS[0]]}, r"lora_A has shape \(3, .* requires shape \(1, "),
        ({"load_trained_adapters": False}, "unexpected tensors .*lora_A"),
        ({"position_embedding_type": "absolute"}, "only 'rotary' is supported"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved is True; only False"),
        ({"rotary_emb_scale_base": 512}, "rotary_emb_scale_base is 512; only None"),
        ({"rotary_emb_dim": 4}, "rotary_emb_dim is 4; only the width of a head, 8"),
        ({"task_instructions": None}, "task_instructions has no text for 'retrieval.query'"),
        ({"task_instructions": {TASKS[0]: "q: "}}, "has no text for 'retrieval.passage'"),
    ],
)
def test_invalid_adapters_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_jina_v3(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_missing_updates_are_refused_by_name(tmp_path: Path) -> None:
    save_jina_v3(tmp_path)
    name = "roberta.encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_B"
    edit_tensors(tmp_path, **{name: None})
    with pytest.raises(CheckpointError, match=f"lacks the tensor {name.removeprefix('roberta.')}"):
        load(tmp_path)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("jina-v3")
    models = save_with_tokenizer(folder)
    instructions = {**dict.fromkeys(TASKS, ""), TASKS[0]: INSTRUCTION}
    edit_json(folder / "config.json", task_instructions=instructions)
    # As sentence-transformers saves it.
    own = {"prompts": {"query": "", "document": ""}}
    write_json(folder / "config_sentence_transformers.json", own)
    return export(resolve(str(folder)), folder / "artifact")[0], models


@pytest.mark.slow
def test_prompt_selects_the_adapter_of_its_name(
    exported: tuple[Artifact, dict[str, Any]],
) -> None:
    artifact, models = exported
    assert artifact.manifest.adapters == TASKS
    texts = ["w7 w9", "w21", "w8 w15 w33 w6"]
    words = [[7, 9], [21], [8, 15, 33, 6]]
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=2)) as model:
        for prompt, task in SELECTED.items():
            instruction = [4, 5] * (task == TASKS[0])
            rows = [[0, *instruction, *ids, 2] for ids in words]
            pooled = [expected_tokens(models, task, row).mean(0) for row in rows]
            expected = torch.nn.functional.normalize(torch.stack(pooled)).numpy()
            for inputs in (texts, rows):
                actual = model.encode(inputs, prompt_name=prompt).vectors
                np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(vitrine.InvalidInput, match="unknown prompt"):
            model.encode([[0, 5, 2]], prompt_name="classify")


@pytest.mark.slow
def test_texts_are_scored_with_the_adapters_of_retrieval(
    exported: tuple[Artifact, dict[str, Any]],
) -> None:
    artifact, models = exported
    query = expected_tokens(models, "retrieval.query", [0, 4, 5, 7, 9, 2]).mean(0)
    document = expected_tokens(models, "retrieval.passage", [0, 8, 15, 33, 2]).mean(0)
    expected = float(torch.nn.functional.cosine_similarity(query, document, dim=0))
    with vitrine.SyncModel(artifact.path) as model:
        (score,) = model.score("w7 w9", "w8 w15 w33").scores
        (ranked,) = model.rerank("w7 w9", ["w8 w15 w33"]).scores
    assert [score, ranked] == pytest.approx([expected, expected], abs=1e-5)


@pytest.mark.slow
def test_self_check_compares_every_adapter(exported: tuple[Artifact, dict[str, Any]]) -> None:
    adapters = exported[0].check().adapters
    assert {NO_ADAPTER, 0, 1, 2} == {*adapters}


def test_module_of_jina_v3_is_refused_in_other_models(tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path)
    edit_json(tmp_path / "config.json", auto_map=None)
    with pytest.raises(CheckpointError, match=r"modules.json names custom_st.Transformer; code"):
        load(tmp_path)
