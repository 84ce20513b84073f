"""Triton's interpreter, several times faster, and usable where TRITON_INTERPRET is not set.

The interpreter patches triton.language anew at every call of a jit function, and tl.sum or tl.max
are jit functions: here it is patched once a launch. A reduction or scan with a combine function of
its own calls that function once an element: here it is called on whole arrays, log2(n) times. And a
`JITFunction` called inside an interpreted launch is interpreted too.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction

from .patches import Patches

_original_patch_language = interpreter._patch_lang
_original_launch = interpreter.GridExecutor.__call__
_original_jit_call = JITFunction.__call__
_original_reduce = interpreter.ReduceOps.apply_impl

# A function whose globals show both modules, as the interpreter's patching wants them.
_sees_language = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})


class LaunchObserver(Protocol):
    """Is told of every interpreted launch, before it starts."""

    def begin(self, executor: Any, arguments: tuple, keywords: dict[str, Any]) -> None: ...


class _State:
    """What is installed in this process."""

    def __init__(self) -> None:
        self.users = 0
        self.depth = 0
        self.patches = Patches()
        self.interpreted: dict[int, tuple[JITFunction, _Interpreted]] = {}
        self.code: dict[Callable, types.CodeType | None] = {}
        self.observers: list[LaunchObserver] = []


class _NothingToRestore:
    def restore(self) -> None:
        pass


class _Interpreted(interpreter.InterpretedFunction):
    """A jit function for the interpreter that leaves the globals of its module as they are."""

    def rewrite(self) -> Callable:
        if not hasattr(self, "_rewritten"):
            self._rewritten = _rewrite(self.fn)
        return self._rewritten

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.rewrite()(*arguments, **keywords)


def _rewrite(function: Callable) -> Callable:
    if function not in _state.code:
        _state.code[function] = _compile_for_interpreter(function)
    code = _state.code[function]
    if code is None:
        return function
    scope = {
        **vars(interpreter),
        **function.__globals__,
        **inspect.getclosurevars(function).nonlocals,
    }
    exec(code, scope)
    return scope[function.__name__]


def _compile_for_interpreter(function: Callable) -> types.CodeType | None:
    try:
        lines, start = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return None
    skipped = next(number for number, line in enumerate(lines) if line.lstrip().startswith("def "))
    tree = ast.parse(textwrap.dedent("".join(lines[skipped:])))
    tree = interpreter.FunctionRewriter.ast_transformer.visit(tree)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, start + skipped - 1)
    return compile(tree, function.__code__.co_filename, "exec", dont_inherit=True)


_state = _State()


def interpreted(kernel: JITFunction) -> _Interpreted:
    """The interpreter's form of a jit function."""
    # By identity: hashing a JITFunction walks its source, which must not happen while the
    # language is patched.
    if id(kernel) not in _state.interpreted:
        _state.interpreted[id(kernel)] = (kernel, _Interpreted(kernel.fn))
    return _state.interpreted[id(kernel)][1]


@contextmanager
def fast_interpreter() -> Iterator[None]:
    """Install everything on entry, restore it when the last user leaves."""
    if _state.users == 0:
        _install(_state.patches)
    _state.users += 1
    try:
        yield
    finally:
        _state.users -= 1
        if _state.users == 0:
            _state.patches.restore()
            _state.interpreted.clear()


def _install(patches: Patches) -> None:
    patches.set(interpreter, "_patch_lang", lambda function: _NothingToRestore())
    patches.set(interpreter.GridExecutor, "__call__", _launch)
    patches.set(JITFunction, "__call__", _call_jit_function)
    patches.set(interpreter.ReduceOps, "apply_impl", _reduce)
    patches.set(interpreter.ReduceOps, "generic_reduce", _generic_reduce)
    patches.set(interpreter.ScanOps, "generic_scan", _generic_scan)


def observe(observer: LaunchObserver) -> None:
    _state.observers.append(observer)


def stop_observing(observer: LaunchObserver) -> None:
    _state.observers.remove(observer)


