"""The flag: switch the acceleration of PyLate, colpali-engine and Sentence Transformers on and off."""

from __future__ import annotations

import logging
import os
import sys
import threading
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pylate_fastmaxsim.integrations.hosts import Replacement, find_replacements
from pylate_fastmaxsim.integrations.log import log_once, reset_log_once, said_about
from pylate_fastmaxsim.integrations.options import (
    OPTIONS,
    PYLATE,
    Options,
    PaddingFree,
    current_options,
    pooling_from_text,
    refuse_unknown_options,
    set_options,
    switched_off,
)
from pylate_fastmaxsim.integrations.patching.patches import PatchSet
from pylate_fastmaxsim.integrations.status import Status
from pylate_fastmaxsim.pooling import Max, Pooling

_logger = logging.getLogger("pylate_fastmaxsim")
_lock = threading.RLock()
_patches = PatchSet()
_blocks: list[_Block] = []
# What was found in the libraries that are patched now, or were last.
_found: list[Replacement] = []


@dataclass(eq=False)
class _Block:
    """An :func:`enabled` block that runs, and the options that are in force again when it ends."""

    before: Options | None


@refuse_unknown_options
def enable(
    *,
    padding_free: PaddingFree = True,
    compile: bool = False,
    stock_masking: bool = False,
    pooling: Pooling | str = Max(),
    quiet: bool = False,
) -> Status:
    """Make PyLate, colpali-engine and Sentence Transformers' MultiVectorEncoder score without a similarity tensor.

    Texts of PyLate and of a MultiVectorEncoder are also encoded without padding in training. So are those of a SPLADE
    model (SparseEncoder), which are embedded without vocabulary logits, in ``encode`` as well. Sentence Transformers'
    ``semantic_search`` and information retrieval evaluators search the embeddings of a SparseEncoder exactly, without a
    score for every document. Whichever of the three libraries is installed is patched. Call it at any time: before or
    after the model and the loss are built, before or after functions are imported. Calling it again changes the options;
    :func:`disable` takes it back.

    Patched functions stay the same objects. Whoever holds one (as a default argument, in a ``partial`` or a closure)
    gets the new behaviour, and models and losses pickle as before, for processes without this package too. Only a
    method that was taken off its class before (``step = Contrastive.forward``) stays as it was.

    A function is replaced only if its source, and that of the host's functions that it calls, is that of a known
    release. In a fork, an edited checkout or a release with other code, the host's own runs; a line of log names it.

    Scores keep their meaning, with three visible differences. They are float32 for bfloat16 and float16 input; stock
    sums in the input's dtype. With PyLate, a masked document token never wins; stock gives it the similarity 0, which
    wins over negative ones. With XTR scores, all tokens pass whose similarity equals the k-th largest, and every token
    of a batch with fewer than k. colpali-engine has no masks; there a row of zeros keeps its similarity of 0.

    Parameters
    ----------
    padding_free
        Encode the documents of a batch back to back in one forward, without padding tokens, and where possible its
        queries in the same forward. ``"always"``: also where the model has modules or hooks of your own, which you know
        to treat each text by itself. Not in colpali-engine. In a MultiVectorEncoder each call of the encoder leaves out
        its own padding, and what is behind the encoder is given a padded batch as ever, with the state of a token in
        place of padding. A loss of your own has to mask that, as those of Sentence Transformers do. PyLate's collator
        adds ``token_total`` to every column, the number of tokens of each text, which stays on the CPU. Its rows may be
        split, picked, reordered and joined with those of the column. The trainer takes it out before a loss sees the
        columns. In a loop of your own, code that changes a mask has to remove it; otherwise a later batch raises a
        ValueError on a GPU. SPLADE models are embedded without logits whatever it says.
    compile
        Compile the encoder's layers for a varying number of tokens. Where transformers checkpoints layers without
        dropout, their checkpointing is compiled with them. Not in colpali-engine.
    stock_masking
        Let a masked document token count with similarity 0, as stock PyLate does, to reproduce
        runs that were made with it. PyLate only.
    pooling
        How a query token pools its similarities to the tokens of a document, in every score that is accelerated:
        ``Max()``, ``TopK(k)``, ``Softmax(temperature)`` or ``LogSumExp(temperature)``, or as the commands write them,
        ``"top_k=4"``; see :func:`~pylate_fastmaxsim.pooled_scores`. XTR scores, which have a choice of tokens of their
        own, stay as they are, and so do losses with a ``score_metric`` of their own and indexes of other libraries.
    quiet
        Print nothing. Otherwise the first process of a machine writes one line to stderr that says what is accelerated.
        ``PYLATE_FASTMAXSIM_QUIET=1`` in the environment does the same.

    Returns
    -------
    Status
        What is accelerated, as :func:`status` gives it later on.

    Raises
    ------
    ImportError
        None of PyLate from 1.5.1 up to but not including 2, colpali-engine from 0.3.18 up to but not including 0.4 and
        Sentence Transformers from 5 up to but not including 7 can be imported. Of those that are installed and cannot
        be, a line of log says why they are left alone.
    ValueError
        The environment variable ``PYLATE_FASTMAXSIM`` says neither on nor off, ``stock_masking=True`` comes with
        another pooling than ``Max()``, or a text names no pooling.
    TypeError
        ``pooling`` is not one, or another option is neither True nor False, nor is ``padding_free`` ``"always"``. Or there
        is no option of a name.

    Notes
    -----
    With ``PYLATE_FASTMAXSIM=0`` in the environment this call does nothing but say so.

    Examples
    --------
    >>> import pylate_fastmaxsim
    >>> from pylate import scores
    >>> state = pylate_fastmaxsim.enable()
    >>> scores.colbert_scores([[[1.0, 0.0]]], [[[0.5, 0.5], [1.0, 0.0]]])
    tensor([[1.]])
    >>> pylate_fastmaxsim.disable()
    """
    if isinstance(pooling, str):
        try:
            pooling = pooling_from_text(pooling)
        except ArgumentTypeError as error:
            raise ValueError(str(error)) from None
    new = Options(padding_free, compile, stock_masking, pooling)
    if (setting := switched_off()) is not None:
        _logger.info("%s: nothing is accelerated.", setting)
        return _say(quiet, f"off, by {setting}")
    if not isinstance(pooling, Max):
        _require_pooled_scores(pooling)
    _switch_to(new)
    hosts = {each.host.name for each in _found if each.provider is not None}
    _logger.info(
        "%s; %s.%s",
        "; ".join(gains(_found)) or "Nothing is accelerated",
        ", ".join(
            f"{name} {('off', 'on')[value] if isinstance(value, bool) else value}" for name, value in vars(new).items()
        ),
        " With PyLate, a loss of your own gets fused scores; call pylate_fastmaxsim.encode in it to leave out padding too."
        * (PYLATE in hosts),
    )
    for option in OPTIONS:
        if (value := getattr(new, option.name)) != option.default and hosts.isdisjoint(option.metadata["hosts"]):
            owners = " and ".join(option.metadata["hosts"])
            _logger.warning("%s=%s has no effect: it is an option for %s.", option.name, value, owners)
    if not isinstance(pooling, Max):
        log_once(
            "pooling=%s: indexes built by others (PLAID, fast-plaid, Voyager) still search with the maximum.", pooling
        )
    libraries = dict.fromkeys(f"{each.host.name} {each.host.version}" for each in _found if each.left is None)
    return _say(quiet, f"on, for {', '.join(libraries) or 'nothing'}; status() says how a model is encoded")


