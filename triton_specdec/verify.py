"""Accept, residual, bonus: which drafted tokens stand, and the token after them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import backend as backends
from . import checks
from .filter import FilteredLogits
from .sample import position_rows, seed_rows, unit_interval

RULES = ("rejection", "block", "coupled")


class VerifyResult(NamedTuple):
    """What one round emits, for B requests with K drafts each.

    Attributes
    ----------
    tokens : int64 [B, K + 1]
        Accepted drafts, then the recovered or bonus token, then -1.
    num_accepted : int32 [B]
        0 .. K.
    num_emitted : int32 [B]
        num_accepted + 1.
    log_probs : float32 [B, K + 1]
        Log-probability of each emitted token under the (filtered) target; 0 behind them.
    status : int32 [B]
        Bits of `Status` of what the row used; 0 where all is well.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    num_emitted: torch.Tensor
    log_probs: torch.Tensor
    status: torch.Tensor


def verify(
    draft_tokens: torch.Tensor,
    target: FilteredLogits | torch.Tensor,
    draft: FilteredLogits | torch.Tensor | None = None,
    *,
    num_draft_tokens: torch.Tensor | None = None,
    rule: str = "rejection",
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    backend: str | None = None,
) -> VerifyResult:
    """Verify drafted tokens: between 1 and K + 1 tokens a row, with exactly the target's law.

    Parameters
    ----------
    draft_tokens : ints [B, K]
        An id outside [0, V), such as a -1 pad, ends the row's drafts.
    target : FilteredLogits or float probabilities [B, K + 1, V]
        The distribution after 0 .. K drafted tokens.
    draft : FilteredLogits or float probabilities [B, K, Vq], Vq <= V, optional
        What each draft was drawn from; missing ids have q = 0. None: a deterministic draft (q is one-hot). Rule
        "coupled" compares tokens and does not look at it.
    num_draft_tokens : ints [B], optional
        Drafts of each row; what lies behind is not looked at.
    rule : "rejection", "block" or "coupled"
        Token by token (Leviathan et al. 2023, algorithm 1; Chen et al. 2023). As a block, which never accepts fewer in
        expectation (Sun et al. 2024, algorithm 2). Or accept while the draft is what plain Gumbel sampling with the
        row's seed gives, which makes the text independent of the draft.
    seeds : int64 [B], optional
        None: from torch's generator.
    positions : ints [B], optional
        Absolute position of the first draft token; 0 where not given. Test i uses positions + i, the draw
        positions + accepted. Under "block" test i uses number i of the first position (see Notes).
    uniforms : float64 [B, K + 1] in [0, 1), optional
        Instead of seeds: K accept tests, then the draw. Not for rule "coupled".
    backend : "reference" or "triton", optional
        For given probabilities; by default what fits the device. Filtered logits bring their own.

    Returns
    -------
    VerifyResult

    Raises
    ------
    TypeError, ValueError
        For a wrong type, dtype, shape or device, and for an unknown rule.

    Notes
    -----
    A block is accepted or not by all of its drafts and tests, so nothing that decided one round may decide another.
    For rule "block", draw the drafts by ``sample(..., positions=first, steps=i, stream="draft")``. For "rejection",
    positions + i is right: what lies behind the first rejection has decided nothing.

    Examples
    --------
    >>> import torch
    >>> p = torch.tensor([[[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]])
    >>> q = torch.tensor([[[0.2, 0.5, 0.3]]])
    >>> u = torch.tensor([[0.9, 0.5]], dtype=torch.float64)
    >>> verify(torch.tensor([[1]]), p, q, uniforms=u).tokens.tolist()
    [[0, -1]]
    """
    checks.choice("rule", rule, RULES)
    checks.tensor("draft_tokens", draft_tokens, checks.INT_DTYPES, (None, None))
    batch, num_drafts = draft_tokens.shape
    device = draft_tokens.device
    own, vocab = _law("target", target, batch, num_drafts + 1, device)
    draft_own = None
    if draft is not None:
        draft_own, draft_vocab = _law("draft", draft, batch, num_drafts, device)
        if draft_vocab > vocab:
            raise ValueError(f"draft has {draft_vocab} ids, more than the target's {vocab}")
    for name, given in (("target", own), ("draft", draft_own)):
        wanted = backend or own or draft_own
        if given is not None and given != wanted:
            raise ValueError(f"{name} was filtered by backend {given!r}, but backend {wanted!r} is to verify")
    chosen = own or draft_own or backends.resolve(backend, device)
    if num_draft_tokens is None:
        num_draft_tokens = torch.full((batch,), num_drafts, dtype=torch.int64, device=device)
    checks.tensor("num_draft_tokens", num_draft_tokens, checks.INT_DTYPES, (batch,))
    checks.same_device("num_draft_tokens", num_draft_tokens, "draft_tokens", device)
    rows = torch.Size([batch])
    if rule == "coupled":
        if uniforms is not None:
            raise ValueError("rule='coupled' needs noise for every token: pass seeds, not uniforms")
        if not isinstance(target, FilteredLogits):
            raise TypeError("rule='coupled' needs target as FilteredLogits (see filter_logits), not probabilities")
    u = None
    if uniforms is not None:
        if seeds is not None or positions is not None:
            raise ValueError("uniforms are given instead of seeds and positions: pass one or the other")
        checks.tensor("uniforms", uniforms, (torch.float64,), (batch, num_drafts + 1))
        u = unit_interval("uniforms", uniforms, uniforms.shape, device)
    keys: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)
    if u is None:
        keys = (seed_rows(seeds, rows, device), position_rows("positions", positions, rows, device))
    args = (draft_tokens.long(), target, draft, num_draft_tokens.long(), rule, *keys, u)
    out: VerifyResult = backends.layer(chosen).verify(*args)
    return out


