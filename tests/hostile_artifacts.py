"""Artifacts with values that no export writes: `python -m tests.hostile_artifacts`.

One or two values anywhere in the JSON files of a good artifact are replaced, and the hashes in the
manifest are made right again. Such an artifact is refused with an error that names a file or a
field, or it is harmless.
"""

import asyncio
import copy
import hashlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.engines import EngineError
from models.manifest import CALIBRATION, CHECK, MANIFEST, QUERY_WEIGHTS, TOKENIZER, ArtifactError
from service.inference.errors import VitrineError
from service.inference.model.model import Model
from service.inference.model.opening import ModelOptions, open_model

FILES = (MANIFEST, MANIFEST, CHECK, CALIBRATION, TOKENIZER)
# Raw JSON, because some values cannot be read from JSON.
VALUES = (
    *("null", "true", "false", "[]", "{}", '""', "[[]]", '[""]', "[null]", '{"": 0}'),
    *("0", "-1", "1", "0.5", "1e999", "-1e999", "NaN", "Infinity", "1e300", "1e-320"),
    *("31", "33", "2048", "16384", "1000000000", "9223372036854775808", "9" * 400, "-" + "9" * 30),
    *('"x"', '"../x"', '"/etc/passwd"', '"a\\nb"', '"\\u001b[31m"', '"\\u0000"', '"\\ud800"'),
    *('"\\u202e"', '"query"', '"tokens"', '"pooled"', '"multi"', '"int8"', '"model.onnx"'),
    *('"' + "x" * 100_000 + '"', "[" * 200 + "]" * 200, '{"a":' * 100_000, "[" + "1," * 99 + "1]"),
    *('{"Fixed": 20000}', '"BatchLongest"', '{"type": "Lowercase"}', '{"type": "x"}'),
    '{"type": "Precompiled", "precompiled_charsmap": "AAAA"}',
    '{"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}',
    '{"strategy": {"Fixed": 20000}, "direction": "Right", "pad_to_multiple_of": null, '
    '"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}',
)
_MARK = "\ue000%d\ue000"


def add_rules(folder: Path) -> None:
    """Give an artifact rules for tokens, so that their values can be replaced too."""
    rules = {"max_tokens": 24, "looks_up": False, "min_tokens": 0, "filler": 0}
    ids = {"skipped": [999], "kept": [], "first": 0, "unweighted": []}
    edit(folder, MANIFEST, token_rules={"query": {**rules, "attends_to_filler": True, **ids}})


def make_hostile(folder: Path, rng: random.Random) -> str:
    """Replace one or two values in a file of an artifact, and return what was done."""
    name = rng.choice(FILES)
    tree = json.loads((folder / name).read_text())
    done = []
    raw: dict[str, str] = {}
    for number in range(rng.choice((1, 1, 1, 2))):
        path, parent, key = rng.choice(list(_places(tree, rng)))
        value, mark = rng.choice(VALUES), _MARK % number
        match rng.randrange(6):
            case 0 if isinstance(parent, dict):
                action = "removed"
                del parent[key]
            case 1 if isinstance(parent, dict):
                action = "renamed"
                parent[rng.choice(("x", "", "\u202e", "x" * 999, "a\x1b[0m"))] = parent.pop(key)
            case 2 if isinstance(parent, list):
                action = "repeated"
                parent += [copy.deepcopy(parent[key])] * rng.choice((1, 9, 999))
            case _:
                action = value[:40]
                parent[key], raw[mark] = mark, value
        done.append(f"{name}{path} {action}")
    text = json.dumps(tree, ensure_ascii=False)
    for mark, value in raw.items():
        text = text.replace(f'"{mark}"', value)
    replace(folder, name, text.encode())
    return ", ".join(done)


def _places(tree: Any, rng: random.Random) -> Iterator[tuple[str, Any, Any]]:  # noqa: ANN401
    """Yield path, container and key of values: all of small containers, some of large ones."""
    waiting: list[tuple[str, Any]] = [("", tree)]
    while waiting:
        path, container = waiting.pop()
        keys: list[Any] = [*container] if isinstance(container, dict) else [*range(len(container))]
        for key in keys if len(keys) < 40 else rng.sample(keys, 8):
            inner = f"{path}[{key!r}]"
            yield inner, container, key
            if isinstance(container[key], dict | list):
                waiting.append((inner, container[key]))


