"""Passages in the formats of files and fields, and rankings in URLs."""

import json
from functools import partial
from urllib.parse import urlencode

import pytest

from tests.service.page.browsing import (
    Browser,
    Json,
    find,
    open_page,
    served,
    set_value,
    shows,
    texts,
    until,
)
from tests.service.page.ranking import (
    PASSAGES,
    QUERY,
    check_after,
    explained,
    opened,
    ranked,
    row_of,
    rows,
    scores_of,
)

# A browser may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


PASSAGES_OF: list[tuple[str, list[tuple[str, str | None]]]] = [
    ("one\n\ntwo\nlines\n \n\nthree", [("one", None), ("two\nlines", None), ("three", None)]),
    ('"one"\n{"text": "two\\n\\n", "id": 7}', [("one", None), ("two\n\n", "7")]),
    ('{"text": "one", "id": 1234567890123456789}', [("one", "1234567890123456789")]),
    (r'"\"one\""', [('"one"', None)]),
    (
        '{"passage": "a"}\n{"document": "b"}\n{"content": "c"}',
        [("a", None), ("b", None), ("c", None)],
    ),
    (
        'id,text\nx,"a, ""b""\nc"\ny,d',
        [("a, “b”\nc".replace("“", '"').replace("”", '"'), "x"), ("d", "y")],
    ),
    ("Content\na\nb", [("a", None), ("b", None)]),
    ('text\n"a\n\nb"', [("a\n\nb", None)]),
    ("Content", [("Content", None)]),
    ("Content\n\na", [("Content", None), ("a", None)]),
    (
        '"Yes," she said.\n\nText, or passage.',
        [('"Yes," she said.', None), ("Text, or passage.", None)],
    ),
]


def test_passages_are_read_by_the_format_of_their_text(shared_page: Browser) -> None:
    again = "writePassages(readPassages(arguments[0]))"
    for text, expected in PASSAGES_OF:
        for source in ("arguments[0]", again):
            actual = shared_page.execute_script(
                "return import('./debug/assets/rank_passages.js').then("
                f"({{readPassages, writePassages}}) => readPassages({source}))",
                text,
            )
            assert [(own["text"], own["id"]) for own in actual] == expected


def test_wrong_passages_are_named(browser: Browser, plain_url: str) -> None:
    page = open_page(browser, f"{plain_url}/debug#tab=rank", has_gradients=False)
    for text, problem in (
        ('"a"\n"b"\nc', "line 3 of the passages is not JSON"),
        (
            '{"text": "a"}\n\n{"body": "b"}',
            "line 3 of the passages is neither a text nor an object",
        ),
        ('text,id\na,1\n"b\nc",2,3', "line 3 of the passages: 3 cells, and the header has 2"),
        ('text,id\n"a,1', "line 2 of the passages: a quote is not closed"),
        ("\n\n".join(["a"] * 51), "51 passages; the limit of this view is 50"),
        (" ", "write at least one passage"),
    ):
        set_value(page, "passages", text)
        until(lambda: find(page, "#rank .go").is_enabled())
        find(page, "#rank .go").click()
        until(partial(shows, page, "#rank > .problem", f"Passages: {problem}"))
        assert find(page, "[name=passages]").get_attribute("aria-invalid") == "true"


def test_file_is_read_into_the_field(
    browser: Browser, minilm_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    page = opened(browser, minilm_url)
    file = tmp_path_factory.mktemp("passages") / "passages.csv"
    file.write_text("id,text\nx,The cat sat.\ny,A dog ran.\n")
    find(page, "#passages-file").send_keys(str(file))
    until(lambda: "The cat" in str(find(page, "[name=passages]").get_property("value")))
    drop = (
        "const data = new DataTransfer(); data.items.add(new File(arguments[0], 'a.jsonl'));"
        "document.querySelector('[name=passages]').dispatchEvent("
        "new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}))"
    )
    page.execute_script(drop, ['"dropped"'])
    until(lambda: find(page, "[name=passages]").get_property("value") == '"dropped"')


@pytest.mark.parametrize(
    "body",
    [
        {"query": QUERY, "documents": [*PASSAGES[:2], {"text": "Two\n\nparts."}], "top_n": 2},
        {"queries": [QUERY], "documents": [*PASSAGES[:2], "Two\n\nparts."]},
        {
            "query": QUERY,
            "documents": [*PASSAGES[:2], {"text": "Two\n\nparts."}],
            "chunking": {"size": 9, "overlap": 2, "late": False},
        },
    ],
)
def test_url_with_a_request_ranks_its_documents(
    browser: Browser, minilm_url: str, body: Json
) -> None:
    address = f"{minilm_url}/debug?{urlencode({'request': json.dumps(body)})}"
    page = explained(open_page(browser, address, has_gradients=False))
    until(lambda: "request=" not in page.current_url)
    explained(page)
    documents = [*PASSAGES[:2], "Two\n\nparts."]
    results = served(minilm_url, "rerank", query=QUERY, documents=documents)["results"]
    assert [index for index, _ in ranked(page)] == [own["index"] for own in results]
    if "chunking" in body:
        scores = scores_of(minilm_url, QUERY, documents, chunking=body["chunking"])
        for index in range(len(documents)):
            check_after(find(page, f"#rank .row[data-index='{index}']"), scores, index)
    else:
        assert shows(page, "#rank-whatif .outcome", "Nothing is struck out or edited.")


def test_url_with_a_wrong_request_says_so(browser: Browser, plain_url: str) -> None:
    browser.get("about:blank")
    browser.get(f"{plain_url}/debug?request=%7Bquery")
    until(partial(shows, browser, "#rank > .problem", "the request in the URL is not JSON"))
    assert not rows(browser)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"queries": ["a", "b"]}, "the request in the URL has several queries"),
        (
            {"query": "a", "chunking": {"strategy": "sentences", "late": True}, "top_n": 1},
            "the request in the URL has chunking.strategy and chunking.late, without which",
        ),
        (
            {"query": "a", "instruction": "Is it about cats?"},
            "the request in the URL has instruction, without which",
        ),
    ],
)
def test_url_with_a_request_that_this_view_cannot_repeat_is_refused(
    browser: Browser, plain_url: str, fields: Json, problem: str
) -> None:
    body = {**fields, "documents": ["c", "d"]}
    browser.get("about:blank")
    browser.get(f"{plain_url}/debug?{urlencode({'request': json.dumps(body)})}")
    until(partial(shows, browser, "#rank > .problem", problem))
    assert not rows(browser)


def test_other_views_open_a_ranking(browser: Browser, minilm_url: str) -> None:
    page = open_page(browser, f"{minilm_url}/debug#tab=explain", has_gradients=False)
    page.execute_script(
        "return import('./debug/assets/rank_open.js').then("
        "({openRanking}) => openRanking(...arguments))",
        *(QUERY, PASSAGES, 2),
    )
    until(lambda: texts(page, "#rank .why li"))
    assert find(page, "#rank").is_displayed()
    assert "should be first" in row_of(page, PASSAGES[2]).text
