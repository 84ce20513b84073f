"""Stand-ins for other projects' functions, by their documented signatures: they show that the calls fit together.

Nothing of the projects' code is here; each function does in plain PyTorch what its documentation says.
"""

from __future__ import annotations

from types import ModuleType

import torch


def draw(weights):
    """One index a row."""
    return torch.multinomial(weights, 1)[:, 0]


def top_k_renorm(probs, top_k):
    """Keep the k largest and renormalise."""
    k = int(torch.as_tensor(top_k).max())
    values, ids = probs.topk(k, -1)
    return torch.zeros_like(probs).scatter_(-1, ids, values / values.sum(-1, keepdim=True))


def top_p_renorm(probs, top_p):
    """Keep the nucleus and renormalise."""
    ranked, ids = probs.sort(-1, descending=True)
    ranked[ranked.cumsum(-1) - ranked >= top_p] = 0
    return torch.zeros_like(probs).scatter_(-1, ids, ranked / ranked.sum(-1, keepdim=True))


def chain(draft_probs, draft_token_ids, target_probs):
    """Rejection along each row: tokens [B, K + 1]."""
    assert draft_token_ids.dtype == torch.int32
    assert draft_probs.dtype == target_probs.dtype == torch.float32
    batch, drafts = draft_token_ids.shape
    out = torch.full((batch, drafts + 1), -1, dtype=torch.int32)
    ids = draft_token_ids.long()[..., None]
    accepts = (
        torch.rand(batch, drafts) * draft_probs.gather(-1, ids)[..., 0] < target_probs[:, :-1].gather(-1, ids)[..., 0]
    )
    number = accepts.long().cumprod(-1).sum(-1)
    for b in range(batch):
        n = int(number[b])
        left = target_probs[b, n] if n == drafts else (target_probs[b, n] - draft_probs[b, n]).clamp(min=0)
        out[b, :n] = draft_token_ids[b, :n]
        out[b, n] = draw(left[None])[0]
    return out, number, number


def flashinfer():
    """flashinfer.sampling."""
    module = ModuleType("flashinfer.sampling")
    module.top_k_renorm_probs, module.top_p_renorm_probs = top_k_renorm, top_p_renorm
    module.chain_speculative_sampling = chain
    module.sampling_from_logits = lambda logits: draw(logits.softmax(-1)).int()
    module.top_p_sampling_from_probs = lambda probs, p: draw(top_p_renorm(probs, p)).int()
    module.min_p_sampling_from_probs = lambda probs, m: draw(probs * (probs >= m * probs.amax(-1, keepdim=True))).int()

    def both(logits, k, p):
        assert logits.dtype == torch.float32
        return draw(top_p_renorm(top_k_renorm(logits.softmax(-1), k), p)).int()

    module.top_k_top_p_sampling_from_logits = both
    return {"flashinfer": ModuleType("flashinfer"), "flashinfer.sampling": module}


def apply_top_k_top_p(logits, k, p):
    """Mask in place, one k and p a row."""
    assert logits.dtype == torch.float32
    ranked, ids = logits.sort(-1, descending=True)
    if k is not None:
        ranked[torch.arange(ranked.shape[-1]) >= k[:, None]] = -torch.inf
    if p is not None:
        probs = ranked.softmax(-1)
        ranked[probs.cumsum(-1) - probs >= p[:, None]] = -torch.inf
    return logits.scatter_(-1, ids, ranked)


def rejection_sample(draft_ids, numbers, most, ends, draft_probs, target_logits, bonus, metadata):
    """The verification of vLLM: flat rows, greedy requests by argmax."""
    drafts, batch = numbers[0], len(numbers)
    assert numbers == [drafts] * batch
    assert most == drafts
    assert ends.tolist() == [drafts * (i + 1) for i in range(batch)]
    assert bonus.shape == (batch, 1)
    p = target_logits.softmax(-1).view(batch, drafts, -1)
    greedy = torch.ones(batch, dtype=torch.bool) if metadata.all_greedy else metadata.temperature == 0
    p[greedy] = torch.nn.functional.one_hot(target_logits.argmax(-1), p.shape[-1]).float().view(p.shape)[greedy]
    ids = draft_ids.view(batch, drafts).int()
    one_hot = torch.nn.functional.one_hot(ids.long(), p.shape[-1]).float()
    q = one_hot if draft_probs is None else draft_probs.view(p.shape)
    out, number, _ = chain(q, ids, torch.cat([p, p[:, -1:]], 1))
    return torch.where((number == drafts)[:, None] & (torch.arange(drafts + 1) == drafts), bonus.int(), out)


def vllm():
    """vllm.v1.sample, as far as it is called."""
    names = ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.ops")
    ops, sampler = ModuleType("topk_topp_sampler"), ModuleType("rejection_sampler")
    ops.apply_top_k_top_p = apply_top_k_top_p
    ops.random_sample = lambda probs, generators: draw(probs)
    sampler.rejection_sample, sampler.GREEDY_TEMPERATURE = rejection_sample, 0
    modules = {name: ModuleType(name) for name in names}
    return {**modules, "vllm.v1.sample.ops.topk_topp_sampler": ops, "vllm.v1.sample.rejection_sampler": sampler}


def tree_speculative_sampling_target_only(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
):
    """Walk each chain; slot i of `predicts` gets the token that follows node i."""
    for b, row in enumerate(candidates):
        node = 0
        while int(retrive_next_token[b, node]) >= 0:
            child = int(retrive_next_token[b, node])
            if uniform_samples[b, node] > target_probs[b, node, row[child]]:
                break
            predicts[retrive_index[b, node]] = int(row[child])
            accept_token_num[b] += 1
            node = child
        left = target_probs[b, node].clone()
        if int(retrive_next_token[b, node]) >= 0:
            left[row[int(retrive_next_token[b, node])]] = 0
        predicts[retrive_index[b, node]] = int(draw(left[None])[0])


def sglang():
    """sgl_kernel, as far as it is called."""
    module = ModuleType("sgl_kernel")
    module.top_k_renorm_prob, module.top_p_renorm_prob = top_k_renorm, top_p_renorm
    module.tree_speculative_sampling_target_only = tree_speculative_sampling_target_only
    return {"sgl_kernel": module}
