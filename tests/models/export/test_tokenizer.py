"""The prepared tokenizer has the tokens of transformers, whatever file a setting is in."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

import vitrine
from models.artifact import Artifact
from models.export.checkpoint import load
from models.export.exporter import export
from models.export.model_folder import CheckpointError, ModelFolder
from models.export.sentence_config import Overrides, SentenceConfig
from models.export.sources import resolve
from models.export.token_rules import check_room_for_texts
from models.export.tokenizer_file import read_tokenizer, tokenizer_of_source
from models.export.transformers_tokenizer import load_tokenizer, read_settings
from models.manifest import TokenRules
from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.models.checkpoints import (
    edit_json,
    save_byte_fallback,
    save_byte_level,
    save_chatml,
    save_checkpoint,
    save_classifier,
    save_sentence_model,
    save_sentencepiece,
    save_tokenizer,
    save_wordpiece,
    write_json,
    write_modules,
)
from tests.sentences import SENTENCES

VOCABULARY = 500
# Number of random settings of each class. Its time is a tenth of a second per setting.
SEEDS = 20


def save_words(folder: Path, _: str) -> None:
    save_tokenizer(folder)


SAVE: dict[str, Callable[[Path, str], None]] = {
    "AlbertTokenizer": save_sentencepiece,
    "BertTokenizer": save_wordpiece,
    "CamembertTokenizer": save_sentencepiece,
    "DebertaV2Tokenizer": save_sentencepiece,
    "DistilBertTokenizer": save_wordpiece,
    "ElectraTokenizer": save_wordpiece,
    "GemmaTokenizer": save_byte_fallback,
    "MPNetTokenizer": save_wordpiece,
    "PreTrainedTokenizerFast": save_words,
    "Qwen2Tokenizer": save_byte_level,
    "RobertaTokenizer": save_byte_level,
    "XLMRobertaTokenizer": save_sentencepiece,
}
FAMILIES = {
    "DebertaV2Tokenizer": "deberta-v2",
    "GemmaTokenizer": "gemma3_text",
    "PreTrainedTokenizerFast": "modernbert",
    "Qwen2Tokenizer": "qwen3",
    "XLMRobertaTokenizer": "xlm-roberta",
}
# Truncation in a tokenizer.json, as the tokenizers library writes it.
LEFT = {"direction": "Left", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
TEXTS = (
    *("", " ", "the cat", " the cat ", "W5 w6 wé", "w5  w6\tW7\r\n\n!", "\ta\u00a0cat \n"),
    *("\uff21\uff22 \ufb01 ``x''", "e\u0301 don't 2026", "Wé 日本 w7", "a" * 99, "b" * 250),
    *("nul\0 \x07 \u200b", "[MASK] [mask]<mask>", "[CLS]a[SEP] </s>", "🎉 👩\u200d💻"),
    *SENTENCES[:10],
)


@pytest.fixture(scope="module")
def sentence_config(tmp_path_factory: pytest.TempPathFactory) -> SentenceConfig:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, "bert")
    return load(folder)[1]


def changed_files(kind: str, folder: Path, rng: random.Random) -> dict[str, dict[str, Any]]:
    """Change up to two settings in each file of a tokenizer; return the changes by file."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    tokens = [entry if isinstance(entry, str) else entry[0] for entry in vocabulary]
    known = rng.choice([token for token in tokens if len(token) > 1])
    size = max(len(tokens), *(token["id"] + 1 for token in content["added_tokens"]))
    flags = {name: rng.random() < 0.5 for name in ("lstrip", "rstrip", "normalized", "single_word")}
    entry = {"content": rng.choice(("<new>", "cat")), "special": rng.random() < 0.5, **flags}
    own_added = [{**token, **flags} for token in content["added_tokens"]]
    more_added = [*content["added_tokens"], {"id": size, **entry}]
    longer = {**content["model"], "max_input_chars_per_word": 200}
    settings: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "do_lower_case": rng.random() < 0.5,
            "strip_accents": rng.random() < 0.5,
            "keep_accents": True,
            "tokenize_chinese_chars": False,
            "split_by_punct": True,
            "add_prefix_space": rng.random() < 0.5,
            "add_bos_token": True,
            "add_eos_token": True,
            "tokenizer_class": rng.choice((None, f"{kind.removesuffix('Fast')}Fast")),
            "mask_token": known,
            "cls_token": {"content": known, **flags},
            "additional_special_tokens": [known, "<extra>"],
            "extra_special_tokens": rng.choice(([known], {"image_token": "<image>"})),
            "added_tokens_decoder": {str(size): entry},
            "model_max_length": 17,
            "truncation_side": "left",
            "model_input_names": ["input_ids", "token_type_ids"],
        },
        "special_tokens_map.json": {
            "additional_special_tokens": [known],
            "mask_token": {"content": "<hidden>", **flags},
            "sep_token": known,
        },
        "added_tokens.json": {"<query>": size, known: 5},
        "tokenizer.json": {
            "post_processor": None,
            "normalizer": rng.choice((None, {"type": "Lowercase"}, {"type": "NFKC"})),
            "pre_tokenizer": {"type": "Whitespace"},
            "added_tokens": rng.choice((own_added, more_added)),
            "truncation": LEFT,
            "model": longer,
        },
    }
    changes: dict[str, dict[str, Any]] = {}
    for name, values in settings.items():
        chosen = rng.sample(sorted(values), rng.choice((0, 0, 1, 2)))
        if chosen:
            changes[name] = {key: values[key] for key in chosen}
            own = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
            write_json(folder / name, {**own, **changes[name]})
    return changes


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAVE)
def test_tokens_with_settings_in_four_files_are_those_of_transformers(
    kind: str, sentence_config: SentenceConfig, tmp_path: Path
) -> None:
    family = FAMILIES.get(kind, kind.removesuffix("Tokenizer").lower())
    compared = 0
    for seed in range(SEEDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        SAVE[kind](folder, kind)
        write_json(folder / "config.json", {"model_type": family})
        changes = changed_files(kind, folder, random.Random(seed))  # noqa: S311
        own = replace(sentence_config, family=family)
        try:
            reference = transformers.AutoTokenizer.from_pretrained(folder)
        except Exception:  # noqa: BLE001 - as with a token that an AddedToken cannot be
            with pytest.raises(CheckpointError, match="AutoTokenizer cannot load"):
                read_tokenizer(ModelFolder(folder), own, VOCABULARY)
            continue
        assert_equal(folder, own, reference, changes)
        compared += 1
    assert compared > 0.8 * SEEDS


def assert_equal(
    folder: Path,
    sentence_config: SentenceConfig,
    reference: Any,  # noqa: ANN401
    changes: dict[str, dict[str, Any]],
) -> None:
    """Compare tokens and settings with those of transformers."""
    tokenizer = read_tokenizer(ModelFolder(folder), sentence_config, VOCABULARY)
    named = [str(token) for token in reference.added_tokens_encoder]
    texts = [*TEXTS, *named, *(f"a {token} b{token}{token}c" for token in named)]
    for text in texts:
        expected = reference(text)["input_ids"]
        assert tokenizer.encode(text).ids == expected, (changes, text)
    types = "token_type_ids" in reference.model_input_names
    for pair in zip(texts, reversed(texts), strict=True):
        if not pair[1]:  # transformers reads it as no second text
            continue
        actual, encoded = tokenizer.encode(*pair), reference(*pair)
        assert actual.ids == encoded["input_ids"], (changes, pair)
        assert not types or actual.type_ids == encoded["token_type_ids"], (changes, pair)
    settings = read_settings(ModelFolder(folder), "", sentence_config.family)
    assert settings.gives_token_types == types, changes
    assert settings.truncation_side == reference.truncation_side, changes
    assert settings.mask_or_end_token == (reference.mask_token or reference.eos_token), changes
    assert settings.max_length == reference.model_max_length, changes


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        {"tokenizer_class": "BertTokenizerFast", "strip_accents": False},
        {"tokenizer_class": "DistilBertTokenizer", "tokenize_chinese_chars": False},
        {"tokenizer_class": "ElectraTokenizer", "do_lower_case": False},
        {"do_lower_case": False},
    ],
)
@pytest.mark.parametrize("family", ["bert", "nomic_bert", "modernbert"])
def test_tokenizer_ids_equal_transformers(
    minilm_folder: Path,
    sentence_config: SentenceConfig,
    tmp_path: Path,
    changes: dict[str, object],
    family: str,
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((minilm_folder / "tokenizer.json").read_bytes())
    write_json(
        tmp_path / "tokenizer_config.json",
        {name: f"[{name[:-6].upper()}]" for name in ("unk_token", "sep_token", "cls_token")}
        | {"pad_token": "[PAD]", "mask_token": "[MASK]", **changes},
    )
    write_json(tmp_path / "config.json", {"model_type": family})
    own = replace(sentence_config, family=family)
    tokenizer = read_tokenizer(ModelFolder(tmp_path), own, 30522)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, *SENTENCES):
        assert tokenizer.encode(text).ids == reference(text)["input_ids"], text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokenizer_class": "RoFormerTokenizer"}, "RoFormerTokenizer.*jieba"),
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "BertJapaneseTokenizer"),
        ({"auto_map": {"AutoTokenizer": ["code.Slow", "code.Fast"]}}, "auto_map names code"),
        ({"auto_map": ["code.Slow", None]}, "auto_map names code"),
        ({"fast_tokenizer_files": ["tokenizer.5.json"]}, "fast_tokenizer_files is not supported"),
        ({"split_special_tokens": True}, "split_special_tokens is true"),
        ({"mask_token": 5}, "AutoTokenizer cannot load the tokenizer"),
        ({"added_tokens_decoder": {"60": {"content": "<new>"}}}, "'<new>' the id 60; the model's"),
        ({"extra_special_tokens": ["<new>"]}, "'<new>' the id 60; the model's vocabulary has"),
    ],
)
def test_setting_that_tokenizer_json_cannot_have_is_refused(
    config: dict[str, object], message: str, tmp_path: Path, sentence_config: SentenceConfig
) -> None:
    save_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", **config)
    with pytest.raises(CheckpointError, match=message):
        read_tokenizer(ModelFolder(tmp_path), sentence_config, 60)