def _say(quiet: bool, line: str) -> Status:
    if not (quiet or os.environ.get("PYLATE_FASTMAXSIM_QUIET") or int(os.environ.get("LOCAL_RANK", 0))):
        print(f"pylate-fastmaxsim: {line}", file=sys.stderr)
    return status()


def status() -> Status:
    """What is accelerated now, and how each model was encoded that has been called. ``print`` it to read it.

    Examples
    --------
    >>> import pylate_fastmaxsim
    >>> print(pylate_fastmaxsim.status())
    pylate-fastmaxsim: off
    """
    options = current_options()
    return Status(options, list(gains(_found)) if options else [], said_about() if options else {})


def gains(found: list[Replacement]) -> Iterator[str]:
    """Sentences that name what is accelerated in which hosts, and functions that are left as they are."""
    hosts_by_gain: dict[str, list[str]] = {}
    for host in dict.fromkeys(each.host for each in found):
        own = [each for each in found if each.host is host]
        left = [each for each in own if each.left]
        if len(left) == len(own):
            continue
        providers = [each.provider for each in left]
        gain = ", ".join(gain for provider, gain in host.gains.items() if provider not in providers) or "in part"
        if left:
            names = ", ".join(each.patch.short_name if each.patch else each.provider for each in left)
            gain += f" (but not {names})"
        hosts_by_gain.setdefault(gain, []).append(f"{host.name} {host.version}")
    for gain, hosts in hosts_by_gain.items():
        yield f"{' and '.join(hosts)} {'is' if len(hosts) == 1 else 'are'} accelerated: {gain}"


