"""The networks, in the order of the table."""

from __future__ import annotations

from real.detection import FastestDet, Nudenet, YoloxNano
from real.network import Network
from real.vision import CifarResNet, MobileNetV2

NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (YoloxNano(), FastestDet(), MobileNetV2(), CifarResNet(20), CifarResNet(44), Nudenet())
}
