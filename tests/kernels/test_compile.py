"""All kernels compile without a GPU, fit the GPUs of the tables, multiply on their matrix units, and spill nothing."""

import re
from functools import cache
from itertools import product
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim import TokenBatch, pool_tokens
from pylate_fastmaxsim.kernels.attention import launch as attention
from pylate_fastmaxsim.kernels.compressed import launch as compressed
from pylate_fastmaxsim.kernels.layers import launch as layers
from pylate_fastmaxsim.kernels.runtime.arch import ARCHITECTURES
from tests.support.attention_cases import case, rotary_case
from tests.support.compiled import MATRIX_UNIT, fits, launchers
from tests.support.operator_checks import float32_products
from tests.support.operators import OPERATORS, problem
from tests.support.recorded_launches import recorded_launches

pytestmark = pytest.mark.compile

# How vectors are multiplied, by the names of the tile tables.
OPERANDS = {
    "bf16": (torch.bfloat16, "highest"),
    "fp16": (torch.float16, "highest"),
    "bf16x6": (torch.float32, "highest"),
    "bf16x3": (torch.float32, "high"),
    "tf32": (torch.float32, "medium"),
}
# Queries of up to 32 tokens, as problems add up to three, and together more rows than any tile.
MANY = {"queries": (29,) * 12, "documents": (50,) * 13, "masked": False, "gapless": True, "dim": 128, "slots": 3}
LONG = {"queries": (300, 2), "documents": (300, 9), "masked": True, "floor": True, "gapless": False}
MASKED = {"masked": True, "floor": True, "gapless": False}
LAYOUTS = ["all", "shared"]


def rows(names: str, operands: str = "bf16", everywhere: bool = False, only: str = "", **options):
    """Cases of operators, for each of the values of options that are lists, and ``only`` kernels of these names.

    Those for all architectures are the smoke slice.
    """
    values = [value if isinstance(value, list) else [value] for value in options.values()]
    for name, operand, *chosen in product(names.split("; "), operands.split(), *values):
        given = tuple(sorted((MANY | dict(zip(options, chosen, strict=True))).items()))
        shown = [name, operand, *(str(each) for each in chosen if isinstance(each, (int, str))), only]
        for arch in ARCHITECTURES if everywhere else (90,):
            marks = [pytest.mark.smoke] if everywhere and arch == 90 else []
            yield pytest.param(arch, name, operand, given, only, id=" ".join([f"sm_{arch}", *shown]), marks=marks)


