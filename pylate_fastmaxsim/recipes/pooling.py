"""The pooling of a recipe's scores: its value at each step of the training, and at the end."""

from __future__ import annotations

import math

from pylate_fastmaxsim.integrations.options import POOLINGS
from pylate_fastmaxsim.pooling import Max, Pooling
from pylate_fastmaxsim.recipes.config.schema import PoolingSection


def pooling_at(section: PoolingSection | None, step: int, steps: int) -> Pooling:
    """The pooling of a step.

    Parameters
    ----------
    section
        ``loss.pooling`` of a recipe.
    step
        Optimizer steps that are done.
    steps
        Optimizer steps of the whole training. The first one has the value ``start``, the last one that at the end.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.config.schema import PoolingSection
    >>> from pylate_fastmaxsim.recipes.pooling import pooling_at
    >>> annealed = PoolingSection(top_k=1, start=16.0, schedule="linear")
    >>> [pooling_at(annealed, step, steps=4).k for step in range(4)]
    [16, 11, 6, 1]
    """
    if section is None:
        return Max()
    value = end = getattr(section, section.name)
    if section.schedule is not None:
        done = min(1.0, step / (steps - 1)) if steps > 1 else 1.0
        if section.schedule == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        value = (1 - done) * section.start + done * end
    return POOLINGS[section.name](round(value) if section.name == "top_k" else value)


def final_pooling(section: PoolingSection | None) -> Pooling:
    """The pooling of a trained model: the value at the end of a schedule."""
    return pooling_at(section, 0, 1)


def described(section: PoolingSection) -> str:
    """The pooling of a training, in words.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.config.schema import PoolingSection
    >>> from pylate_fastmaxsim.recipes.pooling import described
    >>> described(PoolingSection(top_k=4))
    'TopK(k=4)'
    >>> described(PoolingSection(softmax=0.02, start=1.0, schedule="cosine"))
    'Softmax(temperature=1.0) to Softmax(temperature=0.02) (cosine over the training)'
    """
    end = final_pooling(section)
    if section.schedule is None:
        return repr(end)
    return f"{pooling_at(section, 0, 2)} to {end} ({section.schedule} over the training)"
