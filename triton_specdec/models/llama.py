"""A compact Llama-style model in plain PyTorch, with a static cache whose rows have lengths of their own."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from os import PathLike

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from .cache import RowCache, attended


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model; the names are those of the checkpoint's metadata.

    `window` > 0: a token attends to itself and the window - 1 tokens before it. The cache keeps every slot all the
    same, so a truncated row still holds all that its window needs. `eps` is that of every RMSNorm.
    """

    vocab: int
    layers: int
    d: int
    heads: int
    kv: int
    ff: int
    ctx: int
    theta: float = 10000.0
    tie: bool = True
    window: int = 0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d // self.heads


class LlamaCache(RowCache):
    """Static KV cache: keys and values [layers, B, kv heads, capacity, head_dim]."""

    def __init__(self, config: LlamaConfig, batch_size: int, capacity: int, like: torch.Tensor) -> None:
        super().__init__(batch_size, capacity, like.device)
        shape = (config.layers, batch_size, config.kv, capacity, config.head_dim)
        # Zeros, not garbage: a masked slot still meets a weight of 0, and 0 * NaN is NaN.
        self.keys = like.new_zeros(shape)
        self.values = like.new_zeros(shape)
        # What every forward looks up: cosine and sine of each position.
        self.rope = torch.stack(rope_table(config, self.slots), 1)  # [capacity, 2, 1, head_dim]


class _Forward:
    """What all layers of one forward share."""

    def __init__(self, config: LlamaConfig, cache: LlamaCache, count: int) -> None:
        self.reach = cache.reach(count)
        self.rope = cache.rope[self.reach.slots].unbind(2)
        # Query heads of one key head stand below each other, as further rows of queries.
        seen = self.reach.attended(config.window)
        self.mask = seen.repeat(1, config.heads // config.kv, 1)[:, None]  # [B, 1, group * n, stop]


class Block(nn.Module):
    """Attention and feed-forward with residual connections."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.config = c
        self.n1 = nn.RMSNorm(c.d, eps=c.eps)
        self.qkv = nn.Linear(c.d, (c.heads + 2 * c.kv) * c.head_dim, bias=False)
        self.o = nn.Linear(c.heads * c.head_dim, c.d, bias=False)
        self.n2 = nn.RMSNorm(c.d, eps=c.eps)
        self.gu = nn.Linear(c.d, 2 * c.ff, bias=False)
        self.dn = nn.Linear(c.ff, c.d, bias=False)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, ...], cached: _CachedLayer | None) -> torch.Tensor:
        """x [B, n, d]; without a cache the tokens attend to each other, causally."""
        c = self.config
        batch, n, _ = x.shape
        qkv = F.linear(_norm(x, self.n1), self.qkv.weight).view(batch, n, c.heads + 2 * c.kv, c.head_dim)
        qk = rotate(qkv[:, :, : c.heads + c.kv], rope)
        q, k, v = qk[:, :, : c.heads].transpose(1, 2), qk[:, :, c.heads :], qkv[:, :, c.heads + c.kv :]
        if cached is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            at = torch.arange(n, device=x.device)
            mask = attended(at[:, None], at, c.window)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=c.heads != c.kv)
        else:
            out = cached.attend(q, k, v)
        x = x + F.linear(out.transpose(1, 2).reshape(batch, n, c.heads * c.head_dim), self.o.weight)
        gate, up = F.linear(_norm(x, self.n2), self.gu.weight).chunk(2, -1)
        out = F.linear(F.silu(gate) * up, self.dn.weight)
        result: torch.Tensor = x + out
        return result


def _norm(x: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    # The modules hold the weights; calling the functions leaves out their hooks, a tenth of a small model's time.
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


class _CachedLayer:
    """One layer's slice of the cache, for one forward."""

    def __init__(self, cache: LlamaCache, layer: int, forward: _Forward) -> None:
        self.keys, self.values = cache.keys[layer], cache.values[layer]
        self.reach, self.mask = forward.reach, forward.mask

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [B, heads, n, D], k and v [B, n, kv, D]: write, then attend to each row's own prefix."""
        r = self.reach
        self.keys[r.rows, :, r.slots] = k
        self.values[r.rows, :, r.slots] = v
        batch, heads, n, dim = q.shape
        kv = self.keys.shape[1]
        grouped = q.reshape(batch, kv, heads // kv * n, dim)
        keys, values = self.keys[:, :, : r.stop], self.values[:, :, : r.stop]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask)
        return out.view(batch, heads, n, dim)


def rope_table(config: LlamaConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the rotary embedding, [..., 1, head_dim] (half-split layout; Su et al. 2021)."""
    dim = config.head_dim
    inverse = config.theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions[..., None].float() * inverse
    angle = torch.cat([angle, angle], -1)[..., None, :]
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Rotary embedding of x [B, n, heads, head_dim]."""
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos.to(x.dtype), torch.cat([-second, first], -1), sin.to(x.dtype))


class LlamaModel(nn.Module):
    """RMSNorm, rotary embedding, grouped-query attention, SwiGLU; the output head may be the embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab
        self.max_length = config.ctx
        self.emb = nn.Embedding(config.vocab, config.d)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.nf = nn.RMSNorm(config.d, eps=config.eps)
        if not config.tie:
            self.head = nn.Linear(config.d, config.vocab, bias=False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.emb.weight.device

    def new_cache(self, batch_size: int, capacity: int) -> LlamaCache:
        """An empty cache with `capacity` slots a row."""
        return LlamaCache(self.config, batch_size, capacity, self.emb.weight)

    def forward(
        self, tokens: torch.Tensor, cache: LlamaCache | None = None, *, last: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits after each token, as in `Model.forward`; without a cache, of whole sequences [B, n] (training)."""
        batch, count = tokens.shape
        x = self.emb(tokens)
        if cache is None:
            rope = rope_table(self.config, torch.arange(count, device=tokens.device))
            for block in self.blocks:
                x = block(x, rope, None)
        else:
            shared = _Forward(self.config, cache, count)
            for layer, block in enumerate(self.blocks):
                x = block(x, shared.rope, _CachedLayer(cache, layer, shared))
            cache.advance(count)
        if last is not None:
            x = x[torch.arange(batch, device=x.device), last][:, None]
        x = _norm(x, self.nf)
        return F.linear(x, self.emb.weight) if self.config.tie else self.head(x)

    @classmethod
    def load(cls, path: str | PathLike[str], dtype: torch.dtype = torch.float32) -> LlamaModel:
        """Read a safetensors file whose metadata holds the sizes as JSON under "config"."""
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if "config" not in metadata:
                raise ValueError(f"{path} has no 'config' in its metadata: it was not written by LlamaModel.save")
            model = cls(LlamaConfig(**json.loads(metadata["config"])))
            model.load_state_dict({name: file.get_tensor(name).to(dtype) for name in file.keys()})  # noqa: SIM118
        return model.to(dtype).eval().requires_grad_(False)

    def save(self, path: str | PathLike[str], **metadata: str) -> None:
        """Write the weights as float16, and the sizes, to a safetensors file."""
        weights = {name: value.detach().half().contiguous() for name, value in self.state_dict().items()}
        save_file(weights, path, {"config": json.dumps(asdict(self.config)), **metadata})
