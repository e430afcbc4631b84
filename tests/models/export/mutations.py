"""Checkpoints with one fault each: a wrong value, a broken file, or no file at all.

`python -m tests.models.export.mutations 1000` exports that many of them, and prints those that end
otherwise than they should. `--from` sets the first seed.
"""

import argparse
import collections
import json
import os
import random
import shutil
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import (
    CONFIGS,
    save_bge_m3,
    save_checkpoint,
    save_classifier,
    save_dense,
    save_inference_free,
    save_masked_lm,
    save_multi_vector,
    save_sentence_model,
    save_sentencepiece,
    save_token_classifier,
    save_tokenizer,
    write_json,
)
from tests.models.gliner import save_gliner
from tests.models.jina_v3 import save_with_tokenizer
from tests.models.static_models import (
    save_model2vec,
    save_static_embedding,
    unigrams,
    word_pieces,
)

LABELS = 3


def _embedder(folder: Path, family: str) -> None:
    save_sentence_model(folder, family, ("Normalize", "2"))


def _with_tokenizer(save: Callable[..., object], *arguments: object) -> Callable[[Path], object]:
    def saved(folder: Path) -> None:
        save(folder, *arguments)
        save_tokenizer(folder)

    return saved


def _multi_vector(folder: Path) -> None:
    encoder = folder / "encoder"
    save_checkpoint(encoder, "bert")
    save_tokenizer(encoder)
    expansion = {"strategy": "fixed", "length": 8, "token": "w5", "attend": True}
    save_multi_vector(folder, encoder, query_expansion=expansion)
    shutil.rmtree(encoder)


def _albert_words(folder: Path) -> None:
    save_checkpoint(folder, "albert")
    save_sentencepiece(folder, "AlbertTokenizer")
    write_json(folder / "special_tokens_map.json", {"mask_token": "[MASK]"})
    write_json(folder / "added_tokens.json", {"[MASK]": 4})
    settings = {"do_lower_case": False, "max_seq_length": 24}
    write_json(folder / "sentence_bert_config.json", settings)
    model = {"prompts": {"query": "ask: "}, "default_prompt_name": "query"}
    write_json(folder / "config_sentence_transformers.json", {**model, "truncate_dim": 16})


def _lora(folder: Path) -> None:
    save_checkpoint(folder, "bert")
    save_tokenizer(folder)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {".*query": 2}}
    config["target_modules"] = ["query"]
    write_json(folder / "adapter_config.json", config)
    name = "base_model.model.encoder.layer.0.attention.self.query.lora_{}.weight"
    matrices = {name.format("A"): torch.randn(2, 32), name.format("B"): torch.randn(32, 2)}
    save_file(matrices, folder / "adapter_model.safetensors")


def _inference_free(folder: Path) -> None:
    encoder = folder / "encoder"
    save_masked_lm(encoder, "distilbert")
    save_tokenizer(encoder)
    save_inference_free(folder, encoder)
    shutil.rmtree(encoder)


# Good checkpoints, by name: all families, and models of every kind.
SAVE: dict[str, Callable[[Path], object]] = {
    **{family: partial(_embedder, family=family) for family in CONFIGS},
    "words": _albert_words,
    "dense": save_dense,
    "lora": _lora,
    "bge-m3": save_bge_m3,
    "gliner": lambda folder: save_gliner(folder, "bert"),
    "inference-free": _inference_free,
    "jina v3": save_with_tokenizer,
    "model2vec": lambda folder: save_model2vec(folder, word_pieces(), normalize=True),
    "static": lambda folder: save_static_embedding(folder, unigrams(), normalize=True),
    "multi-vector": _multi_vector,
    "classifier": _with_tokenizer(save_classifier, "bert", LABELS),
    "causal classifier": _with_tokenizer(save_classifier, "qwen3", LABELS),
    "token classifier": _with_tokenizer(save_token_classifier, "modernbert", LABELS),
    "masked model": _with_tokenizer(save_masked_lm, "bert"),
}

