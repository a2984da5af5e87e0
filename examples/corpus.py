"""English text as tokens: byte-pair encoding learned from the text itself, nothing to download."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset

_WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s+")
"""Pairs are merged inside these pieces only, so that no token spans two words."""

Pair = tuple[str, str]


class Vocabulary:
    """Tokens learned by byte-pair encoding: the most frequent pair becomes one token, again and again.

    Args:
        text: What to learn from. Only its characters can be encoded.
        size: Tokens to learn, the single characters included.
    """

    def __init__(self, text: str, size: int) -> None:
        words = Counter(_WORD.findall(text))
        self._splits = {word: list(word) for word in words}
        tokens = sorted(set(text))
        counts: Counter[Pair] = Counter()
        places: defaultdict[Pair, set[str]] = defaultdict(set)
        for word, number in words.items():
            self._count_pairs(word, number, counts, places)
        while len(tokens) < size and counts:
            pair, occurrences = max(counts.items(), key=lambda item: (item[1], item[0]))
            if occurrences < 2:
                break
            tokens.append("".join(pair))
            for word in places.pop(pair):
                self._count_pairs(word, -words[word], counts, places)
                self._splits[word] = _merge(self._splits[word], pair)
                self._count_pairs(word, words[word], counts, places)
            counts.pop(pair, None)
        self.tokens = tokens
        self._ids = {token: index for index, token in enumerate(tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> Tensor:
        """Token ids of a text made of words that were learned from. [num_tokens]"""
        return torch.tensor([self._ids[token] for word in _WORD.findall(text) for token in self._splits[word]])

    def decode(self, ids: Tensor) -> str:
        return "".join(self.tokens[index] for index in ids.tolist())

    def _count_pairs(self, word: str, number: int, counts: Counter[Pair], places: defaultdict[Pair, set[str]]) -> None:
        split = self._splits[word]
        for pair in pairwise(split):
            counts[pair] += number
            places[pair].add(word)


def _merge(split: list[str], pair: Pair) -> list[str]:
    merged: list[str] = []
    for token in split:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


class Windows(Dataset[Tensor]):
    """Every window of ``context + 1`` tokens: inputs and, one further, targets."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        if len(tokens) <= context:
            raise ValueError(f"the text has {len(tokens)} tokens; at least {context + 1} are needed for one window")
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return len(self.tokens) - self.context

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index : index + self.context + 1]


@dataclass(frozen=True)
class Corpus:
    """A text, its tokens and what can be known of it without training."""

    text: str
    vocabulary: Vocabulary
    tokens: Tensor  # [num_tokens]

    @classmethod
    def read(cls, path: str | None, *, vocab_size: int) -> Corpus:
        """Reads a text file, or an English text that every Python has: its own language reference."""
        if path is not None:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        else:
            text = "\n".join(topics[name] for name in sorted(topics))
        vocabulary = Vocabulary(text, vocab_size)
        return cls(text, vocabulary, vocabulary.encode(text))

    def windows(self, context: int) -> Windows:
        return Windows(self.tokens, context)

    @cached_property
    def unigram_entropy(self) -> float:
        """Nats per token of a model that knows frequencies and nothing else: what training has to beat."""
        probabilities = torch.bincount(self.tokens).double() / len(self.tokens)
        return -sum(p * math.log(p) for p in probabilities.tolist() if p > 0)