CASES = [
    *rows("maxsim", "bf16 bf16x6", True),
    *rows("maxsim", "bf16 bf16x6", True, "candidate", layout="shared"),
    *rows("maxsim", "fp16 bf16x3 tf32"),
    *rows("maxsim", "fp16 bf16x3 tf32", only="candidate", layout="shared"),
    *rows("maxsim", dim=[96, 256, 768]),
    *rows("maxsim", only="candidate", dim=[96, 256, 768], layout="shared"),
    *rows("maxsim", "bf16x6", dim=[100, 768]),
    *rows("maxsim", "bf16x6", only="candidate", dim=[100, 768], layout="shared"),
    *rows("maxsim", "bf16 bf16x6", **MASKED, layout=LAYOUTS),
    *rows("maxsim", "bf16 bf16x6", **LONG),
    *rows("maxsim", "bf16 bf16x6", only="candidate", layout="own", slots=1),
    *rows("top 4; softmax 1.0", everywhere=True),
    *rows("top 4; softmax 1.0", "fp16 bf16x6 bf16x3 tf32"),
    *rows("log-sum-exp", everywhere=True, only="gradient"),
    *rows("log-sum-exp", "fp16 bf16x6 bf16x3 tf32", only="gradient"),
    *rows("top 4; softmax 1.0", dim=768),
    *rows("top 4", "bf16x6", True, "gradient", layout=LAYOUTS),
    *rows("top 4; log-sum-exp; softmax 1.0", **MASKED, layout="shared"),
    *rows("top 16", "bf16 bf16x6"),
    *rows("top 64", only="gradient|many", layout=LAYOUTS),
    *rows("xtr 100", "bf16 bf16x6", True, "maxima|collect|bisect|xtr"),
    *rows("xtr 100", "fp16 bf16x3 tf32", only="maxima|collect|bisect"),
    *rows("xtr 100", only="maxima|collect|bisect", queries=(29,)),
    *rows("xtr 100", only="maxima|collect|bisect", dim=[96, 768]),
    *rows("xtr 100", "bf16x6", only="maxima|collect|bisect", dim=768),
    *rows("xtr 100; xtr 100, retrieved", **MASKED, documents=(300, *(1,) * 511), layout="shared"),
    *rows("int8; fp8", everywhere=True),
    *rows("residual", everywhere=True, queries=(29,) * 2),
    *rows("int8; fp8", only="forward", queries=(29,)),
    *rows("int8", only="forward", dim=[100, 256, 768]),
    *rows("fp8", dim=768),
    *rows("int8", format="int8 by token"),
    *rows("residual", format=["residual 2", "residual 1", "plaid"], queries=(29,)),
    *rows("residual", dim=[256, 768], queries=(29,)),
    *rows("int8; fp8; residual", **MASKED | {"floor": False}, layout="shared"),
    *rows("project", "bf16 bf16x6", True, hidden=768),
    *rows("project", "fp16 bf16x3 tf32", hidden=768),
    *rows("project", hidden=768, bias=False),
    *rows("project", hidden=1024, dim=96),
    *rows("project", hidden=4096, dim=1024),
    *rows("project", hidden=100, dim=48),
    *rows("project", "bf16x6", hidden=1024, dim=512),
    *rows("splade", "bf16 bf16x6", True, "maxima|slots|values|slopes|vocabulary", dim=768),
    *rows("splade", "bf16x3 tf32", only="maxima", dim=768),
    *rows("splade", only="maxima", dim=[384, 32]),
    *rows("splade", "fp16", only="maxima|vocabulary", dim=[100, 2560]),
    *rows("splade, maxima", dim=768, bias=False),
    *rows("splade, two logs", only="values|slopes", dim=768, documents=(300,) * 4, masked=True, gapless=False),
]


@cache
def programs_of(arch: int, name: str, operand: str, options: tuple, only: str) -> set[tuple]:
    """What scoring and its backward launch; with masks also scoring alone, and the gradient of one argument."""
    dtype, precision = OPERANDS[operand]
    with (
        recorded_launches(arch) as launched,
        float32_products(precision),
        patch.object(compressed, "has_fp8", lambda device: arch > 86),
    ):
        given = problem(name, dtype=dtype, **dict(options))
        learned = {leaf: values.detach().requires_grad_() for leaf, values in given.leaves.items()}
        if ("masked", True) in options:
            OPERATORS[name].call(given)
            last = [*learned][-1]
            OPERATORS[name].call(given.with_leaves({last: learned[last]})).sum().backward()
        OPERATORS[name].call(given.with_leaves(learned)).sum().backward()
    # Kernels that multiply no vectors have the same tiles for all architectures.
    return {
        each for each in launched if re.search(only, each[0]) and (arch in (80, 90) or "PRECISION" in dict(each[2]))
    }


@pytest.mark.parametrize("arch, name, operand, options, only", CASES)
def test_operators(arch, name, operand, options, only, tmp_path):
    for program in programs_of(arch, name, operand, options, only):
        _, kinds, constants, _ = program
        ptx = fits(program, arch, tmp_path)
        constants = dict(constants)
        if "PRECISION" in constants and (constants.get("BLOCK_M", 0) >= 64 or constants.get("IN") == 768):
            unit = dict.fromkeys((torch.bfloat16, torch.float16), MATRIX_UNIT[arch]) | {torch.float32: ""}
            assert unit.get(kinds[0][0], "mma") in ptx, program


# ---- attention and encoder layers

ATTENTION = [
    pytest.param(64, torch.bfloat16, 40, 0.0, marks=pytest.mark.smoke),
    (64, torch.float16, -1, 0.1),
    (32, torch.float16, -1, 0.1),
    (96, torch.bfloat16, 40, 0.0),
    (128, torch.float16, -1, 0.0),
]


