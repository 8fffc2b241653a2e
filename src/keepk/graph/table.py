"""The table of rules: an operation, and what it does to index maps.

The built-in rules and a user's own come through the same door, `rule`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from keepk.errors import TraceError
from keepk.graph.call import Call, is_pointwise
from keepk.plan.names import shown

Rule: TypeAlias = Callable[[Call], None]

RULES: dict[str, Rule] = {}


def rule(*operations: Any) -> Callable[[Rule], Rule]:
    """Teach the trace an operation.

    The rule is called after the operation ran. It labels the outputs (`Call.leave`) and writes down what the operation
    binds together (`Call.merge`, `Call.even`, `Call.pin`, `Call.lossy`). An operation without a rule pins every channel
    that goes into it.

    Args:
        operations: What ``torch.ops.library.name`` gives, or its name, such as ``"mylib::scale"``.

    Examples:
        >>> import keepk, torch
        >>> @torch.library.custom_op("docs::double", mutates_args=())
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> @keepk.rule(torch.ops.docs.double)
        ... def double_rule(call):
        ...     call.pointwise()
    """

    def register(function: Rule) -> Rule:
        for operation in operations:
            name = _name(operation)
            if name in RULES:
                known = RULES[name].__name__
                raise TraceError(f"rule for {name}: there is one already, {shown(known)}. An operation has one rule.")
            RULES[name] = function
        return function

    return register


def rule_for(call: Call) -> Rule | None:
    """The rule of an operation; those that torch calls pointwise need none of their own."""
    found = RULES.get(call.name)
    if found is None and is_pointwise(call.operation):
        return Call.pointwise
    return found


def _name(operation: Any) -> str:
    if isinstance(operation, str):
        return operation if "::" in operation else f"aten::{operation}"
    if isinstance(operation, torch._ops.OpOverload):
        return operation._schema.name
    if isinstance(operation, torch._ops.OpOverloadPacket):
        return operation._qualified_op_name
    if isinstance(operation, torch.library.CustomOpDef):  # type: ignore[attr-defined]  # public, and not exported
        return operation._qualname
    raise TraceError(
        f"rule: got {shown(operation)} ({type(operation).__name__}). Give an operation such as "
        f"torch.ops.mylib.scale, or "
        f"its name, 'mylib::scale'."
    )
