"""The libraries that are accelerated, and what can be replaced in those that are installed."""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, util

from pylate_fastmaxsim._install import install_command
from pylate_fastmaxsim.integrations.options import COLPALI, PYLATE, SENTENCE_TRANSFORMERS
from pylate_fastmaxsim.integrations.patching.known_sources import (
    code_of,
    defined_in,
    host_function,
    not_known,
    unknown_part,
)
from pylate_fastmaxsim.integrations.patching.patches import Patch


@dataclass(frozen=True, eq=False)
class Host:
    """A library that is accelerated."""

    name: str  # of its distribution, as it is printed
    extra: str  # installs it
    module: str
    first: str  # the versions whose names and rules the patches know: from this one
    below: str  # up to but not including this one
    providers: tuple[str, ...]  # modules of this package whose patches() say what to replace in it
    gains: Mapping[str, str]  # what is accelerated, by the provider that must replace all of its functions for it

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def version(self) -> str:
        return getattr(sys.modules[self.package], "__version__", None) or metadata.version(self.name)

    def is_installed(self) -> bool:
        """True if it can be found; of one that is a part of a package, also whether that has been imported."""
        can_be_there = self.module == self.package or sys.modules.get(self.package) is not None
        return can_be_there and util.find_spec(self.module) is not None

    def reason_against_patching(self) -> str | None:
        """A sentence that says why it cannot be patched. Imports it."""
        try:
            importlib.import_module(self.package)
            version = self.version
        except ModuleNotFoundError as error:
            if error.name != self.package:
                return f"{self.name} cannot be imported: {error}."
            return f"{self.name} is not installed: {install_command(self.extra)}."
        except Exception as error:  # a broken installation of what it needs raises anything
            return f"{self.name} cannot be imported: {type(error).__name__}: {error}."
        from packaging.version import Version

        if Version(self.first).release <= Version(version).release < Version(self.below).release:
            return None
        return (
            f"pylate-fastmaxsim accelerates {self.name} from {self.first} up to but not including {self.below}; "
            f"installed is {version}."
        )


_MAXSIM = "fused MaxSim in scores, losses, rerank and evaluation"
HOSTS = (
    Host(
        name=PYLATE,
        extra="pylate",
        module="pylate",
        first="1.5.1",
        below="2",
        providers=(
            "pylate.scores",
            "pylate.losses",
            "pylate.encode",
            "encoding.masks",
            "models.encoders",
            "pylate.fused_head",
        ),
        gains={"pylate.scores": _MAXSIM},
    ),
    Host(
        name=COLPALI,
        extra="colpali",
        module="colpali_engine",
        first="0.3.18",
        below="0.4",
        providers=("colpali.losses",),
        gains={"colpali.losses": _MAXSIM},
    ),
    # Of Sentence Transformers, which PyLate stands on, its own MultiVectorEncoder.
    Host(
        name=SENTENCE_TRANSFORMERS,
        extra="multi-vector",
        module="sentence_transformers.multi_vector_encoder",
        first="6",
        below="7",
        providers=(
            "sentence_transformers.scores",
            "sentence_transformers.encoder",
            "sentence_transformers.inference",
            "sentence_transformers.token_pooling",
            "sentence_transformers.search",
            "encoding.masks",
        ),
        gains={"sentence_transformers.scores": _MAXSIM},
    ),
    # Its SparseEncoder, which release 5.3 beside PyLate has too.
    Host(
        name=SENTENCE_TRANSFORMERS,
        extra="multi-vector",
        module="sentence_transformers.sparse_encoder",
        first="5",
        below="7",
        providers=("sparse_encoder.encoder", "sparse_encoder.inference", "sparse_encoder.search", "encoding.masks"),
        gains={
            "sparse_encoder.encoder": "SPLADE without vocabulary logits",
            "sparse_encoder.search": "exact search of sparse embeddings",
        },
    ),
)
HOST_PACKAGES = frozenset(host.package for host in HOSTS)


def contains_host(package: str) -> bool:
    """True if an imported package is a library to accelerate, or has one in it: Sentence Transformers may not."""
    return any(host.package == package and host.is_installed() for host in HOSTS)


@dataclass(frozen=True)
class Replacement:
    """Something to replace in a host."""

    host: Host
    provider: str | None  # the module of this package that replaces it; None: the host cannot be patched at all
    patch: Patch | None  # None: the provider has none for this release
    left: str | None  # a sentence that says why it is left as it is; None: it is replaced


def find_replacements() -> list[Replacement]:
    """All that there is to replace in the hosts that are installed. Imports them; ImportError if none can be patched."""
    reasons = {host: host.reason_against_patching() for host in HOSTS}
    if all(reasons.values()):
        raise ImportError(" ".join(dict.fromkeys(reasons.values())))
    found = [
        Replacement(host, None, None, f"{host.name} is not accelerated: {reason}")
        for host, reason in reasons.items()
        if reason and host.is_installed()
    ]
    providers: dict[str, Host] = {}
    for host in (host for host, reason in reasons.items() if reason is None):
        for provider in host.providers:
            providers.setdefault(provider, host)
    for provider, host in providers.items():
        try:
            patches = importlib.import_module(f"pylate_fastmaxsim.integrations.{provider}").patches()
        except (ImportError, AttributeError) as error:  # a release that has renamed what the provider imports
            release = f"{host.name} {host.version}"
            line = f"{provider} does not accelerate {release}: {error}. For this release, update pylate-fastmaxsim."
            found.append(Replacement(host, provider, None, line))
            continue
        for patch in patches:
            reason = _reason_against_replacing(patch)
            line = reason and f"{patch.target} is not accelerated (running {host.name}'s own): {reason}."
            found.append(Replacement(host, provider, patch, line))
    return found


def _reason_against_replacing(patch: Patch) -> str | None:
    """A clause that says that the code to replace is not what the patch was written for."""
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
