"""Draft trees on the device: one program walks the tree of a request, and reads the logits of the nodes it visits.

At each node the target's token is drawn with the noise of its depth; the walk goes on to the child that holds it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..filter import FilteredLogits
from ..verify import VerifyTreeResult
from .law import any_bits, law_of, row_of, row_status, support_of, token_probs
from .rules import PAD_TOKEN, is_child
from .sample import draw_by_gumbel
from .tiles import tiling


@triton.jit
def _tree_kernel(
    target,  # Law [B * N]
    tree_ptr,  # [B, N]
    parent_ptr,  # [B, N]
    seed_ptr,  # [B]
    position_ptr,  # [B]
    list_ptr,  # [B, T] scratch
    token_ptr,  # [B, N]
    node_ptr,  # [B, N - 1]
    accepted_ptr,  # [B]
    emitted_ptr,  # [B]
    log_prob_ptr,  # [B, N]
    status_ptr,  # [B]
    size,
    zero,
    HAS_MASK: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    NODES: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, NODES)
    parents = tl.load(parent_ptr + b * size + lane, mask=lane < size, other=PAD_TOKEN)
    tokens = tl.load(tree_ptr + b * size + lane, mask=lane < size, other=PAD_TOKEN)
    tl.store(token_ptr + b * size + lane, tl.full([NODES], PAD_TOKEN, tl.int64), mask=lane < size)
    tl.store(node_ptr + b * (size - 1) + lane, tl.full([NODES], PAD_TOKEN, tl.int32), mask=lane < size - 1)
    tl.store(log_prob_ptr + b * size + lane, tl.zeros([NODES], tl.float32), mask=lane < size)
    tl.debug_barrier()
    seed = tl.load(seed_ptr + b)
    position = tl.load(position_ptr + b)
    status = tl.full([], 0, tl.int32)
    node = tl.full([], 0, tl.int32)
    depth = tl.full([], 0, tl.int32)
    while node < size:
        at = b * size + node
        row = row_of(target, at, list_ptr + b * target.num_tiles, zero, ALIGNED)
        drawn = draw_by_gumbel(row, support_of(target, at), seed, position + depth, HAS_MASK, WIDTH, PADDED)
        here = at + tl.zeros([1], tl.int64)
        token = drawn + tl.zeros([1], tl.int64)
        _, log_p = token_probs(target, here, token, here >= 0, zero, "logits", HAS_MASK, ALIGNED)
        status = status | any_bits(row_status(target, here, here >= 0, "logits"))
        one = tl.zeros([1], tl.int32)
        tl.store(token_ptr + b * size + depth + one, token)
        tl.store(log_prob_ptr + b * size + depth + one, log_p.to(tl.float32))
        # No child: the walk ends behind the last node.
        node = tl.min(tl.where(is_child(lane, parents, node, tokens, drawn), lane, size), 0)
        tl.store(node_ptr + b * (size - 1) + depth, node, mask=node < size)
        depth += 1
    tl.store(accepted_ptr + b, depth - 1)
    tl.store(emitted_ptr + b, depth)
    tl.store(status_ptr + b, status)


def verify_tree(
    tree_tokens: torch.Tensor,
    parents: torch.Tensor,
    target: FilteredLogits,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> VerifyTreeResult:
    """See `triton_specdec.verify_tree`. One launch on descriptors."""
    (batch, size), device = tree_tokens.shape, tree_tokens.device
    accepted = torch.empty(batch, dtype=torch.int32, device=device)
    out = VerifyTreeResult(
        torch.empty(batch, size, dtype=torch.int64, device=device),
        torch.empty(batch, size - 1, dtype=torch.int32, device=device),
        accepted,
        torch.empty_like(accepted),
        torch.empty(batch, size, dtype=torch.float32, device=device),
        torch.empty_like(accepted),
    )
    if batch:
        law, form = law_of(target)
        cut = tiling(target.logits.shape[-1])
        _tree_kernel[(batch,)](
            law,
            tree_tokens.contiguous(),
            parents.contiguous(),
            seeds.contiguous(),
            positions.contiguous(),
            torch.empty(batch, cut.tiles, dtype=torch.int32, device=device),
            *out,
            size,
            0,
            HAS_MASK=form.has_mask,
            ALIGNED=form.aligned,
            WIDTH=cut.width,
            PADDED=cut.padded,
            NODES=max(2, triton.next_power_of_2(size)),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out
