"""Texts with a long tail of lengths: sentences joined until lengths follow a lognormal, the same ones on every machine."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.bench import Bench
from benchmarks.corpus import Corpus, Texts, build

# Most texts are a sentence or two, some a page. Whole sentences are taken, so the lengths that come out are a little larger.
MEDIAN_TOKENS, SIGMA = 26.0, 0.9
MOST_TOKENS = 256
SEED = 256


def join(texts: Sequence[str], lengths: Sequence[int], count: int, most: int = MOST_TOKENS) -> list[str]:
    """Return ``count`` texts, each of whole sentences in their order, up to a length drawn from the lognormal.

    ``lengths``: each sentence's own tokens; no text has more than ``most`` of them.
    """
    sentences = _forever(texts, lengths)
    # The generator of the standard library gives the same numbers everywhere.
    draw = random.Random(SEED)
    joined = []
    for _ in range(count):
        wanted = min(most, draw.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))
        text, tokens = next(sentences)
        while tokens < wanted:
            more, length = next(sentences)
            if tokens + length > most:
                break
            text, tokens = f"{text} {more}", tokens + length
        joined.append(text)
    return joined


def _forever(texts: Sequence[str], lengths: Sequence[int]) -> Iterator[tuple[str, int]]:
    return itertools.cycle(zip(texts, lengths, strict=True))


async def corpus(bench: Bench, count: int) -> Corpus:
    """Return ``count`` such texts of the report's own sentences; what is right is what the model's own file answers."""
    rows = bench.corpus.rows
    # A sentence alone also carries the prompt's prefix and the special tokens, which a joined text has only once.
    around = min(row.tokens for row in rows) - 1
    texts = join(bench.corpus.texts, [row.tokens - around for row in rows], count, MOST_TOKENS - around)
    unlabelled = Texts(tuple(texts), (None,) * len(texts), f"{bench.corpus.source}, joined to a long tail")
    return await build(unlabelled, bench.spec, bench.stack.repository / bench.spec.name, bench.workers)


async def bench_with(bench: Bench, count: int) -> Bench:
    """Return the same run of the report over long-tailed texts."""
    if count not in bench.long_tailed:
        bench.long_tailed[count] = await corpus(bench, count)
    return replace(bench, corpus=bench.long_tailed[count])
