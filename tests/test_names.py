"""Names of classes: a reader who searches for one finds one class."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("models", "service", "deploy", "tests")


def test_no_two_classes_of_modules_have_the_same_name() -> None:
    files = defaultdict(list)
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(ROOT)))
    assert {"TextTokenizer", "Artifact"} <= files.keys()
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