def programs_of_attention(dim: int, dtype: torch.dtype, reach: int, dropout: float) -> set[tuple]:
    """Of texts in tiles of every length; where nothing is dropped with rotary positions too, which turn gradients back."""
    given = [200], reach, dtype, "cpu", 768 // dim, dim
    more = {"seed": torch.tensor([1]), "dropout": dropout} if dropout else {}
    with recorded_launches(90) as launched:
        if (dim, dropout) == (64, 0.0):
            qkv, cos, sin, *texts = rotary_case(*given)
            states, log_sums = attention.rotary_forward(qkv, cos, sin, *texts)
            attention.rotary_backward(states, qkv, cos, sin, states, log_sums, *texts)
        else:
            *vectors, cu_seqlens, key_cu_seqlens, longest, scale, _ = case(*given)
            texts = cu_seqlens, key_cu_seqlens, longest, scale, reach
            states, log_sums = attention.forward(*vectors, *texts, **more)
            attention.backward(states, *vectors, states, log_sums, *texts, **more)
    return launched


@pytest.mark.parametrize("dim, dtype, reach, dropout", ATTENTION)
def test_attention(dim, dtype, reach, dropout, tmp_path):
    for program in programs_of_attention(dim, dtype, reach, dropout):
        # Some spill a few registers, and were faster than those that spill none.
        ptx = fits(program, 90, tmp_path, may_spill=True)
        assert program[0] == "rotary_kernel" or ("wgmma.mma_async" in ptx) == (dict(program[2])["BLOCK"] >= 64)


def test_log_sums_are_there_where_the_backward_reads_them():
    for columns, tiles in attention.FORWARD.items():
        longest_without = max(tile.block for tile in tiles.short)
        assert max(tile.block for tile in attention.BACKWARD[columns].short) >= longest_without


def programs_of_layers() -> set[tuple]:
    x, grad = torch.zeros(2, 2304).bfloat16(), torch.zeros(2, 1152).half()
    with recorded_launches(90) as launched:
        layers.glu(x)
        layers.glu_gradient(x.half(), grad, need_hidden=True)
        for dim in (384, 768, 1024, 4096):
            total, mean = torch.zeros(2, dim), torch.zeros(2)
            layers.norm_gradient(total.bfloat16(), total, total, mean, mean, total[0], torch.bfloat16, True, False)
    return launched


def programs_of_token_pooling(arch: int) -> set[tuple]:
    with recorded_launches(arch) as launched:
        for longest in (200, 300, 768):
            values = torch.zeros(longest + 5, 100 if longest == 200 else 128).bfloat16()
            documents = TokenBatch.from_packed(values, torch.tensor([0, longest, longest + 5]), values[:, 0] == 0)
            pool_tokens(documents, 2)
    return launched


@pytest.mark.parametrize("arch", [pytest.param(90, marks=pytest.mark.smoke), 80, 86, 100, 120])
def test_token_pooling(arch, tmp_path):
    for program in programs_of_token_pooling(arch):
        fits(program, arch, tmp_path)


@pytest.mark.smoke
def test_layers_read_and_write_16_bytes_at_a_time(tmp_path):
    turning = {each for each in programs_of_attention(*ATTENTION[0].values) if each[0] == "rotary_kernel"}
    for program in programs_of_layers() | turning:
        ptx = fits(program, 90, tmp_path)
        assert program[0] == "sum_parts_kernel" or ("ld.global.v4" in ptx and "st.global.v4" in ptx), program


def test_every_kernel_is_compiled_and_its_numbers_are_not_specialised():
    cases = [programs_of(*each.values) for each in CASES if each.values[0] == 90]
    programs = set().union(
        programs_of_attention(*ATTENTION[0].values), programs_of_layers(), programs_of_token_pooling(90), *cases
    )
    assert {launcher for *_, launcher in programs} == set(launchers())
    for name, kinds, _, launcher in programs:
        parameters = launcher.kernel.params
        assert [each.is_constexpr for each in parameters] == [place >= len(kinds) for place in range(len(parameters))]
        numbers = [each.do_not_specialize for each in parameters[: len(kinds)]]
        assert numbers == [kind is int for kind, _ in kinds], name
