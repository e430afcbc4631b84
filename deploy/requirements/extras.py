"""Print the requirements of the project and of some of its extras: `extras.py cpu otel`."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
requirements = [*project["dependencies"]]
for extra in sys.argv[1:]:
    requirements += project["optional-dependencies"][extra]
print(*requirements, sep="\n")
