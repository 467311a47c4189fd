"""The flag: switch the acceleration of PyLate, colpali-engine and Sentence Transformers on and off."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from pylate_fastmaxsim.integrations.hosts import Host, left_alone, usable_hosts
from pylate_fastmaxsim.integrations.log import forget_what_was_said, log_once
from pylate_fastmaxsim.integrations.options import (
    Options,
    PaddingFree,
    current_options,
    forbidden,
    on_or_off,
    set_options,
)
from pylate_fastmaxsim.integrations.patching.known_sources import code_of, host_function, not_known, unknown_part
from pylate_fastmaxsim.integrations.patching.patches import Patch, PatchSet
from pylate_fastmaxsim.integrations.patching.provenance import defined_in
from pylate_fastmaxsim.pooling import Max, Pooling, check_pooling

_logger = logging.getLogger("pylate_fastmaxsim")
_lock = threading.RLock()
_patches = PatchSet()
_blocks: list[_Block] = []
# What was found in the libraries that are patched now, or were last.
_found: list[_Found] = []


@dataclass(frozen=True)
class _Found:
    """Something to replace in a host.

    Parameters
    ----------
    host, provider
        The host, and who replaces it.
    patch
        None: the provider has none for this release.
    left
        A sentence that says why it is left as it is; None: it is replaced.
    """

    host: Host
    provider: str
    patch: Patch | None
    left: str | None


@dataclass(eq=False)
class _Block:
    """An :func:`enabled` block that runs, and the options that are in force again when it ends."""

    before: Options | None


def enable(
    *,
    padding_free: PaddingFree = True,
    compile: bool = False,
    stock_masking: bool = False,
    pooling: Pooling = Max(),
) -> None:
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
        ``Max()``, ``TopK(k)``, ``Softmax(temperature)`` or ``LogSumExp(temperature)``; see
        :func:`~pylate_fastmaxsim.pooled_scores`. XTR scores, which have a choice of tokens of their own, stay as they
        are, and so do losses with a ``score_metric`` of their own and indexes of other libraries.

    Raises
    ------
    ImportError
        None of PyLate from 1.5.1 up to but not including 2, colpali-engine from 0.3.18 up to but not including 0.4 and
        Sentence Transformers from 5 up to but not including 7 can be imported. Of those that are installed and cannot
        be, a line of log says why they are left alone.
    ValueError
        The environment variable ``PYLATE_FASTMAXSIM`` says neither on nor off, or ``stock_masking=True`` comes
        with another pooling than ``Max()``.
    TypeError
        ``pooling`` is not one, or another option is neither True nor False, nor is ``padding_free`` ``"always"``.

    Notes
    -----
    With ``PYLATE_FASTMAXSIM=0`` in the environment this call does nothing but log one line.

    Examples
    --------
    >>> import pylate_fastmaxsim
    >>> from pylate import scores
    >>> pylate_fastmaxsim.enable()
    >>> scores.colbert_scores([[[1.0, 0.0]]], [[[0.5, 0.5], [1.0, 0.0]]])
    tensor([[1.]])
    >>> pylate_fastmaxsim.disable()
    """
    new = Options(padding_free, compile, stock_masking, pooling)
    check_pooling("enable", pooling)
    for name, value in vars(new).items():
        if name == "pooling" or isinstance(value, bool) or (name, value) == ("padding_free", "always"):
            continue
        allowed = "True, False or 'always'" if name == "padding_free" else "True or False"
        raise TypeError(f"{name} must be {allowed}, got {value!r}.")
    if stock_masking and not isinstance(pooling, Max):
        raise ValueError(
            "stock_masking=True takes pooling=Max() only, since PyLate's rule for masked tokens is one for the maximum, "
            f"got {pooling!r}."
        )
    if forbidden():
        _logger.info("PYLATE_FASTMAXSIM=%s: nothing is accelerated.", os.environ["PYLATE_FASTMAXSIM"])
        return
    if not isinstance(pooling, Max):
        _refuse_unpooled(pooling)
    _switch_to(new)
    has_pylate = any(each.host.name == "PyLate" for each in _found)
    _logger.info(
        "%s; %s.%s",
        "; ".join(_sentences(_found)) or "Nothing is accelerated",
        ", ".join(f"{name} {on_or_off(value)}" for name, value in vars(new).items()),
        " With PyLate, a loss of your own gets fused scores; call pylate_fastmaxsim.encode in it to leave out padding too."
        * has_pylate,
    )
    if stock_masking and not has_pylate:
        _logger.warning("stock_masking=True has no effect: only PyLate's losses take it.")
    if not isinstance(pooling, Max):
        log_once(
            "pooling=%s: indexes built by others (PLAID, fast-plaid, Voyager) still search with the maximum.", pooling
        )


