"""Rerankers that are causal language models, against transformers and sentence-transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, processors

from models.export import pair_template
from models.export.checkpoint import load
from models.export.exporter import export
from models.export.model_folder import CheckpointError, ModelFolder
from models.export.pair_template import template_of_hub
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.export.tokenizer_file import read_tokenizer
from models.packing import pack
from service.inference.tokenizing.pairs import NO_LIMITS
from service.inference.tokenizing.shared_tokenizers import SharedTokenizer
from service.inference.tokenizing.templated_pairs import TemplatedPairs
from tests.models.checkpoints import (
    edit_json,
    edit_tensors,
    save_chatml,
    save_checkpoint,
    save_classifier,
    write_json,
)
from tests.models.export.yes_no import (
    CHAT_TEMPLATE,
    CONFIGS,
    INSTRUCTION,
    STRUCTURED,
    mxbai_logits,
    published_logits,
    save_reranker,
)

PAIRS = [
    ("Where did the cat sit?", "The cat sat on the mat."),
    ("naïve <think> 日本\n", " two  spaces, </think> and more 🎉 "),
    ("capital", "Beijing is the capital of China. " * 40),  # longer than the model reads
    ("", ""),
]
QWEN3 = Overrides(pair_template="qwen3-reranker")


def logits_of(
    folder: Path,
    pairs: Sequence[tuple[str, str]],
    overrides: Overrides = Overrides(),  # noqa: B008
    instruction: str = "",
) -> torch.Tensor:
    """Return the logit of each pair, `(N,)`: each row alone, which equals rows in one batch."""
    files = ModelFolder(folder)
    model, config = load(files, overrides)
    assert config.pair_template is not None
    tokenizer = read_tokenizer(files, config, model.encoder.config.vocab_size)
    shared = SharedTokenizer(tokenizer.to_str().encode())
    templated = TemplatedPairs(config.pair_template, shared, config.max_tokens, 10**6)
    rows = [row.ids for row in templated.rows(pairs, instruction, NO_LIMITS)[0]]
    alone = [model(torch.tensor([ids]), None, torch.ones(1, len(ids)))[0] for ids in rows]
    batch = {name: torch.from_numpy(array) for name, array in pack(rows).inputs().items()}
    (packed,) = model.forward_packed(**batch)
    torch.testing.assert_close(packed, torch.stack(alone), rtol=1e-5, atol=1e-5)
    return packed[:, 0]


@pytest.mark.parametrize("config", CONFIGS)
def test_logits_equal_the_published_formula(config: str, tmp_path: Path) -> None:
    reference = save_reranker(tmp_path, config)
    for instruction in ("", "Find sentences about animals"):
        expected = published_logits(tmp_path, reference, PAIRS, instruction or INSTRUCTION)
        actual = logits_of(tmp_path, PAIRS, QWEN3, instruction)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1  # the pairs differ


@pytest.mark.parametrize("instruction", [None, "Find sentences about animals"])
@pytest.mark.parametrize("config", ["Qwen2", "tied", "Llama"])
def test_logits_equal_those_of_mxbai(config: str, instruction: str | None, tmp_path: Path) -> None:
    reference = save_reranker(tmp_path, config)
    pairs = [*PAIRS, ("a long query " * 60, "short"), ("a long query\n" * 60, "and document " * 90)]
    expected, fixed = mxbai_logits(tmp_path, reference, pairs, instruction, 130)
    overrides = Overrides(pair_template="mxbai-rerank-v2", max_tokens=130 + fixed)
    actual = logits_of(tmp_path, pairs, overrides, instruction or "")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert load(tmp_path, overrides)[1].labels == ("1",)
    assert expected.std() > 0.05


def test_limit_of_mxbai_does_not_count_its_template(tmp_path: Path) -> None:
    reference = save_reranker(tmp_path, "Qwen2", max_length=10**6)
    edit_json(tmp_path / "config.json", max_position_embeddings=32_768)
    _, fixed = mxbai_logits(tmp_path, reference, PAIRS[:1], None, 100)
    assert load(tmp_path, Overrides(pair_template="mxbai-rerank-v2"))[1].max_tokens == 8192 + fixed


def test_head_is_one_row_and_the_label_is_the_answer(tmp_path: Path) -> None:
    save_reranker(tmp_path, "own matrix and biases")
    model, config = load(tmp_path, QWEN3)
    assert [tuple(own.shape) for own in model.heads.parameters()] == [(1, 32)]
    assert (config.labels, config.activation, config.pooling) == (("yes",), "sigmoid", ("last",))


def test_published_template_limits_rows_to_8192_tokens(tmp_path: Path) -> None:
    save_reranker(tmp_path, "tied", max_length=10**6)
    edit_json(tmp_path / "config.json", max_position_embeddings=40_960)
    assert load(tmp_path, QWEN3)[1].max_tokens == 8192
    longer = Overrides(pair_template="qwen3-reranker", max_tokens=9000)
    assert load(tmp_path, longer)[1].max_tokens == 9000


def save_for_library(folder: Path, template: str = CHAT_TEMPLATE) -> CrossEncoder:
    """Save a reranker with a chat template for pairs by sentence-transformers; return it."""
    save_reranker(folder / "model", "tied")
    save_chatml(folder / "model", template)
    CrossEncoder(str(folder / "model"), device="cpu").save(str(folder / "saved"))
    return CrossEncoder(str(folder / "saved"), device="cpu")


def predicted(
    model: CrossEncoder, prompt: str | None = None, pairs: Sequence[tuple[str, str]] = PAIRS
) -> torch.Tensor:
    identity = torch.nn.Identity()
    return torch.from_numpy(model.predict(list(pairs), prompt=prompt, activation_fn=identity))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["flat", "structured"])
def test_logits_of_the_chat_template_equal_sentence_transformers(form: str, tmp_path: Path) -> None:
    reference = save_for_library(tmp_path, STRUCTURED if form == "structured" else CHAT_TEMPLATE)
    file = tmp_path / "saved" / "sentence_bert_config.json"
    settings = json.loads(file.read_text())
    assert settings["modality_config"]["message"]["format"] == form
    if form == "structured":  # which the template alone shows, too
        settings["modality_config"]["message"]["format"] = "auto"
        file.write_text(json.dumps(settings))
    folder = tmp_path / "saved"
    torch.testing.assert_close(logits_of(folder, PAIRS), predicted(reference), rtol=1e-5, atol=1e-5)
    expected = predicted(reference, prompt="Find cats.")
    actual = logits_of(folder, PAIRS, instruction="Find cats.")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    template = load(folder)[1].pair_template
    assert template is not None
    assert template.instruction == "Find an answer."
    assert template.before_document == "\n<Document>: "


@pytest.mark.slow
def test_chat_template_without_an_instruction_ignores_prompts(tmp_path: Path) -> None:
    save_reranker(tmp_path / "model", "tied")
    plain = CHAT_TEMPLATE.replace("{{ of('system', 'Find an answer.') }}", "Answer.")
    save_chatml(tmp_path / "model", plain)
    CrossEncoder(str(tmp_path / "model"), device="cpu").save(str(tmp_path / "saved"))
    expected = predicted(CrossEncoder(str(tmp_path / "saved"), device="cpu"), prompt="Find cats.")
    actual = logits_of(tmp_path / "saved", PAIRS, instruction="Find cats.")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    template = load(tmp_path / "saved")[1].pair_template
    assert template is not None
    assert template.instruction is None


@pytest.mark.slow
def test_prompts_without_a_place_in_the_chat_template_are_refused(tmp_path: Path) -> None:
    save_conversion(tmp_path, CHAT_TEMPLATE.replace("{{ of('system', 'Find an answer.') }}", "A."))
    for prompts in ({"cats": "Find cats."}, {"query": "Find cats."}):
        with pytest.raises(CheckpointError, match="prompts would have no effect"):
            load(tmp_path, Overrides(prompts=prompts))
    assert load(tmp_path, Overrides(prompts={"query": ""}))[1].pair_template is not None


def test_folder_without_a_chat_template_has_plain_pairs(tmp_path: Path) -> None:
    save_reranker(tmp_path / "model", "tied")
    CrossEncoder(str(tmp_path / "model"), device="cpu").save(str(tmp_path / "saved"))
    reference = CrossEncoder(str(tmp_path / "saved"), device="cpu")
    model, config = load(tmp_path / "saved")
    assert config.pair_template is None
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    rows = [tokenizer(*pair, truncation=True)["input_ids"] for pair in PAIRS[:3]]
    actual = [model(torch.tensor([ids]), None, torch.ones(1, len(ids)))[0, 0] for ids in rows]
    expected = predicted(reference, pairs=PAIRS[:3])
    torch.testing.assert_close(torch.stack(actual), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("false_token", [None, "no"])
def test_answers_are_those_of_the_module(false_token: str | None, tmp_path: Path) -> None:
    save_reranker(tmp_path / "model", "own matrix and biases")
    save_chatml(tmp_path / "model", CHAT_TEMPLATE)
    network = Transformer(str(tmp_path / "model"), transformer_task="text-generation")
    true, false = (
        token and network.tokenizer.convert_tokens_to_ids(token) for token in ("a", false_token)
    )
    model = CrossEncoder(modules=[network, LogitScore(true, false)], device="cpu")
    model.save(str(tmp_path / "saved"))
    actual = logits_of(tmp_path / "saved", PAIRS)
    torch.testing.assert_close(actual, predicted(model), rtol=1e-5, atol=1e-5)
    assert load(tmp_path / "saved")[1].labels == ("a",)


@pytest.mark.slow
def test_last_token_and_a_layer_equal_sentence_transformers(tmp_path: Path) -> None:
    save_reranker(tmp_path / "model", "windows")
    save_chatml(tmp_path / "model", CHAT_TEMPLATE)
    network = Transformer(str(tmp_path / "model"))
    torch.manual_seed(3)
    names = {"activation_function": torch.nn.Identity(), "module_output_name": "scores"}
    modules = [network, Pooling(32, "lasttoken"), Dense(32, 1, bias=False, **names)]
    reference = CrossEncoder(modules=modules, device="cpu", prompts={"cats": "Find cats."})
    reference.save(str(tmp_path / "saved"))
    actual = logits_of(tmp_path / "saved", PAIRS)
    torch.testing.assert_close(actual, predicted(reference), rtol=1e-5, atol=1e-5)


def save_conversion(folder: Path, chat_template: str | None = None) -> Any:  # noqa: ANN401
    """Save the classifier whose one row is that of the answers; return the language model."""
    reference = save_reranker(folder, "tied")
    size = save_chatml(folder, chat_template)
    weights = reference.get_output_embeddings().weight.detach()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    yes, no = (tokenizer.convert_tokens_to_ids(answer) for answer in ("yes", "no"))
    changes = {"vocab_size": size, "max_position_embeddings": 512, "pad_token_id": 0}
    save_classifier(folder, "qwen3", 1, layer_types=None, tie_word_embeddings=True, **changes)
    tensors = {name: own.detach().clone() for name, own in reference.model.state_dict().items()}
    tensors = {f"model.{name}": own for name, own in tensors.items()}
    edit_tensors(folder, **tensors, **{"score.weight": (weights[yes] - weights[no])[None].clone()})
    return reference


def test_conversions_to_classifiers_equal_the_language_model(tmp_path: Path) -> None:
    reference = save_conversion(tmp_path)
    expected = published_logits(tmp_path, reference, PAIRS)
    actual = logits_of(tmp_path, PAIRS, QWEN3)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert load(tmp_path)[1].pair_template is None  # without a chat template and a choice


@pytest.mark.slow
def test_conversions_with_a_chat_template_equal_sentence_transformers(tmp_path: Path) -> None:
    save_conversion(tmp_path, CHAT_TEMPLATE)
    expected = predicted(CrossEncoder(str(tmp_path), device="cpu"))
    torch.testing.assert_close(logits_of(tmp_path, PAIRS), expected, rtol=1e-5, atol=1e-5)
    assert load(tmp_path, Overrides(pair_template="none"))[1].pair_template is None


def make_panic(folder: Path) -> None:
    """Let the tokenizer panic on each text with a "t" or a letter beyond ASCII."""
    content = json.loads((folder / "tokenizer.json").read_text())
    replaced = {"t": "\N{LATIN SMALL LETTER THORN}", "\u200b": ""}
    steps = [
        {"type": "Replace", "pattern": {"String": old}, "content": new}
        for old, new in replaced.items()
    ]
    content["normalizer"] = {"type": "Sequence", "normalizers": steps}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    last = max(token["id"] for token in content["added_tokens"]) + 1
    invisible = {"id": last, "content": "\u200b", "special": True, "normalized": True, **flags}
    content["added_tokens"].append(invisible)
    write_json(folder / "tokenizer.json", content)


def test_tokenizer_that_panics_on_a_chat_template_is_refused(tmp_path: Path) -> None:
    save_conversion(tmp_path, CHAT_TEMPLATE)
    make_panic(tmp_path)
    message = "the chat template has a text on which the tokenizer fails: .* panicked"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_tokenizer_that_panics_on_a_published_template_is_refused(tmp_path: Path) -> None:
    save_reranker(tmp_path, "tied")
    make_panic(tmp_path)
    message = "the tokenizer fails on the pair template mxbai-rerank-v2: .* panicked"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, Overrides(pair_template="mxbai-rerank-v2"))


def test_language_model_without_a_purpose_is_refused(tmp_path: Path) -> None:
    save_reranker(tmp_path, "tied")
    message = r"a chat model, a reranker or an embedding model: --pair-template qwen3-reranker"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
    assert load(tmp_path, Overrides(pooling=["last"]))[0].outputs == ("pooled", "tokens")


@pytest.mark.parametrize(
    ("hub_id", "template"),
    [
        ("Qwen/Qwen3-Reranker-4B", "qwen3-reranker"),
        ("tomaarsen/Qwen3-Reranker-0.6B-seq-cls", "qwen3-reranker"),
        ("mixedbread-ai/mxbai-rerank-large-v2", "mxbai-rerank-v2"),
        ("Qwen/Qwen3-Embedding-0.6B", None),
        ("folder Qwen3-Reranker-4B", None),
    ],
)
def test_hub_models_have_the_published_template(hub_id: str, template: str | None) -> None:
    assert template_of_hub(hub_id) == template


OTHER_TEMPLATES = {
    "of a chat model, with turns": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}",
        "has special tokens between the texts of a pair",
    ),
    "of a chat model, without the roles": (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "does not have the query and then the document, once each",
    ),
    "that trims texts": (
        CHAT_TEMPLATE.replace("first | default", "first | trim | default"),
        "does not render all texts unchanged",
    ),
    **{
        f"with {change} of documents": (
            CHAT_TEMPLATE.replace("of('document', '')", f"of('document', ''){change}"),
            "does not render all texts unchanged",
        )
        for change in (
            *("[:8000]", "|replace('\"', '')", "|replace('\\r\\n', '\\n')", "|indent"),
            *("|replace('<|im_end|>', '')", "|replace('\\u2019', '')"),
        )
    },
    "with the document first": (
        CHAT_TEMPLATE.replace("'query'", "'other'")
        .replace("'document'", "'query'")
        .replace("'other'", "'document'"),
        "does not have the query and then the document",
    ),
    "whose suffix can join the document": (
        CHAT_TEMPLATE.replace("<|im_end|>\n<|im_start|>assistant", "\nAnswer:"),
        "does not have a special token after the document",
    ),
    "with the date": (
        CHAT_TEMPLATE.replace("Judge the", "{{ strftime_now('%d %b %Y') }} Judge the"),
        "has the current date or time, which no fixed texts have",
    ),
    "that fails": (CHAT_TEMPLATE.replace("'Find an answer.'", "1 // 0"), "renders no pair"),
    "that needs too much time": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "renders no pair within 1 s of a CPU",
    ),
    "that needs too much memory": (
        "{% set x = 'ab' * 1500000000 %}",
        "renders no pair within .* and 1024 MiB",
    ),
    "that writes too much": ("{{ 'ab' * 1000000 }}", "renders no pair: its texts have more than"),
    "with other texts around an instruction": (
        CHAT_TEMPLATE.replace(
            "<Instruct>: ", "{% if messages | length == 3 %}<Instruct>: {% endif %}"
        ),
        "does not render all texts unchanged",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_TEMPLATES)
def test_chat_templates_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_template, "_CPU_SECONDS", 1)
    template, message = OTHER_TEMPLATES[name]
    save_conversion(tmp_path, template)
    with pytest.raises(CheckpointError, match=f"the chat template {message}.*; choose another"):
        load(tmp_path)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "config_sentence_transformers.json": ({"activation_fn": "my.Own"}, "the activation 'my.Own'"),
    "1_LogitScore/config.json": ({"bias": 1.0}, "config.json: bias is not supported"),
    "config.json": ({"architectures": ["Qwen3Model"]}, "needs a causal language model"),
    "tokenizer_config.json": ({"truncation_side": "left"}, "truncates texts on the left"),
    "sentence_bert_config.json": (
        {"processing_kwargs": {"chat_template": {"restore_suffix": False}}},
        "processing_kwargs is",
    ),
}


def messages(**changes: str) -> dict[str, Any]:
    """Return the setting for messages with changes."""
    text = {"method": "forward", "method_output_name": "logits"}
    return {"modality_config": {"text": text, "message": {**text, "format": "flat", **changes}}}


@pytest.mark.slow
def test_settings_that_would_change_scores_are_refused(tmp_path: Path) -> None:
    save_for_library(tmp_path)
    folder = tmp_path / "saved"
    more: list[tuple[str, tuple[dict[str, Any], str]]] = [
        ("1_LogitScore/config.json", ({"module_input_name": "scores"}, "module_input_name is")),
        ("1_LogitScore/config.json", ({"true_token_id": 10**6}, "lacks the token of an answer")),
        ("1_LogitScore/config.json", ({"true_token_id": None}, "lacks the token of an answer")),
        ("sentence_bert_config.json", ({"transformer_task": "fill-mask"}, "transformer_task is")),
        ("sentence_bert_config.json", (messages(format="parts"), "the unknown format 'parts'")),
        ("sentence_bert_config.json", (messages(method="encode"), "modality_config is")),
    ]
    for name, (changes, message) in [*CHANGES.items(), *more]:
        before = (folder / name).read_text()
        edit_json(folder / name, **changes)
        with pytest.raises(CheckpointError, match=message):
            load(folder)
        (folder / name).write_text(before)
    load(folder)


def test_matrix_of_the_logits_must_be_the_one_that_config_json_names(tmp_path: Path) -> None:
    save_reranker(tmp_path, "tied")
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path, **{"lm_head.weight": embeddings + 1})
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true, but lm_head"):
        load(tmp_path, QWEN3)
    edit_tensors(tmp_path, **{"lm_head.weight": embeddings.clone()})
    load(tmp_path, QWEN3)
    edit_tensors(tmp_path, **{"lm_head.weight": None})
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks lm_head\.weight"):
        load(tmp_path, QWEN3)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    for other in (embeddings.flatten(), embeddings[0, 0].clone()):
        edit_tensors(tmp_path, **{"model.embed_tokens.weight": other})
        with pytest.raises(CheckpointError, match=r"the checkpoint lacks embed_tokens\.weight"):
            load(tmp_path, QWEN3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (Overrides(pair_template="qwen"), "the pair template 'qwen' is not one of qwen3-reranker"),
        (Overrides(pair_template="chat"), "the chat template is missing"),
        (Overrides(pair_template="none"), "a pair template cannot be chosen"),
        (Overrides(pair_template="qwen3-reranker", pooling=["last"]), "cannot be chosen"),
    ],
)
def test_choices_that_do_not_apply_are_refused(
    overrides: Overrides, message: str, tmp_path: Path
) -> None:
    save_reranker(tmp_path, "tied")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, overrides)


def test_published_template_needs_a_tokenizer_without_special_tokens(tmp_path: Path) -> None:
    save_reranker(tmp_path, "tied")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="the tokenizer adds special tokens to texts"):
        load(tmp_path, QWEN3)


def test_template_is_for_models_with_one_label_that_score_pairs(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3", vocab_size=save_chatml(tmp_path, CHAT_TEMPLATE))
    with pytest.raises(CheckpointError, match="the model computes no scores of pairs"):
        load(tmp_path, QWEN3)
    save_classifier(tmp_path, "qwen3", 3, vocab_size=save_chatml(tmp_path, CHAT_TEMPLATE))
    assert load(tmp_path)[1].pair_template is None  # as in transformers' pipeline
    with pytest.raises(CheckpointError, match="templates of pairs are for one label"):
        load(tmp_path, QWEN3)


def test_template_must_leave_room_for_a_pair(tmp_path: Path) -> None:
    save_reranker(tmp_path / "model", "tied")
    overrides = Overrides(pair_template="qwen3-reranker", max_tokens=100)
    with pytest.raises(CheckpointError, match=r"the template of pairs has \d+ tokens; .* 100"):
        export(resolve(str(tmp_path / "model")), tmp_path / "artifact", overrides=overrides)
