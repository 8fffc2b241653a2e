"""Networks of torchvision."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchvision import models
from torchvision.models import detection, optical_flow, segmentation, video

from zoo_networks.network import CLASSES, Network, images, noise

PLAIN = (
    "resnet18",
    "resnet50",
    "densenet121",
    "squeezenet1_1",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "mnasnet1_0",
    "efficientnet_b0",
    "convnext_tiny",
)


class RetinaHead(nn.Module):
    """A feature pyramid, and a head shared by all of its levels."""

    def __init__(self) -> None:
        super().__init__()
        detector = detection.retinanet_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=CLASSES, trainable_backbone_layers=5
        )
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        """Scores and boxes, without the detector's filtering."""
        scores: dict[str, Tensor] = self.head(list(self.backbone(pictures).values()))
        return scores


def classifier(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return partial(getattr(models, name), weights=None, num_classes=CLASSES, **settings)


def segmenter(name: str) -> Callable[[], nn.Module]:
    return partial(getattr(segmentation, name), weights=None, weights_backbone=None, num_classes=CLASSES)


def with_small_classifier(name: str, layers: Callable[[], list[nn.Module]]) -> Callable[[], nn.Module]:
    """The network with narrow fully connected layers, because the published ones have 100 million weights."""

    def make() -> nn.Module:
        model: nn.Module = getattr(models, name)(weights=None)
        model.classifier = nn.Sequential(*layers())
        return model

    return make


def vgg_layers() -> list[nn.Module]:
    hidden = [nn.Linear(25088, 64), nn.ReLU(inplace=True), nn.Dropout()]
    hidden += [nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Dropout()]
    return [*hidden, nn.Linear(64, CLASSES)]


def alexnet_layers() -> list[nn.Module]:
    return [nn.Dropout(), nn.Linear(9216, 64), nn.ReLU(inplace=True), nn.Linear(64, CLASSES)]


def small_vision_transformer() -> nn.Module:
    return models.VisionTransformer(64, 16, 4, 4, 64, 128, num_classes=CLASSES)


def flow_features() -> nn.Module:
    encoder: nn.Module = optical_flow.raft_small(weights=None).feature_encoder
    return encoder


NETWORKS = (
    *(Network(f"tv.{name}", classifier(name), images(64)) for name in PLAIN),
    Network("tv.alexnet", with_small_classifier("alexnet", alexnet_layers), images(64)),
    Network("tv.vgg11", with_small_classifier("vgg11", vgg_layers), images(64)),
    Network("tv.vgg16_bn", with_small_classifier("vgg16_bn", vgg_layers), images(64)),
    Network("tv.resnext50_32x4d", classifier("resnext50_32x4d"), images(64)),
    Network("tv.shufflenet_v2_x1_0", classifier("shufflenet_v2_x1_0"), images(64)),
    Network("tv.regnet_y_400mf", classifier("regnet_y_400mf"), images(64)),
    Network("tv.regnet_x_400mf", classifier("regnet_x_400mf"), images(64)),
    Network("tv.googlenet", classifier("googlenet", aux_logits=False, init_weights=False), images(64)),
    Network("tv.inception_v3", classifier("inception_v3", aux_logits=False, init_weights=False), images(96)),
    Network("tv.vit_b_16", small_vision_transformer, images(64)),
    Network("tv.swin_t", classifier("swin_t"), images(64)),
    Network("tv.maxvit_t", classifier("maxvit_t"), images(224, batch=1)),
    Network("tv.fcn_resnet50", segmenter("fcn_resnet50"), images(64)),
    Network("tv.deeplabv3_mnv3", segmenter("deeplabv3_mobilenet_v3_large"), images(64)),
    Network("tv.lraspp_mnv3", segmenter("lraspp_mobilenet_v3_large"), images(64)),
    Network(
        "tv.retinanet_fpn_head",
        RetinaHead,
        images(64, batch=1),
        heads=("head.classification_head.cls_logits", "head.regression_head.bbox_reg"),
    ),
    Network("tv.r3d_18", partial(video.r3d_18, weights=None, num_classes=CLASSES), noise(1, 3, 4, 32, 32)),
    Network("tv.raft_small_feat", flow_features, images(64), heads=("conv",)),
)
