"""Losses for the ``MultiVectorEncoder`` of Sentence Transformers, from its release 6 on."""

from __future__ import annotations

_NAMES = ("encode", "ContrastiveDistillation", "Matryoshka")


# Loaded when asked for, so that this module can be imported beside an older release.
def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pylate_fastmaxsim.losses import sentence_transformers

    return getattr(sentence_transformers, name)
