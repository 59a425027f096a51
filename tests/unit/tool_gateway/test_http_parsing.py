"""Responses as bytes, in whatever pieces they come."""

from __future__ import annotations

import gzip
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill_tool_gateway.http_parsing import BadResponse, ResponseParser, ResponseTooLarge

LIMIT = 1000
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: 1\r\nx-a:  2 \r\n\r\nabcde"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + PLAIN


def parsed(*parts: bytes, method: str = "POST") -> ResponseParser:
    parser = ResponseParser(method, LIMIT)
    for part in parts:
        parser.feed(part)
    return parser


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


@given(st.sampled_from([PLAIN, CHUNKED, INTERIM]), st.lists(st.integers(0, 1000), max_size=12))
def test_the_pieces_do_not_matter(data: bytes, cuts: list[int]) -> None:
    parser = parsed(*split(data, cuts))
    assert parser.complete
    assert parser.reusable
    assert (parser.status, parser.body()) == (200, b"abcde")


@given(st.binary(max_size=300), st.lists(st.integers(0, 1000), max_size=5))
def test_anything_else_is_refused_and_nothing_worse_happens(data: bytes, cuts: list[int]) -> None:
    for start in (b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"):
        whole = start + data
        if not whole:
            continue
        parser = ResponseParser("GET", LIMIT)
        try:
            for part in split(whole, cuts):
                parser.feed(part)
            parser.end()
            assert len(parser.body()) <= LIMIT
        except (BadResponse, ResponseTooLarge):
            pass


def test_headers_are_found_in_any_case_and_joined() -> None:
    parser = parsed(PLAIN)
    assert parser.headers.get("X-a") == "1, 2"
    assert parser.headers.get("X-B") is None


@pytest.mark.parametrize(
    ("data", "reusable"),
    [
        (PLAIN, True),
        (PLAIN + b"HTTP/1.1 200 OK\r\n", False),
        (PLAIN.replace(b"X-A: 1", b"Connection: close"), False),
        (PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"), False),
        (PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"X-A: 1", b"Connection: keep-alive"), True),
        (CHUNKED.replace(b"Trailer", b"Trailer2").replace(b"\r\n\r\n3", b"\r\nContent-Length: 99\r\n\r\n3"), False),
    ],
)
def test_a_connection_is_used_again_only_where_both_sides_agree(data: bytes, reusable: bool) -> None:
    parser = parsed(data)
    assert parser.complete
    assert parser.reusable is reusable


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nabcde",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xd9\xa5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX : a\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(data: bytes) -> None:
    with pytest.raises(BadResponse):
        parsed(data)


@pytest.mark.parametrize("data", [PLAIN[:-1], CHUNKED[:-1], CHUNKED[:60], b"HTTP/1.1 200 OK\r\n"])
def test_what_broke_off_is_refused(data: bytes) -> None:
    parser = parsed(data)
    assert not parser.complete
    with pytest.raises(BadResponse):
        parser.end()


def test_without_a_length_the_body_lasts_to_the_end() -> None:
    parser = parsed(b"HTTP/1.1 200 OK\r\n\r\nab", b"cde")
    parser.end()
    assert (parser.body(), parser.reusable) == (b"abcde", False)


def test_answers_to_head_and_those_without_content_have_no_body() -> None:
    assert parsed(PLAIN.removesuffix(b"abcde"), method="HEAD").complete
    for status in (b"204", b"304"):
        assert parsed(b"HTTP/1.1 " + status + b" X\r\nContent-Length: 5\r\n\r\n").complete


def answer(body: bytes, encoding: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Encoding: %s\r\nContent-Length: %d\r\n\r\n%s" % (encoding, len(body), body)


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (gzip.compress(b"abcde", mtime=0), b"gzip"),
        (gzip.compress(b"abc", mtime=0) + gzip.compress(b"de", mtime=0), b"GZIP"),
        (zlib.compress(b"abcde"), b"deflate"),
        (zlib.compress(b"abcde")[2:-4], b"deflate"),
        (b"abcde", b"identity"),
    ],
)
def test_compressed_bodies_are_unfolded(body: bytes, encoding: bytes) -> None:
    assert parsed(answer(body, encoding)).body() == b"abcde"


@pytest.mark.parametrize(
    ("body", "encoding"),
    [(b"abcde", b"gzip"), (gzip.compress(b"abcde", mtime=0)[:-3], b"gzip"), (b"abcde", b"br"), (gzip.compress(b"a", mtime=0) + b"junk", b"gzip")],
)
def test_what_cannot_be_unfolded_is_refused(body: bytes, encoding: bytes) -> None:
    with pytest.raises(BadResponse):
        parsed(answer(body, encoding)).body()


@pytest.mark.parametrize(("size", "fits"), [(LIMIT - 1, True), (LIMIT, True), (LIMIT + 1, False)])
def test_bodies_are_bounded_however_they_come(size: int, fits: bool) -> None:
    content = b"x" * size
    for data in (
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (size, content),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (size, content),
        b"HTTP/1.1 200 OK\r\n\r\n" + content,
        answer(gzip.compress(content, mtime=0), b"gzip"),
    ):
        if fits:
            parser = parsed(data)
            parser.end()
            assert len(parser.body()) == size
        else:
            with pytest.raises(ResponseTooLarge):
                parsed(data).body()


def test_many_small_chunks_cost_no_more_than_their_bytes() -> None:
    """Of a body in chunks of one byte, each chunk was once a copy of all that had been received: seconds for what comes in one read."""
    parser = ResponseParser("POST", 1_000_000)
    parser.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
    assert parser.complete
    assert len(parser.body()) == 100_000


@pytest.mark.parametrize(("members", "whole"), [(1000, True), (1001, False)])
def test_a_zipped_body_has_a_bounded_number_of_members(members: int, whole: bool) -> None:
    body = gzip.compress(b"", mtime=0) * members
    parser = ResponseParser("POST", 1_000_000)
    parser.feed(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    if whole:
        assert parser.body() == b""
    else:
        with pytest.raises(BadResponse, match="members"):
            parser.body()


def test_interim_answers_without_end_are_refused() -> None:
    with pytest.raises(BadResponse, match="interim"):
        parsed(b"HTTP/1.1 100 Continue\r\n\r\n" * 101)