def test_fields_of_config_json_select_the_tokenizer_as_in_transformers(tmp_path: Path) -> None:
    """`model_name` selects the class of the family, and the version says that a regex is right."""
    named, mistral = tmp_path / "named", tmp_path / "mistral"
    save_wordpiece(named, "BertTokenizer")
    write_json(named / "config.json", {"model_type": "roberta", "model_name": "camembertv2-base"})
    words = {"[UNK]": 0} | {f"w{i}": i for i in range(1, 100_002)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    write_json(mistral / "tokenizer.json", json.loads(tokenizer.to_str()))
    write_json(mistral / "config.json", {"model_type": "mistral", "transformers_version": "5.1.0"})
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "fix_mistral_regex": True}
    write_json(mistral / "tokenizer_config.json", config)
    for folder, family in ((named, "roberta"), (mistral, "mistral")):
        expected = transformers.AutoTokenizer.from_pretrained(folder)("the cat w5")["input_ids"]
        actual = load_tokenizer(ModelFolder(folder), "", family)("the cat w5")["input_ids"]
        assert actual == expected, family


def test_code_for_other_classes_than_the_tokenizer_is_ignored(
    tmp_path: Path, sentence_config: SentenceConfig
) -> None:
    save_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", auto_map={"AutoProcessor": "code.Processor"})
    assert read_tokenizer(ModelFolder(tmp_path), sentence_config, 60).encode("w5").ids == [0, 5, 2]


