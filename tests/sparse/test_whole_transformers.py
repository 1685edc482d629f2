"""nn.Transformer, in a model and by itself; layers that take several inputs are networks too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.sparse import SparseModel


class Translator(nn.Module):
    def __init__(self, **options: bool):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.body = nn.Transformer(16, 4, 2, 1, 32, **options)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.embed(source), self.embed(target)
        if not self.body.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        causal = self.body.generate_square_subsequent_mask(target.shape[1])
        padding = {"src_key_padding_mask": source == 3, "memory_key_padding_mask": source == 3}
        return self.head(self.body(x, y, tgt_mask=causal, **padding))


def ids(batch: int, n: int, padded: int) -> Tensor:
    made = torch.randint(4, 20, (batch, n))
    made[0, n - padded :] = 3
    return made


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_encoder_and_decoder_are_cut_together(batch_first, norm_first):
    torch.manual_seed(0)
    model = Translator(batch_first=batch_first, norm_first=norm_first).eval()
    example, other = (ids(2, 7, 2), ids(2, 5, 0)), (ids(3, 6, 1), ids(3, 9, 0))
    smodel = SparseModel(model, {"SPARSER": {"RATIO": 0.5}}, example)
    torch.testing.assert_close(smodel(*other), model(*other), rtol=1e-4, atol=1e-5)
    smodel.calc_params()
    small = smodel.compact()
    torch.testing.assert_close(small(*other), smodel(*other), rtol=1e-4, atol=1e-5)
    count = lambda m: sum(p.numel() for p in m.parameters())
    assert count(small) < 0.35 * count(model)


X, Y = torch.randn(3, 2, 16), torch.randn(4, 2, 16)
ALONE = {
    "transformer": (nn.Transformer(16, 4, 1, 1, 32), (X, Y)),
    "with a mask": (
        nn.Transformer(16, 4, 1, 1, 32),
        {"src": X, "tgt": Y, "tgt_mask": torch.full((4, 4), -1e9).triu(1)},
    ),
    "decoder": (nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32), 1), (X, Y)),
    "decoder layer": (nn.TransformerDecoderLayer(16, 4, 32), (X, Y)),
    "encoder layer with a mask": (nn.TransformerEncoderLayer(16, 4, 32), (X, torch.zeros(3, 3))),
    "attention": (nn.MultiheadAttention(16, 4), {"query": Y, "key": X, "value": X, "need_weights": False}),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_block_by_itself_is_cut(name):
    block, example = ALONE[name]
    small = sparsebit.prune(block.eval(), example, 0.5)
    assert any("q_proj" in path for path in small.pruning_plan.kept)
    call = lambda m: m(**example) if isinstance(example, dict) else m(*example)
    want, got = call(block), call(small)
    assert type(got) is type(want)
    same = sparsebit.prune(block.eval(), example, 0.0)
    for a, b in zip(call(same), want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_block_by_itself_refuses_a_mask_it_was_not_traced_with():
    small = sparsebit.prune(nn.Transformer(16, 4, 1, 1, 32).eval(), (X, Y), 0.5)
    with pytest.raises(sparsebit.errors.TraceError, match="tgt_mask"):
        small(X, Y, tgt_mask=torch.zeros(4, 4))
