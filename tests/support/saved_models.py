"""Helpers that compare a saved model with the original, and check that a refused load changes nothing."""

from pathlib import Path

import pytest
import torch

import keepk
from keepk.errors import FileError


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def looks(model):
    """Everything that a refused load must not change."""
    state = {name: (id(tensor), tensor.data_ptr(), tensor.clone()) for name, tensor in named(model).items()}
    modules = {path: (type(module), dict(vars(module))) for path, module in model.named_modules()}
    plain = {path: (kind, {k: v for k, v in own.items() if k[0] != "_"}) for path, (kind, own) in modules.items()}
    return state, plain


def named(model):
    return dict([*model.named_parameters(), *model.named_buffers()])


def unchanged(model, before):
    state, modules = looks(model)
    assert modules == before[1]
    assert state.keys() == before[0].keys()
    for name, (identity, address, value) in state.items():
        assert (identity, address) == before[0][name][:2]
        assert torch.equal(value, before[0][name][2])


def refused(folder, model, match):
    before = looks(model)
    with pytest.raises(FileError, match=match):
        keepk.load(model, folder)
    unchanged(model, before)
