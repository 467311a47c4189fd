"""A process that compiles its share of the calls (see processes.py), which it reads from standard input."""

from __future__ import annotations

import pickle
import sys

import torch

from pylate_fastmaxsim.precompile.calls import run
from pylate_fastmaxsim.precompile.processes import Share


def main() -> None:
    share: Share = pickle.load(sys.stdin.buffer)
    torch.cuda.set_device(share.device)
    torch.set_float32_matmul_precision(share.float32_precision)
    for call in share.calls:
        try:
            run(call, torch.device("cuda", share.device))
            torch.cuda.synchronize()
        except Exception as error:
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise SystemExit(f"{call}: {said}") from error


if __name__ == "__main__":
    main()
