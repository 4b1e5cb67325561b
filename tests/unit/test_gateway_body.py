"""Gzip bodies come out whole and in bounded pieces, however they are cut and whatever they pack."""

import gzip
import random

import pytest

from gateway.body import Gzip
from gateway.problems import Problem


async def unpacked(packed: bytes, cut_bytes: int, most_bytes: int) -> bytes:
    decoder, made = Gzip(), bytearray()
    for first in range(0, len(packed), cut_bytes):
        async for piece in decoder.pieces(packed[first : first + cut_bytes], most_bytes):
            assert 0 < len(piece) <= most_bytes
            made += piece
    decoder.finish()
    return bytes(made)


@pytest.mark.parametrize(("cut_bytes", "most_bytes"), [(1, 7), (13, 1), (1000, 4096), (10**9, 65_536), (10**9, 10**9)])
async def test_what_was_packed_comes_out_in_pieces_of_the_size_asked_for(cut_bytes: int, most_bytes: int) -> None:
    text = random.Random(5).randbytes(600) + b"a" * 1400
    packed = gzip.compress(text[:700]) + gzip.compress(b"") * 3 + gzip.compress(text[700:])
    assert await unpacked(packed, cut_bytes, most_bytes) == text


@pytest.mark.parametrize("most_bytes", [4096, 65_536, 2**20])
async def test_output_that_ends_exactly_with_a_piece_is_not_lost(most_bytes: int) -> None:
    text = b"x" * (most_bytes * 3)
    assert await unpacked(gzip.compress(text), 10**9, most_bytes) == text


async def test_a_bomb_becomes_no_more_at_once_than_asked_for() -> None:
    packed = gzip.compress(b" " * (1 << 26))
    async for piece in Gzip().pieces(packed, 65_536):
        assert len(piece) <= 65_536
    assert len(await Gzip().decode(packed, 1000)) == 1001


@pytest.mark.parametrize(
    "packed",
    [b"", gzip.compress(b"text")[:-1], gzip.compress(b"text") + b"junk", b"junk"],
    ids=["empty", "cut", "more follows", "no gzip"],
)
async def test_what_is_no_gzip_or_is_cut_is_refused(packed: bytes) -> None:
    with pytest.raises(Problem) as refused:
        await unpacked(packed, 5, 100)
    assert (refused.value.status, refused.value.code) == (400, "invalid_body")
