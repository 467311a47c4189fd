"""The installed release of Triton."""

import triton

# As in (3, 6).
RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])
