"""Every command on a page of the documentation names a program that exists and options that it has.

`test_code_blocks` and the tests of each route run those of the pages for users.
"""

import argparse
import errno
import logging
import os
import pkgutil
import re
import shlex
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from models.artifact import Artifact, new_folder
from service import commands as commands_of_vitrine
from service.commands import COMMANDS as VERBS
from service.serve_command import parse
from tests.test_code_blocks import blocks, commands

ROOT = Path(__file__).parents[1]
FOLDERS = ("deploy", "docs", "models", "service", "tests")
PAGES = [
    str(page.relative_to(ROOT))
    for pages in (ROOT.glob("*.md"), *((ROOT / folder).rglob("*.md") for folder in FOLDERS))
    for page in sorted(pages)
]
MODULES = {
    **{f"vitrine-{verb}": function for verb, (function, _) in VERBS.items()},
    "deploy/load_test.py": "deploy.load_test:main",
}
# Programs that are not ours.
OTHERS = {
    *(
        "(cd",
        "/usr/lib/apt/apt-helper",
        "apt-cache",
        "apt-get",
        "bible",
        "cat",
        "curl",
        "docker",
        "duckdb",
        "export",
        "openssl",
    ),
    *("kubectl", "ls", "pip", "printf", "serve"),
}
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
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
    if program == "vitrine":
        verb, *arguments = arguments
        assert verb in VERBS
        program = f"vitrine-{verb}"
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
    if program == MODULES["vitrine-serve"]:
        parse(arguments)
        return
    main = pkgutil.resolve_name(program if ":" in program else f"{program}:main")
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


def test_commands_are_verbs_of_one_command_and_have_old_names() -> None:
    assert pkgutil.resolve_name(SCRIPTS["vitrine"]) is commands_of_vitrine.main
    assert {*SCRIPTS} == {"vitrine", "vitrine-serve", "vitrine-export", "vitrine-encode"}


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "vitrine"])
def test_old_name_of_a_command_is_its_verb(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: Sequence[str]) -> int:
        print(*arguments, flush=True)
        return 7

    command = pkgutil.resolve_name(SCRIPTS[name])
    monkeypatch.setattr(MODULES[name].replace(":", "."), run)
    monkeypatch.setattr(sys, "argv", [name, "model", "--help"])
    assert command() == 7
    assert capfd.readouterr().out == "model --help\n"
    with open("/dev/full", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert command() == 1
    assert "the output cannot be written" in capfd.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_verb_passes_its_arguments_on(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[Sequence[str]] = []
    function, _ = VERBS[verb]

    def run(arguments: Sequence[str]) -> int:
        passed.append(arguments)
        return 7

    monkeypatch.setattr(function.replace(":", "."), run)
    assert commands_of_vitrine.main([verb, "model", "--help"]) == 7
    assert passed == [["model", "--help"]]


def test_command_ends_without_a_traceback_if_nobody_reads_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(_: Sequence[str]) -> int:
        print("a text")
        return 0

    monkeypatch.setattr("service.provenance.bom", run)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert commands_of_vitrine.main(["bom", "model"]) == 1


def test_bill_of_materials_that_nobody_reads_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], small_artifact: Artifact
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as output:  # as of one that is larger than the buffer
        monkeypatch.setattr(sys, "stdout", output)
        assert commands_of_vitrine.main(["bom", str(small_artifact.path)]) == 1
    assert capfd.readouterr().err == ""


def test_pipe_other_than_the_output_that_breaks_is_no_quiet_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(_: Sequence[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("service.provenance.bom", run)
    with (tmp_path / "output").open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError):
            commands_of_vitrine.main(["bom", "model"])


@pytest.mark.parametrize("buffering", [1, -1])
def test_output_on_a_full_disk_is_one_sentence(
    buffering: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    small_artifact: Artifact,
) -> None:
    with open("/dev/full", "w", buffering=buffering) as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert commands_of_vitrine.main(["bom", str(small_artifact.path)]) == 1
    expected = f"vitrine bom: the output cannot be written: {os.strerror(errno.ENOSPC)}\n"
    assert capfd.readouterr().err == expected


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file", "a file"),
        OSError(errno.EMFILE, "Too many open files"),
    ],
)
def test_other_error_is_not_said_to_be_of_the_output(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Sequence[str]) -> int:
        raise error

    monkeypatch.setattr("service.provenance.bom", run)
    with pytest.raises(type(error)):
        commands_of_vitrine.main(["bom", "model"])


@pytest.fixture
def own_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logs for a command in this process, which configures them; those of other tests stay."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield
    logging.captureWarnings(False)


