"""Philox against the vectors its authors publish, and streams that never meet."""

import numpy as np
import pytest
from scipy import stats

from triton_specdec.reference import rng, rules

# kat_vectors of Random123 (Salmon et al.): philox4x32 with 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_vectors(counter, key, expected):
    assert tuple(int(w) for w in rng.philox4x32(counter, key)) == expected


def test_rows_do_not_know_their_batch():
    seeds, positions = np.arange(-50, 50) * 2**40, np.arange(100) + 2**33
    together = rng.uniforms(seeds, positions, rules.STREAM_SAMPLE)
    alone = [float(rng.uniforms(s, p, rules.STREAM_SAMPLE)) for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone


def test_every_part_of_the_counter_counts():
    base = (7, 9, rules.STREAM_SAMPLE, 0)
    others = [
        (8, 9, 0, 0),
        (7 + 2**32, 9, 0, 0),
        (7, 10, 0, 0),
        (7, 9 + 2**32, 0, 0),
        (7, 9, 1, 0),
        (7, 9, 0, 1),
        (7, 9, 0, 2),
    ]
    values = {float(rng.uniforms(*c)) for c in [base, *others]}
    assert len(values) == len(others) + 1


def test_streams_are_distinct():
    streams = [rules.STREAM_SAMPLE, rules.STREAM_DRAFT, rules.STREAM_ACCEPT, rules.STREAM_RESIDUAL, rules.STREAM_GUMBEL]
    assert len(set(streams)) == 5
    x = np.stack([rng.uniforms(np.arange(20_000), 3, s) for s in streams])
    off_diagonal = np.corrcoef(x)[~np.eye(5, dtype=bool)]
    assert np.abs(off_diagonal).max() < 5 / np.sqrt(20_000)


@pytest.mark.parametrize("over", ["seeds", "positions", "tokens"])
def test_uniforms_are_uniform(over):
    n = np.arange(200_000)
    args = {"seeds": (n, 0, 0), "positions": (0, n, 0), "tokens": (0, 0, n)}[over]
    u = rng.uniforms(args[0], args[1], rules.STREAM_GUMBEL, args[2])
    assert stats.kstest(u, "uniform").pvalue > 1e-4
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u**1.05, "uniform").pvalue < 1e-4  # the test does see a power of 1.05


def test_gumbel_noise_has_its_distribution_and_its_tail():
    g = rng.gumbel(np.arange(200_000), 0, 5)
    assert stats.kstest(g, "gumbel_r").pvalue > 1e-4
    # 24-bit noise ends at -log(2^-24) = 16.6; 53 bits reach further.
    many = rng.gumbel(0, np.arange(4)[:, None], np.arange(2**20))
    assert many.max() > 15
