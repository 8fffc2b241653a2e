"""Every private name of torch that keepk uses, in one place, checked when keepk is imported.

torch changes names with a leading underscore, and modules such as ``torch.utils._pytree``, without notice. A version of
torch that lacks one of them fails here, with that name, not in the middle of a run. keepk is tested with torch 2.13.
"""

import torch

try:
    from torch._C import DisableTorchFunction
    from torch._C import _current_graph_task_id as current_graph_task_id
    from torch._C import _get_mkldnn_enabled as get_mkldnn_enabled
    from torch._C import _LinAlgError as LinAlgError  # type: ignore[attr-defined]  # missing in torch's types
    from torch._C import _set_mkldnn_enabled as set_mkldnn_enabled
    from torch._C import _will_engine_execute_node as will_engine_execute
    from torch._ops import OpOverload, OpOverloadPacket
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.nn.utils.parametrizations import _WeightNorm as WeightNormParametrization
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

    make_subclass = torch.Tensor._make_subclass
except (ImportError, AttributeError) as missing:
    raise ImportError(
        f"keepk uses internals of torch, and torch {torch.__version__} lacks one of them: {missing}. "
        f"Install a version that keepk is tested with: pip install torch==2.13.0"
    ) from missing

__all__ = [
    "BatchNormBase",
    "DisableTorchFunction",
    "LinAlgError",
    "NormBase",
    "OpOverload",
    "OpOverloadPacket",
    "StorageWeakRef",
    "TorchDispatchMode",
    "WeightNormParametrization",
    "current_graph_task_id",
    "disable_current_modes",
    "get_mkldnn_enabled",
    "make_subclass",
    "set_mkldnn_enabled",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "will_engine_execute",
]
