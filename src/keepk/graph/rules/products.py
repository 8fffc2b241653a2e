"""Matrix products: merges over a joint index space, then a sum over the contracted dim."""

from torch import Tensor

from keepk.graph.algebra import Operand
from keepk.graph.call import Call
from keepk.graph.label import label_of
from keepk.graph.maps import Map, aligned, support
from keepk.graph.table import rule


@rule("mm", "bmm", "addmm", "baddbmm", "_addmm_activation", "mv", "addmv", "dot", "vdot")
def product(call: Call) -> None:
    """(batch, n, k) times (batch, k, m)."""
    left, right = _factors(call)
    sizes = _sizes(left, right)
    maps = call.contract(
        (
            Operand([_as_left(m, left.ndim) for m in call.maps(left)], (sizes[0], sizes[1], 1, sizes[2])),
            Operand([_as_right(m, right.ndim) for m in call.maps(right)], (sizes[3], 1, sizes[4], sizes[2])),
        ),
        3,
        "is multiplied",
    )
    _note_roles(call, left, right)
    _refuse_sum_of_nonzero(call, left, right)
    output = call.outputs[0]
    shaped = [m.reshape(m.shape[:3])[_kept_dims(left, right)] for m in maps]
    if "input" not in call.arguments and not call.name.startswith("aten::add") and call.name != "aten::baddbmm":
        call.leave(shaped, zero=_product_zero(left, right))
        return
    added = call["self"]
    merged = call.merge([Operand(shaped, tuple(output.shape)), call.operand(added, output.ndim)], "is added")
    call.leave(merged, zero=_product_zero(left, right) and label_of(added).zero)


@rule("addbmm")
def batch_of_products(call: Call) -> None:
    """Its products are added up over the batch, which `product` keeps."""
    call.pin_inputs("sums over a batch")


def _factors(call: Call) -> tuple[Tensor, Tensor]:
    tensors = call.inputs[-2:]
    return tensors[0], tensors[1]


def _sizes(left: Tensor, right: Tensor) -> tuple[int, int, int, int, int]:
    """Batch of the left, n, k, batch of the right, m."""
    batch_left = left.shape[0] if left.ndim == 3 else 1
    batch_right = right.shape[0] if right.ndim == 3 else 1
    rows = left.shape[-2] if left.ndim > 1 else 1
    columns = right.shape[-1] if right.ndim > 1 else 1
    return batch_left, rows, left.shape[-1], batch_right, columns


def _as_left(index_map: Map, rank: int) -> Map:
    """(batch, n, 1, k)."""
    return aligned(index_map, 3)[:, :, None, :] if rank else index_map.reshape(1, 1, 1, 1)


def _as_right(index_map: Map, rank: int) -> Map:
    """(batch, 1, m, k)."""
    column = index_map[:, None] if rank == 1 else index_map
    return aligned(column, 3).transpose(0, 2, 1)[:, None, :, :]


def _kept_dims(left: Tensor, right: Tensor) -> tuple[int | slice, ...]:
    """Which of (batch, n, m) the result has."""
    batch = slice(None) if max(left.ndim, right.ndim) == 3 else 0
    rows = slice(None) if left.ndim > 1 else 0
    columns = slice(None) if right.ndim > 1 else 0
    return (batch, rows, columns)


def _note_roles(call: Call, left: Tensor, right: Tensor) -> None:
    if label_of(right).own:
        call.weight_of(right, read=right.ndim - 2 if right.ndim > 1 else 0, produced=right.ndim - 1)
        call.read_by(call.module or "model", call.maps(left), (left.ndim - 1,))
    elif label_of(left).own:
        call.weight_of(left, read=left.ndim - 1, produced=max(left.ndim - 2, 0))
        call.read_by(call.module or "model", call.maps(right), (max(right.ndim - 2, 0),))
    else:
        call.read_by("a product", call.maps(left), (left.ndim - 1,))
        call.read_by("a product", call.maps(right), (max(right.ndim - 2, 0),))


def _refuse_sum_of_nonzero(call: Call, left: Tensor, right: Tensor) -> None:
    """A removed channel must vanish from the sum: one of the two factors is then zero."""
    if not (label_of(left).zero or label_of(right).zero):
        for index_map in call.maps(left):
            call.lossy(index_map, (left.ndim - 1,), "sums over channels that do not vanish")


def _product_zero(left: Tensor, right: Tensor) -> bool:
    """A removed row or column is zero if its own factor is. A factor with channels along the sum alone has neither."""
    summed = ((left, left.ndim - 1), (right, max(right.ndim - 2, 0)))
    zeros = [
        label_of(tensor).zero
        for tensor, dim in summed
        if any(set(support(index_map)) - {dim} for index_map in label_of(tensor).maps)
    ]
    return bool(zeros) and all(zeros)


@rule("_trilinear")
def bilinear(call: Call) -> None:
    """Sum over i and j of left (n, i) times weight (o, i, j) times right (n, j), in the joint index space (n, o, i, j).

    A product with one input, then one with the other. Nothing but `torch.nn.functional.bilinear` calls it.
    """
    left, weight, right = call["i1"], call["i2"], call["i3"]
    layout = [list(call[name]) for name in ("expand1", "expand2", "expand3", "sumdim")]
    if layout != [[1, 3], [0], [1, 2], [2, 3]]:
        call.pin_inputs("a trilinear product of this layout has no rule")
        return
    rows, (outs, lefts, rights) = left.shape[0], weight.shape
    inner = Operand([m[None] for m in call.maps(weight)], (1, outs, lefts, rights))
    one = Operand([m[:, None, :, None] for m in call.maps(left)], (rows, 1, lefts, 1))
    other = Operand([m[:, None, None, :] for m in call.maps(right)], (rows, 1, 1, rights))
    half = Operand(call.contract((one, inner), 2, "is multiplied"), (rows, outs, 1, rights))
    maps = call.contract((half, other), 3, "is multiplied")
    call.weight_of(weight, read=1, produced=0)
    call.weight_of(weight, read=2, produced=0)
    for tensor in (left, right):
        call.read_by(call.module or "model", call.maps(tensor), (1,))
        if not (label_of(tensor).zero or label_of(weight).zero):
            for index_map in call.maps(tensor):
                call.lossy(index_map, (1,), "sums over channels that do not vanish")
    call.leave([m[:, :, 0, 0] for m in maps], zero=label_of(weight).zero)


@rule("_grouped_mm")
def experts(call: Call) -> None:
    """Rows of tokens times one matrix for each expert: the experts stay."""
    tokens, weights = call.inputs[0], call.inputs[1]
    if tokens.ndim != 2 or weights.ndim != 3:
        call.pin_inputs("grouped products of this shape have no rule")
        return
    shared = []
    for index_map in call.maps(weights):
        if index_map.shape[0] > 1:
            call.pin(index_map, "experts are picked by index")
        else:
            shared.append(index_map.transpose(0, 2, 1))
    maps = call.contract(
        (
            Operand([m[:, None, :] for m in call.maps(tokens)], (tokens.shape[0], 1, tokens.shape[1])),
            Operand(shared, (1, weights.shape[2], weights.shape[1])),
        ),
        2,
        "is multiplied",
    )
    call.weight_of(weights, read=1, produced=2)
    call.read_by(call.module or "model", call.maps(tokens), (1,))
    call.leave([m[:, :, 0] for m in maps], zero=_product_zero(tokens, weights))