def _launch(executor: Any, *arguments: Any, **keywords: Any) -> None:
    for observer in _state.observers:
        observer.begin(executor, arguments, keywords)
    scope = _original_patch_language(_sees_language) if _state.depth == 0 else _NothingToRestore()
    _state.depth += 1
    try:
        _original_launch(executor, *arguments, **keywords)
    except InterpreterError as error:
        # The interpreter wraps what went wrong, once a level: show the fault itself when
        # it is one of ours.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, AssertionError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None
    finally:
        _state.depth -= 1
        scope.restore()


def _call_jit_function(kernel: JITFunction, *arguments: Any, **keywords: Any) -> Any:
    if _state.depth > 0:
        return interpreted(kernel)(*arguments, **keywords)
    return _original_jit_call(kernel, *arguments, **keywords)


# -- reductions and scans on whole arrays


def _wrap(array: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    array = np.ascontiguousarray(array)
    block = tl.block_type(dtype, list(array.shape)) if array.ndim else dtype
    return tl.core.tensor(interpreter.TensorHandle(array, dtype.scalar), block)


def _combine(function: Any, left: list[np.ndarray], right: list[np.ndarray], dtypes: list) -> list[np.ndarray]:
    sides = [_wrap(array, dtype) for array, dtype in zip(left, dtypes, strict=True)]
    sides += [_wrap(array, dtype) for array, dtype in zip(right, dtypes, strict=True)]
    result = function(*sides)
    if isinstance(result, tl.core.tensor) or not hasattr(result, "__iter__"):
        result = (result,)
    arrays = []
    for value, like in zip(result, left, strict=True):
        data = value.handle.data if isinstance(value, tl.core.tensor) else np.asarray(value)
        arrays.append(np.broadcast_to(data, like.shape).astype(like.dtype))
    return arrays


def _generic_reduce(operation: Any, tensors: tuple) -> list:
    arrays = [tensor.handle.data for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]
    rank = arrays[0].ndim
    axis = operation.axis
    if axis is None:
        arrays = [array.reshape(-1) for array in arrays]
    arrays = [np.moveaxis(array, 0 if axis is None else axis, -1) for array in arrays]
    while arrays[0].shape[-1] > 1:
        # Neighbours meet, so that the order of the operands is kept.
        left = [array[..., 0::2] for array in arrays]
        right = [array[..., 1::2] for array in arrays]
        arrays = _combine(operation.combine_fn, left, right, dtypes)
    results = []
    for array, dtype in zip(arrays, dtypes, strict=True):
        value = array[..., 0]
        if operation.keep_dims:
            value = value.reshape((1,) * rank) if axis is None else np.expand_dims(value, axis)
        elif axis is None:
            value = value.item()
        results.append(operation.to_tensor(value, dtype))
    return results


def _generic_scan(operation: Any, tensors: tuple) -> list:
    dtypes = [tensor.dtype for tensor in tensors]
    arrays = [np.moveaxis(tensor.handle.data, operation.axis, -1) for tensor in tensors]
    positions = np.arange(arrays[0].shape[-1])
    distance = 1
    while distance < positions.size:
        earlier = [np.roll(array, distance, axis=-1) for array in arrays]
        combined = _combine(operation.combine_fn, earlier, arrays, dtypes)
        arrays = [np.where(positions >= distance, new, old) for old, new in zip(arrays, combined, strict=True)]
        distance *= 2
    results = []
    for array, dtype in zip(arrays, dtypes, strict=True):
        array = np.ascontiguousarray(np.moveaxis(array, -1, operation.axis))
        results.append(operation.to_tensor(array, dtype))
    return results


def _reduce(operation: Any, tensors: tuple) -> Any:
    # tl.sort is made of exclusive-or reductions.
    if operation.combine_fn is not tl.standard._xor_combine or operation.axis is None:
        return _original_reduce(operation, tensors)
    data = np.bitwise_xor.reduce(tensors[0].handle.data, axis=operation.axis, keepdims=operation.keep_dims)
    return [operation.to_tensor(data, tensors[0].dtype)]
