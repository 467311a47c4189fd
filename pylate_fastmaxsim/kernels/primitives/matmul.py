"""Matrix products of float32 on units that take bf16: operands are split into a few bf16 parts."""

import triton
import triton.language as tl


@triton.jit
def split(x):
    """The upper 8 bits of a float32's mantissa as bf16, and the rest. Bit operations: cheaper than a conversion."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b, summed in float32.

    16-bit operands are multiplied as they are. float32 operands are taken as sums of bf16 parts (three of 8 bits hold
    all 24 of a float32), of which the products that matter are summed, small ones first: 6 of 3 parts ("bf16x6",
    exact to float32 rounding) or 3 of 2 parts ("bf16x3", 16 bits). "tf32" rounds them to 11 bits. An infinite operand
    gives infinity or NaN.
    """
    if a.dtype != tl.float32:
        total = tl.dot(a, b, total)
    else:
        # Matrix units cut off what does not fit when they add to a sum, always towards 0: a long sum would shrink. So
        # they sum this product alone, and the total is added to it with rounding.
        part = tl.zeros(total.shape, tl.float32)
        if PRECISION == "tf32":
            part = tl.dot(a, b, part, input_precision="tf32")
        else:
            a_high, a_rest = split(a)
            b_high, b_rest = split(b)
            if PRECISION == "bf16x6":
                a_middle, a_low = split(a_rest)
                b_middle, b_low = split(b_rest)
                part = tl.dot(split(a_low)[0], b_high, part)
                part = tl.dot(a_high, split(b_low)[0], part)
                part = tl.dot(a_middle, b_middle, part)
            else:
                # Rounded: what is cut off would make every product too small.
                a_middle = a_rest.to(tl.bfloat16)
                b_middle = b_rest.to(tl.bfloat16)
            part = tl.dot(a_middle, b_high, part)
            part = tl.dot(a_high, b_middle, part)
            part = tl.dot(a_high, b_high, part)
        total += part
    return total
