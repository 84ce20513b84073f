"""A rule of operators only, in a module without imports: kernels wrap it with ``triton.jit``."""


def is_between(x, low, high):
    """Whether low <= x < high."""
    return (x >= low) & (x < high)
