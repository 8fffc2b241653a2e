"""`save_pretrained` and `from_pretrained`: pruned Hugging Face models in the folders that transformers uses.

A config of transformers describes a model by a few numbers, such as ``num_attention_heads`` and ``intermediate_size``.
Where every layer has the same width after a cut, another config may describe the pruned model too, and plain
``from_pretrained`` can load it. `described_by_config` looks for this config, in three steps that rule out a wrong one:

1. The class is built from candidate configs on the meta device. A candidate must give every tensor of the state_dict
   the shape that it has in the pruned model.
2. Sizes alone can be ambiguous: half of the heads, and heads of half the width, give the same shapes. So every number
   that a module stores must be the pruned model's as well, except copies of the changed numbers, which the pruned model
   no longer reads.
3. The folder is loaded with plain ``from_pretrained`` before it gets its final place, and values and outputs are
   compared.

Where no config passes (layers of different widths, BERT's heads), the folder has the dense config and ``arch.json``
beside it, and `from_pretrained` of this module loads it.
"""

import copy
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from keepk.cut.record import record_of
from keepk.deploy.arch import describe, user_module
from keepk.deploy.arch_json import dense_from
from keepk.deploy.folder import SAVED_MODEL
from keepk.deploy.load import load, refuse_other_model
from keepk.deploy.save import refuse_untrue, save
from keepk.errors import FileError
from keepk.integrations.folders import drafts, exchange
from keepk.model.example import Example
from keepk.model.names import named_tensors
from keepk.plan.names import shortened, shown
from keepk.run.checks import live_pruner
from keepk.storage.codec import dtype_named
from keepk.storage.files import place

Shapes: TypeAlias = dict[str, tuple[int, ...]]
Setting: TypeAlias = tuple[str, str]  # the path of a sub-config ("" for the config itself) and the name of a number

ARCH = "arch.json"
ADAPTER = "adapter_config.json"  # of peft
MOST_BUILDS = 512  # candidate configs; a model is built on the meta device for each
PINNED = ("head_dim",)  # read by many configs from hidden size and heads, unless it is set
OPTIONS = {"attn_implementation"}  # options of from_pretrained that are also accepted for a folder with arch.json
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_TOLERANCE = 5e-2


@dataclass(frozen=True)
class SavedPretrained:
    """The result of `keepk.save_pretrained`. It prints as one line.

    Attributes:
        folder: The folder.
        config: By name of a number in the config, its old and its new value; empty if it did not change.
        reason: Why the folder needs ``arch.json`` and `keepk.from_pretrained`; empty if plain ``from_pretrained`` loads
            it.
    """

    folder: Path
    config: Mapping[str, tuple[int | None, int]]
    reason: str = ""

    @property
    def plain(self) -> bool:
        """Whether plain ``from_pretrained`` loads the folder, with nothing of keepk installed."""
        return not self.reason

    def __str__(self) -> str:
        if self.reason:
            return f"{self.folder}: load it with keepk.from_pretrained, because {self.reason}"
        changed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in self.config.items())
        return f"{self.folder}: plain from_pretrained loads it; {changed or 'the config did not change'}"


