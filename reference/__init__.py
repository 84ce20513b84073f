"""NumPy reference of every stage: what the kernels are compared against, and the CPU backend.

`rules` states each rule once, as a function of operators only; `rng` is the counter-based random number
generator; `filter`, `sample`, `verify`, `kv`, `penalties` and `decode` are the stages, in the order in
which the data passes through them. NumPy only: no torch, no triton.
"""
