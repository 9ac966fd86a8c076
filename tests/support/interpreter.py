"""Triton's interpreter, made to work with every NumPy, and made faster."""

from typing import Any


def prepare() -> None:
    """Before interpreted kernels run."""
    accept_new_numpy()
    patch_once_for_device_functions()


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


def patch_once_for_device_functions() -> None:
    """Spare functions that kernels call, such as `tl.sum`, from patching the language at every call.

    A launch patches what its kernel sees. A call patches what the module of the function sees, which nobody
    takes back, so the first call of each module suffices.
    """
    from triton.runtime import interpreter

    patched = set()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        module = self.fn.__module__
        if module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call
