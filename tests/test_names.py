"""Names of classes: a reader who searches for one finds one class."""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("models", "service", "deploy", "tests")

_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)  # `ast` takes seconds


def test_no_two_classes_of_modules_have_the_same_name() -> None:
    files = defaultdict(list)
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for name in _CLASS.findall(path.read_text()):
            files[name].append(str(path.relative_to(ROOT)))
    assert {"TextTokenizer", "Artifact"} <= files.keys()
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