def test_class_that_changes_texts_in_python_is_refused(
    tmp_path: Path, sentence_config: SentenceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed texts find a difference that no list of settings has."""
    save_wordpiece(tmp_path, "BertTokenizer")
    own = transformers.BertTokenizer._encode_plus

    def replaced(self: object, text: list[str], *arguments: Any, **options: Any) -> object:  # noqa: ANN401
        changed = [part.replace("\u201cquoted", "quoted") for part in text]
        return own(self, changed, *arguments, **options)

    read_tokenizer(ModelFolder(tmp_path), sentence_config, VOCABULARY)
    monkeypatch.setattr(transformers.BertTokenizer, "_encode_plus", replaced)
    with pytest.raises(CheckpointError, match="AutoTokenizer, with the tokenizer_class BertTok"):
        read_tokenizer(ModelFolder(tmp_path), sentence_config, VOCABULARY)


def test_files_outside_the_folder_are_not_read(
    tmp_path: Path, sentence_config: SentenceConfig
) -> None:
    (tmp_path / "elsewhere").mkdir()
    save_wordpiece(tmp_path / "elsewhere", "BertTokenizer")
    save_tokenizer(tmp_path)
    paths = {f"{name}_file": str(tmp_path / "elsewhere") for name in ("vocab", "tokenizer")}
    edit_json(tmp_path / "tokenizer_config.json", **paths)
    assert read_tokenizer(ModelFolder(tmp_path), sentence_config, 60).encode("w5").ids == [0, 5, 2]


def test_token_of_a_class_without_an_embedding_is_left_out(
    tmp_path: Path, sentence_config: SentenceConfig
) -> None:
    """No file of the folder names [MASK], which BERT's class then adds to the vocabulary."""
    save_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    tokenizer = read_tokenizer(ModelFolder(tmp_path), sentence_config, 60)
    assert max(tokenizer.get_vocab().values()) == 59
    edit_json(tmp_path / "tokenizer_config.json", mask_token="[MASK]")  # noqa: S106
    with pytest.raises(CheckpointError, match=r"'\[MASK\]' the id 60; the model's vocabulary"):
        read_tokenizer(ModelFolder(tmp_path), sentence_config, 60)


def test_empty_unknown_token_is_none(tmp_path: Path) -> None:
    """transformers loads such a tokenizer, and recurses without end for the id of the token."""
    save_checkpoint(tmp_path, "bert", num_hidden_layers=1)
    save_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", unk_token="")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(RecursionError):
        assert reference.unk_token_id
    assert read_settings(ModelFolder(tmp_path), "", "bert").unknown_id == -1
    _, config = load(ModelFolder(tmp_path))
    tokenizer = read_tokenizer(ModelFolder(tmp_path), config, VOCABULARY)
    assert tokenizer.encode("w5 w6").ids == reference("w5 w6")["input_ids"]


def save_letters(folder: Path, letters: str) -> None:
    """Save a model whose tokenizer has no unknown token, and adds none to a text."""
    save_checkpoint(folder, "bert", num_hidden_layers=1)
    vocabulary = {token: index for index, token in enumerate([*letters, "[PAD]"])}
    Tokenizer(models.BPE(vocabulary, [])).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    write_json(folder / "tokenizer_config.json", settings)


@pytest.mark.slow  # exports a model
def test_texts_without_tokens_check_nothing(tmp_path: Path) -> None:
    save_letters(tmp_path / "model", "acgt")
    artifact, _ = export(resolve(str(tmp_path / "model")), tmp_path / "out")
    check = artifact.check()
    assert "a" in check.texts
    assert not any("\N{ROCKET}" in text for text in check.texts)
    oracle = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=1)) as model:
        vectors = model.encode(["acgt", "gg"]).vectors
        with pytest.raises(vitrine.InvalidInput):
            model.encode(["\N{ROCKET}"])
    np.testing.assert_allclose(vectors, oracle.encode(["acgt", "gg"]), atol=2e-5)


