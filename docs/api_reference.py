"""The directive `http-api`, which documents the HTTP API from the service's OpenAPI schema."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from service.app import create_app
from service.settings import DebugSettings, Settings

Schema = Mapping[str, Any]

_ESCAPED_BAR = ("|", "\\|")
_REFERENCE = re.compile(r"#/components/schemas/(\w+)")


class HttpApi(SphinxDirective):
    """A section for each route at or below some paths, and one for each schema of their bodies."""

    required_arguments = 1
    final_argument_whitespace = True  # the paths

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        api = create_app(Settings(debug=DebugSettings(enabled=True))).openapi()
        paths = self.arguments[0].split()
        page_name = self.env.docname.rsplit("/", 1)[1]  # labels are unique on the whole site
        operations = {
            f"{method.upper()} {path}": operation
            for path, methods in api["paths"].items()
            if any(path == start or path.startswith(f"{start}/") for start in paths)
            for method, operation in methods.items()
        }
        lines = ["## Routes", ""]
        for name, operation in operations.items():
            lines += _route(name, operation, page_name)
        lines += ["## Schemas", ""]
        schemas = api["components"]["schemas"]
        for name in sorted(_reachable(operations, schemas)):
            label = _label(name, page_name)
            lines += [f"({label})=", f"### {name}", "", *_schema(schemas[name], page_name)]
        page = nodes.section()
        page.document = self.state.document
        self.state.nested_parse(StringList(lines, "openapi.json"), 0, page, match_titles=True)
        return list(page.children)


def _route(name: str, operation: Schema, page: str) -> Iterator[str]:
    yield from (f"### {name}", "", operation.get("description") or f"{operation['summary']}.", "")
    if body := operation.get("requestBody"):
        yield from (f"Body: {_types(body['content'], page)}.", "")
    for status, response in operation["responses"].items():
        if status.startswith("2") and (content := response.get("content")):
            yield from (f"Response {status}: {_types(content, page)}.", "")
    statuses = [status for status in operation["responses"] if not status.startswith("2")]
    if statuses:
        yield from (f"Other statuses: {', '.join(statuses)}.", "")


def _types(content: Mapping[str, Schema], page: str) -> str:
    return ", or ".join(
        f"`{media}`" + (f", {_type(value['schema'], page)}" if value.get("schema") else "")
        for media, value in content.items()
    )


def _schema(schema: Schema, page: str) -> Iterator[str]:
    if description := schema.get("description"):
        yield from (description, "")
    if not (fields := schema.get("properties")):
        yield from (_type({**schema, "description": ""}, page), "")
        return
    yield from ("| field | type | default | |", "|---|---|---|---|")
    for name, field in fields.items():
        default = "" if "default" not in field else f"`{json.dumps(field['default'])}`"
        text = field.get("description", "").replace("\n", " ")
        cells = (f"`{name}`", _type(field, page), default, text)
        yield f"| {' | '.join(cell.replace(*_ESCAPED_BAR) for cell in cells)} |"
    yield ""


def _label(schema: str, page: str) -> str:
    return f"{page}-{schema.lower()}"


def _type(schema: Schema, page: str) -> str:
    """Return the type of a value, with links to the schemas on the page that it refers to."""
    if reference := schema.get("$ref"):
        name = reference.rsplit("/", 1)[1]
        return f"[{name}](#{_label(name, page)})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(choice, page) for choice in schema[key]))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(v)}`" for v in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array" and (items := schema.get("items")):
        return f"list of {_type(items, page)}"
    return str(schema.get("type", "any value"))


def _reachable(value: object, schemas: Mapping[str, Schema]) -> set[str]:
    """Return the names of the schemas that a value refers to, directly or through others."""
    found: set[str] = set()
    queue = [value]
    while queue:
        names = set(_REFERENCE.findall(json.dumps(queue.pop()))) - found
        found |= names
        queue += [schemas[name] for name in names]
    return found


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("http-api", HttpApi)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
