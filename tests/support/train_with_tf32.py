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

from pylate import losses

import pylate_fastmaxsim
from tests.support.models import build_model, load_model
from tests.support.training_runs import pairs, train

if __name__ == "__main__":
    on_gpu, curves = "--cpu" not in sys.argv, {}
    with tempfile.TemporaryDirectory() as folder:
        encoder = build_model(Path(folder) / "encoder", "modernbert")
        # Where a fused-kernel package is installed PyLate would score with that.
        os.environ["PYLATE_SCORES_BACKEND"] = "torch"
        for name in ("stock", "fast"):
            if name == "fast":
                del os.environ["PYLATE_SCORES_BACKEND"]
                pylate_fastmaxsim.enable(stock_masking=True)
            model = load_model(encoder, device="cuda" if on_gpu else "cpu")
            loss = losses.Contrastive(model, temperature=0.5)
            # Small steps, for the losses to differ by the rounding of one step and not by that of all before.
            arguments = {"learning_rate": 1e-4, "use_cpu": not on_gpu, "tf32": on_gpu or None}
            curves[name] = train(model, loss, pairs(), folder, **arguments)
    print(json.dumps(curves))
