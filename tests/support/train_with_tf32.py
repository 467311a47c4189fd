"""Trains in float32 with ``tf32=True`` of the trainer, stock and fast, and prints the losses of both.

By itself, because PyTorch's setting is that of the process.
"""

import json
import os
import tempfile
from pathlib import Path

from pylate import losses

import pylate_fastmaxsim
from tests.support.models import build_model, load_model
from tests.support.training_runs import pairs, train

if __name__ == "__main__":
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        encoder = build_model(Path(folder) / "encoder", "modernbert")
        # Where a fused-kernel package is installed PyLate would score with that.
        os.environ["PYLATE_SCORES_BACKEND"] = "torch"
        for name in ("stock", "fast"):
            if name == "fast":
                del os.environ["PYLATE_SCORES_BACKEND"]
                pylate_fastmaxsim.enable(stock_masking=True)
            model = load_model(encoder, device="cuda")
            loss = losses.Contrastive(model, temperature=0.5)
            # Small steps, for the losses to differ by the rounding of one step and not by that of all before.
            curves[name] = train(model, loss, pairs(), folder, learning_rate=1e-4, use_cpu=False, tf32=True)
    print(json.dumps(curves))
