"""Random crops and reflections, applied to a whole batch at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from keepk.errors import KeepkError


def crop_and_flip(images: Tensor, generator: torch.Generator, *, padding: int = 4, flip: bool = True) -> Tensor:
    """Shift each image of a batch by up to `padding` pixels in each direction, and mirror it with probability 1/2.

    Each image is padded with zeros and cropped to its original size at a random position. For uint8 images the padding
    is black; for normalised images it has the colour of the mean.

    Args:
        images: A batch [N, C, H, W] of any dtype; not modified.
        generator: The source of random numbers. They are drawn on its device, so that a CPU generator gives the same
            crops on every device.
        padding: The width of the padding.
        flip: Whether images may be mirrored (not for digits).

    Returns:
        A new batch of the same shape.

    Raises:
        KeepkError: If `images` is not a batch of images, or `padding` is negative.
    """
    if images.ndim != 4 or padding < 0:
        raise KeepkError(
            f"crop_and_flip: got images {list(images.shape)} and padding={padding}. "
            "Give a batch [N, C, H, W] and a padding of 0 or more."
        )
    number, _, height, width = images.shape

    def drawn(choices: int) -> Tensor:
        numbers = torch.randint(choices, (number,), generator=generator, device=generator.device)
        return numbers.to(images.device)

    top, left = drawn(2 * padding + 1), drawn(2 * padding + 1)
    framed = F.pad(images, (padding,) * 4)
    windows = framed.unfold(2, height, 1).unfold(3, width, 1)  # a view of all crops; the next line copies one each
    crops = windows[torch.arange(number, device=images.device), :, top, left]
    if not flip:
        return crops
    mirrored = drawn(2).bool()[:, None, None, None]
    return torch.where(mirrored, crops.flip(3), crops)
