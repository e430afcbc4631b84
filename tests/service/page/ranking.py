"""A ranking on the page, and the scores that it must have."""

import re
from urllib.parse import urlencode

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.service.page.browsing import (
    Browser,
    find,
    number,
    open_page,
    served,
    until,
)

QUERY = "Which plan includes phone support?"
PASSAGES = [
    "Plans can be changed in the settings. The new price applies from the next month.",
    "The Basic plan does not include phone support. Questions are answered by e-mail.",
    "Call our engineers from Monday to Friday. The Team plan has it.",
    "Rain fell on the town for three days.",
]
FILLER = "The museum was opened in {} by the mayor of the old town. "
ANSWER = "Every plan includes phone support."
# 463 words, with the answer behind the 256 tokens that the model reads.
LONG = (
    "".join(FILLER.format(1800 + index) for index in range(34))
    + ANSWER
    + " Call us by phone for support with your plan. Support by phone is open all day."
)
# Rounding of the engine, which depends on the batch of a text.
TOLERANCE = 2e-5


def opened(
    browser: Browser,
    url: str,
    query: str = QUERY,
    passages: str = "\n\n".join(PASSAGES),
    kind: str = "embedding",
    model: str = "",
    **inputs: str,
) -> Browser:
    """Open the page with a ranking, and wait for its explanations."""
    fields = {"tab": "rank", "run": "1", "query": query, "passages": passages, **inputs}
    address = f"{url}/debug{model and f'?model={model}'}#{urlencode(fields)}"
    return explained(open_page(browser, address, kind, has_gradients=False))


def explained(page: Browser) -> Browser:
    until(lambda: find(page, "#rank .second").get_attribute("aria-busy") == "false")
    return page


def rows(page: Browser) -> list[WebElement]:
    return page.find_elements(By.CSS_SELECTOR, "#rank .row")


def row_of(page: Browser, passage: str) -> WebElement:
    (row,) = [row for row in rows(page) if passage in find_in(row, ".prose").text]
    return row


def find_in(row: WebElement, selector: str) -> WebElement:
    return row.find_element(By.CSS_SELECTOR, selector)


def ranked(page: Browser) -> list[tuple[int, float]]:
    """Return index and exact score of each row."""
    return [
        (
            int(row.get_attribute("data-index") or ""),
            float(find_in(row, ".score").get_attribute("data-score") or ""),
        )
        for row in rows(page)
    ]


def scores_of(url: str, query: str, passages: list[str], **fields: object) -> list[float]:
    scores: list[float] = served(url, "score", queries=query, documents=passages, **fields)[
        "scores"
    ]
    return scores


def place(scores: list[float], index: int) -> int:
    """Return the rank of a passage; equal scores by index."""
    return 1 + int(np.argsort(-np.array(scores), kind="stable").tolist().index(index))


def check_after(row: WebElement, scores: list[float], index: int) -> None:
    """Wait until a row has its new score and rank."""

    def holds() -> bool:
        match = re.match(r"now ([^,]+), rank (\d+)", find_in(row, ".after").text)
        expected = pytest.approx(scores[index], abs=1e-4)
        return (
            match is not None
            and number(match[1]) == expected
            and int(match[2]) == place(scores, index)
        )

    until(holds)
