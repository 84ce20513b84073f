"""SamplingParams: every value out of range is an error that names it."""

import pytest

from triton_specdec import SamplingParams


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": -0.1}, ValueError),
        ({"temperature": float("nan")}, ValueError),
        ({"temperature": "1"}, TypeError),
        ({"temperature": None}, TypeError),
        ({"top_k": 1.5}, TypeError),
        ({"top_p": float("nan")}, ValueError),
        ({"min_p": 1.1}, ValueError),
        ({"min_p": -0.1}, ValueError),
        ({"min_tokens_to_keep": 0}, ValueError),
        ({"min_tokens": -1}, ValueError),
        ({"repetition_penalty": 0}, ValueError),
        ({"repetition_penalty": -1.0}, ValueError),
        ({"frequency_penalty": float("nan")}, ValueError),
        ({"seed": 1.0}, TypeError),
        ({"seed": 2**63}, ValueError),
    ],
)
def test_out_of_range(options, error):
    with pytest.raises(error, match=next(iter(options))):
        SamplingParams(**options)


def test_what_is_off_is_allowed():
    SamplingParams(temperature=0, top_k=0, top_p=1.5, min_p=0, seed=-(2**63))
    SamplingParams(top_k=-1, top_p=0.0, frequency_penalty=-2.0)
    assert not SamplingParams().has_penalties
    assert SamplingParams(presence_penalty=0.1).has_penalties


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_infinite_penalties_are_refused(name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: float("inf")})
