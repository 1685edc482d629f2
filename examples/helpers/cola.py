"""A small BERT for right and wrong sentences, trained in seconds: what the BERT examples start from."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers import loops, sentences
from helpers.transformer import Bert
from torch import Tensor

LENGTH = 16  # words, with the start
Inputs = tuple[Tensor, Tensor]  # ids and mask


def classify(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids, mask), labels)


def trained(train: sentences.Labelled, test: sentences.Labelled, epochs: int) -> tuple[Bert, Inputs, Inputs]:
    """The model, its training inputs, its test inputs."""
    words = sentences.Vocabulary([text for _, text in train])
    inputs, held_out = (words.sentences([text for _, text in part], LENGTH) for part in (train, test))
    model = Bert(len(words), LENGTH)
    labels = torch.tensor([label for label, _ in train])
    loops.fit(model, (*inputs, labels), epochs, lr=2e-3, loss=classify)
    return model, inputs, held_out
