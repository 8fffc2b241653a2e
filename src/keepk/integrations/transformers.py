"""Hugging Face transformers: a callback that prunes in its `Trainer`, and models with ``arch.json``."""

import os
from typing import Any

from torch import nn
from transformers import AutoConfig, GenerationConfig

CAN_GENERATE = "generation_config.json"


def dense_model(cls: Any, folder: str | os.PathLike[str], options: dict[str, Any]) -> nn.Module:
    """The dense model that the config in a folder describes, with random weights, in the saved dtype.

    Args:
        cls: A class of transformers: a model's, or an auto class.
        folder: A folder with a ``config.json``.
        options: Options of ``from_config``.
    """
    config = AutoConfig.from_pretrained(folder)
    build = cls.from_config if hasattr(cls, "from_config") else cls._from_config  # models have only the second
    model: nn.Module = build(config, **options)
    if os.path.isfile(os.path.join(folder, CAN_GENERATE)):  # noqa: PTH113, PTH118 - the folder may be a str
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model
