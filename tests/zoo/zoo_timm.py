"""timm architectures, one or two per family, the smallest variant of each: random weights, images of 64x64.

`SIZED` ones are told the image size when they are built; `OTHERS` say what they need besides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from zoo_run import Case

FREE = [
    "resnet18",
    "resnet10t",
    "resnetblur18",
    "ecaresnet26t",
    "resnetv2_18",
    "legacy_seresnet18",
    "skresnet18",
    "resnest14d",
    "res2next50",
    "tresnet_m",
    "regnetx_002",
    "regnety_002",
    "nf_regnet_b0",
    "nf_resnet26",
    "eca_nfnet_l0",
    "densenet121",
    "dpn48b",
    "dla46x_c",
    "rdnet_tiny",
    "selecsls42",
    "efficientnet_b0",
    "efficientnet_lite0",
    "tf_efficientnetv2_b0",
    "mixnet_s",
    "mnasnet_small",
    "fbnetc_100",
    "spnasnet_100",
    "tinynet_e",
    "mobilenetv1_100",
    "mobilenetv2_035",
    "mobilenet_edgetpu_v2_xs",
    "mobilenetv3_small_050",
    "mobilenetv4_conv_small_035",
    "mobilenetv4_hybrid_medium",
    "lcnet_035",
    "lcnetv2_small",
    "hardcorenas_b",
    "rexnet_100",
    "ghostnet_050",
    "ghostnetv2_100",
    "ghostnetv3_050",
    "repghostnet_050",
    "convnext_atto",
    "convnext_zepto_rms",
    "convnextv2_atto",
    "inception_next_atto",
    "cs3darknet_s",
    "cspresnet50",
    "edgenext_xx_small",
    "fastvit_t8",
    "fasternet_t0",
    "pvt_v2_b0",
    "davit_tiny",
    "efficientvim_m1",
    "efficientvit_b0",
    "focalnet_tiny_srf",
    "sam2_hiera_tiny",
    "iformer_t",
    "lowformer_b0",
    "mambaout_femto",
    "nextvit_small",
    "shvit_s1",
    "tiny_vit_5m_224",
    "crossvit_tiny_240",
    "cpubone_nano",
    "legacy_xception",
    "xception41p",
    "hgnetv2_b0",
    "hrnet_w18_small",
    "ese_vovnet19b_slim_dw",
    "poolformer_s12",
    "caformer_s18",
    "convformer_s18",
    "convmixer_768_32",
    "csatv2",
    "starnet_s050",
]
SIZED = [
    "resnext26ts",
    "regnetz_b16",
    "eca_botnext26ts_256",
    "lambda_resnet26t",
    "mobileone_s1",
    "gernet_s",
    "repvgg_a0",
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "vit_relpos_small_patch16_224",
    "vit_tiny_r_s16_p8_224",
    "vit_tiny_patch16_dinov3_qkvb",
    "eva02_tiny_patch14_224",
    "cait_xxs24_224",
    "xcit_nano_12_p16_224",
    "pit_ti_224",
    "convit_tiny",
    "tnt_s_patch16_224",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "swinv2_cr_tiny_ns_224",
    "maxvit_pico_rw_256",
    "coatnet_pico_rw_224",
    "mixer_s32_224",
    "gmlp_ti16_224",
    "resmlp_12_224",
    "gmixer_12_224",
    "coat_tiny",
    "coat_lite_tiny",
    "levit_128s",
    "levit_conv_128s",
    "efficientformerv2_s0",
    "efficientvit_m0",
    "gcvit_xxtiny",
    "hiera_tiny_224",
    "mobilevit_xxs",
    "mobilevitv2_050",
    "mvitv2_tiny",
    "nest_tiny",
    "repvit_m1",
    "sequencer2d_s",
    "swiftformer_xs",
    "twins_svt_small",
    "twins_pcpvt_small",
    "visformer_tiny",
    "vitamin_small_224",
    "volo_d1_224",
]
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "inception_v3": (96, {}),
    "inception_resnet_v2": (96, {}),
    "efficientformer_l1": (224, {}),
    "dm_nfnet_f0": (64, {}),
    "beit_base_patch16_224": (64, {"img_size": 64, "depth": 3}),
    "samvit_base_patch16_224": (64, {"img_size": 64, "depth": 3}),
    "naflexvit_base_patch16_gap": (64, {"img_size": 64, "depth": 3}),
    "qwen3_vit_88m": (64, {"img_size": 64, "depth": 3}),
}


def _create(name: str, options: dict[str, Any]) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, **options)
    return model


def case(name: str, size: int, options: dict[str, Any]) -> Case:
    return Case("timm", name, lambda: _create(name, options), lambda: torch.randn(2, 3, size, size))


CASES = [
    *[case(name, 64, {}) for name in FREE],
    *[case(name, 64, {"img_size": 64}) for name in SIZED],
    *[case(name, size, options) for name, (size, options) in OTHERS.items()],
]