def save_pretrained(model: Any, folder: str | os.PathLike[str], *, example: Any = None) -> SavedPretrained:
    """Save a pruned model of transformers, so that plain ``from_pretrained`` loads it wherever a config describes it.

    If every layer has the same widths (``per_layer=True`` makes it so), the saved config has the new numbers, and the
    folder is an ordinary one of transformers. It is loaded once before it gets its final place, and its values and
    outputs are compared with the model's; this needs memory for a second copy of the model. Otherwise the folder has
    the dense config, and ``arch.json`` and ``model.safetensors`` as `keepk.save` writes them, for
    `keepk.from_pretrained`. The model and its config do not change.

    A model that is already in the folder is replaced after the new one has been written and compared. If the process is
    killed at that moment, the folder may have no ``model.safetensors`` and no index, so that nothing loads it; the old
    files are then in a folder ``.keepk-old-...`` inside, until a later save succeeds.

    Args:
        model: A ``PreTrainedModel``, pruned or not. Merge adapters of peft first.
        folder: The folder; it is created if it does not exist. A model in it is replaced; other files stay.
        example: An input of forward, to compare outputs with. None uses random token ids or images, if the model takes
            these. Required if the config changes and the model takes something else.

    Returns:
        What was saved: the changed numbers of the config, or why ``arch.json`` is needed.

    Raises:
        FileError: The model is not of transformers, has tensors that its class does not build, or its counts are wrong;
            outputs have to be compared, and the model needs an `example`; or the folder cannot be written. Its previous
            contents are then unchanged.

    >>> import keepk, tempfile, torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    ...     intermediate_size=24, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ... )
    >>> model = LlamaForCausalLM(config)
    >>> example = {"input_ids": torch.ones(2, 5, dtype=torch.long), "use_cache": False}
    >>> heads = keepk.channels("*.self_attn*", keep=2, per_layer=True)
    >>> keepk.Pruner(model, [heads, keepk.channels("*.mlp*", keep=16, per_layer=True)], example=example).step()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = keepk.save_pretrained(model, folder)
    ...     same = LlamaForCausalLM.from_pretrained(folder)  # plain transformers
    >>> saved.config
    {'intermediate_size': (24, 8), 'num_attention_heads': (4, 2), 'num_key_value_heads': (2, 1)}
    >>> torch.equal(same.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    True
    """
    order = "model, folder"
    inner: Any = user_module(model, "save_pretrained", order)
    target = place(folder, "save_pretrained", order, FileError)
    _refuse_other_models(inner)
    refuse_untrue(inner)
    if (target / ADAPTER).exists():
        raise FileError(
            f"save_pretrained: {target} has an {ADAPTER}, with which from_pretrained would load the model that it "
            f"names and add the adapter. Pass another folder, or delete the adapter's files."
        )
    before = dense_config(inner)
    dense = _built(type(inner), _Candidate(before, {}))
    _refuse_other_tensors(inner, {} if dense is None else _shapes(dense))
    candidates, reason = described_by_config(inner)
    with drafts(target) as root:
        for candidate in candidates:
            draft = root / "plain"
            with _having(inner, candidate.config()):
                inner.save_pretrained(draft)  # which also writes dtype and class into the config
            reason = _difference(inner, candidate, draft, example)
            if not reason:
                exchange(draft, target)
                return SavedPretrained(target, candidate.told)
            shutil.rmtree(draft)
        draft = root / "described"
        _save_described(inner, before, draft)
        exchange(draft, target)
    return SavedPretrained(target, {}, reason)


@contextmanager
def _having(model: Any, config: Any) -> Iterator[None]:
    """Give a model another config in a context; transformers may change that config."""
    own = model.config
    model.config = config
    try:
        yield
    finally:
        model.config = own


def _save_described(model: Any, config: Any, folder: Path) -> None:
    """Write the dense config and what `keepk.save` writes, and find out whether `from_pretrained` can load them."""
    config.dtype, config.architectures = model.dtype, [type(model).__name__]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)
    save(model, folder)
    # Imported here: `import keepk` must not import transformers.
    from keepk.integrations.transformers import dense_model  # noqa: PLC0415 - needs transformers

    with torch.device("meta"):
        dense = dense_model(type(model), folder, {})
    _cast_as_saved(dense, folder)
    try:
        refuse_other_model(dense, dense_from(SAVED_MODEL.document(folder)), describe(dense))
    except FileError as error:
        raise FileError(
            f"save_pretrained: the config of this {type(model).__name__} builds another model than this one was before "
            f"the cuts, so it could not be loaded again ({error}). Use keepk.save(model, folder)."
        ) from error


