"""Requests of the benchmarks: seeded English texts of measured lengths."""

import random
from collections.abc import Callable
from dataclasses import dataclass

# Common words with one or two tokens each.
_COMMON_WORDS = """
    the of and to in is was for that on as with by at from his her it an are were which this be
    had not they have one all there been who their more its would when will said what some time
    into only could new other than then first any may like our over also two after most many
    before must through years where way well down should because long each just those people
    little state good very make world still own see men work here get both life being under
    three never know same last another while us off might great go come since against right came
    take used himself few house use during without again place old public small between does
    less water night head business point company school order country hand market part number
    system train garden river street letter window market doctor teacher music picture summer
    winter question answer problem reason result history science language machine engine energy
    metal
"""


@dataclass(frozen=True)
class Workload:
    """Requests of one kind.

    Attributes:
        clients: Number of connections; each sends its next request after a response.
        texts: Number of texts per request.
        words: Draws the number of words per text.
    """

    clients: int
    texts: int
    words: Callable[[random.Random], int]

    def requests(self) -> list[list[str]]:
        """Return the texts of many requests; every call returns the same."""
        draw = random.Random(7)  # noqa: S311 - not for secrets
        count = max(50, 2000 // self.texts)
        return [
            [random_text(draw, self.words(draw)) for _ in range(self.texts)] for _ in range(count)
        ]


def random_text(draw: random.Random, words: int) -> str:
    """Return a text with a number of words."""
    return " ".join(draw.choices(_COMMON_WORDS.split(), k=words))


def _mixed(draw: random.Random) -> int:
    return round(min(max(draw.lognormvariate(3.69, 0.8), 5), 250))  # median 40


WORKLOADS: dict[str, Workload] = {
    "short": Workload(clients=16, texts=1, words=lambda draw: draw.randint(4, 12)),
    "mixed": Workload(clients=32, texts=1, words=_mixed),
    "documents": Workload(clients=4, texts=32, words=lambda draw: draw.randint(60, 200)),
    "one client": Workload(clients=1, texts=1, words=lambda draw: draw.randint(4, 12)),
}


def mixed_texts(count: int) -> list[str]:
    """Return different texts of mixed lengths, the same in every call."""
    draw = random.Random(11)  # noqa: S311 - not for secrets
    return [random_text(draw, _mixed(draw)) for _ in range(count)]
