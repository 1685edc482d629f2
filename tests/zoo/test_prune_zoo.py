"""Models of torchvision, timm and transformers as they are, half of their channels removed: the rest computes what it
did masked."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import zoo_shim
import zoo_timm
import zoo_torchvision
import zoo_transformers
from zoo_run import Case, difference, forward, joined, params, waken

from sparsebit.sparse.choose.allocate import uniform
from sparsebit.sparse.cut.surgery import Cut
from sparsebit.sparse.labels.walk import walk_of
from sparsebit.sparse.plan import compact_with_plan

CASES = [*zoo_torchvision.CASES, *zoo_timm.CASES, *zoo_transformers.CASES]
ALL = {f"{case.package}-{case.name}": case for case in CASES}
TORCHVISION = """resnet18 resnet50 resnext50_32x4d densenet121 mobilenet_v2 mobilenet_v3_small efficientnet_b0
    regnet_y_400mf shufflenet_v2_x1_0 squeezenet1_1 vgg11_bn googlenet inception_v3 vit_b_32 swin_t convnext_tiny maxvit
    fcn_resnet50 r3d_18"""
TIMM = """resnet18 vit_tiny_patch16_224 deit_tiny_distilled_patch16_224 swin_tiny_patch4_window7_224 mixer_s32_224
    ghostnet_050 convnext_atto efficientformer_l1 efficientnet_b0 poolformer_s12 levit_128s pvt_v2_b0 cait_xxs24_224
    regnety_002 skresnet18 res2next50 gmlp_ti16_224 sequencer2d_s mobilevit_xxs"""
TRANSFORMERS = """llama-ForCausalLM mistral-ForCausalLM qwen2-ForCausalLM qwen3-ForCausalLM gemma-ForCausalLM
    phi3-ForCausalLM gpt2-ForCausalLM gpt_neox-ForCausalLM opt-ForCausalLM falcon-ForCausalLM bloom-ForCausalLM
    bert-ForSequenceClassification camembert-ForTokenClassification xlm-roberta-ForQuestionAnswering mobilebert
    vit-ForImageClassification mobilevit segformer-ForSemanticSegmentation dpt-ForSemanticSegmentation regnet pvt_v2
    t5 bart whisper wav2vec2 clip swin modernbert"""
NAMES = [f"torchvision-{name}" for name in TORCHVISION.split()] + [f"timm-{name}" for name in TIMM.split()]
NAMES += [f"transformers-{name}" for name in TRANSFORMERS.split()]
LEFT = 0.4  # of the parameters, when half of all channels go
MORE_LEFT = {
    "torchvision-googlenet": (0.65, "heads that run in training only are in its class, not in the graph"),
    **dict.fromkeys(
        [
            f"transformers-{name}"
            for name in ("t5", "bart", "whisper", "wav2vec2", "clip", "swin", "modernbert")
        ],
        (0.6, "its output is the residual stream itself, which stays whole"),
    ),
}


@pytest.mark.parametrize("case", params(ALL[name] for name in NAMES))
@pytest.mark.filterwarnings("ignore")  # of the packages themselves
def test_half_of_the_channels_go(case: Case) -> None:
    if find_spec(case.package) is None:
        pytest.skip(f"{case.package} is not installed")
    zoo_shim.install()
    torch.manual_seed(0)
    batches = [case.batch(), case.batch()]
    model = waken(case.build(), joined(*batches))
    if getattr(getattr(model, "config", None), "use_cache", False):
        batches = [{**batch, "use_cache": False} for batch in batches]
    walk = walk_of(model, batches[0])
    cut = Cut(walk, uniform(walk, torch.rand(len(walk.labels)), 0.5))
    small = compact_with_plan(
        model, cut
    ).eval()  # compared with the masked model on the first batch, node by node
    error = difference(forward(cut.masked(), batches[1]), forward(small, batches[1]))
    assert error <= 1e-4, f"differs from the masked model by {error:.2g}"
    left = parameters(small) / parameters(model)
    assert left <= MORE_LEFT.get(f"{case.package}-{case.name}", (LEFT, ""))[0], (
        f"{left:.2f} of the parameters are left"
    )


def parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())
