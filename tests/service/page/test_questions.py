"""The view of many questions: files, metrics, failures, and the way to their explanation."""

import csv
import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import (
    label_ranking_average_precision_score,
    ndcg_score,
    top_k_accuracy_score,
)

from tests.service.page.browsing import (
    Browser,
    Json,
    cells,
    find,
    number,
    open_page,
    run,
    served,
    show,
    shows,
    texts,
    type_text,
    until,
)

# A browser may start slowly: the timeout only bounds a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FAILURES = "Questions whose first document is not expected"
QUESTIONS: list[Json] = [
    {"query": "w7 w9", "documents": ["w21 w5 w33", "w8 w51", "w7 w9"], "expected": expected}
    for expected in (0, [1], "w7 w9")
] + [{"query": "w5", "documents": ["w6 w40", "w5"], "expected": ["w6 w40", 1]}]


def called(page: Browser, module: str, function: str, *arguments: object) -> Json:
    """Return the result of a function of one of the page's modules."""
    result: Json = page.execute_script(
        "const [module, name, values] = arguments;"
        "return import(`./debug/assets/${module}.js`).then((found) => found[name](...values))",
        module,
        function,
        arguments,
    )
    return result


@pytest.fixture
def plain_page(browser: Browser, plain_url: str) -> Browser:
    """Return the page with its view of questions, which sends nothing by itself."""
    address = f"{plain_url}/debug?model=embedding#tab=questions"
    return open_page(browser, address, has_gradients=False)


def lines_of(questions: list[Json]) -> str:
    return "\n".join(map(json.dumps, questions))


def fill(page: Browser, content: str) -> None:
    page.execute_script(
        "const list = document.querySelector('[name=question-list]');"
        "list.value = arguments[0]; list.dispatchEvent(new Event('input'))",
        content,
    )


def metrics_of(page: Browser) -> dict[str, float]:
    names, values = (texts(page, f"#questions .facts {tag}") for tag in ("dt", "dd"))
    return dict(zip(names, map(number, values), strict=True))


def test_metrics_equal_those_of_scikit_learn(shared_page: Browser) -> None:
    rng = np.random.default_rng(0)
    scores, graded = rng.normal(size=(50, 14)), rng.integers(0, 4, (50, 14))
    expected = rng.integers(0, 14, 50)
    single = np.eye(14, dtype=int)[expected]
    means = shared_page.execute_script(
        "const [scores, graded, single] = arguments;"
        "return import('./debug/assets/metrics.js').then((own) => {"
        "const rankings = (all) => scores.map((row, index) => own.judgedRanking(row, all[index]));"
        "return [own.meanNdcg(rankings(graded)), own.meanReciprocalRank(rankings(single)),"
        "own.hits(rankings(single), 1), own.hits(rankings(single), 3)]; })",
        scores.tolist(),
        graded.tolist(),
        single.tolist(),
    )
    labels = np.arange(14)
    assert means == pytest.approx(
        [
            ndcg_score(graded, scores, k=10),
            label_ranking_average_precision_score(single, scores),
            top_k_accuracy_score(expected, scores, k=1, labels=labels),
            top_k_accuracy_score(expected, scores, k=3, labels=labels),
        ],
        abs=1e-12,
    )


def test_equal_scores_count_against_the_expected_documents(shared_page: Browser) -> None:
    ranking = called(shared_page, "metrics", "judgedRanking", [0.5, 0.5, 0.5], [1, 0, 0])
    assert ranking["rank"] == 3
    assert ranking["margin"] == 0


@pytest.mark.parametrize("kind", ["embedding", "reranker", "sparse", "multi"])
def test_failures_have_the_ranks_and_margins_of_score(
    browser: Browser, plain_url: str, kind: str
) -> None:
    page = open_page(browser, f"{plain_url}/debug?model={kind}", kind, has_gradients=False)
    show(page, "questions")
    fill(page, lines_of(QUESTIONS))
    assert find(page, "#questions-read").text == "4 questions with 11 documents."
    run(page, "questions")
    expected_of = [[0], [1], [2], [0, 1]]
    rows, ranks = [], []
    raw = {"raw_scores": True} if kind == "reranker" else {}
    for question, expected in zip(QUESTIONS, expected_of, strict=True):
        body = {"queries": question["query"], "documents": question["documents"], **raw}
        scores = served(plain_url, "score", model=kind, **body)["scores"]
        order = np.argsort(scores)[::-1].tolist()
        best = next(index for index in order if index in expected)
        ranks.append(order.index(best) + 1)
        if ranks[-1] > 1:
            margin = scores[best] - max(scores)
            documents = question["documents"]
            rows.append(
                (margin, question["query"], ranks[-1], documents[best], documents[order[0]])
            )
    rows.sort()
    actual = cells(page, FAILURES)
    assert [(row[0], int(row[1]), *row[3:]) for row in actual] == [row[1:] for row in rows]
    assert [float(row[2]) for row in actual] == pytest.approx([row[0] for row in rows], abs=2e-5)
    shown = metrics_of(page)
    assert shown["hits@1"] == pytest.approx(np.mean(np.array(ranks) == 1), abs=1e-4)
    assert shown["MRR"] == pytest.approx(np.mean(1 / np.array(ranks)), abs=1e-4)
    type_text(page, "hits-k", "2")
    until(lambda: "hits@2" in metrics_of(page))
    assert metrics_of(page)["hits@2"] == pytest.approx(np.mean(np.array(ranks) <= 2), abs=1e-4)
    assert not find(page, "#questions .stale").is_displayed()
    find(page, "#questions td .link").click()
    until(lambda: find(page, "#rank .row.expected").is_displayed())
    assert find(page, "[name=query]").get_property("value") == rows[0][1]
    _, _, rank, expected, first = rows[0]
    ranked = texts(page, "#rank .row")
    assert expected in find(page, "#rank .row.expected").text == ranked[rank - 1]
    assert first in ranked[0]


