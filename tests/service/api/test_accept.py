"""Accept and Accept-Encoding, compared with werkzeug's reading of them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from service.api.accept import accepts_gzip, best_offer

OFFERS = ("application/json", "application/octet-stream", "text/plain")
RANGES = (*OFFERS, "application/*", "text/*", "*/*", "image/png", "Application/JSON", "TEXT/*")
WEIGHTS = ("", ";q=0", ";q=0.0", ";q=0.001", "; q=0.5", " ;Q=0.5", ";q=0.75", ";q=1", ";q=1.000")
# Example of RFC 9110, 12.5.1, with the weights 0.7 of text/plain, 0.5 of image/jpeg and 0.3 of
# text/html.
RFC = (
    "text/*;q=0.3, text/plain;q=0.7, text/plain;format=flowed, text/plain;format=fixed;q=0.4, "
    "*/*;q=0.5"
)


@given(st.lists(st.tuples(st.sampled_from(RANGES), st.sampled_from(WEIGHTS)), max_size=6))
@example([])
@example([("application/octet-stream", ";q=0.1"), ("*/*", "")])
@example([("application/json", ";q=0"), ("*/*", "")])
def test_preferred_type_has_the_highest_quality_of_werkzeug(ranges: list[tuple[str, str]]) -> None:
    header = ", ".join(name + weight for name, weight in ranges)
    accept = parse_accept_header(header, MIMEAccept)
    qualities = [accept.quality(offer) for offer in OFFERS]
    best = [offer for offer, own in zip(OFFERS, qualities, strict=True) if own == max(qualities)]
    named = [offer for offer in best if offer in {name.lower() for name, _ in ranges}]
    expected = OFFERS[0] if not any(qualities) else (named[-1] if named else best[0])
    assert best_offer(header, OFFERS) == expected


@given(st.text(st.sampled_from('*/;=q01.,"\\ \tajson-'), max_size=60), st.integers(1, 3000))
@example('"a\\', 20_000)  # quadratic time, if the end of each quoted string is looked for
def test_every_header_selects_an_offered_type(text: str, count: int) -> None:
    assert best_offer(text * count, OFFERS) in OFFERS


@pytest.mark.parametrize(
    ("header", "offers", "expected"),
    [
        (RFC, ("text/html", "image/jpeg", "text/plain"), "text/plain"),
        (RFC, ("text/html", "image/jpeg"), "image/jpeg"),
        ("a/b, c/d", ("a/b", "c/d"), "c/d"),
        ("c/d, */*", ("a/b", "c/d"), "c/d"),
        ("a/b, */*", ("a/b", "c/d"), "a/b"),
        ("c/*, a/b;q=0.9", ("a/b", "c/d"), "c/d"),
        ('x/y;z="a, c/d", a/b;q=0.1', ("a/b", "c/d"), "a/b"),
        ("c/d;", ("a/b", "c/d"), "c/d"),
        ("c/d;q=0.5;extension=1, a/b;q=0.4", ("a/b", "c/d"), "c/d"),
        ("c/d;charset=utf-8;version=1.0.0", ("a/b", "c/d"), "c/d"),
        ("c/d;profile=other", ("a/b", "c/d"), "a/b"),
        ("c/d;q=2", ("a/b", "c/d"), "a/b"),
        ("c/d;q=nan", ("a/b", "c/d"), "a/b"),
        ("c/d;q=-1", ("a/b", "c/d"), "a/b"),
    ],
)
def test_preferred_type_of_special_cases(
    header: str, offers: tuple[str, ...], expected: str
) -> None:
    assert best_offer(header, offers) == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", False),
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip;q=0, *", False),
        ("*", True),
        ("identity", False),
        ("gzip;q=0.5, identity", False),
        ("gzip;q=0.5, identity;q=0.5", True),
        ("gzip, *;q=0", True),
    ],
)
def test_gzip_is_accepted_unless_excluded_or_less_preferred(header: str, expected: bool) -> None:
    assert accepts_gzip(header) == expected


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("*/*", "text/plain"),
        ("application/openmetrics-text;q=0.1, text/plain;q=0.9", "text/plain"),
        ("text/plain;q=0, */*", "application/openmetrics-text"),
        (PROMETHEUS, "application/openmetrics-text"),
    ],
)
def test_accept_header_selects_the_format_of_the_metrics(
    client: TestClient, header: str, expected: str
) -> None:
    response = client.get("/metrics", headers={"Accept": header})
    assert response.headers["Content-Type"].startswith(f"{expected}; version=")
    assert response.headers["Vary"] == "Accept"
    assert response.text.endswith("# EOF\n") == (expected == "application/openmetrics-text")
    assert "vitrine_model_info" in response.text
