"""What the files of a deployment say of each other and of the settings."""

import re
from pathlib import Path

from service.settings import table, variable

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "deploy/compose.yaml").read_text()


def test_every_variable_that_a_container_is_given_is_a_setting() -> None:
    settings = {variable(group, name) for group, name, _ in table()}
    given = set(re.findall(r"^ +(VITRINE_\w+):", COMPOSE, re.MULTILINE))
    given |= set(re.findall(r"(VITRINE_\w+)=", (ROOT / "Dockerfile").read_text()))
    assert len(given) >= 5
    assert given <= settings


def test_the_table_of_variables_is_that_of_the_compose_file() -> None:
    read = set(re.findall(r"\$\{(\w+)", COMPOSE))
    told = re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "deploy/README.md").read_text(), re.MULTILINE)
    assert read == set(told)
