"""Text for the examples: sentences of a small grammar, right and wrong ones, or CoLA; and words as numbers."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from random import Random

import torch
from torch import Tensor

NOUNS = ["dog", "cat", "child", "teacher", "river", "tree", "song", "letter"]
VERBS = ["sees", "likes", "finds", "follows", "hears", "paints"]
ADJECTIVES = ["old", "small", "quiet", "green", "strange"]
Labelled = list[tuple[int, str]]


def sentence(random: Random) -> list[str]:
    """`the old dogs follow a cat`: noun and verb agree."""
    plural = random.random() < 0.5
    noun, verb, other = random.choice(NOUNS), random.choice(VERBS), random.choice(NOUNS)
    subject = [*random.choices(ADJECTIVES, k=random.randint(0, 1)), noun + "s" * plural]
    return ["the", *subject, verb.removesuffix("s") if plural else verb, random.choice(["a", "the"]), other]


def grammar(count: int, seed: int) -> Labelled:
    """Half of the sentences are wrong: the verb does not agree, or two words changed places."""
    random, found = Random(seed), []
    for i in range(count):
        words = sentence(random)
        if i % 2 and random.random() < 0.5:
            verb = len(words) - 3
            words[verb] = words[verb].removesuffix("s") if words[verb] in VERBS else words[verb] + "s"
        elif i % 2:
            place = random.randrange(len(words) - 1)
            words[place], words[place + 1] = words[place + 1], words[place]
        found.append((1 - i % 2, " ".join(words)))
    return found


def cola(folder: Path) -> tuple[Labelled, Labelled]:
    """CoLA of GLUE: train.tsv and dev.tsv with source, label, mark, sentence."""
    parts = []
    for name in ("train.tsv", "dev.tsv"):
        with open(folder / name, encoding="utf-8", newline="") as file:
            rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            parts.append([(int(row[1]), row[3]) for row in rows if len(row) == 4])
    return parts[0], parts[1]


def load(data: Path | None, samples: int) -> tuple[Labelled, Labelled]:
    """What --data names: nothing (the grammar) or the folder of CoLA; sentences to train and to test with."""
    if data is None:
        return grammar(samples, 0), grammar(200, 1)
    train, test = cola(data)
    return train[:samples], test


class Vocabulary:
    """Words by frequency; 0 is padding, 1 an unknown word, 2 the start."""

    def __init__(self, texts: list[str], most: int = 5000) -> None:
        common = Counter(word for text in texts for word in text.lower().split()).most_common(most)
        self.numbers = {word: i + 3 for i, (word, _) in enumerate(common)}

    def __len__(self) -> int:
        return len(self.numbers) + 3

    def stream(self, text: str) -> Tensor:
        return torch.tensor([self.numbers.get(word, 1) for word in text.lower().split()])

    def sentences(self, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
        """ids and mask, (sentences, length)."""
        ids = torch.zeros(len(texts), length, dtype=torch.long)
        for row, text in zip(ids, texts):
            words = torch.cat([torch.tensor([2]), self.stream(text)])[:length]
            row[: len(words)] = words
        return ids, (ids > 0).float()
