"""Relations between the fields of an artifact's manifest, and of its self-check.

Types and bounds of single fields are in their declarations in `models.manifest`. Standard library
only.
"""

from collections.abc import Callable
from pathlib import PurePosixPath

from models.manifest import Check, Manifest, Quality

# Maximum total number of tokens in the inputs of the self-check.
_MAX_CHECK_TOKENS = 2**16

# What must be, and whether it is.
_Rules = tuple[tuple[str, Callable[..., bool]], ...]


def _widths(manifest: Manifest) -> dict[str, int]:
    """Return the width of the vectors of outputs; "multi" beside others has a width of its own."""
    own = {"tokens": manifest.hidden_size, "sparse": manifest.vocab_size, "weights": 1}
    return {**own, manifest.outputs[0]: manifest.width}


def _looks_up(manifest: Manifest) -> bool:
    return any(rules.looks_up for rules in manifest.token_rules.values())


def _measured_outputs(quality: Quality) -> set[str]:
    """Return the outputs whose agreement was measured."""
    return {output for output, own in quality.check.items() if {"cosine", "norm"} <= own.keys()}


_MANIFEST_RULES: _Rules = (
    ("outputs must be different", lambda m: len({*m.outputs}) == len(m.outputs)),
    (
        "labels must have one label for each logit or tag",
        lambda m: not {"logits", "tags"} & {*m.outputs} or len(m.labels) == m.width,
    ),
    (
        "spans must be the rules of the only output spans, whose width is their max_width",
        lambda m: (
            m.spans is None
            if "spans" not in m.outputs
            else m.outputs == ("spans",) and m.spans is not None and m.width == m.spans.max_width
        ),
    ),
    (
        "matryoshka_dimensions must not exceed width",
        lambda m: max(m.matryoshka_dimensions, default=0) <= m.width,
    ),
    (
        "width must be vocab_size for sparse vectors",
        lambda m: m.width == m.vocab_size or not (m.outputs[0] == "sparse" or _looks_up(m)),
    ),
    (
        "default_prompt must be the name of a prompt",
        lambda m: m.default_prompt is None or m.default_prompt in m.prompts,
    ),
    (
        "pair_template must be that of a model with one label, which truncates on the right",
        lambda m: (
            m.pair_template is None
            or (m.outputs, len(m.labels), m.truncation_side) == (("logits",), 1, "right")
        ),
    ),
    (
        "prompts must be empty if pair_template has no place for an instruction",
        lambda m: (
            m.pair_template is None
            or m.pair_template.takes_instruction
            or not any(m.prompts.values())
        ),
    ),
    ("adapters must be different", lambda m: len({*m.adapters}) == len(m.adapters)),
    (
        "prompt_adapters must map names of prompts to names of adapters",
        lambda m: (
            m.prompt_adapters.keys() <= m.prompts.keys()
            and {*m.prompt_adapters.values()} <= {*m.adapters}
        ),
    ),
    (
        "token_rules: min_tokens must not exceed max_tokens",
        lambda m: all(rules.min_tokens <= rules.max_tokens for rules in m.token_rules.values()),
    ),
    (
        "token_rules: token ids must be less than vocab_size",
        lambda m: all(
            token < m.vocab_size
            for rules in m.token_rules.values()
            for token in (
                *(rules.filler, *rules.skipped, *rules.kept),
                *(*rules.unweighted, *rules.dropped),
            )
        ),
    ),
    (
        "files must be paths inside the artifact",
        lambda m: all(
            str(path := PurePosixPath(name)) == name
            and not path.is_absolute()
            and ".." not in path.parts
            for name in m.files
        ),
    ),
    (
        "files must have tokenizer.json, check.json and, if token_rules look up, query_weights.npy",
        lambda m: (
            {"tokenizer.json", "check.json"} <= m.files.keys()
            and ("query_weights.npy" in m.files or not _looks_up(m))
        ),
    ),
    (
        "graphs must name files of the artifact",
        lambda m: {name for own in m.graphs for name in (own.file, own.weights)} <= m.files.keys(),
    ),
    (
        "graphs of the engine numpy, and no others, must have one file",
        lambda m: all((own.engine == "numpy") == (own.file == own.weights) for own in m.graphs),
    ),
    (
        "graphs: quality must describe each output of an int8 graph, and no other graph",
        lambda m: all(
            (graph.dtype == "int8") == (graph.quality is not None)
            and (graph.quality is None or _measured_outputs(graph.quality) == {*m.outputs})
            for graph in m.graphs
        ),
    ),
    (
        "baseline_ids must be less than vocab_size",
        lambda m: all(token < m.vocab_size for token in m.baseline_ids.values()),
    ),
)

_CHECK_RULES: _Rules = (
    (
        f"rows must have at most {_MAX_CHECK_TOKENS} tokens in total",
        lambda c, _: sum(map(len, c.rows)) <= _MAX_CHECK_TOKENS,
    ),
    (
        "rows: token ids must be less than vocab_size in the manifest",
        lambda c, m: max(map(max, c.rows)) < m.vocab_size,
    ),
    (
        "outputs must be those of the manifest",
        lambda c, m: c.outputs.keys() == {*m.outputs},
    ),
    (
        "outputs: the vectors of an output must have the width in the manifest",
        lambda c, m: all(
            {*map(len, vectors)} == {_widths(m).get(output, len(vectors[0]))}
            for output, vectors in c.outputs.items()
        ),
    ),
    (
        "adapters and unattended must have one number for each row",
        lambda c, _: len(c.rows) == len(c.adapters) == len(c.unattended),
    ),
    (
        "adapters must be indices of the adapters in the manifest, or -1",
        lambda c, m: max(c.adapters) < len(m.adapters),
    ),
    (
        "unattended must leave a token of each row",
        lambda c, _: all(own < len(row) for own, row in zip(c.unattended, c.rows, strict=True)),
    ),
    (
        "token_types must be empty, or have one number for each token",
        lambda c, _: not c.token_types or [*map(len, c.token_types)] == [*map(len, c.rows)],
    ),
    (
        "words and labels must have positions in each row for the output spans, and else be empty",
        lambda c, m: (
            len(c.words) == len(c.labels) == (len(c.rows) if m.spans else 0)
            and all(
                max(*words, *labels) < len(row)
                for row, words, labels in zip(c.rows, c.words, c.labels, strict=False)
            )
        ),
    ),
    (
        "texts must be empty, or have one text for each row",
        lambda c, _: len(c.texts) in (0, len(c.rows)),
    ),
)


def check_manifest(manifest: Manifest) -> None:
    """Raise a ValueError with the first rule that the fields of a manifest break."""
    _check(_MANIFEST_RULES, manifest)


def check_self_check(check: Check, manifest: Manifest) -> None:
    """Raise a ValueError with the first rule that the inputs of a self-check break."""
    _check(_CHECK_RULES, check, manifest)


def _check(rules: _Rules, *values: object) -> None:
    for rule, holds in rules:
        if not holds(*values):
            raise ValueError(rule)