# Values of every type, and sizes at which something overflows or runs out.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 5, 7, 1000, 2**15, 2**20, 2**31, 2**63, 10**9, 10**30),
    *(-(2**63), 0.0, -0.5, 1e-320, 1e300, 0.5, 1e9, "", "a", "\0", "gelu", "relu", "../..", "/"),
    *("x" * 5000, "1", "[MASK]", "é\u202e\x1b[31m\n", [], [[]], [None], ["a"], [1, 2], [{}] * 3),
    *({}, {"": None}, {"a": 1}, {"0": "a"}, {"type": "linear", "factor": 0}, {"a": {"b": [1]}}),
)
# Fields that code reads and few files have.
FIELDS = """
architectures auto_map model_type quantization_config layer_types head_dim rope_parameters
rope_scaling rope_theta matryoshka_dimensions problem_type id2label num_labels pad_token_id
embedding_size num_hidden_groups n_embd n_head n_layer n_inner sliding_window
use_sliding_window max_window_layers is_causal use_bidirectional_attention pooling temperature
query_pre_attn_scalar num_key_value_heads classifier_pooling prompts default_prompt_name
similarity_fn_name truncate_dim activation_fn sentence_transformers query_prefix
query_length query_expansion skiplist_words pooling_mode include_prompt
pooling_mode_cls_token activation_function bias module_input_name max_seq_length
do_lower_case tokenizer_class mask_token added_tokens_decoder additional_special_tokens
extra_special_tokens model_max_length truncation_side padding_side model_input_names
split_special_tokens path post_processor normalizer pre_tokenizer truncation padding
added_tokens type vocab merges unk_token pattern task_instructions lora_adaptations
load_trained_adapters rank_pattern tokenizer
"""
# Contents that replace a JSON file.
CONTENTS = (
    *(b"", b"null", b"[]", b"{}", b'"text"', b"0", b"[" * 100_000, b'{"a":' * 100_000, b"\xff{}"),
    *(
        b"\xef\xbb\xbf{}",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\\ud83d"}',
        b'{"a": 1',
        b"\0" * 64,
    ),
    *(b'{"a": ' + b"9" * 5000 + b"}", b'{"a": 1, "a": 2}', b"[1, 2]", b"[{}]", b'[{"path": 1}]'),
)


def mutate(folder: Path, seed: int) -> str:
    """Change one thing in a checkpoint, and return what it is."""
    rng = random.Random(seed)  # noqa: S311
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    texts = [file for file in files if file.suffix == ".json"]
    weights = [file for file in files if file.suffix == ".safetensors"]
    kinds: list[tuple[int, Callable[[random.Random, Path], str], list[Path]]] = [
        (12, _change_value, texts),
        (2, _change_content, texts),
        (2, _change_file, files),
        (4, _change_tensors, weights),
        (3, _change_header, weights),
        (1, _change_shards, weights),
    ]
    _, change, candidates = rng.choices(kinds, [weight for weight, *_ in kinds])[0]
    file = rng.choice(candidates)
    return f"{file.relative_to(folder)}: {change(rng, file)}"


def _change_value(rng: random.Random, file: Path) -> str:
    content = json.loads(file.read_text())
    places = list(_places(content))
    parent, key = rng.choice(places) if places else ({}, "")
    if isinstance(content, dict) and rng.random() < 0.35:
        parent, key = content, rng.choice(FIELDS.split())
    if isinstance(parent, dict) and rng.random() < 0.1:
        parent.pop(key, None)
        change = f"{key!r} is missing"
    else:
        parent[key] = rng.choice(VALUES)
        change = f"{key!r} = {str(parent[key])[:60]!r}"
    file.write_text(json.dumps(content))
    return change


def _places(content: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    """Yield the container and the key of each value; of long containers, only a few values."""
    keys = range(len(content)) if isinstance(content, list) else list(content)
    for key in keys[:40]:
        yield content, key
        if isinstance(content[key], dict | list):
            yield from _places(content[key])


def _change_content(rng: random.Random, file: Path) -> str:
    content = file.read_bytes()
    changed = rng.choice([*CONTENTS, content[: rng.randrange(len(content) + 1)], content + b"]"])
    file.write_bytes(changed)
    return f"content {changed[:30]!r}"


def _change_file(rng: random.Random, file: Path) -> str:
    file.unlink()
    kind = rng.choice(("missing", "fifo", "folder", "loop", "device", "sparse", "dangling"))
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "sparse":
        with file.open("wb") as stream:
            stream.truncate(2**40)
    elif kind != "missing":
        targets = {"loop": file.name, "device": "/dev/zero", "dangling": "nothing"}
        file.symlink_to(targets[kind])
    return kind


def _change_tensors(rng: random.Random, file: Path) -> str:
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    tensor = tensors.pop(name).clone()
    dtypes = (torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.float64)
    changes: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "missing": dict,
        "twice": lambda: {name: tensor, f"{name}.copy": tensor.clone()},
        "prefixed": lambda: {name: tensor, f"bert.{name}": tensor.clone()},
        "renamed": lambda: {rng.choice(("", "é\n", "lm_head.bias", "x" * 500)): tensor},
        "flat": lambda: {name: tensor.flatten()},
        "scalar": lambda: {name: tensor.flatten()[0]},
        "empty": lambda: {name: tensor[:0]},
        "longer": lambda: {name: torch.cat([tensor, tensor])},
        "transposed": lambda: {name: tensor.T.contiguous() if tensor.dim() == 2 else tensor[None]},
        "NaN": lambda: {name: torch.full_like(tensor, float("nan"))},
        "infinite": lambda: {name: torch.full_like(tensor, float("-inf"))},
        "huge": lambda: {name: torch.full_like(tensor, 3e38)},
        "zero": lambda: {name: torch.zeros_like(tensor)},
        "dtype": lambda: {name: tensor.to(rng.choice(dtypes))},
    }
    change = rng.choice(sorted(changes))
    save_file({**tensors, **changes[change]()}, file)
    return f"{name} {change}"


