"""Shadow memory for the interpreter: traffic of every launch, and faults that values hide."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from .fast_interpreter import fast_interpreter, observe, stop_observing
from .patches import Patches
from .shadow_record import NOBODY, SEVERAL, ShadowArgument, ShadowLaunch

SECTOR_BYTES = 32
_POISON = np.array(0x5A5A5A5A5A5A5A5A, np.uint64)


class ShadowError(AssertionError):
    """A fault that shadow memory found."""


class Shadow:
    """Watch every launch of the interpreter.

    Parameters
    ----------
    bounds : find unmasked lanes outside every argument; the padding of a strided view counts as
    outside races : find elements that two programs of a launch touch, one of them with a plain
    store hazards : find loads of what the same program stored since its last
    ``tl.debug_barrier`` poison : give masked lanes of a load without ``other`` a NaN or an
    improbable integer instead of 0 synchronised : names of arguments whose accesses the kernel
    orders by itself: no race or hazard there extra : tensors that kernels reach through
    addresses that are no arguments order : seed of a random order of the programs, None for the
    natural one

    Examples
    --------
    >>> with device("interpreter"), Shadow() as shadow:  # doctest: +SKIP
    ...     kernel[grid](logits, out, vocab_size)
    >>> assert shadow.last["logits"].max_reads_per_element == 1  # doctest: +SKIP
    """

    _active: list[Shadow] = []

    def __init__(
        self,
        bounds: bool = True,
        races: bool = True,
        hazards: bool = True,
        poison: bool = True,
        synchronised: Iterable[str] = (),
        extra: Iterable[torch.Tensor] = (),
        order: int | None = None,
    ):
        self.bounds = bounds
        self.races = races
        self.hazards = hazards
        self.poison = poison
        self.synchronised = set(synchronised)
        self.extra = list(extra)
        self.order = order
        self.launches: list[ShadowLaunch] = []
        self._unwritten: dict[int, tuple[torch.Tensor, np.ndarray]] = {}
        self._atomic = False

    @property
    def last(self) -> ShadowLaunch:
        return self.launches[-1]

    @classmethod
    def current(cls) -> Shadow | None:
        """The innermost shadow that is watching."""
        return cls._active[-1] if cls._active else None

    def uninitialised(self, tensor: torch.Tensor) -> torch.Tensor:
        """Report loads of elements of this tensor that no kernel has written."""
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.element_size()
        self._unwritten[storage.data_ptr()] = (tensor, np.ones(count, bool))
        return tensor

    # -- hooks

    def __enter__(self) -> Shadow:
        self._exit = ExitStack()
        self._exit.enter_context(fast_interpreter())
        observe(self)
        self._exit.callback(stop_observing, self)
        patches = Patches()
        self._exit.callback(patches.restore)
        self._hook(patches)
        self._active.append(self)
        self._exit.callback(self._active.remove, self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._exit.close()

    def _hook(self, patches: Patches) -> None:
        builder_class = interpreter.InterpreterBuilder
        load, store = builder_class.create_masked_load, builder_class.create_masked_store
        update, swap = builder_class.create_atomic_rmw, builder_class.create_atomic_cas
        barrier, set_program = builder_class.create_barrier, builder_class.set_grid_idx

        def watched_load(builder, pointers, mask, other, *rest, **keywords):
            self._access(pointers, mask.data, "atomic" if self._atomic else "load")
            if other is None and self.poison and not mask.data.all():
                other = _poison_like(pointers)
            return load(builder, pointers, mask, other, *rest, **keywords)

        def watched_store(builder, pointers, value, mask, *rest, **keywords):
            self._access(pointers, mask.data, "atomic" if self._atomic else "store")
            return store(builder, pointers, value, mask, *rest, **keywords)

        def watched_update(builder, operation, pointers, value, mask, *rest, **keywords):
            self._access(pointers, mask.data, "atomic")
            return update(builder, operation, pointers, value, mask, *rest, **keywords)

        def watched_swap(builder, pointers, *rest, **keywords):
            self._access(pointers, np.ones(pointers.data.shape, bool), "atomic")
            return swap(builder, pointers, *rest, **keywords)

        def watched_barrier(builder, *rest, **keywords):
            self._epoch += 1
            return barrier(builder, *rest, **keywords)

        def watched_program(builder, x, y, z):
            return set_program(builder, *self._next_program(builder.grid_dim, x, y, z))

        patches.set(builder_class, "create_masked_load", watched_load)
        patches.set(builder_class, "create_masked_store", watched_store)
        patches.set(builder_class, "create_atomic_rmw", watched_update)
        patches.set(builder_class, "create_atomic_cas", watched_swap)
        patches.set(builder_class, "create_barrier", watched_barrier)
        patches.set(builder_class, "set_grid_idx", watched_program)
        for name in ("create_atomic_load", "create_atomic_store", "create_atomic_poll"):
            if hasattr(builder_class, name):
                patches.set(builder_class, name, self._as_atomic(getattr(builder_class, name)))

    def _as_atomic(self, method):
        def watched(*arguments, **keywords):
            self._atomic = True
            try:
                return method(*arguments, **keywords)
            finally:
                self._atomic = False

        return watched

    def begin(self, executor: Any, arguments: tuple, keywords: dict[str, Any]) -> None:
        """Start the record of a launch."""
        bound = dict(zip(executor.arg_names, arguments, strict=False))
        bound.update({name: value for name, value in keywords.items() if name in executor.arg_names})
        named = [pair for name, value in bound.items() for pair in _tensors(name, value)]
        named += [(f"extra{number}", tensor) for number, tensor in enumerate(self.extra)]
        found: dict[int, ShadowArgument] = {}
        for name, tensor in named:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                continue
            argument = found.get(storage.data_ptr())
            if argument is None:
                argument = found[storage.data_ptr()] = ShadowArgument(name, tensor)
            else:
                argument.name += "|" + name
            if argument.base in self._unwritten:
                argument.unwritten = self._unwritten[argument.base][1]
            argument.add_view(tensor)
        self._launch = ShadowLaunch(executor.fn.__name__)
        for argument in found.values():
            if argument.valid is not None and argument.valid.all():
                argument.valid = None
            self._launch[argument.name] = argument
        self._arguments = sorted(found.values(), key=lambda argument: argument.base)
        self._bases = np.array([argument.base for argument in self._arguments], np.uint64)
        self._permutation: np.ndarray | None = None
        self._epoch = 0
        self._program = 0
        self._program_id = (0, 0, 0)
        self.launches.append(self._launch)

    def _next_program(self, grid: tuple[int, int, int], x: int, y: int, z: int) -> tuple[int, int, int]:
        number = (x * grid[1] + y) * grid[2] + z
        if self.order is not None:
            if self._permutation is None:
                self._permutation = np.random.default_rng(self.order).permutation(int(np.prod(grid)))
            number = int(self._permutation[number])
            x, rest = divmod(number, grid[1] * grid[2])
            y, z = divmod(rest, grid[2])
        self._program = number
        self._program_id = (x, y, z)
        self._epoch += 1
        return x, y, z

    # -- one access

    def _access(self, pointers: Any, mask: np.ndarray, kind: str) -> None:
        addresses = pointers.data
        mask = np.broadcast_to(mask, addresses.shape)
        addresses = addresses.reshape(-1) if mask.all() else addresses[mask]
        if addresses.size == 0:
            return
        item = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        which = np.searchsorted(self._bases, addresses, side="right") - 1
        if (which == which[0]).all():
            self._access_argument(int(which[0]), addresses, item, kind)
        else:
            for index in np.unique(which):
                self._access_argument(int(index), addresses[which == index], item, kind)

    def _access_argument(self, index: int, addresses: np.ndarray, item: int, kind: str) -> None:
        if index < 0:
            if self.bounds:
                self._fail("OUT OF BOUNDS", "no tensor", hex(int(addresses[0])), kind)
            return
        argument = self._arguments[index]
        low, high = int(addresses.min()), int(addresses.max())
        if high + item > argument.end:
            if self.bounds:
                element = (high - argument.base) // argument.element_bytes
                self._fail("OUT OF BOUNDS", f"'{argument.name}' ({argument.count} elements)", element, kind)
            return
        elements = ((addresses - np.uint64(argument.base)) // np.uint64(argument.element_bytes)).astype(np.int64)
        contiguous = elements.size == 1 or bool((np.diff(elements) == 1).all())
        where = slice(int(elements[0]), int(elements[-1]) + 1) if contiguous else elements
        span = ((high + item - 1) >> 5) - (low >> 5) + 1
        sectors = span if contiguous else np.unique(addresses >> np.uint64(5)).size
        if argument.valid is not None and self.bounds and not argument.valid[where].all():
            outside = elements[~argument.valid[elements]][0]
            self._fail("OUT OF BOUNDS (padding of a view)", f"'{argument.name}'", outside, kind)
        moved = addresses.size * item
        if kind == "load":
            argument.load_bytes += moved
            argument.load_sector_bytes += SECTOR_BYTES * sectors
            self._load(argument, where, elements, contiguous)
        elif kind == "store":
            argument.store_bytes += moved
            argument.store_sector_bytes += SECTOR_BYTES * sectors
            self._store(argument, where, elements, contiguous)
        else:
            argument.atomic_bytes += moved
            self._wrote(argument, where, elements, contiguous)

    def _load(self, argument: ShadowArgument, where: Any, elements: np.ndarray, contiguous: bool) -> None:
        _count(argument.reads, where, contiguous)
        if argument.unwritten is not None and argument.unwritten[where].any():
            self._fail(
                "UNINITIALISED",
                f"'{argument.name}'",
                elements[argument.unwritten[elements]][0],
                "load",
            )
        writer = argument.writer[where]
        if argument.name not in self.synchronised:
            foreign = (writer != NOBODY) & (writer != self._program)
            if self.races and foreign.any():
                what = f"load after a store by program {writer[foreign][0]},"
                self._fail("RACE", f"'{argument.name}'", elements[foreign][0], what)
            fresh = argument.write_epoch[where] == self._epoch
            if self.hazards and fresh.any():
                what = "store, then load with no tl.debug_barrier between,"
                self._fail("HAZARD", f"'{argument.name}'", elements[fresh][0], what)
        reader = argument.reader[where]
        argument.reader[where] = np.where((reader == NOBODY) | (reader == self._program), self._program, SEVERAL)

    def _store(self, argument: ShadowArgument, where: Any, elements: np.ndarray, contiguous: bool) -> None:
        self._wrote(argument, where, elements, contiguous)
        if self.races and argument.name not in self.synchronised:
            writer, reader = argument.writer[where], argument.reader[where]
            foreign = (writer != NOBODY) & (writer != self._program)
            foreign |= (reader != NOBODY) & (reader != self._program)
            if foreign.any():
                self._fail(
                    "RACE",
                    f"'{argument.name}'",
                    elements[foreign][0],
                    "store after another program's access",
                )
            if not contiguous and np.unique(elements).size != elements.size:
                self._fail("RACE", f"'{argument.name}'", elements[0], "store by two lanes")
        argument.writer[where] = self._program
        argument.write_epoch[where] = self._epoch

    def _wrote(self, argument: ShadowArgument, where: Any, elements: np.ndarray, contiguous: bool) -> None:
        _count(argument.writes, where, contiguous)
        if argument.unwritten is not None:
            argument.unwritten[where] = False

    def _fail(self, kind: str, target: str, element: Any, action: str) -> None:
        frame = inspect.currentframe()
        while frame is not None and _is_machinery(frame.f_code.co_filename):
            frame = frame.f_back
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "unknown line"
        program = f"program {self._program_id} of {self._launch.kernel}"
        raise ShadowError(f"{kind}: {action} of {target} element {element} by {program} at {where}")


def _is_machinery(file_name: str) -> bool:
    return file_name == __file__ or ("triton" in file_name and "site-packages" in file_name)


def _count(counts: np.ndarray, where: Any, contiguous: bool) -> None:
    if contiguous:
        counts[where] += 1
    else:
        np.add.at(counts, where, 1)


def _poison_like(pointers: Any) -> Any:
    dtype = pointers.get_element_ty()
    numpy_dtype = interpreter._get_np_dtype(dtype)
    if dtype == tl.bfloat16:
        value: Any = 0x7FC0
    elif numpy_dtype.kind == "f":
        value = np.nan
    elif numpy_dtype.kind == "b":
        value = True
    else:
        value = _POISON.astype(numpy_dtype)
    return interpreter.TensorHandle(np.full(pointers.data.shape, value, numpy_dtype), dtype)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}[{index}]", item)
    elif hasattr(value, "base"):
        yield from _tensors(name, value.base)
