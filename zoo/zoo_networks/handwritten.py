"""Hand-written networks, one for each construct that makes channels hard to remove."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from zoo_networks.network import CLASSES, VOCABULARY, Inputs, Network, images, noise, tokens

POOL = "pool"
VGG16 = (64, 64, POOL, 128, 128, POOL, 256, 256, 256, POOL, 512, 512, 512, POOL, 512, 512, 512)


def conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1)


def conv_bn_relu(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [conv3(inputs, outputs, stride), nn.BatchNorm2d(outputs), nn.ReLU()]


class Perceptron(nn.Module):
    """Fully connected layers after a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(784, 300), nn.Linear(300, 100), nn.Linear(100, CLASSES)])

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = pictures.view(pictures.size(0), -1)
        for layer in self.layers[:-1]:
            hidden = F.relu(layer(hidden))
        return self.layers[-1](hidden)


class LeNet5(nn.Module):
    """A view that flattens channels and pixels into one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(800, 500)
        self.fc2 = nn.Linear(500, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        maps = F.max_pool2d(F.relu(self.conv1(pictures)), 2)
        maps = F.max_pool2d(F.relu(self.conv2(maps)), 2)
        return self.fc2(F.relu(self.fc1(maps.view(maps.shape[0], -1))))


class VGG(nn.Module):
    """The paper's VGG-16 for CIFAR: 4,224 channels and one hidden fully connected layer."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for step in VGG16:
            if isinstance(step, str):
                layers.append(nn.MaxPool2d(2, 2))
                continue
            layers += [conv3(width, step), nn.BatchNorm2d(step), nn.ReLU(inplace=True)]
            width = step
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(width, 512), nn.BatchNorm1d(512), nn.ReLU(inplace=True), nn.Linear(512, CLASSES)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        maps = self.features(pictures)
        return self.classifier(F.avg_pool2d(maps, maps.shape[-1]).flatten(1))


class FlattenedBatchNorm(nn.Module):
    """A reshape to a product of three sizes, after a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*conv_bn_relu(3, 16, 2), *conv_bn_relu(16, 32, 2))
        self.classifier = nn.Sequential(nn.Linear(32 * 64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, pictures: Tensor) -> Tensor:
        maps = self.features(pictures)
        return self.classifier(maps.reshape(maps.size(0), maps.size(1) * maps.size(2) * maps.size(3)))


def prelu_network() -> nn.Module:
    """A PReLU with one parameter per channel, and one with a single parameter."""
    first = [conv3(3, 16), nn.PReLU(16), conv3(16, 32, 2), nn.PReLU(32), conv3(32, 32, 2), nn.PReLU()]
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def instance_norm(channels: int) -> nn.Module:
    return nn.InstanceNorm2d(channels, affine=True)


class NormedResiduals(nn.Module):
    """Residual blocks with norms that are not BatchNorm."""

    def __init__(self, norm: Callable[[int], nn.Module] = group_norm) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv3(3, 32), norm(32), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(conv3(32, 64), norm(64), nn.ReLU(), conv3(64, 32), norm(32)) for _ in range(2)
        )
        self.classifier = nn.Linear(32, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        maps = self.stem(pictures)
        for block in self.blocks:
            maps = F.relu(maps + block(maps))
        return self.classifier(maps.mean((2, 3)))


class SplitAndGate(nn.Module):
    """Two halves of one output take different paths; a gated linear unit pairs two halves of another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv3(3, 32)
        self.left = conv3(16, 16)
        self.right = conv3(16, 24)
        self.gated = nn.Conv2d(40, 48, 1)
        self.classifier = nn.Linear(24, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        left, right = F.relu(self.stem(pictures)).chunk(2, 1)
        maps = torch.cat([self.left(left), self.right(right)], 1)
        return self.classifier(F.glu(self.gated(F.relu(maps)), 1).mean((2, 3)))


class GroupShuffle(nn.Module):
    """Grouped convolutions with a channel shuffle and a depthwise one between them, in a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv3(3, 32)
        self.norm = nn.BatchNorm2d(32)
        self.grouped1 = nn.Conv2d(32, 32, 1, groups=4)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.grouped2 = nn.Conv2d(32, 32, 1, groups=4)
        self.classifier = nn.Linear(32, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        stem = F.relu(self.norm(self.stem(pictures)))
        maps = self.grouped1(stem)
        batch, channels, height, width = maps.shape
        maps = maps.view(batch, 4, channels // 4, height, width).transpose(1, 2)
        maps = self.grouped2(self.depthwise(maps.reshape(batch, channels, height, width)))
        return self.classifier((maps + stem).mean((2, 3)))


class SuperResolution(nn.Module):
    """A pixel shuffle turns four channels into one."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2), nn.Tanh(), conv3(32, 64), nn.PixelShuffle(2), conv3(16, 16), nn.ReLU()
        )
        self.output = conv3(16, 3)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.output(self.features(pictures))


