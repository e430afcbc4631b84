import ast

import pytest

from tests.controls import GUARDS, ROOT, Guard


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.file}: {guard.code:.40}")
def test_every_guard_stands_once_where_the_table_says_and_has_its_test(guard: Guard) -> None:
    assert (ROOT / guard.file).read_text().count(guard.code) == 1
    file, _, name = guard.test.partition("::")
    tests = ast.parse((ROOT / file).read_text()).body
    names = {
        test.name for test in tests if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not name or name in names
