"""Draw models, losses and batches at random, and compare the flag with stock: loss and gradients of two steps.

    python -m tools.fuzz pylate --seconds 60 --seed 0  # or multi_vector, sparse, colpali
    python -m tools.fuzz pylate --only 17              # one configuration, with details

Everything is in float64 on a CPU, without dropout. A difference is one line: its seed, the numbers, the configuration (only
what is not the default) and what the package logged. Differences that are documented, or that stock shows when its weights
change in their last digits, are counted with the reason. The exit status is 1 if another one was found.
"""

from __future__ import annotations

import argparse
import io
import logging
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention, modes
from tests.support.models import attend_to_own_document
from tools.fuzz_draws import BATCHES, Draw
from tools.fuzz_hosts import HOSTS, Host, Training

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-9, 1e-7
# Gradients below are what rounding leaves of terms that cancel: of terms of 1 some 1e-15, more than 1e-7 of what is left.
CANCELLED = 1e-7
# Changes of weights: one that decides ties otherwise, and one in the last digits.
OTHER_TIES, LAST_DIGITS = 1e-6, 1e-14


@dataclass
class Outcome:
    """What a configuration gave: losses, and an error in place of what is missing."""

    draw: Draw
    losses: list[float] = field(default_factory=list)
    # Of each batch the gradients, and at the end the buffers, all by name.
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    error: BaseException | None = None
    modes: str = ""


@contextmanager
def in_float64() -> Iterator[None]:
    """Have no host round scores to float32, which it does for float64 input as well: differences would hide there."""
    with mock.patch.object(Tensor, "float", Tensor.double):
        yield


def run(host: Host, seed: int, accelerated: bool, fixed: dict | None = None, noise: float = 0.0) -> Outcome:
    """Two steps of a configuration. ``noise``: change of all weights beforehand, relative to them."""
    draw = Draw(seed, fixed)
    outcome = Outcome(draw)
    flag = pylate_fastmaxsim.enabled(**host.options(draw)) if accelerated else nullcontext()
    of_gpu = draw.any("encoding", "packed", "grouped") == "packed" and host.name != "colpali"
    attend = attend_to_own_document if of_gpu else attention.variable_length_attention
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(seed)
    with in_float64(), mock.patch.object(attention, "variable_length_attention", attend), flag:
        try:
            # colpali-engine prints scores above 1.
            with _few_tokens(draw), redirect_stdout(io.StringIO()):
                _train(draw, host.build(draw, stock=not accelerated), outcome, noise)
        except Exception as error:
            outcome.error = error
        found = {mode for decisions in modes.chosen.values() for mode in decisions.values()}
        outcome.modes = "+".join(sorted(found)) or "stock"
    return outcome


def _few_tokens(draw: Draw) -> AbstractContextManager:
    """A CPU leaves small SPLADE batches to stock."""
    from pylate_fastmaxsim.integrations.sparse_encoder import encoder

    return mock.patch.object(encoder, "FEW_TOKENS", draw("FEW_TOKENS", 0, 128, often=0.9))


def _train(draw: Draw, training: Training, outcome: Outcome, noise: float) -> None:
    model, accumulates = training.model, draw("accumulation", False, True, often=0.85)
    weights = dict(model.named_parameters())
    if noise:
        generator = torch.Generator().manual_seed(draw.seed)
        with torch.no_grad():
            for weight in weights.values():
                # Weights of 0, as WordWeights has them, make similarities of 0, which are equal as well.
                scale = weight if noise == LAST_DIGITS else weight.masked_fill(weight == 0, 1)
                weight += noise * scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    for batch in range(BATCHES):
        model.zero_grad(set_to_none=True)
        total = 0.0
        for part in range(BATCHES) if accumulates else [batch]:
            loss = training.loss_of(part)
            if training.penalties:
                loss = loss + sum(training.penalties)
                training.penalties.clear()
            loss.backward()
            total += loss.item()
        outcome.losses.append(total)
        found = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
        outcome.gradients.append(found)
        with torch.no_grad():
            for name, gradient in found.items():
                weights[name] -= 0.01 * gradient / max(1.0, gradient.abs().max().item())
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    outcome.gradients[-1] |= {f"buffer {name}": buffer.clone() for name, buffer in buffers.items()}


@dataclass
class Difference:
    """The first batch that differs, both losses, and the largest difference of a gradient, relative to the largest one."""

    said: str
    cancelled: bool = False


def difference(ours: Outcome, stock: Outcome) -> Difference | None:
    if ours.error is not None:
        return Difference(f"raises {type(ours.error).__name__}: {' '.join(str(ours.error).split())[:200]}")
    for batch, (mine, theirs) in enumerate(zip(ours.losses, stock.losses, strict=True)):
        gradients, expected = ours.gradients[batch], stock.gradients[batch]
        largest = _largest(expected)
        error, name = next(iter(_errors(gradients, expected)), (0.0, ""))
        same = mine == theirs or abs(mine - theirs) <= LOSS_TOLERANCE * abs(theirs) or math.isnan(mine + theirs)
        if not same or not error <= GRADIENT_TOLERANCE * largest:
            said = f"batch {batch}: loss {mine:.12g}, stock {theirs:.12g}; gradient of {name} off by {error / (largest or 1):.1e}"
            return Difference(said, same and max(error, largest) < CANCELLED)
    return None


