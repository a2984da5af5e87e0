"""Converts English text to tokens with a byte-pair encoding that is learned from the text. Downloads nothing."""

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
"""Pieces of text within which pairs are merged, so that no token spans two words."""

Pair = tuple[str, str]


class Vocabulary:
    """Tokens of a byte-pair encoding, which repeatedly merges the most frequent pair into one token.

    Args:
        text: The text to learn from. Only its words can be encoded.
        size: Number of tokens, including the single characters.
    """

    def __init__(self, text: str, size: int) -> None:
        words = Counter(_WORD.findall(text))
        self._splits = {word: list(word) for word in words}
        tokens = sorted(set(text))
        counts: Counter[Pair] = Counter()
        words_by_pair: defaultdict[Pair, set[str]] = defaultdict(set)
        for word, number in words.items():
            self._count_pairs(word, number, counts, words_by_pair)
        while len(tokens) < size and counts:
            pair, occurrences = max(counts.items(), key=lambda item: (item[1], item[0]))
            if occurrences < 2:
                break
            tokens.append("".join(pair))
            for word in words_by_pair.pop(pair):
                self._count_pairs(word, -words[word], counts, words_by_pair)
                self._splits[word] = _merge(self._splits[word], pair)
                self._count_pairs(word, words[word], counts, words_by_pair)
            counts.pop(pair, None)
        self.tokens = tokens
        self._ids = {token: index for index, token in enumerate(tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> Tensor:
        """Returns the token ids of a text that consists of learned words. [num_tokens]"""
        return torch.tensor([self._ids[token] for word in _WORD.findall(text) for token in self._splits[word]])

    def decode(self, ids: Tensor) -> str:
        return "".join(self.tokens[index] for index in ids.tolist())

    def _count_pairs(
        self, word: str, number: int, counts: Counter[Pair], words_by_pair: defaultdict[Pair, set[str]]
    ) -> None:
        split = self._splits[word]
        for pair in pairwise(split):
            counts[pair] += number
            words_by_pair[pair].add(word)


def _merge(split: list[str], pair: Pair) -> list[str]:
    merged: list[str] = []
    for token in split:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


class Windows(Dataset[Tensor]):
    """All windows of ``context + 1`` tokens: the inputs, and the targets one position later."""

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
    """A text, its vocabulary and its tokens."""

    text: str
    vocabulary: Vocabulary
    tokens: Tensor  # [num_tokens]

    @classmethod
    def read(cls, path: str | None, *, vocab_size: int) -> Corpus:
        """Reads a text file. Without a path, reads the language reference that is part of every Python."""
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
        """Loss of a model that knows token frequencies only, in nats per token. Training must reach a lower loss."""
        probabilities = torch.bincount(self.tokens).double() / len(self.tokens)
        return -sum(p * math.log(p) for p in probabilities.tolist() if p > 0)
