"""Losses: a model may compute its own; they stay float."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import loss

from sparsebit.quantization.modules.base import Opr, define, spelled

CLASSES = [c for c in vars(loss).values() if isinstance(c, type) and issubclass(c, loss._Loss)]

Loss = define(
    "Loss",
    Opr,
    *(c for c in CLASSES if not c.__name__.startswith("_")),
    *(nn.CosineEmbeddingLoss, nn.TripletMarginWithDistanceLoss),
    *spelled("cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss"),
    *spelled(
        "smooth_l1_loss huber_loss kl_div poisson_nll_loss gaussian_nll_loss ctc_loss margin_ranking_loss"
    ),
    *spelled("hinge_embedding_loss soft_margin_loss multi_margin_loss multilabel_margin_loss"),
    *spelled("multilabel_soft_margin_loss cosine_embedding_loss triplet_margin_loss linear_cross_entropy"),
    *spelled("triplet_margin_with_distance_loss"),
)