def copy_of(artifact: Path, target: Path) -> Path:
    """Return a copy of an artifact, whose files may be replaced; it shares those that are not."""
    shutil.copytree(artifact, target, copy_function=os.link)
    return target


def replace(folder: Path, name: str, content: bytes) -> None:
    """Replace a file, and write its hash into the manifest, as the owner of a folder could."""
    (folder / name).unlink(missing_ok=True)  # other artifacts have hard links to the file
    (folder / name).write_bytes(content)
    if name != MANIFEST:
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"][name] = hashlib.sha256(content).hexdigest()
        replace(folder, MANIFEST, json.dumps(manifest).encode())


def edit(folder: Path, name: str, /, **values: object) -> None:
    """Replace members of a JSON file."""
    content = json.loads((folder / name).read_text()) | values
    replace(folder, name, json.dumps(content).encode())


def edit_graph(folder: Path, name: str, change: Callable[[onnx.ModelProto], object]) -> None:
    """Change an ONNX file."""
    model = onnx.load(folder / name, load_external_data=False)
    change(model)
    replace(folder, name, model.SerializeToString())


def rename_output(model: onnx.ModelProto, new: str) -> str:
    """Give the value of the first output another name, and return the output's name."""
    output: str = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = [new if name == output else name for name in node.output]
    return output


def make_slow(model: onnx.ModelProto, iterations: int = 2**21) -> None:
    """Add the result of a loop, 0, to the first output; by default each run takes seconds.

    A loop without end would keep a test from ending that its guard lets fail.
    """
    values = {"n": np.int64(iterations), "go": np.bool_(True), "x": np.float32(0)}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()
    )
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_"], ["next"]),
            helper.make_node("Add", ["y", "y"], ["z"]),
        ],
        "body",
        [
            info("i", TensorProto.INT64, []),
            info("go_", TensorProto.BOOL, []),
            info("y", TensorProto.FLOAT, []),
        ],
        [info("next", TensorProto.BOOL, []), info("z", TensorProto.FLOAT, [])],
    )
    output = rename_output(model, "result")
    model.graph.node.append(helper.make_node("Loop", ["n", "go", "x"], ["zero"], body=body))
    model.graph.node.append(helper.make_node("Add", ["result", "zero"], [output]))


async def outcome_of(folder: Path) -> str:
    """Open an artifact and use it; return what happened, or raise what must not happen."""
    try:
        model = await open_model(folder, ModelOptions(threads=1))
    except (ArtifactError, EngineError) as error:
        message = str(error)
        assert any(word in message for word in NAMED), message
        assert message.isprintable(), message
        assert len(message) < 2000, message
        return type(error).__name__
    async with model:
        return " ".join([await _use(model, prompt) for prompt in (None, "query")])


# An error names a file, the self-check, or what the graph or the engine lacks.
NAMED = (*FILES, QUERY_WEIGHTS, ".onnx", "self-check", "graph", "lacks file", "unlisted file")


async def _use(model: Model, prompt_name: str | None) -> str:
    try:
        result = await model.encode(["a cat", "the dog sat"], prompt_name=prompt_name)
    except VitrineError as error:
        return type(error).__name__
    assert np.isfinite(result.vectors).all()
    return "encoded"


def main() -> int:
    """Try artifacts for a number of seconds; print counts and every finding."""
    source, seconds, seed = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2)
    counts: Counter[str] = Counter()
    findings, slowest, started = 0, 0.0, time.monotonic()
    while time.monotonic() < started + seconds:
        rng = random.Random(seed)  # noqa: S311
        with tempfile.TemporaryDirectory() as parent:
            folder = copy_of(source, Path(parent) / "artifact")
            add_rules(folder)
            done = make_hostile(folder, rng)
            began = time.monotonic()
            try:
                outcome = asyncio.run(outcome_of(folder))
            except BaseException as error:  # noqa: BLE001 - this is what is looked for
                outcome = f"FINDING {type(error).__name__}"
                findings += 1
                print(f"seed {seed}: {done}: {type(error).__name__}: {error}"[:600])
            took = time.monotonic() - began
            if took > max(slowest, 5.0):
                print(f"seed {seed}: {done}: {took:.1f} s")
            slowest = max(slowest, took)
        counts[outcome] += 1
        seed += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{sum(counts.values())} artifacts to seed {seed}, {findings} findings: {dict(counts)}")
    print(f"slowest {slowest:.1f} s, peak {peak} MB")
    return findings


if __name__ == "__main__":
    sys.exit(main())
