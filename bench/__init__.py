"""The benchmark suite: checks a provider first, times it beside the others, and leaves a row for every point.

`python -m bench.run` from the repository, or `triton-specdec bench`; `python -m bench.plot` draws from the rows.
"""