def test_tokenizer_without_tokens_for_common_texts_is_refused(tmp_path: Path) -> None:
    save_letters(tmp_path / "model", "\N{BLACK CHESS KING}")
    with pytest.raises(CheckpointError, match="the tokenizer finds no tokens in common texts"):
        export(resolve(str(tmp_path / "model")), tmp_path / "out")


@pytest.mark.slow  # exports a model
def test_settings_in_all_files_reach_the_artifact(tmp_path: Path) -> None:
    """The side of truncation is in tokenizer.json, as other libraries write it."""
    folder = tmp_path / "tiny"
    save_checkpoint(folder, "bert", num_hidden_layers=1)
    save_tokenizer(folder)
    edit_json(folder / "tokenizer.json", truncation=LEFT, post_processor=None)
    write_json(folder / "special_tokens_map.json", {"additional_special_tokens": ["w5"]})
    artifact, _ = export(resolve(str(folder)), tmp_path / "out")
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    assert artifact.manifest.truncation_side == reference.truncation_side == "left"
    tokenizer = Tokenizer.from_file(str(artifact.path / "tokenizer.json"))
    assert tokenizer.encode("w5w6 w7").ids == reference("w5w6 w7")["input_ids"] == [5, 6, 7]
    assert tokenizer_of_source(artifact).encode("w5w6 w7").ids == [5, 6, 7]


