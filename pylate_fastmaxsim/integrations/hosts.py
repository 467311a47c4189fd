"""The libraries that are accelerated, and which of them can be patched here."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib import metadata, util


@dataclass(frozen=True)
class Host:
    """A library that is accelerated.

    Parameters
    ----------
    name
        Of its distribution, as it is printed; ``extra`` installs it.
    module
        What to import.
    first, below
        The versions whose names and rules the patches know: from the one up to but not including the other.
    providers
        Modules of this package whose ``patches()`` say what to replace in it.
    gains
        What is accelerated, as the line of log of ``enable()`` has it, each behind the provider that must replace all of
        its functions for it.
    """

    name: str
    extra: str
    module: str
    first: str
    below: str
    providers: tuple[str, ...]
    gains: tuple[tuple[str, str], ...]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def version(self) -> str:
        return getattr(sys.modules[self.package], "__version__", None) or metadata.version(self.name)


_MAXSIM = "fused MaxSim in scores, losses, rerank and evaluation"
HOSTS = (
    Host(
        "PyLate",
        "pylate",
        "pylate",
        "1.5.1",
        "2",
        (
            *("pylate.scores", "pylate.xtr", "pylate.losses", "pylate.collator"),
            *("encoding.masks", "pylate.kv_cache", "pylate.fused_head"),
        ),
        (("pylate.scores", _MAXSIM),),
    ),
    Host(
        "colpali-engine",
        "colpali",
        "colpali_engine",
        "0.3.18",
        "0.4",
        ("colpali.losses",),
        (("colpali.losses", _MAXSIM),),
    ),
    # Of Sentence Transformers, which PyLate stands on, its own MultiVectorEncoder.
    Host(
        "Sentence Transformers",
        "multi-vector",
        "sentence_transformers.multi_vector_encoder",
        "6",
        "7",
        (
            *(
                "sentence_transformers.scores",
                "sentence_transformers.xtr",
                "sentence_transformers.encoder",
                "sentence_transformers.losses",
            ),
            *("sentence_transformers.gradcache", "encoding.masks"),
        ),
        (("sentence_transformers.scores", _MAXSIM),),
    ),
    # Its SparseEncoder, which release 5.3 beside PyLate has too.
    Host(
        "Sentence Transformers",
        "multi-vector",
        "sentence_transformers.sparse_encoder",
        "5",
        "7",
        (
            *(
                "sparse_encoder.encoder",
                "sparse_encoder.training",
                "sparse_encoder.gradcache",
                "sparse_encoder.collator",
            ),
            *("sparse_encoder.search", "sparse_encoder.evaluation", "encoding.masks"),
        ),
        (
            ("sparse_encoder.encoder", "SPLADE without vocabulary logits"),
            ("sparse_encoder.search", "exact search of sparse embeddings"),
        ),
    ),
)
HOST_PACKAGES = frozenset(host.package for host in HOSTS)


def brings_host(package: str) -> bool:
    """Whether a package that is imported is a library to accelerate, or has it in it: Sentence Transformers may not."""
    return any(host.package == package and _is_there(host) for host in HOSTS)


def _is_there(host: Host) -> bool:
    """Whether a library is installed; of one that is a part of a package, also whether that can be imported."""
    can_be_there = host.module == host.package or sys.modules.get(host.package) is not None
    return can_be_there and util.find_spec(host.module) is not None


def left_alone(reasons: dict[Host, str] | None = None) -> list[str]:
    """A sentence for each host library that is installed and cannot be patched; ``reasons`` as of usable_hosts()."""
    _, reasons = usable_hosts() if reasons is None else (None, reasons)
    return [f"{host.name} is not accelerated: {reason}" for host, reason in reasons.items() if _is_there(host)]


def usable_hosts() -> tuple[list[Host], dict[Host, str]]:
    """The host libraries that can be patched, and why the others cannot."""
    usable, reasons = [], {}
    for host in HOSTS:
        reason = _reason_to_leave(host)
        if reason is None:
            usable.append(host)
        else:
            reasons[host] = reason
    return usable, reasons


def _reason_to_leave(host: Host) -> str | None:
    try:
        importlib.import_module(host.package)
        version = host.version
    except ModuleNotFoundError as error:
        if error.name != host.package:
            return f"{host.name} cannot be imported: {error}."
        return f'{host.name} is not installed: pip install "pylate-fastmaxsim[{host.extra}]".'
    except Exception as error:  # a broken installation of what it needs raises anything
        return f"{host.name} cannot be imported: {type(error).__name__}: {error}."
    from packaging.version import Version

    if not Version(host.first).release <= Version(version).release < Version(host.below).release:
        return (
            f"pylate-fastmaxsim accelerates {host.name} from {host.first} up to but not including {host.below}; "
            f"installed is {version}."
        )
    return None
