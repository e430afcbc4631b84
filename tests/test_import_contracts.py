"""Each import contract fails on a violation of it."""

import re
import shutil
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]
# A module and an import that it must not have, by contract.
VIOLATIONS = {
    "layers": ("models/packing.py", "import service.logs"),
    "service-layers": ("service/api/auth.py", "import service.debug.pipeline.access"),
    "rooms": (
        "service/inference/results/scores.py",
        "import service.inference.explain.terms",
    ),
    "text": ("models/gradients/budget.py", "def f():\n    import models.export.tokenizer_file"),
    "meeting-points": ("service/inference/results/vectors.py", "import models.network.pooling"),
    "torch-free": ("service/page/routes.py", "def f():\n    import service.debug.child.jobs"),
    "http-free": ("service/inference/errors.py", "import starlette.responses"),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("models", "service", "deploy"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def check(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", *options]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def test_every_contract_has_a_violation_and_is_kept_without_it(tree: Path) -> None:
    assert VIOLATIONS.keys() == {contract["id"] for contract in CONTRACTS}
    kept = check(tree)
    assert kept.returncode == 0, kept.stdout


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_contract_fails_on_a_violation(tree: Path, contract: str) -> None:
    name, violation = VIOLATIONS[contract]
    module = tree / name
    content = module.read_text()
    module.write_text(f"{content}\n{violation}\n")
    try:
        violated = check(tree, "--contract", contract)
    finally:
        module.write_text(content)
    assert violated.returncode == 1, violated.stdout
    assert "BROKEN" in violated.stdout


def test_modules_of_the_page_import_each_other_in_no_circle() -> None:
    files = {file.name: file.read_text() for file in (ROOT / "service/page/static").glob("*.js")}
    imports = {name: re.findall(r'from "\./(.+?)"', text) for name, text in files.items()}
    assert {"page.js", "state.js"} <= {*TopologicalSorter(imports).static_order()}
