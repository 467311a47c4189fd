"""The schedule of the pooling over a training."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pylate_fastmaxsim.recipes.config.schema import PoolingSection
from pylate_fastmaxsim.recipes.pooling import pooling_at
from pylate_fastmaxsim.recipes.scores import ScoreMetric


class FollowSchedule(TrainerCallback):
    """Sets the pooling of a loss in each optimizer step, and logs k or the temperature beside the learning rate."""

    def __init__(self, section: PoolingSection, metric: ScoreMetric) -> None:
        self.section = section
        self.metric = metric

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.metric.pooling = pooling_at(self.section, state.global_step, state.max_steps)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **kwargs: Any,
    ) -> None:
        if "learning_rate" in logs:  # a step, not the summary at the end
            values = {f"pooling_{name}": value for name, value in vars(self.metric.pooling).items()}
            for entry in (logs, state.log_history[-1]):
                entry.update(values)