def _sentences(found: Sequence[_Found]) -> Iterator[str]:
    """What is accelerated in which of the hosts, and which functions there are left as they are."""
    of_gain: dict[str, list[str]] = {}
    for host in dict.fromkeys(each.host for each in found):
        own = [each for each in found if each.host is host]
        left = {each.provider: each for each in own if each.left}
        names = [each.patch.short_name if each.patch else each.provider for each in own if each.left]
        if len(names) == len(own):
            continue
        gain = ", ".join(gain for provider, gain in host.gains if provider not in left) or "in part"
        gain += f" (but not {', '.join(names)})" * bool(names)
        of_gain.setdefault(gain, []).append(f"{host.name} {host.version}")
    for gain, names in of_gain.items():
        yield f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} accelerated: {gain}"


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


@contextmanager
def enabled(
    *,
    padding_free: PaddingFree = True,
    compile: bool = False,
    stock_masking: bool = False,
    pooling: Pooling = Max(),
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
        enable(
            padding_free=padding_free,
            compile=compile,
            stock_masking=stock_masking,
            pooling=pooling,
        )
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


def available_patches() -> list[Patch]:
    """What :func:`enable` replaces in the host libraries. Imports those that are installed.

    Raises
    ------
    ImportError
        As :func:`enable`.
    """
    return _to_apply(_available())


def not_accelerated() -> list[str]:
    """A sentence for each host and each function of a host that is left as it is, and why."""
    hosts, reasons = usable_hosts()
    return [*left_alone(reasons), *_lines(_find(hosts))]


def all_patches() -> list[Patch]:
    """What there is to replace in the hosts that are installed, whether or not it is known code."""
    return [patch for _, name in _providers(usable_hosts()[0]) for patch in _provider(name).patches()]


def _available() -> list[_Found]:
    """What there is to replace in the host libraries that can be patched."""
    hosts, reasons = usable_hosts()
    if not hosts:
        raise ImportError(" ".join(dict.fromkeys(reasons.values())))
    found = _find(hosts)
    for line in (*left_alone(reasons), *_lines(found)):
        log_once("%s", line)
    return found


def _find(hosts: Iterable[Host]) -> list[_Found]:
    found = []
    for host, name in _providers(hosts):
        try:
            made = _provider(name).patches()
        except (ImportError, AttributeError) as error:  # a release that has renamed what the provider imports
            release = f"{host.name} {host.version}"
            line = f"{name} does not accelerate {release}: {error}. For this release, update pylate-fastmaxsim."
            found.append(_Found(host, name, None, line))
            continue
        for patch in made:
            reason = _reason_to_leave(patch)
            line = reason and f"{patch.target} is not accelerated (running {host.name}'s own): {reason}."
            found.append(_Found(host, name, patch, line))
    return found


def _to_apply(found: Iterable[_Found]) -> list[Patch]:
    return [each.patch for each in found if each.left is None]


def _lines(found: Iterable[_Found]) -> list[str]:
    return [each.left for each in found if each.left is not None]


def _refuse_unpooled(pooling: Pooling) -> None:
    """Raise ValueError if scores of a host would be left as they are, which take the maximum."""
    for each in _find(usable_hosts()[0]):
        replacement = each.patch and getattr(each.patch.replacement, "__func__", each.patch.replacement)
        # Of a provider without a patch nothing is known.
        if each.left and (each.patch is None or getattr(replacement, "pooled", False)):
            raise ValueError(f"pooling={pooling} cannot be used: its scores would take the maximum. {each.left}")


def _providers(hosts: Iterable[Host]) -> list[tuple[Host, str]]:
    found: dict[str, Host] = {}
    for host in hosts:
        for name in host.providers:
            found.setdefault(name, host)
    return [(host, name) for name, host in found.items()]


def _provider(name: str) -> ModuleType:
    return importlib.import_module(f"pylate_fastmaxsim.integrations.{name}")


def _reason_to_leave(patch: Patch) -> str | None:
    """Why a patch is not applied: what it would replace is not what it was written for."""
    now = patch.original
    if now is None:
        return "this release has no such name"
    # What is inherited from these libraries the replacement calls.
    inherited = defined_in(host_function(now), ("torch", "transformers"))
    for function in patch.needs if inherited else (now, *patch.needs):
        if (part := unknown_part(function)) is not None:
            return not_known(part)
    if inherited:
        return None
    # It may have been put back since the replacement was made, which calls what stood there then.
    was = code_of(patch.replacement)
    return None if was is code_of(now) else not_known(patch.target)


def _switch_to(new: Options | None) -> None:
    global _found
    with _lock:
        if new == current_options():
            return
        if current_options() is None:
            _found = _available()
            _patches.apply(_to_apply(_found))
        else:
            # Models that were prepared for the old options go back to how they were built.
            from pylate_fastmaxsim.integrations.encoding import encode as encoding_encode

            encoding_encode.release()
            forget_what_was_said()
        if new is None:
            _patches.undo()
        elif new.compile:
            from pylate_fastmaxsim.integrations.compilation import checkpointing as compilation_checkpointing

            compilation_checkpointing.patch_checkpointing()
        set_options(new)
