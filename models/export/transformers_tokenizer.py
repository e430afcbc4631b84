"""The tokenizer of a model folder, as transformers builds it from all its files.

Only JSON files and the chat template are read, from a copy in a temporary folder: no code, no
pickle, no file elsewhere.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from models.export.families import MAX_SIZE
from models.export.model_folder import CheckpointError, ModelFolder, join
from models.export.tokenizer_settings import (
    CHAT_TEMPLATE,
    CONFIG,
    MAX_TOKENIZER_BYTES,
    TOKENIZER,
    TokenizerSettings,
)
from models.panics import panics_as_errors

# Other files whose tokens transformers adds.
TOKEN_FILES = ("special_tokens_map.json", "added_tokens.json")
# Fields of config.json by which transformers selects the tokenizer, besides `model_type`.
_OF_MODEL = ("tokenizer_class", "model_name", "transformers_version")
# Settings in tokenizer_config.json that select other files, and are refused.
_OTHER_FILES = ("fast_tokenizer_files", "gguf_file", "init_inputs", "tokenizer_object")


def read_settings(folder: ModelFolder, subfolder: str, model_type: str) -> TokenizerSettings:
    """Return the settings of a tokenizer; the defaults if the folder has no tokenizer.json.

    Raises:
        CheckpointError: See `load_tokenizer`.
    """
    if not folder.has(join(subfolder, TOKENIZER)):
        return TokenizerSettings()
    tokenizer = load_tokenizer(folder, subfolder, model_type)
    longest = tokenizer.model_max_length
    # transformers writes 1e30 for "no limit", as a float or an integer.
    longest = int(longest) if isinstance(longest, float) and longest.is_integer() else longest
    names = ("cls_token", "eos_token", "pad_token", "unk_token")
    tokens = (getattr(tokenizer, name) for name in names)
    return TokenizerSettings(
        max_length=longest,
        truncation_side=tokenizer.truncation_side,
        padding_side=tokenizer.padding_side,
        gives_token_types="token_type_ids" in tokenizer.model_input_names,
        mask_or_end_token=tokenizer.mask_token or tokenizer.eos_token,
        unweighted=tuple(str(token) for token in tokens if token),
        unknown_id=tokenizer.unk_token_id if tokenizer.unk_token else -1,
        baseline_ids={
            name: getattr(tokenizer, f"{name}_token_id")
            for name in ("pad", "mask")
            if getattr(tokenizer, f"{name}_token")
        },
    )


def load_tokenizer(folder: ModelFolder, subfolder: str, model_type: str) -> Any:  # noqa: ANN401
    """Return the tokenizer of transformers, a `TokenizersBackend`, for a model folder.

    Args:
        folder: Model folder.
        subfolder: Subfolder with tokenizer.json.
        model_type: `model_type` in config.json, which selects the class if tokenizer_config.json
            does not.

    Raises:
        CheckpointError: A file is missing or invalid, transformers cannot load the tokenizer, or
            the tokenizer does more than its tokenizer.json can say.
    """
    # Imported late: it takes a second, and the gradient process seldom needs it.
    from transformers import AutoTokenizer, TokenizersBackend
    from transformers.utils import logging

    read_tokenizer_file(folder, subfolder)
    content = folder.bytes(join(subfolder, TOKENIZER), MAX_TOKENIZER_BYTES)
    config = _read_config(folder, subfolder)
    of_model = folder.json(join(subfolder, "config.json"), dict, {})
    selected = {name: of_model[name] for name in _OF_MODEL if name in of_model}
    kind = config.get("tokenizer_class") or f"that of model_type {model_type!r}"
    verbosity = logging.get_verbosity()
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        (copy / TOKENIZER).write_bytes(content)
        (copy / CONFIG).write_text(json.dumps(config))
        (copy / "config.json").write_text(json.dumps({**selected, "model_type": model_type}))
        for file in TOKEN_FILES:
            if folder.has(join(subfolder, file)):
                tokens = folder.json(join(subfolder, file), dict)
                (copy / file).write_text(json.dumps(tokens))
        if folder.has(template := join(subfolder, CHAT_TEMPLATE)):
            (copy / CHAT_TEMPLATE).write_bytes(folder.bytes(template))
        logging.set_verbosity_error()
        try:
            with panics_as_errors("the tokenizers library"):
                tokenizer = AutoTokenizer.from_pretrained(
                    directory, local_files_only=True, trust_remote_code=False
                )
        except Exception as error:
            raise CheckpointError(
                f"{folder.name}: transformers' AutoTokenizer cannot load the tokenizer "
                f"(tokenizer_class: {kind}) from its JSON files: "
                f"{_line(error).replace(directory, folder.name)}"
            ) from error
        finally:
            logging.set_verbosity(verbosity)
    if not isinstance(tokenizer, TokenizersBackend):
        raise no_file_error(folder, tokenizer)
    if tokenizer.split_special_tokens:
        raise CheckpointError(
            f"{CONFIG}: split_special_tokens is true, which {TOKENIZER} cannot say; only false is "
            "supported"
        )
    return tokenizer


def read_tokenizer_file(folder: ModelFolder, subfolder: str) -> Tokenizer:
    """Return the tokenizer of a subfolder's tokenizer.json, as the file describes it.

    Raises:
        CheckpointError: The file is missing or invalid, or two tokens of its vocabulary have the
            same id.
    """
    name = join(subfolder, TOKENIZER)
    if not folder.has(name):
        raise CheckpointError(
            f"{folder.name} has no {name}; "
            "create it with AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    content = folder.bytes(name, MAX_TOKENIZER_BYTES)
    try:
        with panics_as_errors("the tokenizers library"):
            tokenizer: Tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:
        raise CheckpointError(f"{name} is not a tokenizer: {_line(error)}") from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > MAX_SIZE:  # the library takes time in proportion to the id
        raise CheckpointError(f"{name} has a token with the id {largest}; the limit is {MAX_SIZE}")
    first: dict[int, str] = {}
    for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        other = first.setdefault(token_id, token)
        if other != token:  # the library would write only one of them, at random
            names = " and ".join(map(repr, sorted((other, token))))
            raise CheckpointError(
                f"{name}: the tokens {names} have the same id, {token_id}; each token needs its own"
            )
    return tokenizer


def check_random(tokenizer: Tokenizer, name: str) -> None:
    """Raise CheckpointError if a tokenizer, from the file `name`, gives a text random tokens.

    Of two added tokens that the normalizer makes equal, the library finds another one at each load.
    """
    normalize = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    first: dict[str, str] = {}
    for token in tokenizer.get_added_tokens_decoder().values():
        if not token.normalized:
            continue
        other = first.setdefault(normalize(token.content), token.content)
        if other != token.content:
            raise CheckpointError(
                f"{name}: the normalizer makes the added tokens {other!r} and {token.content!r} "
                "equal, so that a text can have other tokens after each load; set normalized to "
                "false, or remove one of them"
            )
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise CheckpointError(
            f"{name}: dropout is {dropout:g}, so that a text has other tokens each time; only null "
            "is supported"
        )


def _read_config(folder: ModelFolder, subfolder: str) -> dict[str, object]:
    """Return tokenizer_config.json without paths; empty if it is missing."""
    config = folder.json(join(subfolder, CONFIG), dict, {})
    code = config.pop("auto_map", None)
    if isinstance(code, list) or (isinstance(code, dict) and code.get("AutoTokenizer")):
        raise CheckpointError(f"{CONFIG}: auto_map names code, and code of models is never run")
    for setting in _OTHER_FILES:
        if config.get(setting):
            raise CheckpointError(f"{CONFIG}: {setting} is not supported")
    # transformers replaces these paths with those of the folder's own files.
    return {name: value for name, value in config.items() if not name.endswith("_file")}


def no_file_error(folder: ModelFolder, tokenizer: object) -> CheckpointError:
    """Return the error for a tokenizer that a tokenizer.json cannot describe."""
    return CheckpointError(
        f"{folder.name}: the tokenizer_class {type(tokenizer).__name__} splits words with code "
        f"that no {TOKENIZER} contains; only tokenizers that {TOKENIZER} describes are supported"
    )


def _line(error: Exception) -> str:
    """Return an error's class and the first line of its message, of at most 200 characters."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
