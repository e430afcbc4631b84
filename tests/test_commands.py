"""Every command on a page of the documentation names a program that exists and options that it has.

`test_code_blocks` and the tests of each route run those of the pages for users.
"""

import argparse
import importlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from service.settings import from_command_line
from tests.test_code_blocks import blocks, commands

ROOT = Path(__file__).parents[1]
FOLDERS = ("deploy", "docs", "models", "service", "tests")
PAGES = [
    str(page.relative_to(ROOT))
    for pages in (ROOT.glob("*.md"), *((ROOT / folder).rglob("*.md") for folder in FOLDERS))
    for page in sorted(pages)
]
MODULES = {
    "vitrine-export": "models.export.__main__",
    "vitrine-encode": "service.bulk.command_line",
    "deploy/load_test.py": "deploy.load_test",
}
# Programs that are not ours.
OTHERS = {
    *("(cd", "apt-cache", "apt-get", "bible", "cat", "curl", "docker", "duckdb", "export"),
    *("kubectl", "ls", "pip", "serve"),
}
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Parsed(Exception):
    """The options were accepted."""


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """The commands of all pages in words, from the name of the program."""
    for page in PAGES:
        for block in blocks(page, "console"):
            for command in commands(block):
                words = shlex.split(command.text.replace("\\\n", " "))
                while "=" in words[0] or words[0] in ("time", "nice", "-n", "-15"):
                    words.pop(0)
                yield page, [words[0].removeprefix(".venv/bin/"), *words[1:]]


COMMANDS = list(shown_commands())


def program_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The module, or the program, and the arguments of a command."""
    program, *arguments = words[words.index("--") + 1 :] if words[0] == "ray" else words
    if program == "python":
        program, *arguments = arguments[1:] if arguments[0] == "-m" else arguments
    return MODULES.get(program, program), arguments


def accept(parse: Callable[..., object]) -> Callable[..., object]:
    def parsed(*arguments: object) -> object:
        parse(*arguments)
        raise Parsed

    return parsed


@pytest.mark.parametrize(
    ("page", "words"),
    [(page, words) for page, words in COMMANDS if program_of(words)[0] not in OTHERS],
)
def test_program_has_the_options(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, arguments = program_of(words)
    if program == "make":
        targets = [word for word in arguments if "=" not in word]
        assert set(targets) <= TARGETS, page
        return
    if program == "vitrine-serve":
        from_command_line(arguments)
        return
    main = importlib.import_module(program).main
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    parser = argparse.ArgumentParser
    monkeypatch.setattr(parser, "parse_args", accept(parser.parse_args))
    with pytest.raises(Parsed):
        main()


def test_make_has_the_targets_that_texts_name() -> None:
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    missing = [
        (page, target)
        for page, text in texts.items()
        for target in re.findall(r"`make ([a-z-]+)", text)
        if target not in TARGETS
    ]
    assert not missing
