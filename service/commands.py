"""`vitrine`: the commands of Vitrine as verbs of one."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

# Module whose `main` runs a verb.
COMMANDS = {
    "serve": ("service.__main__", "serve models over HTTP, and explain their results"),
    "export": ("models.export.__main__", "export a model with options, to an artifact"),
    "encode": ("service.bulk.__main__", "encode files of texts"),
    "eval": ("service.evaluation.__main__", "measure search with a model by relevance judgements"),
    "migrate": ("service.evaluation.migrate", "search an old model's index with a new model"),
    "explain": ("service.explain_command", "score two texts or label one, and colour their words"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        "vitrine", epilog="vitrine COMMAND --help lists the options of a command."
    )
    verbs = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, summary) in COMMANDS.items():
        verbs.add_parser(name, help=summary, add_help=False)
    module, _ = COMMANDS[parser.parse_args(words[:1]).command]
    status: int = import_module(module).main(words[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