def test_tokenizer_with_a_huge_id_is_refused_before_it_is_built(
    tmp_path: Path, sentence_config: SentenceConfig
) -> None:
    save_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["w5"] = 10**8
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(CheckpointError, match="a token with the id 100000000; the limit is"):
        read_tokenizer(ModelFolder(tmp_path), sentence_config, 60)


def test_token_of_images_beyond_the_vocabulary_is_left_out(tmp_path: Path) -> None:
    save_byte_fallback(tmp_path, "GemmaTokenizer")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<image_soft_token>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    entry = {"content": "<image_soft_token>", "special": True}
    edit_json(tmp_path / "tokenizer_config.json", added_tokens_decoder={str(size): entry})
    save_checkpoint(tmp_path / "model", "bert")
    sentence_config = replace(load(tmp_path / "model")[1], family="gemma3_text")
    served = read_tokenizer(ModelFolder(tmp_path), sentence_config, size)
    assert max(served.get_vocab(with_added_tokens=True).values()) == size - 1
    assert served.encode("ca the <eos>").ids == tokenizer.encode("ca the <eos>").ids
    assert max(served.encode("<image_soft_token>").ids) < size


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    rng = random.Random(0)  # noqa: S311 - no cryptography
    special = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    pieces = [("ha" * length, -rng.uniform(3, 14)) for length in range(1, 40)]
    transformers.XLMRobertaTokenizer(vocab=[*special, *pieces]).save_pretrained(tmp_path)
    save_checkpoint(tmp_path / "model", "bert")
    sentence_config = replace(load(tmp_path / "model")[1], family="xlm-roberta")
    size = len(special) + len(pieces) + 1  # with <mask>
    scores = scores_of(transformers.AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer)
    assert scores == dict([*special, *pieces])
    assert scores_of(read_tokenizer(ModelFolder(tmp_path), sentence_config, size)) == scores
    # With a token that is left out.
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image_soft_token>"])
    added = json.loads(tokenizer.to_str())["added_tokens"]
    edit_json(tmp_path / "tokenizer.json", added_tokens=added)
    served = read_tokenizer(ModelFolder(tmp_path), sentence_config, size)
    assert served.token_to_id("<image_soft_token>") is None
    assert scores_of(served) == scores


def scores_of(tokenizer: Tokenizer) -> dict[str, float]:
    scores = dict(json.loads(tokenizer.to_str())["model"]["vocab"])
    return {token: score for token, score in scores.items() if token != "<mask>"}  # noqa: S105


