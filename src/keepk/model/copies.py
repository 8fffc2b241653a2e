"""`Workshop`: copies of a model for tracing, without weights where possible, and cut by edits on request.

The user's model is never run, labelled or changed. `Workshop.copy` makes a copy, and `Workshop.running` sets up torch
so that a forward pass on it is deterministic, runs no fused operations and has no side effects.
"""

import copy
import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import keepk.version
from keepk.errors import TraceError
from keepk.model.edits import Cut, Edits, cut_tensor, write_attribute
from keepk.model.example import Example
from keepk.model.layers import SELECTED, HeadwiseAttention, selecting
from keepk.model.names import named_tensors
from keepk.model.torch_internals import get_mkldnn_enabled, set_mkldnn_enabled, tree_leaves
from keepk.model.values import keep_buffers_beside

META = torch.device("meta")
_GLOBALS = (functools._lru_cache_wrapper, dict)  # places where a program keeps tensors from one pass to the next
_SEQUENCES = (tuple, list)
_HOLDERS = (Tensor, *_SEQUENCES)


@dataclass(frozen=True)
class Workshop:
    """Makes copies of one model, which can be labelled, run and cut. The model itself never changes.

    Args:
        model: The user's model.
        example: The arguments of its forward.
        device: The device of the copies: the meta device, or None for the model's own device.
    """

    model: nn.Module
    example: Example
    device: torch.device | None

    def copy(self, edits: Edits | None = None, *, training: bool = False) -> nn.Module:
        """A copy in eval or train mode, cut by edits if there are any.

        Raises:
            TraceError: The model cannot be deep-copied.
        """
        cuts = {cut.tensor: cut for cut in edits.cuts} if edits is not None else {}
        # deepcopy takes tensors from the memo, so a copy on the meta device never allocates weights.
        memo = dict[int, Any]()
        for name, tensor, parameter in named_tensors(self.model):
            made = self._tensor(tensor.detach(), cuts.get(name))
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if parameter else made
        for tensor in plain_tensors(self.model):
            memo.setdefault(id(tensor), self._tensor(tensor.detach(), None))
        try:
            twin = copy.deepcopy(self.model, memo)
        except Exception as error:
            raise TraceError(
                f"model {type(self.model).__name__}: cannot be copied ({type(error).__name__}: {error}). "
                f"The trace works on a copy; make copy.deepcopy(model) work."
            ) from error
        if self.device is not None:
            keep_buffers_beside(twin, self.model)
        _adapt(twin, edits)
        return twin.train(training)

    def _tensor(self, tensor: Tensor, cut: Cut | None) -> Tensor:
        if self.device is not None:
            return torch.empty(cut.after if cut else tensor.shape, dtype=tensor.dtype, device=self.device)
        return cut_tensor(tensor, cut) if cut else tensor.clone()

    @functools.cached_property
    def _globals(self) -> list[Any]:
        """The caches and dicts at the top level of the packages and in the classes that define the model."""
        kinds = {type(module) for module in self.model.modules()}
        packages = {kind.__module__.partition(".")[0] for kind in kinds} - {"torch", "builtins"}
        modules = [
            it for name, it in list(sys.modules.items()) if name.partition(".")[0] in packages and it is not None
        ]
        found = (item for scope in (*modules, *kinds) for item in list(vars(scope).items()))
        kept = (value for name, value in found if isinstance(value, _GLOBALS) and not name.startswith("__"))
        return list({id(value): value for value in kept}.values())  # once, although modules import each other's dicts

    def _clear_caches(self) -> None:
        """Empty the caches of functions. A cached function runs only once, so the second pass would be shorter."""
        for cache in self._globals:
            if not isinstance(cache, dict) and cache.cache_info().currsize:
                cache.cache_clear()

    def _remove_traces(self) -> None:
        """Empty the caches, and remove the tensors of a trace from global dicts.

        The user's model would otherwise get tensors that have no values.
        """
        self._clear_caches()
        if self._device_of_model == META:
            return
        for cache in self._globals:
            if isinstance(cache, dict):
                # Not `cache.items()`: the lazy mappings of transformers import every model when asked for it.
                holders = [(key, value) for key, value in dict.items(cache) if isinstance(value, _HOLDERS)]
                for key, value in holders:
                    tensors = value if isinstance(value, _SEQUENCES) else (value,)
                    if any(isinstance(it, Tensor) and it.is_meta for it in tensors):
                        del cache[key]

    @contextmanager
    def running(self, example: Example | None = None, *, gradients: bool = False) -> Iterator[Example]:
        """A context for a traced forward pass; yields the example on the workshop's device.

        In it there are no fused kernels, and every pass draws the same random numbers, so that two traces of a model
        agree.

        Args:
            example: The arguments of forward; by default those of the workshop.
            gradients: Whether gradients are recorded, as in training. A forward may depend on that.
        """
        self._clear_caches()
        with ExitStack() as stack:
            stack.callback(self._remove_traces)
            stack.enter_context(torch.set_grad_enabled(gradients))
            # Fused attention is a single operation, in which channels cannot be followed.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_fused_attention_off())
            stack.enter_context(_random_state_kept(self.model))
            if any(isinstance(module, nn.RNNBase) for module in self.model.modules()):
                stack.enter_context(_mkldnn_off())
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            if self.device is not None:  # tensors that forward creates are then made on the meta device as well
                stack.enter_context(self.device)
                stack.enter_context(_AsIfOn(self._device_of_model))
            yield (example or self.example).on(self.device)

    @functools.cached_property
    def _device_of_model(self) -> torch.device:
        tensors = chain((tensor for _, tensor, _ in named_tensors(self.model)), tree_leaves(self.example.arguments))
        return next((it.device for it in tensors if isinstance(it, Tensor)), torch.device("cpu"))