class VerifyTreeResult(NamedTuple):
    """What one walk through a draft tree emits, for B requests with N nodes each.

    Attributes
    ----------
    tokens : int64 [B, N]
        The tokens of the accepted nodes, then the target's own next token, then -1.
    nodes : int32 [B, N - 1]
        The accepted nodes in order, without the anchor, then -1: what `compact_kv_` moves.
    num_accepted : int32 [B]
        0 .. N - 1.
    num_emitted : int32 [B]
        num_accepted + 1.
    log_probs : float32 [B, N]
        Log-probability of each emitted token under the (filtered) target; 0 behind them.
    status : int32 [B]
        Bits of `Status` of the nodes on the path; 0 where all is well.
    """

    tokens: torch.Tensor
    nodes: torch.Tensor
    num_accepted: torch.Tensor
    num_emitted: torch.Tensor
    log_probs: torch.Tensor
    status: torch.Tensor


def verify_tree(
    tree_tokens: torch.Tensor,
    parents: torch.Tensor,
    target: FilteredLogits,
    *,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> VerifyTreeResult:
    """Verify a tree of deterministic drafts: the text is that of plain Gumbel sampling with the row's seed.

    At each node the target's token is drawn with the noise of its depth, as under rule "coupled"; the walk goes on to
    the child that holds this token (the first of equal ones), and stops where none does.

    Parameters
    ----------
    tree_tokens : ints [B, N]
        Node 0 is the anchor; its token is not looked at.
    parents : ints [B, N]
        Each node's parent, which stands before it; -1 for node 0 and for padding behind the tree.
    target : FilteredLogits [B, N, V]
        Row n: the distribution after node n.
    seeds : int64 [B], optional
        None: from torch's generator.
    positions : ints [B], optional
        Absolute position of the token after the anchor; 0 where not given.

    Returns
    -------
    VerifyTreeResult

    Raises
    ------
    TypeError, ValueError
        For a wrong type, dtype, shape or device, and (CPU tensors) for a parent that does not stand before its child.

    Examples
    --------
    >>> import torch
    >>> from triton_specdec import filter_logits
    >>> logits = torch.tensor([[[0.0, 9, 0], [0, 0, 9], [9, 0, 0]]])
    >>> tree = torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 0]])
    >>> verify_tree(*tree, filter_logits(logits, temperature=0.0)).tokens.tolist()
    [[1, 2, -1]]
    """
    checks.tensor("tree_tokens", tree_tokens, checks.INT_DTYPES, (None, None))
    batch, size = tree_tokens.shape
    device = tree_tokens.device
    if size < 1:
        raise ValueError("tree_tokens must have at least the anchor, got shape " + str(list(tree_tokens.shape)))
    checks.tensor("parents", parents, checks.INT_DTYPES, (batch, size))
    checks.same_device("parents", parents, "tree_tokens", device)
    if not isinstance(target, FilteredLogits):
        raise TypeError(f"target must be FilteredLogits (see filter_logits), got {type(target).__name__}")
    backend, _ = _law("target", target, batch, size, device)
    assert backend is not None
    if device.type == "cpu" and ((parents < -1) | (parents >= torch.arange(size).clamp(min=0))).any():
        raise ValueError("parents must be -1 or stand before their children")
    rows = torch.Size([batch])
    keys = seed_rows(seeds, rows, device), position_rows("positions", positions, rows, device)
    layer = backends.layer(backend)
    out: VerifyTreeResult = layer.verify_tree(tree_tokens.long(), parents.long(), target, *keys)
    return out


def _law(name: str, law: object, batch: int, rows: int, device: torch.device) -> tuple[str | None, int]:
    """Backend (None for probabilities) and vocabulary of a checked target or draft."""
    tensor = law.logits if isinstance(law, FilteredLogits) else law
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be FilteredLogits or a tensor of probabilities, got {type(law).__name__}")
    given = () if isinstance(law, FilteredLogits) else (torch.float64,)
    checks.tensor(name, tensor, (*checks.LOGIT_DTYPES, *given), (batch, rows, None))
    if tensor.shape[-1] < 1:
        raise ValueError(f"{name} must have at least one id, got shape {list(tensor.shape)}")
    checks.same_device(name, tensor, "draft_tokens", device)
    return law.backend if isinstance(law, FilteredLogits) else None, tensor.shape[-1]
