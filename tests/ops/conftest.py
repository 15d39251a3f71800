"""Kernels run on the GPU where there is one, and in Triton's interpreter where there is none."""

import tests.attention.conftest  # noqa: F401
