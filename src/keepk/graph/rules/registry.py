"""The table of rules, which say for each operation what it does to index maps.

Built-in rules and users' rules are registered in the same way, through `rule`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from keepk.errors import TraceError
from keepk.graph.rules.call import Call, is_pointwise
from keepk.model.torch_internals import OpOverload, OpOverloadPacket
from keepk.plan.names import shown

Rule: TypeAlias = Callable[[Call], None]

RULES: dict[str, Rule] = {}


def rule(*operations: Any) -> Callable[[Rule], Rule]:
    """Register a rule for an operation that the trace does not know.

    An operation without a rule pins every channel that it reads, since nothing is known about what it does with them.
    A rule is a function of a `Call`, which is called after the operation ran. It labels the outputs
    (`Call.label_output`), and records what the operation requires of its channels: `Call.merge`, `Call.pin`,
    `Call.mark_lossy`, `Call.require_equal_rows`, `Call.require_grid`. For an operation that works on each element by
    itself, `Call.pointwise` does both.

    Args:
        operations: One or more operations that the rule applies to, each as ``torch.ops.library.name`` (with or without
            an overload), as the object that ``torch.library.custom_op`` returned, or as a name such as
            ``"mylib::scale"``. A name without a library means ``aten``. In-place variants share the rule of the
            operation: ``aten::add`` also covers ``aten::add_``.

    Returns:
        A decorator that registers the rule and returns it unchanged.

    Raises:
        TraceError: If the operation already has a rule, or is not an operation.

    Examples:
        >>> import keepk, torch
        >>> from torch import nn
        >>> @torch.library.custom_op("docs::double", mutates_args=())
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> @double.register_fake
        ... def _(x):
        ...     return torch.empty_like(x)
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        ...     def forward(self, x):
        ...         return self.b(torch.ops.docs.double(self.a(x)))
        >>> net, x = Net(), torch.zeros(2, 4)
        >>> len(keepk.trace(net, x).units)  # without a rule, the 8 channels between the layers are pinned
        0
        >>> @keepk.rule(torch.ops.docs.double)
        ... def double_rule(call):
        ...     call.pointwise()
        >>> len(keepk.trace(net, x).units)
        8
    """

    def register(function: Rule) -> Rule:
        for operation in operations:
            name = _name(operation)
            # A second rule is refused instead of replacing the first: which one won would depend on the import order.
            if name in RULES:
                known = RULES[name].__name__
                raise TraceError(f"rule for {name}: already registered, by {shown(known)}. An operation has one rule.")
            RULES[name] = function
        return function

    return register


def rule_for(call: Call) -> Rule | None:
    """The rule of an operation, if it has one; operations that torch tags as pointwise share one rule."""
    # The table comes first: torch also tags max, min and equal as pointwise, which may reduce or compare all values.
    found = RULES.get(call.name)
    if found is None and is_pointwise(call.operation):
        return Call.pointwise
    return found


def _name(operation: Any) -> str:
    """The qualified name of an operation, without its overload."""
    if isinstance(operation, str):
        return operation if "::" in operation else f"aten::{operation}"
    if isinstance(operation, OpOverload):
        return operation._schema.name
    if isinstance(operation, OpOverloadPacket):
        return operation._qualified_op_name
    if isinstance(operation, torch.library.CustomOpDef):  # type: ignore[attr-defined]  # public, and not exported
        return operation._qualname
    raise TraceError(
        f"rule: got {shown(operation)} ({type(operation).__name__}). Pass an operation such as torch.ops.mylib.scale, "
        f"or its name, 'mylib::scale'."
    )
