"""`trace`: find what one channel is in any network."""

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from keepk.errors import TraceError
from keepk.graph.attributes import sized_attributes
from keepk.graph.facts import Bound, Reason
from keepk.graph.given import likely_slip, no_model, refuse_scripted
from keepk.graph.graph import Graph
from keepk.graph.label import tensors_in
from keepk.graph.layers import HeadwiseAttention
from keepk.graph.maps import support
from keepk.graph.probe import Probe
from keepk.graph.shell import META, Example, Workshop
from keepk.graph.tracer import Tracer, named_tensors, output_maps
from keepk.graph.wiring import Wiring
from keepk.graph.wrappers import adapters_of, unwrap


def trace(model: nn.Module, example: Any) -> Graph:
    """Find the channels of a model: which slices of which tensors go together, what is fixed, and why.

    One forward pass is watched, on a copy without weights; nothing of the model changes. Where the model's Python looks
    at values, the copy has weights.

    Args:
        model: Any module whose forward works on the example.
        example: A tensor, a tuple of positional arguments, or a dict of keyword arguments. Two or more pictures or
            sequences, so that the batch is not taken for something else.

    Examples:
        >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> graph = trace(net, torch.zeros(2, 8))
        >>> [(space.name, len(space.units)) for space in graph.spaces]
        [('0', 6)]
        >>> graph.slices(0)
        [('0.weight', 0, 0), ('0.bias', 0, 0), ('2.weight', 1, 0)]
    """
    given = Example.of(example)
    _refuse_strange(model, given)
    with torch.inference_mode(False):  # whose tensors tell nothing of where they come from
        try:
            return _traced(Workshop(unwrap(model), given, META))
        except _NotOnMeta:
            return _traced(Workshop(unwrap(model), given, None))


class _NotOnMeta(Exception):  # noqa: N818 - says only that the copy needs weights
    """The model's Python looks at values."""


def _traced(workshop: Workshop) -> Graph:
    tracer, training = _watch(workshop)
    wiring = _wiring(workshop.model, tracer)
    return Probe(workshop, tracer, training, wiring, pins=[], lossy=[], constants=[]).settle()


def _watch(workshop: Workshop) -> tuple[Tracer, Tracer | None]:
    """The first trace, and one in train mode; begun again if weights turn out to belong to grouped convolutions."""
    groups = dict[str, int]()
    while True:
        known = len(groups)
        tracer = Tracer(workshop.copy(), groups)
        tracer.label_tensors()
        _bind_recurrent(tracer)
        _pin_outputs(workshop, tracer, _run(workshop, tracer))
        training = _see_what_training_uses(workshop, tracer)
        if len(groups) == known:
            return tracer, training


def _pin_outputs(workshop: Workshop, tracer: Tracer, output: Any) -> None:
    for index_map in output_maps(_cache_in(output)):
        why = "is kept in past_key_values, the cache that forward returns; trace the model with use_cache=False"
        tracer.facts.add_pin(index_map, Reason(why, place=_place_of_forward(workshop.model)))
    for index_map in output_maps(output):
        tracer.facts.add_pin(index_map, Reason("is an output of the model", place=_place_of_forward(workshop.model)))


def _cache_in(output: Any) -> Any:
    """The keys and values of past tokens among what a language model of transformers returns."""
    if isinstance(output, tuple | list):
        return [part for part in output if type(part).__name__.endswith("Cache")]
    held = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    return held.get("past_key_values")


def _see_what_training_uses(workshop: Workshop, tracer: Tracer) -> Tracer | None:
    """A parameter that forward uses in training only is traced there; one that it never uses keeps its size."""
    if all(name in tracer.touched for name, maps in tracer.tensors.items() if maps):
        return None
    training = _in_train_mode(tracer)
    try:
        with workshop.running() as example:
            output = training.follow(example.arguments, example.by_name)
    except Exception as error:  # whatever the user's forward raises
        if workshop.device is not None:
            raise _NotOnMeta from error  # with weights it may go through
        # The facts up to here stay: they fix what goes into a layer that keeps its size.
        why = f"is used in training at most, where forward fails: {type(error).__name__}: {error}"[:200]
        _pin_all_but(tracer.touched, workshop, tracer, why)
        return None
    finally:
        tracer.model.eval()
    _pin_outputs(workshop, tracer, output)
    _pin_all_but(training.touched, workshop, tracer, "is never used in forward")
    return training


