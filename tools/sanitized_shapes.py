"""Small shapes of the operators' kernels, forward and backward, and of sparse search, for compute-sanitizer on a CUDA GPU.

    compute-sanitizer --tool racecheck python -m tools.sanitized_shapes
    compute-sanitizer --tool memcheck --report-api-errors no python -m tools.sanitized_shapes

Run it once without the sanitizer first, which compiles the kernels into Triton's cache.
"""

import torch

from pylate_fastmaxsim.ops.encoder.attention import rotary_self_attention, text_attention
from tests.support.operator_checks import outcome
from tests.support.operators import FORMATS, OPERATORS, lengths, problem
from tests.support.sparse_cases import CASES, check, check_removed

SIZES = {"queries": lengths(0, 5, 33), "documents": lengths(1, 9, 150), "hidden": 256, "device": "cuda"}
SHORT = SIZES | {"queries": lengths(2, 5, 32), "documents": lengths(3, 10, 150), "slots": 2}


def run(name: str, **options) -> None:
    case = problem(name, **options)
    outcome(OPERATORS[name].call, case, torch.ones_like(OPERATORS[name].call(case)))


def main() -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for dim in (128, 48):
            for layout in ("all", "shared"):
                run("maxsim", dim=dim, dtype=dtype, layout=layout, slots=3, **SIZES)
                run("maxsim", dim=dim, dtype=dtype, layout="own" if layout == "all" else layout, **SHORT)
    for name in ("from hidden documents", "xtr 30", "xtr 30, retrieved", "top 4", "top 16", "softmax 0.2", "splade"):
        run(name, dim=128, dtype=torch.bfloat16, **SIZES)
    for format in FORMATS:
        for layout in ("all", "shared"):
            name = format.split()[0].replace("plaid", "residual")
            run(name, dim=128, dtype=torch.bfloat16, format=format, layout=layout, **SIZES)
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
    for name in ("plain", "equal scores in masses", "int32 terms"):
        check(CASES[name], "cuda", "cuda")
    check_removed("cuda", "cuda")
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
