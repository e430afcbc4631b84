"""Pair templates: how a reranker based on a language model reads a query and a document.

A template is the checkpoint's chat template, as sentence-transformers renders it, or one that the
model's authors publish beside the checkpoint.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.export.model_files import ModelFiles
from models.export.model_folder import CheckpointError, ModelFolder, join
from models.export.tokenizer_settings import CHAT_TEMPLATE, CONFIG, text_failures
from models.manifest import PairTemplate

# Choices of `Overrides.pair_template` that are not names in `PUBLISHED`.
CHAT, NONE = "chat", "none"


@dataclass(frozen=True)
class PublishedTemplate:
    """A template that the files of a checkpoint do not have.

    Attributes:
        template: The template.
        answers: Tokens for relevant and for other documents.
        max_tokens: Maximum length in the authors' code, in tokens: of a row, or of the body if
            there are two texts in it.
        hub_ids: Starts of the hub ids of the models that it is for.
    """

    template: PairTemplate
    answers: tuple[str, str]
    max_tokens: int
    hub_ids: tuple[str, ...]


PUBLISHED: Mapping[str, PublishedTemplate] = {
    # Source: README of https://github.com/QwenLM/Qwen3-Embedding
    "qwen3-reranker": PublishedTemplate(
        PairTemplate(
            prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on "
            "the Query and the Instruct provided. Note that the answer can only be "
            '"yes" or "no".<|im_end|>\n<|im_start|>user\n',
            before_instruction="<Instruct>: ",
            after_instruction="\n",
            before_query="<Query>: ",
            before_document="\n<Document>: ",
            suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
            instruction="Given a web search query, retrieve relevant passages that answer the "
            "query",
            splits_body=False,
        ),
        answers=("yes", "no"),
        max_tokens=8192,
        hub_ids=("Qwen/Qwen3-Reranker-", "tomaarsen/Qwen3-Reranker-"),
    ),
    # Source: the package mxbai-rerank 0.1.6
    "mxbai-rerank-v2": PublishedTemplate(
        PairTemplate(
            prefix="<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
            "assistant.<|im_end|>\n<|im_start|>user\n",
            before_instruction="instruction: ",
            after_instruction="\n",
            before_query="query: ",
            before_document="\ndocument: ",
            suffix="\nYou are a search relevance expert who evaluates how well documents match "
            "search queries. For each query-document pair, carefully analyze the semantic "
            "relationship between them, then provide your binary relevance judgment (0 for not "
            "relevant, 1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n",
            instruction=None,
            splits_body=True,
        ),
        answers=("1", "0"),
        max_tokens=8192,
        hub_ids=("mixedbread-ai/mxbai-rerank-base-v2", "mixedbread-ai/mxbai-rerank-large-v2"),
    ),
}
CHOICES = (*PUBLISHED, CHAT, NONE)

# Texts that show which text of a rendered pair is which.
_MARKS = ("first mark", "second mark", "third mark")
# Texts in chat templates for messages whose content is a list of parts. Source: `_infer_format` in
# sentence_transformers/base/modality.py
_SIGNS_OF_PARTS = ("content[0]", ".type", "'type'", '"type"', "message.content[")
# Texts that a template must render unchanged as instruction, query and document, besides special
# tokens: white space, Latin letters, all punctuation, markup, a link, and lengths of full rows.
_TEXTS = (
    "a",
    "",
    " a \n",
    "\tb  ",
    " c\n\n",
    "one...\r\n  two\n\tthree",
    "".join(map(chr, (*range(0x300), *range(0x2000, 0x2070), 0x3000, 0xFEFF, 0xFFFD))),
    "<a>&'\"",
    "</think>\n<think>b",
    "<tool_response>c</tool_response>",
    "{{ a }} {% b %} {# c #}",
    "naïve 日本\u00a0\u200b🎉 \\n",
    "https://a.example/b",
    "a" * 3000,
    "b " * 2**15,
)

# Limits of rendering a chat template with all probes, which takes milliseconds. The time of a
# process that waits for a CPU does not count as time of a CPU.
_CPU_SECONDS = 10
_WALL_SECONDS = 120
_MEMORY_BYTES = 2**30
_MAX_CHARS = 2**20


def template_of_hub(hub_id: str) -> str | None:
    """Return the name in `PUBLISHED` of the template of a hub model; None: it has none."""
    names = (name for name, own in PUBLISHED.items() if hub_id.startswith(own.hub_ids))
    return next(names, None)


def answers_of(template: str | PairTemplate | None) -> tuple[str, str]:
    """Return the answers of a template, or of its name; those of other templates are yes and no."""
    own = (p for name, p in PUBLISHED.items() if template in (name, p.template))
    return next(own, PUBLISHED["qwen3-reranker"]).answers


def published_limit(name: object, load_tokenizer: Callable[[], Any]) -> int | None:
    """Return the maximum length of a row with a published template; None: it is another one.

    Args:
        name: Choice of the template.
        load_tokenizer: Returns the tokenizer of transformers.

    Raises:
        CheckpointError: The tokenizer fails on the template.
    """
    if not isinstance(name, str) or name not in PUBLISHED:
        return None
    own, template = PUBLISHED[name].max_tokens, PUBLISHED[name].template
    if not template.splits_body:
        return own
    tokenizer = load_tokenizer()
    with text_failures(f"the tokenizer fails on the pair template {name}"):
        fixed = tokenizer([template.prefix, template.suffix], add_special_tokens=False)
    return own + sum(map(len, fixed["input_ids"]))


def read_pair_template(
    files: ModelFiles,
    load_tokenizer: Callable[[], Any],
    settings: Mapping[str, object],
    choice: str | PairTemplate | None,
    labels: int,
) -> PairTemplate | None:
    """Return the template of a model's pairs; None: it has none.

    As in sentence-transformers, the chat template applies if the settings of the Transformer module
    have the modality "message", or if there is no modules.json. But without modules.json, a model
    with several labels is a classifier of texts, as in transformers, and has no template.

    Args:
        files: Files of the model.
        load_tokenizer: Returns the tokenizer of transformers; see `models.export.tokenizer_file`.
        settings: Settings of the Transformer module.
        choice: The template, or a name in `CHOICES`; None: the folder's.
        labels: Number of labels.

    Raises:
        CheckpointError: The choice is unknown, or the model has a template and several labels. Or
            the tokenizer has no chat template, or one that does more than to place instruction,
            query and document between fixed texts.
    """
    if isinstance(choice, PairTemplate):
        return choice
    modalities = settings.get("modality_config") if files.modules else None
    message = modalities.get("message") if isinstance(modalities, dict) else None
    applies = message is not None
    if not files.modules and labels == 1:
        applies = _has_chat_template(files.folder, files.transformer)
    if choice == NONE or (choice is None and not applies):
        return None
    if labels != 1:
        raise CheckpointError(f"templates of pairs are for one label; the model has {labels}")
    tokenizer = load_tokenizer()
    if tokenizer.truncation_side != "right":
        raise CheckpointError(
            "the tokenizer truncates texts on the left, where a pair template has its instruction"
        )
    if choice not in (CHAT, None):
        return _find_published(choice, tokenizer)
    kind = message.get("format") if isinstance(message, dict) else None
    try:
        return _read_chat_template(tokenizer, is_flat=_is_flat(kind, tokenizer.chat_template))
    except CheckpointError as error:
        raise CheckpointError(
            f"the chat template {error}; choose another template with --pair-template, of "
            f"{', '.join(CHOICES)}"
        ) from error


def _has_chat_template(folder: ModelFolder, transformer: str) -> bool:
    config = folder.json(join(transformer, CONFIG), dict, {})
    return folder.has(join(transformer, CHAT_TEMPLATE)) or bool(config.get("chat_template"))


def check_without_template(folder: ModelFolder, transformer: str) -> None:
    """Refuse an embedding model whose folder does not say how it reads a text.

    Args:
        folder: Model folder without modules.json.
        transformer: Subfolder of the tokenizer.

    Raises:
        CheckpointError: The tokenizer has a chat template.
    """
    if _has_chat_template(folder, transformer):
        raise CheckpointError(
            "the tokenizer has a chat template, in which sentence-transformers places the texts of "
            "a folder without modules.json: --pooling mean (or last) exports embeddings of the "
            "texts as they are"
        )


def _is_flat(kind: object, template: object) -> bool:
    """Return whether the content of a message is a text, not a list of parts.

    Args:
        kind: Format in the settings of the Transformer module; None: unknown.
        template: Chat template, by which sentence-transformers decides if the format is unknown.
    """
    if kind not in ("flat", "structured", "auto", None):
        raise CheckpointError(f"has messages of the unknown format {kind!r}")
    if kind in ("flat", "structured"):
        return kind == "flat"
    return isinstance(template, str) and not any(sign in template for sign in _SIGNS_OF_PARTS)


def _find_published(name: str, tokenizer: Any) -> PairTemplate:  # noqa: ANN401
    if name not in PUBLISHED:
        raise CheckpointError(f"the pair template {name!r} is not one of {', '.join(CHOICES)}")
    if tokenizer.num_special_tokens_to_add():
        raise CheckpointError(
            f"the tokenizer adds special tokens to texts, and the template {name} has none of them"
        )
    return PUBLISHED[name].template


def _read_chat_template(tokenizer: Any, *, is_flat: bool) -> PairTemplate:  # noqa: ANN401
    """Return the parts of a chat template, after a check that it has no others.

    Raises:
        CheckpointError: It has; the message continues the name of the template.
    """

    def messages(instruction: str | None, query: str, document: str) -> list[dict[str, object]]:
        contents = {"system": instruction, "query": query, "document": document}
        return [
            {"role": role, "content": text if is_flat else [{"type": "text", "text": text}]}
            for role, text in contents.items()
            if text is not None
        ]

    if not tokenizer.chat_template:
        raise CheckpointError("is missing")
    if "strftime_now" in str(tokenizer.chat_template):  # which transformers calls for each text
        raise CheckpointError("has the current date or time, which no fixed texts have")
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    unchanged = (*_TEXTS, " ".join(special))
    shifted = (unchanged[start:] + unchanged[:start] for start in range(len(_MARKS)))
    probes = [
        (own, query, document)
        for instruction, query, document in (_MARKS, *zip(*shifted, strict=True))
        for own in (instruction or None, None)
    ]
    first, second, *others = _render(tokenizer, [messages(*probe) for probe in probes])
    template = _parts(first, second, special)
    for (instruction, query, document), rendered in zip(probes[2:], others, strict=True):
        body = "".join(template.body(query, document, instruction or ""))
        pieces = (template.prefix, body, template.suffix)
        if rendered != "".join(pieces):
            raise CheckpointError("does not render all texts unchanged between fixed texts")
        with text_failures("has a text on which the tokenizer fails"):
            texts = [rendered, *pieces]
            whole, *apart = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        if whole != [token for part in apart for token in part]:
            raise CheckpointError("has a token that spans the border of a pair's texts")
    return template


def _render(tokenizer: Any, conversations: Sequence[Sequence[object]]) -> list[str]:  # noqa: ANN401
    """Return the text of each conversation by the chat template, as `apply_chat_template` does.

    Raises:
        CheckpointError: The template fails, or exceeds the limits of time, memory or length.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise CheckpointError(f"renders no pair: {str(error)[:200]}") from error
    arguments = {**tokenizer.special_tokens_map, "chat_template": template}
    request = {
        "arguments": {**arguments, "conversations": conversations},
        "cpu_seconds": _CPU_SECONDS,
        "memory_bytes": _MEMORY_BYTES,
        "max_chars": _MAX_CHARS,
    }
    renderer = Path(__file__).with_name("chat_renderer.py")
    try:
        child = subprocess.run(  # noqa: S603 - the template is data on standard input
            # -P keeps Python from importing modules beside the renderer.
            [sys.executable, "-P", str(renderer)],
            input=json.dumps(request, default=str),
            capture_output=True,
            text=True,
            timeout=_WALL_SECONDS,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise CheckpointError(
            f"renders no pair within {_CPU_SECONDS} s of a CPU and {_MEMORY_BYTES >> 20} MiB"
        ) from error
    result = json.loads(child.stdout)
    if "error" in result:
        raise CheckpointError(f"renders no pair: {result['error']}")
    texts: list[str] = result["texts"]
    return texts


def _parts(marked: str, without_instruction: str, special: Sequence[str]) -> PairTemplate:
    """Return the parts of a template that was rendered with `_MARKS`, and without the first.

    Args:
        marked: Text with all marks.
        without_instruction: Text without a system message.
        special: The special tokens.
    """
    by_default = _between(without_instruction, _MARKS[1:])
    if by_default is None:
        raise CheckpointError("does not have the query and then the document, once each")
    start, before_document, suffix = by_default
    first, after_instruction, instruction = start, "", None
    if (parts := _between(marked, _MARKS)) is not None:
        first, after_instruction = parts[:2]
        instruction = start[len(first) : len(start) - len(after_instruction)]
    within = after_instruction + before_document + (instruction or "")
    if any(token in within for token in special):
        raise CheckpointError("has special tokens between the texts of a pair")
    if not suffix.startswith(tuple(special)):
        raise CheckpointError("does not have a special token after the document")
    # No token spans the border after a special token.
    cut = max((first.rfind(token) + len(token) for token in special if token in first), default=0)
    prefix, before = first[:cut], first[cut:]
    return PairTemplate(
        prefix=prefix,
        before_instruction="" if instruction is None else before,
        after_instruction=after_instruction,
        before_query=before if instruction is None else "",
        before_document=before_document,
        suffix=suffix,
        instruction=instruction,
        splits_body=False,
    )


def _between(text: str, marks: Sequence[str]) -> list[str] | None:
    """Return the texts around marks; None unless each mark is there once, in order."""
    parts: list[str] = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            return None
        parts.append(before)
    return [*parts, text]
