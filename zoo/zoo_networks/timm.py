"""Networks of timm: its main families, in their smallest variants and with small images."""

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
from torch import nn

from zoo_networks.network import CLASSES, Network, images

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}


def network(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return partial(timm.create_model, name, pretrained=False, num_classes=CLASSES, **settings)


NETWORKS = (
    Network("timm.vit", network("vit_tiny_patch16_224", **SMALL), images(32)),
    Network("timm.vit_qk_norm", network("vit_tiny_patch16_224", qk_norm=True, **SMALL), images(32)),
    Network("timm.deit", network("deit_tiny_patch16_224", **SMALL), images(32)),
    Network("timm.deit_distilled", network("deit_tiny_distilled_patch16_224", **SMALL), images(32)),
    Network("timm.eva02", network("eva02_tiny_patch14_224", **SMALL), images(32)),
    Network("timm.vit_rope", network("vit_small_patch16_rope_224", **SMALL), images(32)),
    Network(
        "timm.swin",
        network(
            "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4)
        ),
        images(64),
    ),
    Network(
        "timm.swinv2",
        network("swinv2_tiny_window8_256", img_size=64, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4)),
        images(64),
    ),
    Network("timm.convnext", network("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 24, 32, 48)), images(64)),
    Network("timm.efficientnet_b0", network("efficientnet_b0"), images(64)),
    Network("timm.efficientnetv2", network("tf_efficientnetv2_b0"), images(64)),
    Network("timm.mobilenetv3", network("mobilenetv3_small_050"), images(64)),
    Network("timm.mobilenetv4", network("mobilenetv4_conv_small_035"), images(64)),
    Network("timm.regnetx", network("regnetx_002"), images(64)),
    Network("timm.regnety", network("regnety_002"), images(64)),
    Network("timm.mixer", network("mixer_s32_224", img_size=64), images(64)),
)
