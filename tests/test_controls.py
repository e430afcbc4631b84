import ast

import pytest

from tests.controls.__main__ import GUARDS, ROOT, sample
from tests.controls.guard import Guard


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.file}: {guard.code:.40}")
def test_guard_occurs_once_in_its_file_and_its_test_exists(guard: Guard) -> None:
    assert (ROOT / guard.file).read_text().count(guard.code) == 1
    file, _, name = guard.test.partition("::")
    tests = ast.parse((ROOT / file).read_text()).body
    names = {
        test.name for test in tests if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not name or name in names


@pytest.mark.parametrize("size", [1, 12, len(GUARDS)])
def test_consecutive_samples_cover_every_guard_once(size: int) -> None:
    windows = -(-len(GUARDS) // size)
    samples = [sample(size, 1000 * windows + seed) for seed in range(windows)]
    assert max(map(len, samples)) <= size
    assert sorted(guard for chosen in samples for guard in chosen) == sorted(GUARDS)
