"""What the files of a deployment say of each other and of the settings."""

import re
from pathlib import Path

from deploy.ray_serve import Arguments
from service.settings import table, variable

ROOT = Path(__file__).parents[2]
COMPOSE = "".join((ROOT / f"deploy/{name}.yaml").read_text() for name in ("compose", "compose.gpu"))


def test_every_variable_that_a_container_is_given_is_a_setting() -> None:
    settings = {variable(group, name) for group, name, _ in table()}
    given = set(re.findall(r"^ +(VITRINE_\w+):", COMPOSE, re.MULTILINE))
    given |= set(re.findall(r"(VITRINE_\w+)=", (ROOT / "Dockerfile").read_text()))
    assert len(given) >= 5
    assert given <= settings


def told(chapter: str) -> set[str]:
    """The names in the first column of the chapter's table."""
    page = (ROOT / "deploy/README.md").read_text()
    lines = page.partition(f"\n## {chapter}\n")[2].partition("\n## ")[0].splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_table_of_variables_is_that_of_the_compose_file() -> None:
    assert told("Compose") == set(re.findall(r"\$\{(\w+)", COMPOSE))


def test_the_table_of_alerts_is_that_of_the_rules() -> None:
    rules = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    assert told("Monitoring") == set(re.findall(r"- alert: (\w+)", rules))


def test_the_table_of_arguments_is_that_of_the_ray_application() -> None:
    assert told("Ray Serve") == Arguments.model_fields.keys()