def _in_train_mode(tracer: Tracer) -> Tracer:
    """A trace that goes on with the same atoms and facts, and has steps of its own."""
    training = copy.copy(tracer)
    training.steps, training.touched = [], set(tracer.touched)
    training.model.train()
    return training


def _pin_all_but(used: set[str], workshop: Workshop, tracer: Tracer, why: str) -> None:
    reason = Reason(why, place=_place_of_forward(workshop.model))
    for name in set(tracer.tensors) - used:
        for index_map in tracer.tensors[name]:
            tracer.facts.add_pin(index_map, reason)


def _place_of_forward(model: nn.Module) -> str:
    """File and line where the model's forward begins."""
    try:
        source, line = inspect.getsourcefile(type(model).forward), inspect.getsourcelines(type(model).forward)[1]
    except (OSError, TypeError):
        return type(model).__qualname__
    return f"{Path(source or '').name}:{line}"


def _run(workshop: Workshop, tracer: Tracer) -> Any:
    try:
        with workshop.running() as example:
            return tracer.follow(example.arguments, example.by_name)
    except Exception as error:
        if workshop.device is not None:
            raise _NotOnMeta from error
        raise TraceError(
            f"model {type(workshop.model).__name__}: its forward failed on the example "
            f"({type(error).__name__}: {error}). Give an example on which model(*example) works."
            f"{likely_slip(workshop.model, workshop.example)}"
        ) from error


def _bind_recurrent(tracer: Tracer) -> None:
    """Recurrent layers of torch have one hidden size for all layers and directions."""
    for path, module in tracer.model.named_modules():
        if isinstance(module, nn.RNNBase):
            prefix = f"{path}." if path else ""
            rows = [
                index_map.ravel()
                for name, maps in tracer.tensors.items()
                if name.startswith(f"{prefix}weight_hh") and name.rpartition(".")[0] == path
                for index_map in maps
                if support(index_map) == (1,)
            ]
            if len(rows) > 1:
                why = Reason("has one hidden size for all layers and directions", module=path)
                tracer.facts.even.append(Bound(np.stack(rows), why))


def _wiring(model: nn.Module, tracer: Tracer) -> Wiring:
    tensors = list(named_tensors(model))
    names = {id(tensor): name for name, tensor, _ in tensors}
    return Wiring(
        axes=tracer.atoms.axes,
        tensors=tracer.tensors,
        shapes={name: tuple(tensor.shape) for name, tensor, _ in tensors},
        parameters={name for name, _, parameter in tensors if parameter},
        roles=tracer.facts.roles,
        sized=tuple(sized_attributes(model, names)),
        headwise=dict(_attentions(model, names)),
        adapters=adapters_of(model),
    )


def _attentions(model: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, set[str]]]:
    for path, module in model.named_modules():
        if HeadwiseAttention.fits(module):
            yield path, {names[id(weight)] for weight in module.parameters(recurse=False)}


def _refuse_strange(model: object, example: Example) -> None:
    if not isinstance(model, nn.Module):
        raise TraceError(f"trace: {no_model(model)}")
    refuse_scripted("trace", model)
    for name, tensor, _ in named_tensors(model):
        if nn.parameter.is_lazy(tensor):
            raise TraceError(f"tensor {name!r} has no shape yet. Run one forward pass of the lazy module first.")
        if hasattr(tensor, "device_mesh"):
            raise TraceError(f"tensor {name!r} is sharded over processes. Trace and shrink before sharding.")
    for place, argument in (*enumerate(example.arguments), *example.by_name.items()):
        for tensor in tensors_in([argument]):
            if tensor.numel() == 0:
                raise TraceError(
                    f"example: argument {place!r} has a tensor of shape {tuple(tensor.shape)}, without elements, in "
                    f"which nothing can be followed. Give two or more pictures or sequences, none of them empty."
                )
    devices = {tensor.device.type for _, tensor, _ in named_tensors(model)}
    for tensor in tensors_in([*example.arguments, example.by_name]):
        if devices and tensor.device.type not in devices:
            raise TraceError(
                f"example: a tensor is on {tensor.device}, the model on {', '.join(sorted(devices))}. Move one of them."
            )
