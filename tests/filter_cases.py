"""Rows of logits and filters that kernels are compared with the reference on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from triton_specdec import FilteredLogits, filter_logits

REAL = Path(__file__).parent / "data" / "real_logits.npz"

# temperature, top_k, top_p, min_p, min_tokens_to_keep
FILTERS = [
    (1.0, 0, 1.0, 0.0, 1),
    (0.0, 50, 0.9, 0.0, 3),
    (0.7, 0, 1.0, 0.0, 1),
    (1.0, 1, 1.0, 0.0, 1),
    (1.0, 50, 1.0, 0.0, 1),
    (0.8, 50, 0.95, 0.0, 1),
    (1.0, 0, 0.9, 0.0, 1),
    (1.0, 0, 0.5, 0.0, 1),
    (1.3, 0, 0.999, 0.0, 1),
    (1.0, 0, 1.0, 0.05, 1),
    (1.5, 0, 1.0, 1e-4, 1),
    (1.0, 20, 0.95, 0.1, 1),
    (1.0, 5000, 1.0, 0.0, 1),
    (1.0, 5000, 0.8, 0.0, 1),
    (1.0, 0, 0.0, 0.0, 100),
    (2.0, 0, 0.3, 0.5, 7),
    (1.0, 0, 1.0, 1.0, 3000),
    (0.05, 0, 0.9999, 0.0, 1),
]
KINDS = ("normal", "wide", "ties", "equal", "peaked", "flat", "gumbel", "two values", "masked")


def rows(kind: str, count: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Logits [count, vocab] of a kind."""
    g = torch.Generator().manual_seed(seed + 1000 * KINDS.index(kind))
    x = torch.randn(count, vocab, generator=g)
    if kind == "wide":
        x *= 5
    elif kind == "ties":
        x = (x * 2).round()
    elif kind == "equal":
        x = torch.full_like(x, 1.25)
    elif kind == "peaked":
        x[torch.arange(count), torch.randint(vocab, (count,), generator=g)] += 12
    elif kind == "flat":
        x *= 0.01
    elif kind == "gumbel":
        x = -torch.log(torch.rand(count, vocab, generator=g).clamp(1e-9).log().neg())
    elif kind == "two values":
        x = (x > 1).float() * 3
    elif kind == "masked":
        x[:, torch.rand(vocab, generator=g) < 0.9] = -torch.inf
    return x.to(dtype)


def mixed(vocab: int, dtype: torch.dtype = torch.float32, each: int = 2, seed: int = 0) -> torch.Tensor:
    """Some rows of every kind."""
    return torch.cat([rows(kind, each, vocab, dtype, seed) for kind in KINDS])


def filters(count: int, first: int = 0) -> dict[str, torch.Tensor]:
    """Parameters of `count` rows, which go round the list in steps that meet every one."""
    chosen = [FILTERS[(first + 5 * i) % len(FILTERS)] for i in range(count)]
    t, k, p, m, least = zip(*chosen, strict=True)
    f64, i64 = torch.float64, torch.int64
    return {
        "temperature": torch.tensor(t, dtype=f64),
        "top_k": torch.tensor(k, dtype=i64),
        "top_p": torch.tensor(p, dtype=f64),
        "min_p": torch.tensor(m, dtype=f64),
        "min_tokens_to_keep": torch.tensor(least, dtype=i64),
    }


def decided(logits: torch.Tensor, options: dict, order: str = "top_k_first") -> torch.Tensor:
    """Rows whose cut does not hang on a millionth of the mass: moving top-p and min-p by that changes nothing."""
    out = torch.ones(len(logits), dtype=torch.bool)
    base = filter_logits(logits, **options, order=order)
    for by in (-2e-6, 2e-6):
        moved = dict(options)
        on = (options["top_p"] < 1) & (options["top_p"] > 0)
        moved["top_p"] = torch.where(on, options["top_p"] * (1 + by), options["top_p"])
        other = filter_logits(logits, **moved, order=order)
        out &= (other.cut_value == base.cut_value) & (other.cut_id == base.cut_id)
    return out


def assert_same_supports(ours: FilteredLogits, reference: FilteredLogits, decided_rows: torch.Tensor) -> None:
    """The kernels' descriptor is the reference's."""
    exact = ("maximum", "inverse_temperature", "argmax", "status")
    for name in exact:
        assert torch.equal(getattr(ours, name).cpu(), getattr(reference, name)), name
    for name in ("cut_value", "cut_id", "support_size"):
        a, b = getattr(ours, name).cpu(), getattr(reference, name)
        assert torch.equal(a[decided_rows], b[decided_rows]), (name, a, b)
    off = (ours.log_normalizer.cpu() - reference.log_normalizer).abs()[decided_rows]
    assert off.max() < 1e-6 if off.numel() else True


def real_rows() -> torch.Tensor:
    """Logits of a small language model on text, float16 [24, 49152]."""
    return torch.from_numpy(np.load(REAL)["logits"])
