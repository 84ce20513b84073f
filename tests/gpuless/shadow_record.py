"""What shadow memory records of one launch."""

from __future__ import annotations

import numpy as np
import torch

NOBODY = -1
SEVERAL = -2


class ShadowArgument:
    """What one launch did to one tensor's storage.

    Attributes
    ----------
    load_bytes, store_bytes, atomic_bytes : bytes of the active lanes
    load_sector_bytes, store_sector_bytes : bytes of the 32-byte sectors that each access of a
    block touched reads, writes : how often each element was read and written
    """

    def __init__(self, name: str, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        self.name = name
        self.base = storage.data_ptr()
        self.end = self.base + storage.nbytes()
        self.element_bytes = tensor.element_size()
        count = self.count = storage.nbytes() // self.element_bytes
        self.load_bytes = 0
        self.store_bytes = 0
        self.atomic_bytes = 0
        self.load_sector_bytes = 0
        self.store_sector_bytes = 0
        self.reads = np.zeros(count, np.uint32)
        self.writes = np.zeros(count, np.uint32)
        self.writer = np.full(count, NOBODY, np.int32)
        self.reader = np.full(count, NOBODY, np.int32)
        self.write_epoch = np.full(count, NOBODY, np.int32)
        self.unwritten: np.ndarray | None = None
        self.valid: np.ndarray | None = np.zeros(count, bool)

    def add_view(self, tensor: torch.Tensor) -> None:
        """Elements of this view may be touched."""
        if self.valid is None:
            return
        if tensor.element_size() != self.element_bytes:
            self.valid = None
            return
        flags = torch.zeros(self.count, dtype=torch.bool)
        torch.as_strided(flags, tensor.size(), tensor.stride(), tensor.storage_offset()).fill_(True)
        self.valid |= flags.numpy()

    @property
    def max_reads_per_element(self) -> int:
        return int(self.reads.max(initial=0))

    @property
    def mean_reads_per_element(self) -> float:
        """Over the elements that were read at all."""
        return float(self.reads.sum() / max(1, np.count_nonzero(self.reads)))

    @property
    def fewest_bytes(self) -> int:
        """Bytes when every element that was touched moved once."""
        return (np.count_nonzero(self.reads) + np.count_nonzero(self.writes)) * self.element_bytes

    @property
    def moved_bytes(self) -> int:
        return self.load_sector_bytes + self.store_sector_bytes + 2 * self.atomic_bytes


class ShadowLaunch(dict[str, ShadowArgument]):
    """The arguments of one launch, by name."""

    def __init__(self, kernel: str):
        super().__init__()
        self.kernel = kernel

    @property
    def moved_bytes(self) -> int:
        return sum(argument.moved_bytes for argument in self.values())

    @property
    def fewest_bytes(self) -> int:
        return sum(argument.fewest_bytes for argument in self.values())
