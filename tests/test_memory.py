from pathlib import Path

import pytest
import torch

# Nothing public fails in the words of other allocators, nor knows how much memory it takes.
from pylate_fastmaxsim._memory import PeakMemory, is_out_of_memory, peak_resident


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    # Where another one than PyTorch's allocator asked for memory of the GPU, in PyTorch's words and in Triton's.
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_peak_memory_counts_from_where_it_starts():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the kernel does not let a process reset its peak memory")
    torch.ones(64 * 2**20, dtype=torch.uint8)  # earlier, so it does not count
    memory = PeakMemory(torch.device("cpu"))
    assert memory.peak() - memory.before < 32 * 2**20
    torch.ones(128 * 2**20, dtype=torch.uint8)
    assert 120 * 2**20 < memory.peak() - memory.before < 200 * 2**20
    assert peak_resident() == memory.peak()
