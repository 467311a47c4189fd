"""How far gradient filtering moves the gradients of a real training run, against rounding them to bf16.

    python -m benchmarks.quality.grad_filter_training
    python -m benchmarks.quality.grad_filter_training --recipe recipes/colbert_msmarco.yaml --set training.max_steps=100

A recipe, by default the quickstart at a temperature of 0.02, is trained with the filter. Before some of its steps, the
gradients of all weights are computed from the same batch without the filter and with it. Their difference, relative to
the norm, is compared with that from rounding the gradients to bf16.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import pylate_fastmaxsim
from benchmarks.harness.paths import RESULTS, ROOT
from benchmarks.harness.records import environment, write
from pylate_fastmaxsim.ops import grad_filter
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.training.arguments import training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.prepare import prepare
from pylate_fastmaxsim.recipes.training.sharded import RecipeTrainer
from pylate_fastmaxsim.recipes.training.trainer import build_trainer

DEFAULTS = ["loss.temperature=0.02", "training.max_steps=200", "training.report_to=none", "training.save_steps=null"]


def relative(difference: list[Tensor], of: list[Tensor]) -> tuple[float, float]:
    """Norm of the difference over that of the gradients: of all weights together, and of the worst one."""
    norms = torch.stack([part.norm() for part in difference]), torch.stack([part.norm() for part in of])
    return float(norms[0].norm() / norms[1].norm()), float((norms[0] / norms[1]).nan_to_num(0.0).max())


class ComparingTrainer(RecipeTrainer):
    """Trains with the filter, and records in ``rows`` how it changes the gradients of every ``every``-th step."""

    every: int
    rows: list[dict]

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step % self.every == 0:
            self.rows.append({"step": self.state.global_step + 1, **self.compare(model, inputs)})
            print(self.rows[-1], flush=True)
        with pylate_fastmaxsim.enabled(grad_filter="auto"):
            return super().training_step(model, inputs, num_items_in_batch)

    def compare(self, model, inputs) -> dict:
        plain, loss, _ = self.gradients(model, inputs, None)
        ours, _, kept = self.gradients(model, inputs, "auto")
        filtered, worst_filtered = relative([a - b for a, b in zip(ours, plain, strict=True)], plain)
        rounded, worst_rounded = relative([part.bfloat16().float() - part for part in plain], plain)
        return {
            "loss": loss,
            "pairs_kept": kept,
            "moved_by_filter": filtered,
            "moved_by_rounding_to_bf16": rounded,
            "worst_weight_moved_by_filter": worst_filtered,
            "worst_weight_moved_by_rounding_to_bf16": worst_rounded,
        }

    def gradients(self, model, inputs, option) -> tuple[list[Tensor], float, float | None]:
        """Gradients of the weights, the loss, and the share of pairs that the filter keeps."""
        kept = []
        original = grad_filter._Filter.backward

        def counting(ctx, gradient):
            result = original(ctx, gradient)
            kept.append(float((result != 0).float().mean()))
            return result

        counted = mock.patch.object(grad_filter._Filter, "backward", staticmethod(counting))
        with counted, pylate_fastmaxsim.enabled(grad_filter=option):
            loss = super().training_step(model, inputs)
        gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        model.zero_grad()
        return gradients, float(loss), kept[0] if kept else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "quickstart.yaml"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--every", type=int, default=20, help="steps from one comparison to the next")
    parser.add_argument("--output", type=Path, default=RESULTS / "grad_filter_training.json")
    options = parser.parse_args()
    overrides = [*DEFAULTS, *options.overrides]
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(options.recipe, [*overrides, f"output_dir={folder}"])
        prepared = prepare(recipe)
        arguments = training_arguments(recipe, disable_tqdm=True)
        model = load_model(prepared.model, arguments.device, recipe.training.seed)
        trainer = build_trainer(recipe, model, load_data(prepared).train, arguments, ComparingTrainer)
        trainer.every, trainer.rows = options.every, []
        trainer.train()
    content = {
        "recipe": Path(options.recipe).name,
        "overrides": overrides,
        "batch_size": recipe.training.per_device_train_batch_size,
        "environment": environment(),
        "rows": trainer.rows,
    }
    write(options.output, content)


if __name__ == "__main__":
    main()