@pytest.mark.usefixtures("own_logs")
@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_closed_output_stops_no_command(
    closed: str, monkeypatch: pytest.MonkeyPatch, small_artifact: Artifact, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, closed, None)
    (tmp_path / "texts.txt").write_text("a text")
    model = str(small_artifact.path)
    assert commands_of_vitrine.main(["bom", model]) == 0
    assert commands_of_vitrine.main(["explain", "a text", "texts", "--model", model]) == 0
    words = ["encode", str(tmp_path / "texts.txt"), str(tmp_path / "vectors"), "--model", model]
    assert commands_of_vitrine.main(words) == 0
    getattr(sys, closed).close()


@pytest.mark.parametrize("path", ["s3://bucket/folder", "file:///tmp/folder", ""])
@pytest.mark.parametrize(
    "words",
    [
        "encode PATH out --model m",
        "encode in.txt PATH --model m",
        "eval PATH --model m",
        *(f"eval out --{name} PATH" for name in ("beir", "corpus", "queries", "qrels", "against")),
        "migrate PATH --old old --new new --space s",
        "migrate out --old PATH --new new --space s",
        "migrate out --old old --new PATH --space s",
        "export m --out PATH",
        "export m --out out --calibrate PATH",
        "sign PATH --key key",
        "verify folder --key PATH",
    ],
)
def test_path_that_is_a_url_or_empty_is_refused(
    words: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        commands_of_vitrine.main([path if word == "PATH" else word for word in words.split()])
    expected = f"{path} is a URL; give the path of a file or folder" if path else "is empty"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *(
            (words, "s3://a/b is a URL; a model is a folder, an installed package or a hub id")
            for words in (
                "serve URL",
                "serve --model.path URL",
                'serve --models.served [{"path":"URL"}]',
                "explain a b --model URL",
                "encode in.txt out --model URL",
                "eval out --corpus c --known-items 2 --model URL",
            )
        ),
        *(
            (f"serve m --{name} URL", f"{name}: s3://a/b is a URL; give the path of a file or fol")
            for name in ("models.folder", "models.cache", "models.verify", "auth.keys_file")
        ),
    ],
)
def test_model_and_path_of_a_setting_that_are_a_url_are_refused(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = words.replace("URL", "s3://a/b").split()
    with suppress(SystemExit):  # of a parser
        assert commands_of_vitrine.main(arguments) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "name", "extra"),
    [
        ("encode", "vitrine-encode", "bulk"),
        ("eval", "vitrine eval", "eval"),
        ("migrate", "vitrine migrate", "eval"),
    ],
)
def test_verb_without_a_package_of_its_extra_names_both(
    verb: str,
    name: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(commands_of_vitrine, "find_spec", lambda name: name == "pyarrow" or None)
    with pytest.raises(SystemExit, match="2"):
        commands_of_vitrine.main([verb, "--help"])
    assert capsys.readouterr().err == (
        f"{name}: the package rich is not installed; install Vitrine with its extra '{extra}'\n"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_interrupted_command_ends_without_a_traceback(
    verb: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(_: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(VERBS[verb][0].replace(":", "."), run)
    assert commands_of_vitrine.main([verb, "model"]) == 130
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "serve"])
def test_terminated_command_removes_its_temporary_files(
    verb: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Sequence[str]) -> int:
        with new_folder(tmp_path / "out"):
            os.kill(os.getpid(), number)
        return 0

    previous = signal.signal(number, lambda *_: None)
    monkeypatch.setattr(VERBS[verb][0].replace(":", "."), run)
    try:
        with pytest.raises(SystemExit) as ended:
            commands_of_vitrine.main([verb, "model"])
    finally:
        signal.signal(number, previous)
    assert ended.value.code == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_command_under_nohup_survives_the_end_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(_: Sequence[str]) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 0

    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(VERBS["export"][0].replace(":", "."), run)
    try:
        assert commands_of_vitrine.main(["export", "model"]) == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        commands_of_vitrine.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert all(any(line.startswith(f"    {verb} ") for line in lines) for verb in VERBS)


@pytest.mark.parametrize(
    "function",
    # The commands of `service.provenance` have no such options.
    [*(own for own in MODULES.values() if "provenance" not in own), "deploy.ray_encode:main"],
)
def test_help_states_the_default_of_each_option_with_a_value(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsers: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser, *_: object) -> None:
        parsers.append(parser)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", keep)
    with pytest.raises(Parsed):
        pkgutil.resolve_name(function)([])
    helps = {
        action.option_strings[0]: str(action.help)
        for action in parsers[0]._actions
        if action.option_strings and action.nargs != 0 and not action.required
    }
    shown = {option: text for option, text in helps.items() if text != argparse.SUPPRESS}
    assert shown
    assert not [option for option, text in shown.items() if "default" not in text]
