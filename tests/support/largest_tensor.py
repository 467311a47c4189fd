"""How much memory the largest tensor takes that a call makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operation gives back."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result