def test_file_that_is_no_tokenizer_is_refused(
    tmp_path: Path, sentence_config: SentenceConfig
) -> None:
    save_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer.json", version="0")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not a tokenizer"):
        read_tokenizer(ModelFolder(tmp_path), sentence_config, 60)


def test_tokenizer_whose_tokens_share_an_id_is_refused(
    tmp_path: Path, sentence_config: SentenceConfig
) -> None:
    save_tokenizer(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    model["vocab"] |= {"w7": model["vocab"]["w8"]}
    edit_json(tmp_path / "tokenizer.json", model=model)
    written = json.loads(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str())
    assert len({"w7", "w8"} & written["model"]["vocab"].keys()) == 1
    with pytest.raises(CheckpointError, match=r"tokenizer.json: the tokens 'w7' and 'w8' have the"):
        read_tokenizer(ModelFolder(tmp_path), sentence_config, 60)


def test_tokenizer_with_random_tokens_is_refused(
    tmp_path: Path, sentence_config: SentenceConfig
) -> None:
    save_byte_level(tmp_path, "RobertaTokenizer")
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    read_tokenizer(ModelFolder(tmp_path), sentence_config, VOCABULARY)
    edit_json(tmp_path / "tokenizer.json", model={**model, "dropout": 0.1})
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len({tuple(reference("ca" * 50)["input_ids"]) for _ in range(50)}) > 1
    with pytest.raises(CheckpointError, match=r"tokenizer.json: dropout is 0.1"):
        read_tokenizer(ModelFolder(tmp_path), sentence_config, VOCABULARY)


def test_special_token_of_a_class_that_the_model_has_no_embedding_for_is_refused(
    tmp_path: Path, sentence_config: SentenceConfig
) -> None:
    save_tokenizer(tmp_path)
    settings = {"tokenizer_class": "RobertaTokenizer", "pad_token": "[PAD]", "sep_token": "[SEP]"}
    write_json(tmp_path / "tokenizer_config.json", settings)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    first = reference("w7")["input_ids"][0]
    assert first >= 60
    with pytest.raises(CheckpointError, match=rf"gives '<s>' the id {first}; the model's vocab"):
        read_tokenizer(ModelFolder(tmp_path), sentence_config, 60)


@pytest.mark.parametrize("lowercases", [True, False])
def test_added_tokens_that_are_equal_after_normalisation_are_refused(
    tmp_path: Path, sentence_config: SentenceConfig, lowercases: bool
) -> None:
    file = tmp_path / "tokenizer.json"
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens([AddedToken(token, normalized=True) for token in ("Foo", "foo")])
    tokenizer.save(str(file))
    folder = ModelFolder(tmp_path)
    read_tokenizer(folder, sentence_config, VOCABULARY)
    if lowercases:  # by a module of sentence-transformers
        sentence_config = replace(sentence_config, lowercase=True)
    else:
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.save(str(file))
        loads = [transformers.AutoTokenizer.from_pretrained(tmp_path) for _ in range(40)]
        assert len({tuple(load("foo")["input_ids"]) for load in loads}) > 1
    with pytest.raises(CheckpointError, match=r"tokenizer.json: .* 'Foo' and 'foo' equal"):
        read_tokenizer(folder, sentence_config, VOCABULARY)


# As a tokenizer of another script, which has no token for "a".
WITHOUT_LETTERS = {"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": ""}


@pytest.mark.parametrize("edits", [{}, {"normalizer": WITHOUT_LETTERS}])
@pytest.mark.parametrize(
    ("kind", "part", "type_id", "message"),
    [
        ("single", 1, 1, "tokens of a single text another type than 0"),
        ("pair", 3, 2, "tokens of a pair the type 2; the model has 2 types"),
    ],
)
def test_texts_with_other_token_types_are_refused(
    kind: str, part: int, type_id: int, message: str, edits: dict[str, object], tmp_path: Path
) -> None:
    """transformers passes the types to the network, whose results depend on them."""
    save_classifier(tmp_path, "bert", 2)
    save_tokenizer(tmp_path)
    template = json.loads((tmp_path / "tokenizer.json").read_text())["post_processor"]
    template[kind][part]["Sequence"]["type_id"] = type_id
    edit_json(tmp_path / "tokenizer.json", post_processor=template, **edits)
    read_tokenizer(ModelFolder(tmp_path), load(tmp_path)[1], 60)  # types are not passed
    names = ["input_ids", "token_type_ids", "attention_mask"]
    edit_json(tmp_path / "tokenizer_config.json", model_input_names=names)
    with pytest.raises(
        CheckpointError, match=rf"tokenizer.json: the post_processor gives {message}"
    ):
        read_tokenizer(ModelFolder(tmp_path), load(tmp_path)[1], 60)


REPLACED = {"type": "Replace", "pattern": {"String": "W5"}, "content": "w7"}


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        {"type": "Lowercase"},
        {"type": "NFC"},
        {"type": "Sequence", "normalizers": [REPLACED, {"type": "Lowercase"}]},
    ],
)
def test_do_lower_case_equals_sentence_transformers(
    normalizer: dict[str, object] | None, tmp_path: Path
) -> None:
    save_sentence_model(tmp_path)
    edit_json(tmp_path / "tokenizer.json", normalizer=normalizer)
    settings = {"max_seq_length": 24, "do_lower_case": True}
    write_json(tmp_path / "sentence_bert_config.json", settings)
    reference = SentenceTransformer(str(tmp_path), device="cpu").tokenizer
    tokenizer = read_tokenizer(ModelFolder(tmp_path), load(tmp_path)[1], 60)
    assert tokenizer.encode("W5 W6 [CLS]").ids == reference("W5 W6 [CLS]")["input_ids"]
    assert tokenizer.encode("W6").ids == [0, 6, 2]


