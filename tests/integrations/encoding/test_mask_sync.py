"""Masks on a GPU are not looked at while embeddings of a batch are made, and otherwise as transformers has it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import masking_utils

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import masks


class Inspected(Exception):
    pass


def inspect():
    raise Inspected


@pytest.mark.parametrize(
    "name, sizes", [("_ignore_bidirectional_mask_sdpa", (8,)), ("_ignore_causal_mask_sdpa", (8, 8, 0))]
)
def test_only_masks_on_a_gpu_and_only_inside_are_not_looked_at(name, sizes):
    def leave_out(mask):
        return getattr(masking_utils, name)(mask, *sizes)

    stock = getattr(masking_utils, name).__code__
    on_gpu = SimpleNamespace(is_cuda=True, all=inspect, shape=(2, 8))
    full, part = torch.ones(2, 8, dtype=torch.bool), torch.eye(8, dtype=torch.bool)
    with pylate_fastmaxsim.enabled():
        with masks.masks_unread():
            assert not leave_out(on_gpu)
            assert leave_out(full) and not leave_out(part) and leave_out(None)
        with pytest.raises(Inspected):  # outside, transformers decides
            leave_out(on_gpu)
    assert getattr(masking_utils, name).__code__ is stock
