"""What logging gradient concentration costs, against a training step of the same run.

    python -m benchmarks.training.gradient_concentration_cost                                  # on a GPU
    python -m benchmarks.training.gradient_concentration_cost --layers 2 --batch 32            # a trial on a CPU

A ColBERT around ModernBERT-base with random weights is trained by the trainer of Sentence Transformers with PyLate's
contrastive loss and the plugin. The callback of training.log_gradient_concentration measures 32 pairs after every second
step here; its time, with the device waited for before and after, is divided by that of a step and by --every.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import environment, write
from benchmarks.training.cell import DOCUMENT_LENGTH, build_model, make_rows

PAIRS = 32


def measure(options: argparse.Namespace) -> dict:
    """Medians of the milliseconds of a step and of a measurement, and their ratio."""
    from datasets import Dataset
    from pylate import losses, utils
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from transformers import TrainerCallback

    import pylate_fastmaxsim
    from pylate_fastmaxsim.recipes.models.encode import encode
    from pylate_fastmaxsim.recipes.trainers.callbacks import LogGradientConcentration

    cuda = torch.cuda.is_available()

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Timed(LogGradientConcentration):
        seconds: list[float] = []

        def _log(self, *arguments) -> None:
            began = now()
            super()._log(*arguments)
            self.seconds.append(now() - began)

    class Steps(TrainerCallback):
        seconds: list[float] = []

        def on_step_begin(self, *arguments, **named) -> None:
            self.began = now()

        def on_step_end(self, *arguments, **named) -> None:
            self.seconds.append(now() - self.began)

    rows = make_rows(options.batch * 4, 1, "contrastive", random.Random(0))
    queries, positives = ([row[column] for row in rows[:PAIRS]] for column in ("query", "positive"))
    with tempfile.TemporaryDirectory() as folder, pylate_fastmaxsim.enabled():
        model = build_model(Path(folder), options.layers, options.document_length)
        model.to("cuda" if cuda else "cpu")
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.batch,
                bf16=cuda,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_strategy="no",
            ),
            train_dataset=Dataset.from_list(rows),
            loss=losses.Contrastive(model=model, temperature=0.02),
            data_collator=utils.ColBERTCollator(tokenize_fn=model.tokenize),
        )

        def pairs():
            return encode(model, queries, PAIRS, is_query=True), encode(model, positives, PAIRS, is_query=False)

        # Its time is not in that of a step: callbacks are called in the order in which they were added.
        for callback in (Steps(), Timed(trainer, pairs, every=2, temperature=0.02)):
            trainer.add_callback(callback)
        trainer.train()
    warm = options.steps // 2
    step, logged = statistics.median(Steps.seconds[warm:]), statistics.median(Timed.seconds[warm // 2 + 1 :])
    return {
        "batch": options.batch,
        "document_length": options.document_length,
        "layers": options.layers,
        "pairs": PAIRS,
        "step_ms": step * 1e3,
        "logging_ms": logged * 1e3,
        "every": options.every,
        "share_of_a_step": logged / step / options.every,
        "environment": environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128, help="queries, with a positive and a negative each")
    parser.add_argument("--document-length", type=int, default=DOCUMENT_LENGTH)
    parser.add_argument("--layers", type=int, help="fewer encoder layers, for a trial")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--every", type=int, default=100, help="steps from one measurement to the next")
    parser.add_argument("--output", type=Path, default=RESULTS / "gradient_concentration_cost.json")
    options = parser.parse_args()
    result = measure(options)
    write(options.output, result)
    print(
        f"A measurement takes {result['logging_ms']:.1f} ms and a step {result['step_ms']:.1f} ms: every {options.every} "
        f"steps {result['share_of_a_step']:.2%} of a step."
    )


if __name__ == "__main__":
    main()