@pytest.mark.slow
def test_baselines_have_the_tokens_that_the_tokenizer_names(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    renamed = {'"[PAD]"': '"<|pad|>"', '"w40"': '"[PAD]"', '"w50"': '"<|mask|>"'}
    for old, new in renamed.items():
        file.write_text(file.read_text().replace(old, new))
    named = {"pad_token": "<|pad|>", "mask_token": "<|mask|>"}
    edit_json(tmp_path / "tokenizer_config.json", **named)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    artifact, _ = export(resolve(str(tmp_path)), tmp_path / "artifact", copy_source=False)
    text = TextTokenizer(artifact, 100).tokenized_text("w5 w6", None)
    for name, token in (("pad", reference.pad_token_id), ("mask", reference.mask_token_id)):
        assert text.baseline[name] == [0, token, token, 2]
    edit_json(tmp_path / "artifact" / "manifest.json", baseline_ids={})  # of an older version
    older = TextTokenizer(Artifact.load(artifact.path), 100)
    assert older.baseline_ids == {"pad": 40}


def test_baseline_has_no_token_without_an_embedding(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    save_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", mask_token="<mask>")  # noqa: S106
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).mask_token_id == 60
    assert load(tmp_path)[1].baseline_ids == {"pad": 1}


def test_tokenizer_with_ids_beyond_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    save_tokenizer(tmp_path)
    _, sentence_config = load(tmp_path)
    with pytest.raises(CheckpointError, match="'w59' the id 59; the model's vocabulary has"):
        read_tokenizer(ModelFolder(tmp_path), sentence_config, 59)


def test_special_tokens_with_another_number_of_ids_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "bert")
    save_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["post_processor"]["special_tokens"]["[SEP]"]["tokens"] = []
    write_json(tmp_path / "tokenizer.json", content)
    message = "the post_processor has another number of special tokens than of their ids"
    with pytest.raises(CheckpointError, match=message):
        export(resolve(str(tmp_path)), tmp_path / "artifact")


