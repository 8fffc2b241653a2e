"""Random crops and reflections of a whole batch at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from keepk.errors import KeepkError


def crop_and_flip(images: Tensor, generator: torch.Generator, *, padding: int = 4, flip: bool = True) -> Tensor:
    """Each picture of a batch [N, C, H, W] moved by up to `padding` pixels each way, and mirrored half of the time.

    A picture is set in a frame of zeros, and a window of its own size is cut out at a random place. Given bytes, the
    frame is black; given normalised pictures, it has the mean's colour. The numbers are drawn where the generator is:
    one on the CPU gives the same windows on every device.

    Args:
        images: Of any type; the batch itself stays as it is.
        generator: Where the random numbers come from.
        padding: The width of the frame.
        flip: Whether left and right may change places (not so for digits).
    """
    if images.ndim != 4 or padding < 0:
        raise KeepkError(
            f"crop_and_flip: got pictures {list(images.shape)} and padding={padding}. "
            "Give a batch [N, C, H, W] and a padding of 0 or more."
        )
    number, _, height, width = images.shape

    def drawn(choices: int) -> Tensor:
        numbers = torch.randint(choices, (number,), generator=generator, device=generator.device)
        return numbers.to(images.device)

    top, left = drawn(2 * padding + 1), drawn(2 * padding + 1)
    framed = F.pad(images, (padding,) * 4)
    windows = framed.unfold(2, height, 1).unfold(3, width, 1)
    crops = windows[torch.arange(number, device=images.device), :, top, left]
    if not flip:
        return crops
    mirrored = drawn(2).bool()[:, None, None, None]
    return torch.where(mirrored, crops.flip(3), crops)
