"""Kernels run on the GPU where there is one, and in Triton's interpreter where there is none."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch


def _mend_interpreter() -> None:
    """Triton 3.6's interpreter fails at loop bounds with numpy 2.4, and multiplies bfloat16 by its bits."""
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(numpy.uint32) << 16
        return interpreter.TensorHandle(bits.view(numpy.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *others)

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = dot


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is imported
    if importlib.util.find_spec("triton") is not None:
        _mend_interpreter()
