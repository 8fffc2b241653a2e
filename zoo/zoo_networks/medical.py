"""Networks of monai."""

from functools import partial

from monai.networks import nets

from zoo_networks.network import CLASSES, Network, images, noise

NETWORKS = (
    Network("monai.unet", partial(nets.UNet, 2, 3, CLASSES, (8, 16, 32), (2, 2), num_res_units=2), images(32)),
    Network("monai.basicunet", partial(nets.BasicUNet, 2, 3, CLASSES, (8, 8, 16, 32, 32, 8)), images(32)),
    Network("monai.attention_unet", partial(nets.AttentionUnet, 2, 3, CLASSES, (8, 16, 32), (2, 2)), images(32)),
    Network("monai.densenet121_3d", partial(nets.DenseNet, 3, 1, CLASSES, 8, 8, (2, 2)), noise(1, 1, 32, 32, 32)),
    Network("monai.unetr", partial(nets.UNETR, 3, CLASSES, (32, 32), 8, 48, 96, 4, spatial_dims=2), images(32)),
)
