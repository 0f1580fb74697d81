"""How much of the full attention the rows that a budget allows hold."""

from __future__ import annotations

from statistics import fmean

from kvstore.adapters.hf import StoreCache
from kvstore.adapters.queries import recorded_queries
from kvstore.demo.decoder import Decoder


def attention_mass(decoder: Decoder, cache: StoreCache, tokens: list[int]) -> tuple[float, str]:
    """Run the newest tokens once more, and compare what each layer reads with the full softmax.

    tokens are the last that the decoder has seen; they are taken back first. Returns the share of the softmax
    that the rows read hold, mean over tokens, layers and query heads, and the explanation of a middle layer's
    last query in words. Apart from the timed run, because looking at all rows takes time.
    """
    decoder.rewind(len(tokens))
    masses: list[float] = []
    explanation = ""
    with recorded_queries(cache) as queries:
        for token in tokens:
            decoder.step(token)
            [sequence] = cache.sequences
            for layer, q in queries.items():
                explained = sequence.explain(layer, q, analyze=True)
                if explained.measured is not None:
                    masses.append(explained.measured.mass)
                if layer == len(queries) // 2:
                    explanation = str(explained)
    return fmean(masses), explanation