class SpaceToDepth(nn.Module):
    """A pixel unshuffle turns one channel into four."""

    def __init__(self) -> None:
        super().__init__()
        self.first = conv3(3, 8)
        self.unshuffle = nn.PixelUnshuffle(2)
        self.second = conv3(32, 32)
        self.classifier = nn.Linear(32, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        maps = self.unshuffle(F.relu(self.first(pictures)))
        return self.classifier(F.relu(self.second(maps)).mean((2, 3)))


class DeconvolutionalGenerator(nn.Module):
    """Transposed convolutions without bias."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride, padding in ((64, 128, 1, 0), (128, 64, 2, 1), (64, 32, 2, 1)):
            layers.append(nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.output = nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False)

    def forward(self, noises: Tensor) -> Tensor:
        return torch.tanh(self.output(self.features(noises)))


class PictureTranslator(nn.Module):
    """Norms without parameters, reflected borders, residuals and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        norm, relu = nn.InstanceNorm2d, partial(nn.ReLU, inplace=True)
        self.encoder = nn.Sequential(
            nn.ReflectionPad2d(3), nn.Conv2d(3, 16, 7), norm(16), relu(), conv3(16, 32, 2), norm(32), relu()
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(*self.padded_conv(), norm(32), relu(), *self.padded_conv(), norm(32)) for _ in range(2)
        )
        self.decoder = nn.Sequential(nn.ConvTranspose2d(32, 16, 3, 2, 1, 1), norm(16), relu(), nn.ReflectionPad2d(3))
        self.output = nn.Conv2d(16, 3, 7)

    @staticmethod
    def padded_conv() -> list[nn.Module]:
        return [nn.ReflectionPad2d(1), nn.Conv2d(32, 32, 3)]

    def forward(self, pictures: Tensor) -> Tensor:
        maps = self.encoder(pictures)
        for block in self.blocks:
            maps = maps + block(maps)
        return torch.tanh(self.output(self.decoder(maps)))


class UNet(nn.Module):
    """A U-Net, which concatenates the encoder's features with the decoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(*conv_bn_relu(3, 16))
        self.down2 = nn.Sequential(*conv_bn_relu(16, 32))
        self.down3 = nn.Sequential(*conv_bn_relu(32, 64))
        self.enlarge2 = nn.ConvTranspose2d(64, 32, 2, 2)
        self.up2 = nn.Sequential(*conv_bn_relu(64, 32))
        self.enlarge1 = nn.ConvTranspose2d(32, 16, 2, 2)
        self.up1 = nn.Sequential(*conv_bn_relu(32, 16))
        self.output = nn.Conv2d(16, CLASSES, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        fine = self.down1(pictures)
        middle = self.down2(F.max_pool2d(fine, 2))
        coarse = self.down3(F.max_pool2d(middle, 2))
        middle = self.up2(torch.cat([middle, self.enlarge2(coarse)], 1))
        return self.output(self.up1(torch.cat([fine, self.enlarge1(middle)], 1)))


class Recurrent(nn.Module):
    """An LSTM, GRU or plain RNN, one-directional or bidirectional."""

    def __init__(self, kind: Callable[..., nn.RNNBase] = nn.LSTM, *, both_ways: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.cells = kind(32, 48, num_layers=layers, batch_first=True, bidirectional=both_ways)
        self.hidden = nn.Linear(96 if both_ways else 48, 40)
        self.output = nn.Linear(40, CLASSES)

    def forward(self, sentences: Tensor) -> Tensor:
        states, _ = self.cells(self.embedding(sentences))
        return self.output(F.relu(self.hidden(states[:, -1])))


class ConvolutionalRecurrent(nn.Module):
    """Channels and heights are flattened into the inputs of a bidirectional LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*conv_bn_relu(1, 16, 2), *conv_bn_relu(16, 32, 2))
        self.cells = nn.LSTM(32 * 8, 32, bidirectional=True, batch_first=True)
        self.output = nn.Linear(64, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        maps = self.features(pictures)
        batch, channels, height, width = maps.shape
        columns = maps.permute(0, 3, 1, 2).reshape(batch, width, channels * height)
        return self.output(self.cells(columns)[0])


class TiedAutoencoder(nn.Module):
    """The decoder uses the encoder's weights, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder1 = nn.Linear(64, 48)
        self.encoder2 = nn.Linear(48, 24)
        self.bias2 = nn.Parameter(torch.zeros(48))
        self.bias1 = nn.Parameter(torch.zeros(64))

    def forward(self, vectors: Tensor) -> Tensor:
        code = F.relu(self.encoder2(F.relu(self.encoder1(vectors))))
        hidden = F.relu(F.linear(code, self.encoder2.weight.t(), self.bias2))
        return F.linear(hidden, self.encoder1.weight.t(), self.bias1)


class RepeatedLayer(nn.Module):
    """One convolution and its BatchNorm, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv3(3, 24)
        self.repeated = conv3(24, 24)
        self.norm = nn.BatchNorm2d(24)
        self.classifier = nn.Linear(24, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        maps = F.relu(self.stem(pictures))
        for _ in range(3):
            maps = F.relu(self.norm(self.repeated(maps)))
        return self.classifier(maps.mean((2, 3)))


class Siamese(nn.Module):
    """One trunk reads two inputs; their features are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *conv_bn_relu(3, 16), conv3(16, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.output = nn.Linear(64, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.output(torch.cat([self.trunk(left), self.trunk(right)], 1))


class DilatedResiduals(nn.Module):
    """One-dimensional dilated convolutions with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv1d(32 if depth else 8, 32, 3, padding=2**depth, dilation=2**depth) for depth in range(4)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(4))
        self.output = nn.Linear(32, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        for depth, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            features = F.relu(norm(convolution(series)))
            series = series + features if depth else features
        return self.output(series.mean(-1))


class Volumes(nn.Module):
    """Three-dimensional convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*self.layer(1, 8, 1), *self.layer(8, 16, 2), nn.AdaptiveAvgPool3d(1), nn.Flatten())
        self.output = nn.Linear(16, CLASSES)

    @staticmethod
    def layer(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv3d(inputs, outputs, 3, stride, 1), nn.BatchNorm3d(outputs), nn.ReLU()]

    def forward(self, volumes: Tensor) -> Tensor:
        return self.output(self.trunk(volumes))


class TorchEncoder(nn.Module):
    """torch's transformer layers, which contain nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(32, CLASSES)

    def forward(self, sentences: Tensor) -> Tensor:
        return self.output(self.encoder(self.embedding(sentences)).mean(1))


class TinyGPT(nn.Module):
    """A causal language model: query, key and value from one layer, and a head tied to the embedding."""

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.attention_norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.projections = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.mlp_norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def attend(self, states: Tensor, layer: int) -> Tensor:
        query, key, value = self.qkv[layer](self.attention_norms[layer](states)).chunk(3, -1)
        batch, length, width = query.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in (query, key, value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projections[layer](mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, sentences: Tensor) -> Tensor:
        states = self.embedding(sentences) + self.positions[:, : sentences.shape[1]]
        for layer in range(len(self.qkv)):
            states = states + self.attend(states, layer)
            states = states + self.down[layer](F.gelu(self.up[layer](self.mlp_norms[layer](states))))
        return self.head(states)


class BareParameters(nn.Module):
    """A convolution with parameters that do not belong to a layer, and a gain per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(16, 3, 3, 3) * 0.1)
        self.bias1 = nn.Parameter(torch.zeros(16))
        self.norm = nn.BatchNorm2d(16)
        self.conv2 = conv3(16, 32)
        self.gain = nn.Parameter(torch.ones(1, 32, 1, 1))
        self.output = nn.Linear(32, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        maps = F.relu(self.norm(F.conv2d(pictures, self.weight1, self.bias1, padding=1)))
        return self.output((F.relu(self.conv2(maps)) * self.gain).mean((2, 3)))


class Einsum(nn.Module):
    """A layer that is an einsum with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.weight = nn.Parameter(torch.randn(32, 24) * 0.2)
        self.output = nn.Linear(24, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        hidden = torch.einsum("btd,de->bte", F.relu(self.first(series)), self.weight)
        return self.output(F.relu(hidden))


class GatedSlice(nn.Module):
    """Concatenation, residual, a gate per channel from a squeeze, and a slice of constant size."""

    def __init__(self) -> None:
        super().__init__()
        self.left = conv3(3, 16)
        self.right = conv3(3, 16)
        self.residual = conv3(32, 32)
        self.squeeze = nn.Conv2d(32, 8, 1)
        self.excite = nn.Conv2d(8, 32, 1)
        self.sliced = conv3(16, 16)
        self.output = nn.Linear(48, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        both = torch.cat([F.relu(self.left(pictures)), F.relu(self.right(pictures))], 1)
        maps = F.relu(self.residual(both)) + both
        squeezed = F.relu(self.squeeze(maps.mean((2, 3), keepdim=True)))
        maps = maps * torch.sigmoid(self.excite(squeezed))
        return self.output(torch.cat([maps, self.sliced(maps[:, :16])], 1).mean((2, 3)))


class TwoHeads(nn.Module):
    """Two outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*conv_bn_relu(3, 16), conv3(16, 32), nn.ReLU())
        self.scores = nn.Linear(32, CLASSES)
        self.boxes = nn.Sequential(conv3(32, 16), nn.ReLU(), nn.Conv2d(16, CLASSES, 1))

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        maps = self.trunk(pictures)
        return {"cls": self.scores(maps.mean((2, 3))), "box": self.boxes(maps)}


class WeightNorm(nn.Module):
    """Weights that are computed from a direction and a length."""

    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(conv3(3, 16))
        self.second = weight_norm(conv3(16, 32))
        self.output = nn.Linear(32, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.output(F.relu(self.second(F.relu(self.first(pictures)))).mean((2, 3)))


class Branch(nn.Module):
    """A branch that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = conv3(3, 16)
        self.second = conv3(16, 32)
        self.output = nn.Linear(32, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        maps = F.relu(self.first(pictures))
        if float(maps.sum()) > -1e9:
            maps = maps * 1.0
        return self.output(F.relu(self.second(maps)).mean((2, 3)))


def two_pictures() -> Inputs:
    return torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)


NETWORKS = (
    Network("my.mlp_784_300_100", Perceptron, images(28, channels=1)),
    Network("my.lenet5", LeNet5, images(28, channels=1)),
    Network("my.vgg16_cifar", VGG, images(32)),
    Network("my.bn_flatten", FlattenedBatchNorm, images(32)),
    Network("my.prelu", prelu_network, images(32)),
    Network("my.groupnorm_res", NormedResiduals, images(16)),
    Network("my.instnorm_res", partial(NormedResiduals, instance_norm), images(16)),
    Network("my.split_glu", SplitAndGate, images(16)),
    Network("my.group_shuffle", GroupShuffle, images(16)),
    Network("my.espcn_pixelshuffle", SuperResolution, images(16, channels=1), heads=("output",)),
    Network("my.pixel_unshuffle", SpaceToDepth, images(16)),
    Network("my.dcgan_gen", DeconvolutionalGenerator, noise(2, 64, 1, 1), heads=("output",)),
    Network("my.cyclegan_gen", PictureTranslator, images(32), heads=("output",)),
    Network("my.unet_lite", UNet, images(32)),
    Network("my.lstm", Recurrent, tokens()),
    Network("my.gru", partial(Recurrent, nn.GRU), tokens()),
    Network("my.bilstm", partial(Recurrent, both_ways=True), tokens()),
    Network("my.rnn_tanh", partial(Recurrent, nn.RNN, layers=1), tokens()),
    Network("my.crnn", ConvolutionalRecurrent, images(32, channels=1)),
    Network("my.tied_autoencoder", TiedAutoencoder, noise(4, 64), heads=()),
    Network("my.shared_conv", RepeatedLayer, images(16)),
    Network("my.siamese", Siamese, two_pictures),
    Network("my.tcn", DilatedResiduals, noise(2, 8, 32)),
    Network("my.conv3d", Volumes, noise(2, 1, 8, 8, 8)),
    Network("my.nn_transformer_encoder", TorchEncoder, tokens()),
    Network("my.tiny_gpt_tied", TinyGPT, tokens()),
    Network("my.functional_param_conv", BareParameters, images(16)),
    Network("my.einsum_param", Einsum, noise(2, 5, 16)),
    Network("my.concat_add_se_slice", GatedSlice, images(16)),
    Network("my.multi_head_dict_out", TwoHeads, images(16)),
    Network("my.weight_norm_param", WeightNorm, images(16)),
    Network("my.python_branch", Branch, images(16)),
)
