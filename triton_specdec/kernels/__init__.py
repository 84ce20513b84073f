"""The fused Triton kernels: the only part of the package that imports triton."""
