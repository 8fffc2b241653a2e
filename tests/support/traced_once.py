"""The zoo's small networks with their graphs, each traced once per process.

A trace takes a hundred times as long as a copy of its result. A test whose subject is the trace itself calls
`keepk.trace`; all others get their network from here.
"""

import copy
from contextlib import contextmanager
from functools import cache
from unittest import mock

import keepk
from keepk.graph.trace import trace_inputs
from keepk.model.example import TraceInputs
from networks import NETWORKS


def traced_network(name):
    """A model, its example and its graph, copied for every call, so that no two callers share mutable state.

    The three are copied together, so that a reference from one to another stays among the copies.
    """
    return copy.deepcopy(_pristine(name))


@cache
def _pristine(name):
    model, example = NETWORKS[name]()
    return model, example, keepk.trace(model, example)


@contextmanager
def traced_before(model, example, graph, caller="keepk.run.checks"):
    """Give this graph to the first trace of `model` in the module `caller`; later traces are real."""
    asked: list[TraceInputs] = []

    def known(inner, inputs):
        if asked:
            return trace_inputs(inner, inputs)
        assert inner is model
        assert inputs == type(inputs).of(example)  # the caller asks for the trace that `graph` comes from
        asked.append(inputs)
        return graph

    with mock.patch(f"{caller}.trace_inputs", known):
        yield
    assert asked