def disable() -> None:
    """Put the host libraries back as they came. Does nothing where they are.

    A loss that was computed before can still be differentiated, except with ``compile=True`` and dropout: call
    ``backward()`` first then. What the backward computes again (CachedContrastive, gradient checkpointing) would run
    through layers that are no longer compiled, draw other dropout masks and give other gradients.

    Examples
    --------
    >>> import pylate_fastmaxsim
    >>> pylate_fastmaxsim.disable()
    """
    _switch_to(None)


@refuse_unknown_options
@contextmanager
def enabled(
    *,
    padding_free: PaddingFree = True,
    compile: bool = False,
    stock_masking: bool = False,
    pooling: Pooling | str = Max(),
) -> Iterator[None]:
    """:func:`enable` for the length of a ``with`` block. Afterwards the options from before are in force again.

    Of blocks that overlap, in threads or tasks, the last begun decides until it ends, for all of the process.

    With ``compile=True`` and dropout call ``backward()`` inside the block; see :func:`disable`.

    Examples
    --------
    >>> import pylate_fastmaxsim
    >>> from pylate import scores
    >>> with pylate_fastmaxsim.enabled(stock_masking=True):
    ...     scores.colbert_scores([[[1.0]]], [[[-2.0], [5.0]]], documents_mask=[[True, False]])
    tensor([[0.]])
    """
    with _lock:
        block = _Block(current_options())
        enable(padding_free=padding_free, compile=compile, stock_masking=stock_masking, pooling=pooling, quiet=True)
        _blocks.append(block)
    try:
        yield
    finally:
        with _lock:
            later = _blocks[_blocks.index(block) + 1 :]
            _blocks.remove(block)
            if later:
                # Of another thread or task, which still runs: what it has switched on stays on until it ends.
                later[0].before = block.before
            else:
                _switch_to(block.before)


def _require_pooled_scores(pooling: Pooling) -> None:
    """Raise ValueError if scores of a host would be left as they are, which take the maximum."""
    for each in find_replacements():
        replacement = each.patch and getattr(each.patch.replacement, "__func__", each.patch.replacement)
        # Of a provider without a patch nothing is known.
        unknown = each.provider is not None and each.patch is None
        if each.left and (unknown or getattr(replacement, "pooled", False)):
            raise ValueError(f"pooling={pooling} cannot be used: its scores would take the maximum. {each.left}")


def _switch_to(new: Options | None) -> None:
    global _found
    with _lock:
        if new == current_options():
            return
        if current_options() is None:
            _found = find_replacements()
            for line in (each.left for each in _found if each.left):
                log_once("%s", line)
            _patches.apply(each.patch for each in _found if each.left is None)
        else:
            # Models that were prepared for the old options go back to how they were built.
            from pylate_fastmaxsim.integrations.encoding import encode as encoding_encode

            encoding_encode.release()
            reset_log_once()
        if new is None:
            _patches.undo()
        elif new.compile:
            from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers

            compilation_layers.patch_checkpointing()
        set_options(new)
