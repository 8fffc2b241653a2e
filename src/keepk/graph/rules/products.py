"""Matrix products: a merge in the joint index space, then a sum over the contracted dim.

``(batch, n, k) @ (batch, k, m)`` is a product over (batch, n, m, k), summed over k. All products here are brought to
that layout, with dims of size 1 where a factor does not have them.
"""

from torch import Tensor

from keepk.graph.ids.atoms import label_of
from keepk.graph.ids.maps import Map, aligned
from keepk.graph.ids.merge import Operand, Tracked
from keepk.graph.rules.call import Call
from keepk.graph.rules.registry import rule


@rule("mm", "bmm", "addmm", "baddbmm", "_addmm_activation", "mv", "addmv", "dot", "vdot")
def product(call: Call) -> None:
    """Contract k of (batch, n, k) times (batch, k, m), and merge with an addend if there is one."""
    left, right = call.inputs[-2:]  # of addmm(self, mat1, mat2) the last two are the factors
    sizes = _sizes(left, right)
    tracked = call.contract(
        (
            call.shaped_operand(left, lambda m: _as_left(m, left.ndim), (sizes[0], sizes[1], 1, sizes[2])),
            call.shaped_operand(right, lambda m: _as_right(m, right.ndim), (sizes[3], 1, sizes[4], sizes[2])),
        ),
        3,
        "is multiplied",
    )
    _note_roles(call, left, right)
    output = call.outputs[0]
    shaped = [m.reshape(m.shape[:3])[_kept_dims(left, right)] for m, _ in tracked]
    zeros = [zero for _, zero in tracked]
    if "input" not in call.arguments and not call.name.startswith("aten::add") and call.name != "aten::baddbmm":
        call.label_output(shaped, zero=zeros)
        return
    operands = [Operand(shaped, tuple(output.shape), zeros), call.operand(call["self"], output.ndim)]
    merged = call.merge(operands, "is added")
    call.label_output(merged, zero=[all(operand.zero_along(m) for operand in operands) for m in merged])


@rule("addbmm")
def batch_of_products(call: Call) -> None:
    """Pin everything: addbmm sums over the batch too, and the layout of `product` keeps the batch."""
    call.pin_inputs("sums over a batch")


def _sizes(left: Tensor, right: Tensor) -> tuple[int, int, int, int, int]:
    """The sizes of the left batch, n, k, the right batch, and m."""
    batch_left = left.shape[0] if left.ndim == 3 else 1
    batch_right = right.shape[0] if right.ndim == 3 else 1
    rows = left.shape[-2] if left.ndim > 1 else 1
    columns = right.shape[-1] if right.ndim > 1 else 1
    return batch_left, rows, left.shape[-1], batch_right, columns


def _as_left(index_map: Map, rank: int) -> Map:
    """A map of the left factor as (batch, n, 1, k)."""
    return aligned(index_map, 3)[:, :, None, :] if rank else index_map.reshape(1, 1, 1, 1)


def _as_right(index_map: Map, rank: int) -> Map:
    """A map of the right factor as (batch, 1, m, k)."""
    column = index_map[:, None] if rank == 1 else index_map
    return aligned(column, 3).transpose(0, 2, 1)[:, None, :, :]


def _kept_dims(left: Tensor, right: Tensor) -> tuple[int | slice, ...]:
    """An index that removes those of (batch, n, m) that the result does not have."""
    batch = slice(None) if max(left.ndim, right.ndim) == 3 else 0
    rows = slice(None) if left.ndim > 1 else 0
    columns = slice(None) if right.ndim > 1 else 0
    return (batch, rows, columns)


def _note_roles(call: Call, left: Tensor, right: Tensor) -> None:
    """Record which factor is a weight, and who reads the channels of the other one."""
    # F.linear(x, w) is x @ w.T, so the weight is usually on the right. Of two activations (queries and keys) neither
    # produces channels; both are read by the product.
    if label_of(right).from_parameters:
        call.note_weight(right, read=right.ndim - 2 if right.ndim > 1 else 0, produced=right.ndim - 1)
        call.note_reader(call.module or "model", call.maps(left), (left.ndim - 1,))
    elif label_of(left).from_parameters:
        call.note_weight(left, read=left.ndim - 1, produced=max(left.ndim - 2, 0))
        call.note_reader(call.module or "model", call.maps(right), (max(right.ndim - 2, 0),))
    else:
        call.note_reader("a product", call.maps(left), (left.ndim - 1,))
        call.note_reader("a product", call.maps(right), (max(right.ndim - 2, 0),))


@rule("_trilinear")
def bilinear(call: Call) -> None:
    """Contract i and j of left (n, i) times weight (o, i, j) times right (n, j), in the joint space (n, o, i, j)."""
    left, weight, right = call["i1"], call["i2"], call["i3"]
    # The operation is general, but only torch.nn.functional.bilinear calls it, always with this layout.
    layout = [list(call[name]) for name in ("expand1", "expand2", "expand3", "sumdim")]
    if layout != [[1, 3], [0], [1, 2], [2, 3]]:
        call.pin_inputs("a trilinear product of this layout has no rule")
        return
    rows, (outs, lefts, rights) = left.shape[0], weight.shape
    inner = call.shaped_operand(weight, lambda m: m[None], (1, outs, lefts, rights))
    one = call.shaped_operand(left, lambda m: m[:, None, :, None], (rows, 1, lefts, 1))
    other = call.shaped_operand(right, lambda m: m[:, None, None, :], (rows, 1, 1, rights))
    # Two contractions one after the other, each with the rules of a matrix product.
    half = call.contract((one, inner), 2, "is multiplied")
    between = Operand([m for m, _ in half], (rows, outs, 1, rights), [zero for _, zero in half])
    tracked = call.contract((between, other), 3, "is multiplied")
    call.note_weight(weight, read=1, produced=0)
    call.note_weight(weight, read=2, produced=0)
    for tensor in (left, right):
        call.note_reader(call.module or "model", call.maps(tensor), (1,))
    call.label_output([m[:, :, 0, 0] for m, _ in tracked], zero=[zero for _, zero in tracked])


@rule("_grouped_mm")
def experts(call: Call) -> None:
    """Contract tokens with one matrix for each expert; the experts are pinned, since tokens pick them by index."""
    tokens, weights = call.inputs[0], call.inputs[1]
    if tokens.ndim != 2 or weights.ndim != 3:
        call.pin_inputs("grouped products of this shape have no rule")
        return
    label = label_of(weights)
    shared = list[Tracked]()
    for index_map, zero in zip(label.maps, label.zeros, strict=True):
        if index_map.shape[0] > 1:
            call.pin(index_map, "experts are picked by index")
        else:
            shared.append(Tracked(index_map.transpose(0, 2, 1), zero))
    tracked = call.contract(
        (
            call.shaped_operand(tokens, lambda m: m[:, None, :], (tokens.shape[0], 1, tokens.shape[1])),
            Operand([m for m, _ in shared], (1, weights.shape[2], weights.shape[1]), [zero for _, zero in shared]),
        ),
        2,
        "is multiplied",
    )
    call.note_weight(weights, read=1, produced=2)
    call.note_reader(call.module or "model", call.maps(tokens), (1,))
    call.label_output([m[:, :, 0] for m, _ in tracked], zero=[zero for _, zero in tracked])
