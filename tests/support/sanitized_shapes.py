"""Small shapes of the operators' kernels, forward and backward, and of sparse search, for compute-sanitizer on a CUDA GPU.

    compute-sanitizer --tool racecheck python -m tests.support.sanitized_shapes
    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.support.sanitized_shapes

Run it once without the sanitizer first, which compiles the kernels into Triton's cache.
"""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from pylate_fastmaxsim import Softmax, TokenBatch, TopK, maxsim, maxsim_from_hidden, pooled_scores, xtr_scores
from pylate_fastmaxsim.ops.attention import rotary_self_attention, text_attention
from tests.support.compressed_exactness import FORMATS, compressed_as
from tests.support.sparse_cases import CASES, check, check_removed


def ragged(count: int, longest: int, d: int, dtype: torch.dtype) -> TokenBatch:
    lengths = torch.randint(1, longest, (count,)).tolist()
    batch = TokenBatch.from_list(
        [normalize(torch.randn(length, d, device="cuda"), dim=-1).to(dtype) for length in lengths]
    )
    return batch.with_values(batch.values.requires_grad_())


def main() -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for d in (128, 48):
            for candidates in (None, torch.randint(0, 9, (5, 3), device="cuda")):
                queries, documents = ragged(5, 33, d, dtype), ragged(9, 150, d, dtype)
                maxsim(queries, documents, candidates).sum().backward()
            queries, documents = ragged(5, 32, d, dtype), ragged(10, 150, d, dtype)
            for own in (torch.arange(10, device="cuda"), torch.tensor([0, 0, 2, 2, 2, 5, 6, 7, 8, 0], device="cuda")):
                maxsim(queries, documents, own.view(5, 2)).sum().backward()
    queries, hidden = ragged(5, 33, 128, torch.bfloat16), ragged(9, 150, 256, torch.bfloat16)
    weight = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    maxsim_from_hidden(queries, hidden, weight).sum().backward()
    documents = ragged(9, 150, 128, torch.bfloat16)
    for normalizer in ("positive", "retrieved"):
        xtr_scores(queries, documents, 20, normalizer=normalizer).sum().backward()
    states = torch.randn(3, 343, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    borders = torch.tensor([0, 20, 20, 70, 170, 343], device="cuda", dtype=torch.int32)
    for reach in (-1, 40):
        text_attention(*states, borders, borders, 173, 0.125, reach).sum().backward()
        for dim in (32, 96, 128):
            vectors = torch.randn(3, 343, 2, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            text_attention(*vectors, borders, borders, 173, 0.125, reach, dropout=0.1).sum().backward()
        angles = torch.rand(2, 343, 64, device="cuda")
        x, weight = states[0].flatten(1), torch.randn(384, 128, device="cuda", dtype=torch.bfloat16)
        rotary_self_attention(x, weight, None, *angles, borders, borders, 173, 2, 0.125, reach).sum().backward()
    for pooling in (TopK(4), TopK(16), Softmax(0.5)):
        queries, documents = ragged(5, 33, 128, torch.bfloat16), ragged(9, 150, 128, torch.bfloat16)
        pooled_scores(queries, documents, pooling=pooling).sum().backward()
    for format in FORMATS:
        for candidates in (None, torch.randint(0, 9, (5, 3), device="cuda")):
            queries, documents = ragged(5, 33, 128, torch.bfloat16), ragged(9, 150, 128, torch.bfloat16)
            documents = documents.with_values(documents.values.detach())  # compressed ones have no gradient
            maxsim(queries, compressed_as(documents, format), candidates).sum().backward()
    for name in ("plain", "equal scores in masses", "int32 terms"):
        check(CASES[name], "cuda", "cuda")
    check_removed("cuda", "cuda")
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
