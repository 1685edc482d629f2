"""The networks, in the order of the table."""

from __future__ import annotations

from real.detection import FastestDet, Nudenet, YoloxNano
from real.network import Network
from real.ocr import READERS, Captcha
from real.speech import WhisperEncoder
from real.text import MiniLM
from real.vision import CifarResNet, MobileNetV2

ALL: list[Network] = [
    *(YoloxNano(), FastestDet(), MobileNetV2(), CifarResNet(20), CifarResNet(44), Nudenet()),
    *READERS,
    *(MiniLM(), WhisperEncoder(), Captcha()),
]
NETWORKS = {network.name: network for network in ALL}