def _largest(gradients: dict[str, Tensor]) -> float:
    return max((float(each.abs().max()) for each in gradients.values()), default=0.0)


def _errors(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[tuple[float, str]]:
    """Differences of all gradients, the largest first."""
    return sorted(((_distance(mine.get(name), theirs.get(name)), name) for name in mine | theirs), reverse=True)


def _distance(mine: Tensor | None, theirs: Tensor | None) -> float:
    """The largest difference; where both are NaN there is none. A gradient that is missing is one of zeros."""
    if mine is None or theirs is None:
        found = theirs if mine is None else mine
        return float(found.abs().max())
    both = mine.isnan() & theirs.isnan()
    return float((mine - theirs).masked_fill(both, 0).abs().nan_to_num(nan=math.inf).max()) if mine.numel() else 0.0


@dataclass
class Verdict:
    seed: int
    ours: Outcome
    stock: Outcome
    log: list[str]
    found: Difference | None
    reason: str | None = None

    def __str__(self) -> str:
        log = " | ".join(self.log) or "nothing"
        return f"seed {self.seed}: {self.found.said} [{self.ours.draw}; encoded {self.ours.modes}; log: {log}]"


def judge(host: Host, seed: int) -> Verdict:
    """Compare a configuration with stock, and look for a reason where they differ."""
    logger, log = logging.getLogger("pylate_fastmaxsim"), BufferingHandler(sys.maxsize)
    logger.addHandler(log)
    stock = run(host, seed, accelerated=False)
    ours = run(host, seed, accelerated=True)
    logger.removeHandler(log)
    # The first line says what is accelerated, in every run.
    lines = [line for line in (record.getMessage() for record in log.buffer) if " accelerated: " not in line]
    if stock.error is not None:
        return Verdict(seed, ours, stock, lines, None, "stock raises")
    found = difference(ours, stock)
    return Verdict(seed, ours, stock, lines, found, found and _reason(host, seed, found, ours.draw, stock))


def _reason(host: Host, seed: int, found: Difference, draw: Draw, stock: Outcome) -> str | None:
    if found.cancelled:
        return "gradients cancel"
    if difference(run(host, seed, False, noise=LAST_DIGITS), stock) is not None:
        return "stock differs with the last digits of its weights"
    changes = [("ties", {"noise": OTHER_TIES})]
    changes += [(reason, {"fixed": fixed}) for reason, fixed in host.explanations(draw)]
    for reason, change in changes:
        ours, theirs = (run(host, seed, accelerated, **change) for accelerated in (True, False))
        if theirs.error is None and difference(ours, theirs) is None:
            return reason
    return None


def sweep(host: Host, seeds: Sequence[int], seconds: float = math.inf) -> list[Verdict]:
    """Judge configurations until the time is up, and print what no reason was found for."""
    end, verdicts = time.monotonic() + seconds, []
    for seed in seeds:
        verdicts.append(verdict := judge(host, seed))
        if unexplained([verdict]):
            print(verdict, flush=True)
        if time.monotonic() > end:
            break
    return verdicts


def unexplained(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.found and not verdict.reason]


def summary(host: Host, verdicts: Sequence[Verdict], seconds: float) -> str:
    kinds = Counter(verdict.ours.modes for verdict in verdicts)
    reasons = Counter(verdict.reason for verdict in verdicts if verdict.reason)
    lines = [f"{host.name}: {len(verdicts)} configurations in {seconds:.0f} s, {len(verdicts) / seconds:.1f} a second"]
    lines += [f"  encoded {kind}: {count}" for kind, count in kinds.most_common()]
    lines += [f"  explained, {reason}: {count}" for reason, count in reasons.most_common()]
    return "\n".join([*lines, f"  unexplained: {len(unexplained(verdicts))}"])


def details(verdict: Verdict) -> None:
    print(f"seed {verdict.seed}: {verdict.ours.draw}\nencoded {verdict.ours.modes}")
    for line in verdict.log:
        print(f"log: {line}")
    for name, outcome in (("ours", verdict.ours), ("stock", verdict.stock)):
        print(f"{name}: losses {outcome.losses}")
        if outcome.error is not None:
            traceback.print_exception(outcome.error)
    for batch, (mine, theirs) in enumerate(zip(verdict.ours.gradients, verdict.stock.gradients, strict=False)):
        errors = [f"{name} {error:.1e}" for error, name in _errors(mine, theirs)[:5]]
        print(f"batch {batch}: largest gradient {_largest(theirs):.3e}, differences {errors}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("host", choices=HOSTS)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to draw (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; each configuration takes the next")
    parser.add_argument("--only", type=int, metavar="SEED", help="repeat this configuration and print details")
    options = parser.parse_args(arguments)
    _quiet()
    host = HOSTS[options.host]
    if options.only is not None:
        details(verdict := judge(host, options.only))
        print(verdict.found.said if verdict.found else "no difference", f"({verdict.reason or 'no reason found'})")
        return bool(unexplained([verdict]))
    begin = time.monotonic()
    verdicts = sweep(host, range(options.seed, sys.maxsize), options.seconds)
    print(summary(host, verdicts, time.monotonic() - begin))
    return bool(unexplained(verdicts))


def _quiet() -> None:
    """No output of the libraries."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    for name in (None, "sentence_transformers", "pylate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logger = logging.getLogger("pylate_fastmaxsim")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(logging.NullHandler())


if __name__ == "__main__":
    sys.exit(main())