def test_csv_has_the_same_questions_as_json_lines(shared_page: Browser) -> None:
    questions: list[Json] = [
        {
            "query": 'Who said "no, never"?',
            "documents": ["Two\nlines, one cell", "b"],
            "expected": 1,
        },
        {"query": "w5", "documents": ["w6", "w7"], "expected": [0, 1]},
    ]
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow(["relevance", "id", "Query", "document"])
    for question in questions:
        for index, document in enumerate(question["documents"]):
            relevance = int(index in np.atleast_1d(question["expected"]))
            writer.writerow([relevance, "x", question["query"], document])
    parsed = [
        called(shared_page, "question_file", "parseQuestions", content)
        for content in ("\ufeff" + written.getvalue(), lines_of(questions))
    ]
    assert [found["problems"] for found in parsed] == [[], []]
    first, second = ([{**own, "line": 0} for own in found["questions"]] for found in parsed)
    assert first == second
    # The first document is on the lines 2 and 3, and the second one on line 4.
    assert [own["line"] for own in parsed[0]["questions"]] == [2, 5]


HEAD = "query,document,relevance\n"


WRONG = [
    ('{"query": "a", "documents": ["b"], "expected": 0}\n{"query"', "line 2: it is not JSON"),
    ('{"documents": ["b"], "expected": 0}', "line 1: “query” must be a text"),
    ('\n{"query": "a", "documents": [], "expected": 0}', "line 2: “documents” must be"),
    ('{"query": "a", "documents": ["b"], "expected": 1}', "line 1: “expected” must be"),
    ('{"query": "a", "documents": ["b"], "expected": []}', "line 1: “expected” must be"),
    ('{"query": "a", "documents": ["b"]}', "line 1: “expected” must be"),
    ("question,document\na,b", "line 1: the header must name the columns"),
    (f"{HEAD}a,b,1\na,c,yes", "line 3: the relevance must be"),
    (f"{HEAD}a,b,-1", "line 2: the relevance must be"),
    (f"{HEAD}a,b,0\na,c,0", "line 2: no document of this query"),
    (f'{HEAD}a,"b\nc",1\na', "line 4: 1 cell, and the header has 3"),
    (f'{HEAD}a,b,1\na,"c,1', "line 3: a quote is not closed"),
    ('"query,document,relevance', "line 1: a quote is not closed"),
    ('[{"query": "a", "documents": ["b"], "expected": 0}]', "line 1: “query” must be a text"),
    (f"{HEAD}a,,1", "line 2: it must have a query and a document"),
    (f"{HEAD}a,b,1\na,c,0,more", "line 3: 4 cells, and the header has 3"),
]


def test_wrong_lines_of_files_are_named(shared_page: Browser) -> None:
    for content, problem in WRONG:
        (first, *_) = called(shared_page, "question_file", "parseQuestions", content)["problems"]
        assert first.startswith(problem)


def test_wrong_line_is_a_problem_of_the_field(plain_page: Browser) -> None:
    content, problem = WRONG[0]
    show(plain_page, "questions")
    fill(plain_page, content)
    assert problem in find(plain_page, "#questions-read").text
    run(plain_page, "questions")
    assert problem in find(plain_page, "#questions > .problem").text
    assert find(plain_page, "[name=question-list]").get_attribute("aria-invalid") == "true"
    assert not texts(plain_page, "#questions .facts dd")


