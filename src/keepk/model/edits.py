"""Edits: the changes that a removal makes to tensors and attributes, and how they are carried out.

Edits are plain values. Computing them changes nothing, so they can be checked, replayed on a copy, saved and printed
before `keepk.shrink` applies them. Trial copies, `keepk.shrink` and `keepk.load` share the functions that carry them
out.

A `Change` is a function that makes one change and returns an `Undo`, a function that reverts it; `all_or_nothing` makes
all of several changes, or none. Functions that return a change do their computations immediately, and the change only
assigns the results. So the expensive steps, which may run out of memory, are over before anything has changed.

`replace_contents` puts new contents of a different shape into a tensor object, so that everything that refers to the
object sees them. ``parameter.data = small`` keeps the object, its hooks and its name. But the autograd node that
accumulates its gradient remembers the old shape, and lives as long as any loss that was computed with it. Torch makes a
new node only if the dtype or device changes, so the tensor briefly gets contents of another dtype.

A loss from before the cut can no longer be back-propagated, because its graph has the old sizes. Usually torch raises
an error about shapes. Where it does not, the gradient would have the old shape, so a hook on the old node raises.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keepk.errors import ShrinkError
from keepk.model.layers import SELECTED, HeadwiseAttention, selecting

Indices = NDArray[np.int64]
SHOWN = 3  # unchanged attributes that `str` lists
PIECE = 1 << 17  # elements; a block of this size stays in a core's cache
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Cut:
    """The indices of a tensor that remain.

    Attributes:
        tensor: Its name.
        kept: By axis, the indices that remain. If the input channels of a grouped convolution's weight differ from
            group to group, the entry of axis 1 is a matrix: for each row that remains, the columns that remain.
        before: Its shape before the cut.
        after: Its shape after the cut.
    """

    tensor: str
    kept: dict[int, Indices]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def __repr__(self) -> str:
        """Shapes instead of indices.

        >>> Cut("fc.weight", {0: np.array([0, 2])}, (3, 8), (2, 8))
        <Cut: fc.weight (3, 8) -> (2, 8)>
        """
        return f"<Cut: {self.tensor} {self.before} -> {self.after}>"


@dataclass(frozen=True)
class Setting:
    """A module's attribute that gets a new value.

    Attributes:
        module: The module's path.
        attribute: Its attribute. ``"config.num_heads"`` is a value inside an object that the attribute refers to.
        item: Which entry, if the attribute is a tuple or list.
        old: Its value before the cut.
        new: Its value after the cut.
    """

    module: str
    attribute: str
    item: int | None
    old: Any
    new: Any


@dataclass(frozen=True)
class Unchanged:
    """An attribute that keeps its value although a size of the same value changes.

    Forward does not use it, so the trace cannot tell whether it is that size or equal by chance.

    Attributes:
        module: The module's path.
        attribute: Its attribute.
        item: Which entry, if the attribute is a tuple or list.
        value: Its value.
        size: The size after the cut.
    """

    module: str
    attribute: str
    item: int | None
    value: int
    size: int

    def __str__(self) -> str:
        """One line for a report.

        >>> print(Unchanged("layers.0.attn", "num_heads", None, 8, 4))
        layers.0.attn.num_heads = 8 (4 are left)
        """
        entry = "" if self.item is None else f"[{self.item}]"
        path = f"{self.module}." if self.module else ""
        return f"{path}{self.attribute}{entry} = {self.value} ({self.size} are left)"


@dataclass(frozen=True)
class Selection:
    """A BatchNorm that reads only some channels of its input after the cut."""

    module: str
    channels: Indices

    def __repr__(self) -> str:
        return f"<Selection: {self.module} reads {len(self.channels)} channels>"


@dataclass(frozen=True)
class Edits:
    """Everything that one shrink does to a model.

    Attributes:
        units: The units that are removed, including those that have to be removed with them.
        cuts: The tensors that are cut.
        settings: The attributes that change.
        selections: The BatchNorms that read a selection afterwards.
        headwise: The paths of attention modules that lose heads.
        unchanged: Attributes that may still have an old size; see `Unchanged`.
    """

    units: Indices
    cuts: tuple[Cut, ...]
    settings: tuple[Setting, ...]
    selections: tuple[Selection, ...]
    headwise: tuple[str, ...]
    unchanged: tuple[Unchanged, ...] = ()

    def __len__(self) -> int:
        return len(self.units)

    def __repr__(self) -> str:
        return f"<Edits: {len(self.units)} units, {len(self.cuts)} cuts, {len(self.settings)} settings>"

    def __str__(self) -> str:
        """How much is removed, on one line; a second line lists attributes that may still have an old size."""
        before = sum(int(np.prod(cut.before)) for cut in self.cuts)
        after = sum(int(np.prod(cut.after)) for cut in self.cuts)
        gone = f"{before - after:,} of their {before:,} numbers gone"
        line = f"{len(self.units)} units removed: {len(self.cuts)} tensors cut, {gone}"
        if not self.unchanged:
            return line
        more = f" and {len(self.unchanged) - SHOWN} more" if len(self.unchanged) > SHOWN else ""
        return f"{line}\nleft as they are, though a size changed: {', '.join(map(str, self.unchanged[:SHOWN]))}{more}"


def read_attribute(module: Any, setting: Setting) -> Any:
    """The current value of the attribute that a setting changes."""
    outer, _, inner = setting.attribute.partition(".")
    value = getattr(module, outer)
    if inner:
        value = entries_of(value)[inner]
    return value if setting.item is None else value[setting.item]


def write_attribute(module: Any, setting: Setting, value: Any) -> None:
    """Set an attribute, or one entry of it."""
    outer, _, inner = setting.attribute.partition(".")
    if setting.item is not None:  # a tuple cannot be changed in place, so a new one of the same type replaces it
        whole = read_attribute(module, replace(setting, item=None))
        entries = list(whole)
        entries[setting.item] = value
        value = type(whole)(entries)
    if inner:
        # The config itself is not changed: other layers, or another model that was built from it, may share it. The
        # module gets a copy.
        holder = copy.copy(getattr(module, outer))
        entries_of(holder)[inner] = value
        value = holder
    setattr(module, outer, value)


def entries_of(holder: Any) -> dict[str, Any]:
    """The named values of a config object or dict, as a dict that can be written to."""
    return holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})


def cut_tensor(tensor: Tensor, cut: Cut) -> Tensor:
    """The kept part of a tensor; its memory format is up to the caller."""
    kept = {axis: torch.from_numpy(np.ascontiguousarray(ids)).to(tensor.device) for axis, ids in cut.kept.items()}
    large = tensor.numel() > PIECE and tensor.device.type == "cpu"  # elsewhere many small kernels are slower
    if large and set(kept) == {0, 1} and kept[1].ndim == 1 and tensor.is_contiguous():
        return _cut_in_pieces(tensor, kept[0], kept[1], cut.after)
    for axis, index in sorted(kept.items()):
        if index.ndim == 1:
            tensor = tensor.index_select(axis, index)
        else:
            rows = torch.arange(tensor.shape[0], device=tensor.device)
            tensor = tensor[rows[:, None], index]
    return tensor


def _cut_in_pieces(tensor: Tensor, rows: Tensor, columns: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Select rows and columns together, a few rows at a time, so that the intermediate result stays in the cache."""
    left = tensor.new_empty(shape)
    size = max(1, PIECE * len(tensor) // tensor.numel())
    for piece, into in zip(torch.split(rows, size), torch.split(left, size), strict=True):
        torch.index_select(tensor.index_select(0, piece), 1, columns, out=into)
    return left


def silencing(cut: Cut, length: Tensor | None) -> Cut:
    """The part of a cut that makes its channels zero when it is applied as a mask.

    Weight norm computes g v / |v|. Zeros in the length g make a channel zero, but a direction v of zeros gives 0 / 0.
    So the direction is masked only along axes where g has size 1, that is, within a channel.

    Args:
        cut: The cut.
        length: The length g, if the cut tensor is the direction of a weight norm.
    """
    if length is None or length.ndim != len(cut.before):
        return cut
    return replace(cut, kept={axis: kept for axis, kept in cut.kept.items() if length.shape[axis] == 1})


def doomed(cut: Cut, device: torch.device) -> Tensor:
    """A mask of the entries of a tensor that a cut removes.

    >>> doomed(Cut("w", {0: np.array([0, 2])}, before=(3, 2), after=(2, 2)), torch.device("cpu"))[:, 0]
    tensor([False,  True, False])
    """
    stays = torch.ones(cut.before, dtype=torch.bool, device=device)
    for axis, indices in cut.kept.items():
        kept = torch.zeros(cut.before[: axis + 1] if indices.ndim == 2 else cut.before[axis], dtype=torch.bool)
        if indices.ndim == 2:
            rows = cut.kept.get(0, np.arange(cut.before[0]))
            kept[torch.from_numpy(rows)[:, None], torch.from_numpy(indices)] = True
        else:
            kept[torch.from_numpy(indices)] = True
        shape = [1] * axis if indices.ndim == 1 else []
        stays &= kept.reshape(*shape, *kept.shape, *[1] * (stays.ndim - axis - 1)).to(device)
    return ~stays


T = TypeVar("T")
Undo = Callable[[], None]
Change = Callable[[], Undo]


def all_or_nothing(changes: Sequence[Change]) -> Undo:
    """Make all changes; if one fails, undo those before it, last first.

    Returns:
        A function that undoes all of them.
    """
    with ExitStack() as undos:
        for change in changes:
            undos.callback(change())
        return undos.pop_all().close  # the end of the block no longer undoes anything


def replaced(read: Callable[[], T], write: Callable[[T], object], new: T) -> Change:
    """A change that replaces a value; its undo writes the old value again.

    >>> shelf = ["old"]
    >>> undo = replaced(lambda: shelf[0], lambda it: shelf.__setitem__(0, it), "new")()
    >>> undo(), shelf
    (None, ['old'])
    """

    def change() -> Undo:
        old = read()

        def undo() -> None:
            write(old)

        with undone_by(undo):
            write(new)
            return undo

    return change


@contextmanager
def undone_by(undo: Undo) -> Iterator[None]:
    """Run `undo` if the block fails, so that a single change is itself all or nothing."""
    try:
        yield
    except BaseException:  # even an interrupt: the caller gets the undo only when the change returns
        undo()
        raise


def left_of(tensor: Tensor, cut: Cut) -> Tensor:
    """The part of a tensor that a cut leaves, in new memory and in the tensor's memory format."""
    left, layout = cut_tensor(tensor.detach(), cut), _layout(tensor)
    if layout is torch.contiguous_format:
        return left.contiguous()
    return torch.empty(left.shape, dtype=left.dtype, device=left.device, memory_format=layout).copy_(left)


def _layout(tensor: Tensor) -> torch.memory_format:
    """The memory format of a tensor."""
    layout = LAYOUTS.get(tensor.dim())
    if layout is None or not tensor.is_contiguous(memory_format=layout):
        return torch.contiguous_format
    # A tensor of one channel or one pixel is contiguous in both formats; only its strides show which one was chosen.
    usual = torch.empty(tensor.shape, device="meta", memory_format=layout).stride()
    return layout if not tensor.is_contiguous() or tensor.stride() == usual else torch.contiguous_format


def replace_contents(tensor: Tensor, contents: Tensor) -> None:
    """Put new contents into a tensor object and drop its gradient, which callers set again."""
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32  # every device has both
    tensor.grad = None
    tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = contents


def refuse_old_losses(tensor: Tensor, name: str) -> Callable[[], None]:
    """Make the backward pass of every loss computed so far raise when it reaches this tensor.

    Returns:
        A function that undoes this.
    """
    if not tensor.requires_grad:
        return lambda: None

    def refuse(_gradients: Any) -> None:
        raise ShrinkError(
            f"backward: this loss was computed before {name!r} was cut to shape {tuple(tensor.shape)}, so its gradient "
            f"does not fit. Run the forward pass again."
        )

    node = torch.autograd.graph.get_gradient_edge(tensor).node
    handle = node.register_prehook(refuse)
    return handle.remove


def index_tensor(indices: np.ndarray, like: Tensor) -> Tensor:
    """Indices as a new tensor on the device of another one."""
    return torch.tensor(indices, device=like.device)


def refuse_missing_modules(module: nn.Module, modules: Mapping[str, nn.Module], edits: Edits) -> None:
    """Refuse a model or a follower that lacks a module whose attributes or class the cut changes."""
    paths = [*(it.module for it in edits.settings), *(it.module for it in edits.selections), *edits.headwise]
    for path in paths:
        if path not in modules:
            raise ShrinkError(
                f"shrink: {type(module).__name__} has no module {path!r}, which has to change with its tensors. "
                f"Build the model and its followers like the model that was traced."
            )


def cut_module(module: nn.Module, tensors: Mapping[str, Tensor], edits: Edits) -> list[Change]:
    """The changes that cut a module: tensors with their gradients, attributes and special layers.

    Args:
        module: The model, or a follower built like it.
        tensors: Its tensors by name.
        edits: The cuts.
    """
    modules = dict(module.named_modules())
    refuse_missing_modules(module, modules, edits)
    changes: list[Change] = [new_contents(tensors[cut.tensor], cut) for cut in edits.cuts]
    changes += [new_setting(modules[setting.module], setting) for setting in edits.settings]
    for selection in edits.selections:
        changes.append(new_selection(modules[selection.module], selection.channels))
    for path in edits.headwise:
        changes.append(new_class(modules[path], HeadwiseAttention))
    # Last, because the changes before it put the weights of a recurrent layer into separate pieces of memory.
    changes += [flatten_again(found) for found in modules.values() if isinstance(found, nn.RNNBase)]
    return changes


def new_contents(tensor: Tensor, cut: Cut) -> Change:
    """A change that cuts a tensor and its gradient, in the same tensor object."""
    contents, grad = left_of(tensor, cut), None if tensor.grad is None else left_of(tensor.grad, cut)

    def change() -> Undo:
        old, old_grad = tensor.data, tensor.grad
        allow_old_losses = refuse_old_losses(tensor, cut.tensor)

        def undo() -> None:
            replace_contents(tensor, old)
            tensor.grad = old_grad
            allow_old_losses()

        with undone_by(undo):
            replace_contents(tensor, contents)
            tensor.grad = grad
            return undo

    return change


def new_setting(module: nn.Module, setting: Setting) -> Change:
    """A change that sets an attribute of a module, or an entry of it."""
    outer = setting.attribute.partition(".")[0]

    def change() -> Undo:
        old = getattr(module, outer)

        def undo() -> None:
            setattr(module, outer, old)

        with undone_by(undo):
            write_attribute(module, setting, setting.new)
            return undo

    return change


def new_selection(module: nn.Module, channels: np.ndarray) -> Change:
    """A change that makes a BatchNorm read only these channels of its input."""
    index = index_tensor(channels, next(chain(module.parameters(), module.buffers())))

    def change() -> Undo:
        kind, old = type(module), getattr(module, SELECTED, None)

        def undo() -> None:
            module.__class__ = kind
            module.__dict__.pop(SELECTED, None)
            if old is not None:
                setattr(module, SELECTED, old)

        with undone_by(undo):
            setattr(module, SELECTED, index)
            module.__class__ = selecting(kind)
            return undo

    return change


def new_class(module: nn.Module, kind: type[nn.Module]) -> Change:
    """A change that gives a plain `nn.MultiheadAttention` another class, such as one whose sizes follow its weights."""
    # A user's subclass keeps its class, because the trace has followed its forward.
    new = kind if type(module) is nn.MultiheadAttention else type(module)
    return replaced(lambda: type(module), lambda it: setattr(module, "__class__", it), new)


def flatten_again(module: nn.RNNBase) -> Change:
    """A change that puts a recurrent layer's weights into one block of memory, which cuDNN needs to run at full speed.

    Without it, torch copies the weights in every forward pass and warns.
    """

    def change() -> Undo:
        module.flatten_parameters()
        return lambda: None  # undoing the cuts restores the old weights

    return change


def new_entry(entries: dict[Any, Any], key: Any, value: Tensor) -> Change:
    """A change that replaces the tensor under a key."""
    return replaced(lambda: entries[key], lambda it: entries.__setitem__(key, it), value)


def forget_compiled(model: nn.Module) -> None:
    """Discard compiled code of a model whose shapes have changed."""
    # torch.compile recompiles a function only a few times (8) and then stays in eager mode; a reset starts over.
    if any(module._compiled_call_impl is not None or "_orig_mod" in module._modules for module in model.modules()):
        torch.compiler.reset()