def _change_header(rng: random.Random, file: Path) -> str:
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    change = rng.choice(("size", "truncated", "bytes", "value", "key"))
    if change == "size":
        wrong = rng.choice((0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1))
        file.write_bytes(struct.pack("<Q", wrong) + content[8:])
        return f"header of {wrong} bytes"
    if change == "truncated":
        file.write_bytes(content[: rng.randrange(len(content))])
        return change
    if change == "bytes":
        start = rng.randrange(8 + size)
        file.write_bytes(content[:start] + rng.randbytes(8) + content[start + 8 :])
        return f"random bytes at {start}"
    name = rng.choice(sorted(header.keys() - {"__metadata__"}))
    if change == "key":
        header[rng.choice(("", "__metadata__", "\x1b"))] = header.pop(name)
        what = f"key of {name}"
    else:
        field = rng.choice(("dtype", "shape", "data_offsets"))
        header[name][field] = rng.choice(
            (*VALUES, "F4", "U64", [2**62, 2**62], [-1, 4], [0, 2**60])
        )
        what = f"{name} {field} {str(header[name][field])[:40]}"
    changed = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + data)
    return what


def _change_shards(rng: random.Random, file: Path) -> str:
    tensors = load_file(file)
    file.unlink()
    shards = [f"{i}.safetensors" for i in range(2)]
    names = sorted(tensors)
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    for shard, part in zip(shards, parts, strict=True):
        save_file({name: tensors[name] for name in part}, file.parent / shard)
    index: Any = {name: shard for shard, part in zip(shards, parts, strict=True) for name in part}
    change = rng.choice(("good", "value", "map", "twice"))
    if change == "value":
        index[names[0]] = rng.choice(VALUES)
    elif change == "map":
        index = rng.choice(VALUES)
    elif change == "twice":
        save_file(tensors, file.parent / shards[1])
    write_json(file.with_name(f"{file.name}.index.json"), {"weight_map": index})
    return f"shards, {change}: {str(index)[:60] if change == 'map' else ''}"


def run(number: int, first: int, limit_s: float, kinds: list[str]) -> int:
    """Export mutated checkpoints, and print each that ends with a traceback or takes too long."""
    from models.export.__main__ import main

    outcomes: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as directory:
        for kind in kinds:
            SAVE[kind](Path(directory) / kind)
        for seed in range(first, first + number):
            kind = kinds[seed % len(kinds)]
            folder, out = Path(directory) / "folder", Path(directory) / "out"
            for old in (folder, out):
                shutil.rmtree(old, ignore_errors=True)
            shutil.copytree(Path(directory) / kind, folder)
            change = mutate(folder, seed)
            start, printed = time.process_time(), StringIO()
            sparse = ["--sparse"] if kind == "masked model" else []
            try:
                with redirect_stdout(printed), redirect_stderr(printed):
                    status = main([str(folder), "--out", str(out), *sparse])
                lines = printed.getvalue().strip().splitlines() or [""]
                outcome = f"status {status}"
                if status and not lines[-1].startswith("vitrine-export: "):
                    outcome = "no sentence"
            except BaseException:  # noqa: BLE001
                outcome = "exception"
                lines = traceback.format_exc().splitlines()
            seconds = time.process_time() - start
            slowest = max(slowest, seconds)
            outcome = "slow" if seconds > limit_s else outcome
            outcomes[outcome] += 1
            if not outcome.startswith("status"):
                what = f"{seed} {kind}, {change}: {outcome}, {seconds:.1f} s of CPU"
                print(what, *lines[-4:], sep="\n  ", flush=True)
    print(dict(outcomes), f"slowest {slowest:.1f} s of CPU", flush=True)
    return outcomes.total() - outcomes["status 0"] - outcomes["status 1"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=30.0, help="CPU time of an export")
    parser.add_argument("--kinds", nargs="*", default=list(SAVE))
    options = parser.parse_args()
    raise SystemExit(bool(run(options.number, options.first, options.limit_s, options.kinds)))
