"""`vitrine`: the commands of Vitrine as verbs of one."""

import argparse
import errno
import gc
import os
import select
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from io import TextIOWrapper
from pkgutil import resolve_name

from service.signals import exit_on

# Function that runs each verb, and its summary.
COMMANDS = {
    "serve": ("service.serve_command:main", "serve models over HTTP, and explain their results"),
    "export": ("models.export.__main__:main", "export a model with options, to an artifact"),
    "sign": ("service.provenance:sign", "sign an artifact"),
    "verify": ("service.provenance:verify", "verify the signature of an artifact"),
    "bom": ("service.provenance:bom", "print the bill of materials of an artifact"),
    "encode": ("service.bulk.command_line:main", "encode files of texts"),
    "eval": (
        "service.evaluation.command_line:main",
        "measure search with a model by relevance judgements",
    ),
    "migrate": (
        "service.evaluation.migrate_command:main",
        "search an old model's index with a new model",
    ),
    "explain": (
        "service.explain_command:main",
        "score two texts or label one, and colour their words",
    ),
}

# Extra that a verb needs, and its packages.
_BULK = ("pyarrow", "rich")
_EVAL = (*_BULK, "httpx2", "pytrec_eval", "scipy")
_EXTRAS = {"encode": ("bulk", _BULK), "eval": ("eval", _EVAL), "migrate": ("eval", _EVAL)}

# Errors of a full disk, a quota, a limit of file sizes, and a broken disk.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the verb of a command line and return its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        "vitrine", epilog="vitrine COMMAND --help lists the options of a command."
    )
    verbs = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, summary) in COMMANDS.items():
        verbs.add_parser(name, help=summary, add_help=False)
    return run(parser.parse_args(words[:1]).command, words[1:])


def run(verb: str, arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return its exit status."""
    function, _ = COMMANDS[verb]
    _prepare_streams()
    _check_packages(verb)
    try:
        gc.disable()  # imports make many objects, and no garbage that is worth a collection
        if verb == "serve":
            _ignore_early_signals()
            _check_propagators()
        command = resolve_name(function)
        gc.freeze()  # they stay for as long as the process: collections skip them
        gc.enable()
        # The server has handlers of its own.
        own = () if verb == "serve" else (signal.SIGTERM, signal.SIGHUP)
        with exit_on(*own):
            status: int = command(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # as in shells
    except BrokenPipeError:
        if not _is_unread(sys.stdout.fileno()):
            raise
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        print(f"vitrine {verb}: the output cannot be written: {error.strerror}", file=sys.stderr)
    else:
        return status
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
    return 1


# Scripts with names of their own.
serve, encode, export = (partial(run, verb) for verb in ("serve", "encode", "export"))


def _check_packages(verb: str) -> None:
    """Exit with status 2 if a package is missing that the verb needs."""
    extra, packages = _EXTRAS.get(verb, ("", ()))
    for package in packages:
        if find_spec(package) is None:
            name = "vitrine-encode" if verb == "encode" else f"vitrine {verb}"
            print(
                f"{name}: the package {package} is not installed; install Vitrine with its extra "
                f"'{extra}'",
                file=sys.stderr,
            )
            sys.exit(2)


def _ignore_early_signals() -> None:
    """Ignore the server's own signals until it runs: it reads all artifacts then anyway.

    By handlers, which the child process of an export does not inherit.
    """
    for number in (signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup has ignored the first
            signal.signal(number, lambda *_: None)


def _check_propagators() -> None:
    """Exit with status 2 if a propagator is missing, which FastAPI's import raises otherwise."""
    try:
        import opentelemetry.propagate  # noqa: F401 - it reads the variable
    except ValueError as error:
        print(f"vitrine-serve: OTEL_PROPAGATORS: {error}", file=sys.stderr)
        sys.exit(2)


def _prepare_streams() -> None:
    """Open closed streams as `/dev/null`, and make standard output and error accept any text."""
    if sys.stdin is None:  # closed; its descriptor would be that of another file
        os.open(os.devnull, os.O_RDONLY)
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed, as by `>&-`
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, TextIOWrapper):  # its encoding can lack characters of a text
        sys.stdout.reconfigure(errors="backslashreplace")


def _is_unread(file: int) -> bool:
    """Return whether a file is a pipe that nobody reads on, as after `| head`."""
    poll = select.poll()
    poll.register(file, 0)  # errors and ends are reported whatever is asked for
    return bool(poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