# Properties and methods of tensors that tell the device, each with its answer for a device.
_TELLS_DEVICE: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: device.type == "meta",  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.is_xpu.__get__: lambda device: device.type == "xpu",  # type: ignore[attr-defined]
    Tensor.is_mps.__get__: lambda device: device.type == "mps",  # type: ignore[attr-defined]
    Tensor.get_device: lambda device: -1 if device.type in ("cpu", "meta") else device.index or 0,
}
_MOVES = (Tensor.cpu, Tensor.cuda, Tensor.xpu)
# The code of torch and keepk. `torch.nn.init` counts as the model's, because some of its functions do nothing with meta
# tensors, and the trace has to follow what `dirac_` writes in a forward.
_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, keepk.version.__file__))


class _AsIfOn(TorchFunctionMode):
    """Makes meta tensors look as if they were on the model's device, to the model's own code.

    A forward may branch on the device (``if x.is_cuda``) and has to take the branch that it takes for the user. Where
    it creates or moves a tensor with that device as an argument, the meta device takes its place. torch's own code
    sees the meta device: its implementations for that device depend on it.

    Args:
        device: The device of the user's model.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_name = kwargs or {}
        if func in _TELLS_DEVICE:
            pretends = self._is_called_by_model() and args[0].is_meta  # this mode is off here, so that is the truth
            return _TELLS_DEVICE[func](self._device) if pretends else func(*args)
        if func in _MOVES and self._is_called_by_model():
            return args[0].to(META)
        if by_name.get("device") is not None and self._is_called_by_model():
            by_name = {**by_name, "device": META}
        elif func is Tensor.to and isinstance(args[1] if len(args) > 1 else None, str | torch.device):
            args = (args[0], META if self._is_called_by_model() else args[1], *args[2:])
        return func(*args, **by_name)

    def _is_called_by_model(self) -> bool:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_name == "__torch_function__":  # of another mode, which passes it on
            frame = frame.f_back
        if frame is None:
            return False
        name = frame.f_code.co_filename
        return name == nn.init.__file__ or not name.startswith(_LIBRARIES)


def _adapt(twin: nn.Module, edits: Edits | None) -> None:
    """Apply the parts of edits that are not tensors: attributes, selections, and the class of attentions."""
    modules = dict(twin.named_modules())
    for module in modules.values():
        if type(module) is nn.MultiheadAttention and HeadwiseAttention.fits(module):
            # torch's forward asserts the original embedding size; this class takes its sizes from the weights.
            module.__class__ = HeadwiseAttention
    if edits is None:
        return
    for setting in edits.settings:
        write_attribute(modules[setting.module], setting, setting.new)
    for selection in edits.selections:
        module = modules[selection.module]
        device = next(chain(module.parameters(), module.buffers())).device
        setattr(module, SELECTED, torch.from_numpy(selection.channels).to(device))
        module.__class__ = selecting(type(module))


def plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors in plain attributes of modules, or one level deeper in lists and dicts; not parameters or buffers."""
    own = ("_parameters", "_buffers")
    for value in (value for module in model.modules() for name, value in vars(module).items() if name not in own):
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from (item for item in items if isinstance(item, Tensor))


@contextmanager
def _fused_attention_off() -> Iterator[None]:
    """Disable the fast path of `nn.MultiheadAttention`, which runs a whole layer as one operation in eval mode."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _mkldnn_off() -> Iterator[None]:
    """Disable oneDNN, which runs a whole recurrent layer as one operation; torch then runs it step by step."""
    before = get_mkldnn_enabled()
    set_mkldnn_enabled(False)
    try:
        yield
    finally:
        set_mkldnn_enabled(before)


@contextmanager
def _random_state_kept(model: nn.Module) -> Iterator[None]:
    """Seed all random generators for a pass, and restore their states afterwards."""
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # a user's forward may draw from both
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[it] for it in sorted(devices))):
                generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
