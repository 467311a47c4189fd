"""Trains in float32 with ``tf32=True`` of the trainer, stock and fast, and prints the losses of both.

By itself, because PyTorch's setting is that of the process. ``--cpu`` is for a look without a GPU, where tf32 is not
taken.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from models import build_model, load_model
from pylate import losses
from test_training import _pairs, train

import pylate_fastmaxsim


def main() -> None:
    on_gpu = "--cpu" not in sys.argv
    with tempfile.TemporaryDirectory() as folder:
        encoder = build_model(Path(folder) / "encoder", "modernbert")
        curves = {}
        for name in ("stock", "fast"):
            if name == "stock":  # Where a fused-kernel package is installed PyLate would score with that.
                os.environ["PYLATE_SCORES_BACKEND"] = "torch"
            else:
                del os.environ["PYLATE_SCORES_BACKEND"]
                pylate_fastmaxsim.enable(stock_masking=True)
            model = load_model(encoder, device="cuda" if on_gpu else "cpu")
            loss = losses.Contrastive(model, temperature=0.5)
            # Small steps, for the losses to differ by the rounding of one step and not by that of all before.
            arguments = {"learning_rate": 1e-4, "use_cpu": not on_gpu, "tf32": on_gpu or None}
            curves[name] = train(model, loss, _pairs(), folder, **arguments)
    print(json.dumps(curves))


if __name__ == "__main__":
    main()
