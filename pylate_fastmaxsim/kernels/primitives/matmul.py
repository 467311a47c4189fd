"""float32 matrix products on bf16 matrix units: operands are split into bf16 parts."""

import triton
import triton.language as tl


@triton.jit
def split(x):
    """The upper 8 bits of a float32's mantissa as bf16, and the rest. Bit operations are cheaper than a conversion."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b, summed in float32.

    16-bit operands are multiplied directly. A float32 operand is the sum of three bf16 parts of 8 bits each. "bf16x6"
    sums 6 products of these, small ones first, and is exact to float32 rounding. "bf16x3" sums 3 products of two parts
    (16 bits). "tf32" rounds operands to 11 bits. An infinite operand gives infinity or NaN.
    """
    if a.dtype != tl.float32:
        total = tl.dot(a, b, total)
    else:
        # Matrix units truncate when they add to a sum, so that a long sum would shrink. So they sum this product alone,
        # and it is added to the total with rounding.
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
                # Rounded, since truncation would make every product too small.
                a_middle = a_rest.to(tl.bfloat16)
                b_middle = b_rest.to(tl.bfloat16)
            part = tl.dot(a_middle, b_high, part)
            part = tl.dot(a_high, b_middle, part)
            part = tl.dot(a_high, b_high, part)
        total += part
    return total