def test_file_is_opened_or_dropped_and_is_not_in_the_url(
    plain_page: Browser, tmp_path: Path
) -> None:
    page = plain_page
    show(page, "questions")
    file = tmp_path / "questions.jsonl"
    file.write_text(lines_of(QUESTIONS[:2]))
    find(page, "#question-file").send_keys(str(file))
    until(partial(shows, page, "#questions-read", "2 questions with 6 documents."))
    until(lambda: not find(page, "#question-file").get_property("value"))
    page.execute_script(
        "const files = new DataTransfer(); files.items.add(new File([arguments[0]], 'q.csv'));"
        "document.getElementById('questions').dispatchEvent("
        "new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true}))",
        f"{HEAD}a secret,b,1\n",
    )
    until(partial(shows, page, "#questions-read", "1 question with 1 document."))
    run(page, "questions")
    assert "No question has another document first." in find(page, "#questions .result").text
    assert "secret" not in page.current_url
    find(page, "#questions [data-export=link]").click()
    assert "secret" not in find(page, "#questions .curl").text


def test_cancelled_run_keeps_its_results_and_says_what_is_missing(plain_page: Browser) -> None:
    page = plain_page
    show(page, "questions")
    # So many that not every response is drawn when it arrives.
    fill(page, lines_of(QUESTIONS * 30))
    # The third request has no response until it is cancelled. A view adds a run.
    page.execute_script(
        "const add = () => import('./debug/assets/state.js').then("
        "({sections}) => sections.questions.runs.push({}));"
        "const send = window.fetch; let scores = 0;"
        "window.fetch = (path, options) => path === 'score' && (scores += 1) > 2"
        "? new Promise((_, reject) => add() && options.signal.addEventListener('abort',"
        "() => reject(new DOMException('', 'AbortError')))) : send(path, options)"
    )
    find(page, "#questions .go").click()
    until(partial(shows, page, "#questions .elapsed", "question of line 3 (3 of 120)"))
    find(page, "#questions .cancel").click()
    until(partial(shows, page, "#questions > .problem", "Cancelled"))
    shown = find(page, "#questions .result").text
    assert "118 questions of 120 have not run." in shown
    assert "no result" not in shown
    assert metrics_of(page)["hits@1"] in (0, 0.5, 1)


def test_question_without_result_is_named_and_does_not_count(plain_page: Browser) -> None:
    show(plain_page, "questions")
    long = {"query": "a" * 100_001, "documents": ["b"], "expected": 0}
    fill(plain_page, lines_of([long, {"query": "cat", "documents": ["cat"], "expected": 0}]))
    run(plain_page, "questions")
    shown = find(plain_page, "#questions .result").text
    assert "The question of line 1 could not be computed: " in shown
    assert "1 question of 2 has no result and does not count." in shown
    assert metrics_of(plain_page)["hits@1"] == 1


def test_run_without_any_result_shows_the_problems(plain_page: Browser) -> None:
    show(plain_page, "questions")
    fill(plain_page, lines_of([{"query": "a" * 100_001, "documents": ["b"], "expected": 0}] * 2))
    shown = run(plain_page, "questions")
    assert "The question of line 1 could not be computed: " in shown
    assert "The question of line 2 could not be computed: " in shown


@pytest.mark.parametrize("status", [401, 403, None])
def test_run_stops_at_a_problem_of_all_questions(plain_page: Browser, status: int | None) -> None:
    show(plain_page, "questions")
    fill(plain_page, lines_of(QUESTIONS))
    plain_page.execute_script(
        "const send = window.fetch; window.sent = 0;"
        "window.fetch = (path, options) => { if (path !== 'score') return send(path, options);"
        "window.sent += 1; return arguments[0] === null ? Promise.reject(new TypeError())"
        ": Promise.resolve(Response.json({detail: 'no access'}, {status: arguments[0]})); }",
        status,
    )
    run(plain_page, "questions")
    problem = {401: "needs an API key", 403: "No access.", None: "could not be reached"}[status]
    assert problem in find(plain_page, "#questions > .problem").text
    assert plain_page.execute_script("return window.sent") == 1


@pytest.mark.parametrize(
    ("section", "name"), [("questions", "question-list"), ("rank", "passages")]
)
def test_last_of_two_opened_files_stays(plain_page: Browser, section: str, name: str) -> None:
    show(plain_page, section)
    plain_page.execute_async_script(
        """
        const [name, done] = arguments;
        const field = document.querySelector(`[name=${name}]`);
        const text = Blob.prototype.text;
        let finish;
        Blob.prototype.text = function () {
          const isSlow = this.name === "slow";
          return isSlow ? new Promise((resolve) => { finish = resolve; }) : text.call(this);
        };
        for (const file of ["slow", "quick"]) {
          const data = new DataTransfer();
          data.items.add(new File([file], file));
          field.dispatchEvent(
            new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        }
        field.addEventListener("input", () => {
          Blob.prototype.text = text;
          finish("slow");
          setTimeout(done);
        }, { once: true });
        """,
        name,
    )
    assert find(plain_page, f"[name={name}]").get_property("value") == "quick"