def save_without_pooled_prompts(folder: Path, family: str, prompts: dict[str, str]) -> None:
    """Save a mean-pooled model that pools no prompts; its tokenizer adds no token at the end."""
    size = 60
    if family == "qwen3":
        size = save_chatml(folder)
    else:
        save_tokenizer(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A", special_tokens=[("[CLS]", 0)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    save_checkpoint(folder, family, vocab_size=size)
    write_modules(folder, ("Transformer", ""), ("Pooling", "1_Pooling"))
    pooling = {"word_embedding_dimension": 32, "include_prompt": False}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "end"), [("bert", "[SEP]"), ("distilbert", "[PAD]"), ("qwen3", "<|im_end|>")]
)
def test_special_token_at_the_end_of_a_prompt_is_pooled_as_in_sentence_transformers(
    tmp_path: Path, family: str, end: str
) -> None:
    prompts = {"special": f"w5 w6 {end}", "inner": f"w5{end} w6 ", "only": end}
    save_without_pooled_prompts(tmp_path, family, prompts)
    oracle = SentenceTransformer(str(tmp_path), device="cpu")
    artifact, _ = export(resolve(str(tmp_path)), tmp_path / "artifact", copy_source=False)
    texts = ["w7 w8 w9", "w9", "w5 w40 w41 w5"]
    with vitrine.SyncModel(artifact.path, vitrine.ModelOptions(threads=1)) as model:
        for name in prompts:
            expected = np.stack([oracle.encode(text, prompt_name=name) for text in texts])
            actual = model.encode(texts, prompt_name=name).vectors
            np.testing.assert_allclose(actual, expected, atol=2e-5, err_msg=name)


def test_prompt_that_ends_in_a_special_token_of_one_file_alone_is_refused(tmp_path: Path) -> None:
    save_without_pooled_prompts(tmp_path, "qwen3", {"query": "find <|im_start|>"})
    message = "the prompt 'query' ends in '<|im_start|>', a special token in tokenizer.json alone"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        export(resolve(str(tmp_path)), tmp_path / "artifact")


def test_prompt_that_leaves_no_room_for_a_text_is_refused(tmp_path: Path) -> None:
    """All texts have one vector, so that int8 and quantised vectors find every neighbour."""
    save_checkpoint(tmp_path, "bert")
    save_tokenizer(tmp_path)
    prompts = {"fits": "w5 " * 21, "long": "w5 " * 22}
    encoder = SentenceTransformer(str(tmp_path), device="cpu", prompts=prompts)
    for name, count in (("fits", 2), ("long", 1)):
        vectors = encoder.encode(["w7", "w9 w40"], prompt_name=name)
        assert len(np.unique(vectors, axis=0)) == count
    with pytest.raises(CheckpointError, match="the prompt 'long' leaves no room for a text within"):
        export(resolve(str(tmp_path)), tmp_path / "artifact", overrides=Overrides(prompts=prompts))
    config = load(tmp_path)[1]
    tokenizer = read_tokenizer(ModelFolder(tmp_path), config, 60)
    rules = {"": TokenRules(max_tokens=config.max_tokens)}
    check_room_for_texts(tokenizer, {"fits": prompts["fits"]}, rules, "right")
    check_room_for_texts(tokenizer, prompts, rules, "left")
    check_room_for_texts(tokenizer, prompts, rules | {"long": TokenRules(max_tokens=25)}, "right")


def test_tokenizer_that_fails_on_a_prompt_is_refused(tmp_path: Path) -> None:
    sign = "\N{BLACK CHESS KING}"
    save_without_pooled_prompts(tmp_path, "distilbert", {"query": sign})
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    # Only the sign has tokens, and neither it nor the unknown token is in the vocabulary.
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": f"[^{sign}]"}, "content": ""}
    content["model"] |= {"unk_token": "?"}
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(CheckpointError, match="the tokenizer fails on the prompt 'query': "):
        export(resolve(str(tmp_path)), tmp_path / "artifact")