def from_pretrained(cls: Any, folder: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model that `keepk.save_pretrained` saved, whether or not its folder has an ``arch.json``.

    Args:
        cls: A class of transformers, such as ``LlamaForCausalLM`` or ``AutoModelForCausalLM``.
        folder: The folder, or anything else that ``cls.from_pretrained`` takes.
        **options: Options of ``cls.from_pretrained``. For a folder with ``arch.json`` only ``attn_implementation``.

    Returns:
        The model in eval mode, on the CPU if the folder has an ``arch.json``.

    Raises:
        FileError: The folder is damaged, or `cls` is not the class of the model that was saved.
    """
    if not isinstance(cls, type) or not hasattr(cls, "from_pretrained"):
        raise FileError(
            f"from_pretrained: got {shown(cls)} as the class. Pass a class of transformers, then the folder: "
            f"keepk.from_pretrained(LlamaForCausalLM, folder)."
        )
    if not (Path(folder) / ARCH).is_file():
        return cls.from_pretrained(folder, **options)
    if unknown := sorted(set(options) - OPTIONS):
        raise FileError(
            f"from_pretrained: {folder} has an {ARCH}, and {unknown[0]}= does not apply to it. Load the model without "
            f"it, then move or cast it: keepk.from_pretrained(cls, folder).to(...)."
        )
    # Imported here: `import keepk` must not import transformers.
    from keepk.integrations.transformers import dense_model  # noqa: PLC0415 - needs transformers

    dense = dense_model(cls, folder, options)
    _cast_as_saved(dense, Path(folder))
    return load(dense, folder).eval()


def _cast_as_saved(model: nn.Module, folder: Path) -> None:
    """Cast each tensor of a dense model to its dtype in ``arch.json``: a config knows only one dtype for all."""
    try:
        saved = dense_from(SAVED_MODEL.document(folder)).tensors
    except FileError as error:
        raise FileError(f"{folder}: {error}") from error
    for name, tensor, _ in named_tensors(model):
        dtype = dtype_named(saved[name].dtype) if name in saved else tensor.dtype
        if dtype != tensor.dtype and dtype.is_floating_point and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


# Configs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """A config with changed numbers.

    Attributes:
        base: The config of the dense model; it never changes.
        changes: The new numbers.
    """

    base: Any
    changes: Mapping[Setting, int]

    def config(self) -> Any:
        """A copy of the config with the new numbers."""
        config = copy.deepcopy(self.base)
        for (path, name), value in self.changes.items():
            setattr(_part(config, path), name, value)
        return config

    def build(self, cls: Any) -> nn.Module:
        """A model on the meta device; if the numbers do not fit together, the class raises an error of its own."""
        with torch.device("meta"):
            built: nn.Module = cls(self.config())
        return built

    @property
    def told(self) -> dict[str, tuple[int | None, int]]:
        """By name, the old and the new numbers."""
        return {
            f"{path}.{name}".lstrip("."): (getattr(_part(self.base, path), name, None), value)
            for (path, name), value in sorted(self.changes.items())
        }


def described_by_config(model: Any) -> tuple[list[_Candidate], str]:
    """The configs that describe a pruned model, in sizes and stored numbers; and the reason if there is none."""
    cls, target = type(model), _shapes(model)
    base = _Candidate(dense_config(model), {})
    dense = _shapes(base.build(cls))
    cut = {(name, dim) for name, shape in target.items() for dim in _differing(shape, dense[name])}
    if not cut:
        return [base], ""
    if record_of(model)["selections"] or record_of(model)["headwise"]:
        return [], "a layer of another class reads the remaining channels"
    pinned = _pinned(model, base, dense)
    moves = _moves(cls, pinned, dense, target, cut)
    choices: list[list[tuple[Setting, int] | None]] = [
        [None, *((setting, value) for value in values)] for setting, values in moves.items()
    ]
    found, reason = list[_Candidate](), f"no config of {cls.__name__} describes the remaining widths"
    for number, chosen in enumerate(product(*choices)):
        if number >= MOST_BUILDS:
            break
        changes = dict(it for it in chosen if it is not None)
        # Numbers are pinned only where they have to be.
        candidates = (_Candidate(base.base, it) for it in (changes, {**pinned.changes, **changes}))
        describing = [it for it in candidates if _describes(it, model, target)][:1]
        if refused := [said for it in describing if (said := _refusal(it.config()))]:
            reason = f"{type(model.config).__name__} refuses the remaining widths: {refused[0]}"
        else:
            found += describing
    return found, "" if found else reason


def _refusal(config: Any) -> str:
    """Why transformers would neither save nor load a config, which some classes check; empty if it would."""
    try:
        getattr(config, "validate", bool)()
    except Exception as error:  # of the class's own checks
        return shortened(str(error))
    return ""


def dense_config(model: Any) -> Any:
    """A copy of a model's config as it was before the cuts, which change it where forward reads widths from it."""
    config, modules = copy.deepcopy(model.config), dict(model.named_modules())
    for path, values in record_of(model)["attributes"].items():
        for key, value in values.items():
            held, _, name = key.partition(".")
            if held == "config" and getattr(modules.get(path), held, None) is model.config:
                setattr(config, name, value["dense"])
    return config


def _pinned(model: Any, base: _Candidate, dense: Shapes) -> _Candidate:
    """The config with numbers that modules derive from others, such as the width of a head, set to what they are."""
    changes = dict[Setting, int]()
    for name in PINNED:
        values = {value for module in model.modules() if type(value := vars(module).get(name)) is int}
        if len(values) == 1 and getattr(base.base, name, None) is None:
            changes[("", name)] = values.pop()
    pinned = _Candidate(base.base, changes)
    built = _built(type(model), pinned) if changes else None
    return pinned if built is not None and _shapes(built) == dense else base


def _moves(
    cls: Any, pinned: _Candidate, dense: Shapes, target: Shapes, cut: set[tuple[str, int]]
) -> dict[Setting, list[int]]:
    """By number of the config, the new values that change nothing but sizes that were cut."""
    ratios = sorted({(dense[name][dim], target[name][dim]) for name, dim in cut})
    found = dict[Setting, list[int]]()
    for setting, old in _numbers_of(pinned.base):
        if setting in pinned.changes:
            continue
        if old is None:  # a width that follows from others unless it is set, such as GPT-2's n_inner
            values = {now for _, now in ratios}
        else:
            values = {old * now // before for before, now in ratios if old * now % before == 0} - {old}
        for value in sorted(values):
            built = _built(cls, _Candidate(pinned.base, {**pinned.changes, setting: value}))
            shapes = {} if built is None else _shapes(built)
            if shapes.keys() != dense.keys():
                continue
            moved = {(name, dim) for name, shape in shapes.items() for dim in _differing(shape, dense[name])}
            if moved and moved <= cut:
                found.setdefault(setting, []).append(value)
    return found


def _numbers_of(config: Any, path: str = "") -> Iterator[tuple[Setting, int | None]]:
    """The numbers of a config and its sub-configs that may be widths: ints above 1, and None."""
    for name, value in vars(config).items():
        if name.startswith("_") or name.endswith("_token_id"):
            continue
        if value is None or (type(value) is int and value > 1):
            yield (path, name), value
        elif name in getattr(config, "sub_configs", ()):
            yield from _numbers_of(value, f"{path}.{name}".lstrip("."))


def _part(config: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        config = getattr(config, name)
    return config


def _built(cls: Any, candidate: _Candidate) -> nn.Module | None:
    try:
        return candidate.build(cls)
    except Exception:  # whatever a class or its config raises on numbers that do not fit together
        return None


def _shapes(model: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _differing(shape: Sequence[int], other: Sequence[int]) -> Iterator[int]:
    """The dims in which two shapes differ; all dims if their numbers differ."""
    if len(shape) != len(other):
        yield from range(max(len(shape), len(other)))
    else:
        yield from (dim for dim, (one, two) in enumerate(zip(shape, other, strict=True)) if one != two)


def _describes(candidate: _Candidate, model: nn.Module, target: Shapes) -> bool:
    built = _built(type(model), candidate)
    return built is not None and _shapes(built) == target and _same_numbers(model, built, candidate)


def _same_numbers(model: nn.Module, built: nn.Module, candidate: _Candidate) -> bool:
    """Whether the modules store the same numbers, except for copies of the config's changed ones."""
    told = candidate.told.values()
    theirs = dict(built.named_modules())
    for path, module in model.named_modules():
        other_module = theirs.get(path)
        if other_module is None or type(other_module) is not type(module):
            return False
        mine, other = _stored(module), _stored(other_module)
        for name in (name for name in other if mine.get(name) != other[name]):
            if (mine.get(name), other[name]) not in told:
                return False
    return True


def _stored(module: nn.Module) -> dict[str, Any]:
    kept = (int, float, str, tuple)
    return {name: value for name, value in vars(module).items() if type(value) in kept and name != "training"}


# Comparing what was saved ---------------------------------------------------------------------------------------------


def _refuse_other_models(model: Any) -> None:
    needed = ("config", "save_pretrained", "from_pretrained")
    if not all(hasattr(model, name) for name in needed) or not hasattr(model.config, "save_pretrained"):
        raise FileError(
            f"save_pretrained: {type(model).__name__} is not a model of transformers. Use keepk.save(model, folder); "
            f"for a model of peft, merge the adapters first: model.merge_and_unload()."
        )


def _refuse_other_tensors(model: Any, dense: Shapes) -> None:
    found, name = set(_shapes(model)), type(model).__name__
    if strange := sorted(found ^ set(dense)):
        which = "the model has and its class does not build" if strange[0] in found else "the model lacks"
        raise FileError(
            f"save_pretrained: {name}(config) builds other tensors than the model has, for example {strange[0]!r}, "
            f"which {which}, so it could not be loaded again. Merge adapters of peft first, with "
            f"model.merge_and_unload(), or use keepk.save(model, folder)."
        )


def _difference(model: Any, candidate: _Candidate, draft: Path, example: Any) -> str:
    """Load a folder with plain ``from_pretrained``, and say how the result differs from the model; empty if not."""
    implementation = getattr(model.config, "_attn_implementation", None)
    options = {} if implementation is None else {"attn_implementation": implementation}
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        try:
            loaded = type(model).from_pretrained(draft, **options)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a class raises on a config that does not suit it
            return f"from_pretrained fails with the config that describes its sizes ({shortened(str(error))})"
        mine, theirs = model.state_dict(), loaded.state_dict()
        for name, value in mine.items():
            if name not in theirs or theirs[name].dtype != value.dtype:
                found = str(theirs[name].dtype).removeprefix("torch.") if name in theirs else "nothing"
                return f"from_pretrained reads {name} as {found}, and it is {str(value.dtype).removeprefix('torch.')}"
            if not torch.equal(theirs[name], value.detach().cpu()):
                return f"from_pretrained reads other values of {name}"
        return _other_outputs(model, loaded, example, required=bool(candidate.changes))


def _other_outputs(model: Any, loaded: Any, example: Any, *, required: bool) -> str:
    """Compare the outputs of two models; without `required`, only if an input of forward is known."""
    given = _example(model, example, required=required)
    if given is None:
        return ""

    def outputs_of(net: Any) -> list[Tensor]:
        torch.manual_seed(0)  # for models that draw random numbers in eval mode, too
        with evaluated(net), torch.no_grad():
            return [*_tensors(net(*given.arguments, **given.by_name))]

    try:
        first = outputs_of(model)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any class, on inputs that may not suit it
        if example is None and not required:
            return ""
        raise FileError(
            f"save_pretrained: the outputs of {type(model).__name__} have to be compared, and it fails on "
            f"{'random inputs' if example is None else 'the example'} ({shortened(str(error))}). Pass an input of its "
            f"forward: keepk.save_pretrained(model, folder, example={{...}})."
        ) from error
    try:
        second = outputs_of(loaded.to(model.device))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return f"the forward of the config that describes its sizes fails ({shortened(str(error))})"
    if required and not any(bool(it.isfinite().any()) for it in first):
        return "its outputs have no finite numbers that could be compared"
    same = len(first) == len(second) and all(_close(*pair) for pair in zip(first, second, strict=True))
    return "" if same else "the config that describes its sizes gives other outputs"


def _close(one: Tensor, two: Tensor) -> bool:
    """Whether two outputs agree: in NaN and infinities exactly, elsewhere up to rounding."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    finite = one.isfinite() & two.isfinite()
    if not torch.allclose(one.masked_fill(finite, 0), two.masked_fill(finite, 0), rtol=0, atol=0, equal_nan=True):
        return False
    one, two = one[finite], two[finite]
    tolerance = TOLERANCE.get(one.dtype, HALF_TOLERANCE)
    return not one.numel() or bool((one - two).abs().max() <= tolerance * one.abs().max())


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in eval mode and its passes do not count for statistics."""
    modes, pruner = {module: module.training for module in model.modules()}, live_pruner(model)
    with ExitStack() as paused:
        for statistics in () if pruner is None else pruner.statistics:
            paused.enter_context(statistics.paused())
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _example(model: Any, given: Any, *, required: bool) -> Example | None:
    if given is not None:
        return Example.of(given)
    found = random_inputs(model)
    if found is not None:
        return Example.of({name: value.to(model.device) for name, value in found.items()})
    if not required:
        return None
    raise FileError(
        f"save_pretrained: the outputs of {type(model).__name__} have to be compared, and its inputs are not known. "
        f"Pass one: keepk.save_pretrained(model, folder, example={{...}})."
    )


def random_inputs(model: Any) -> dict[str, Tensor] | None:
    """Random token ids or images on the CPU, as a model of transformers takes them; None if it takes something else."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    name = getattr(model, "main_input_name", "")
    if name == "input_ids" and not getattr(config, "is_encoder_decoder", False):
        return {name: torch.randint(0, config.get_text_config().vocab_size, (2, 8), generator=generator)}
    size = getattr(config, "image_size", None)
    if name == "pixel_values" and size is not None:
        sides = [size, size] if isinstance(size, int) else [*size]
        return {name: torch.randn(2, config.num_channels, *sides, generator=generator).to(model.dtype)}
    return None


def _tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of an output: of tuples, lists and dicts, which outputs of transformers are."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping | list | tuple):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)
