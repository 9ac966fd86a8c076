"""Triton's interpreter, made to work with every NumPy."""

from typing import Any


def accept_new_numpy() -> None:
    """Let interpreted kernels have loops with tensors as bounds.

    The interpreters of older Triton versions (3.6, for example) call `int` on arrays with one element, which
    NumPy 2.4 refuses.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_tensor_and_index
