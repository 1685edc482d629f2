"""Normalisations stay float. A BatchNorm is folded into the op before it, and no runtime computes the others in
integers. One scale for the unequal inputs of a norm would cost 10 to 20 dB (vision transformers)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from sparsebit.quantization.modules.base import Computed, Opr, QuantOpr, define, register_qmodule, spelled


@register_qmodule(sources=[nn.BatchNorm2d])
class QBatchNorm2d(QuantOpr, nn.BatchNorm2d):
    quantize_weight = quantize_input = False

    @Computed
    def module(self) -> nn.Module:
        """The BatchNorm that the original kept beside the op: here the op is that BatchNorm."""
        return self._modules.get("module") or self

    def forward(self, input: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, input)


@register_qmodule(sources=[nn.BatchNorm1d])
class QBatchNorm1d(Opr, nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return nn.BatchNorm1d.forward(self, input)


@register_qmodule(sources=[nn.BatchNorm3d])
class QBatchNorm3d(Opr, nn.BatchNorm3d):
    def forward(self, input: Tensor) -> Tensor:
        return nn.BatchNorm3d.forward(self, input)


@register_qmodule(sources=[nn.SyncBatchNorm])
class QSyncBatchNorm(Opr, nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return nn.SyncBatchNorm.forward(self, input)


class _Norm(QuantOpr):
    """A module that is taken over, or a function with the weight among its arguments."""

    quantize_weight = False  # one factor per channel
    quantize_input = False
    original: ClassVar[type[nn.Module]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = self.quantize_first(args, kwargs)
        function = self.__dict__.get("op")
        if function:
            return function(*args, **kwargs)
        return self.original.forward(self, *args, **kwargs)


@register_qmodule(sources=[nn.LayerNorm, *spelled("layer_norm native_layer_norm")])
class QLayerNorm(_Norm, nn.LayerNorm):
    original = nn.LayerNorm


@register_qmodule(sources=[nn.RMSNorm, *spelled("rms_norm")])
class QRMSNorm(_Norm, nn.RMSNorm):
    original = nn.RMSNorm


@register_qmodule(sources=[nn.GroupNorm, *spelled("group_norm native_group_norm")])
class QGroupNorm(_Norm, nn.GroupNorm):
    original = nn.GroupNorm


@register_qmodule(sources=[nn.InstanceNorm1d])
class QInstanceNorm1d(_Norm, nn.InstanceNorm1d):
    original = nn.InstanceNorm1d


@register_qmodule(sources=[nn.InstanceNorm2d])
class QInstanceNorm2d(_Norm, nn.InstanceNorm2d):
    original = nn.InstanceNorm2d


@register_qmodule(sources=[nn.InstanceNorm3d])
class QInstanceNorm3d(_Norm, nn.InstanceNorm3d):
    original = nn.InstanceNorm3d


QInstanceNorm = define("QInstanceNorm", Opr, *spelled("instance_norm"))
QLocalResponseNorm = define(
    "QLocalResponseNorm", Opr, nn.LocalResponseNorm, nn.CrossMapLRN2d, *spelled("local_response_norm")
)
BatchNormFunction = define("BatchNormFunction", Opr, *spelled("batch_norm native_batch_norm"))
