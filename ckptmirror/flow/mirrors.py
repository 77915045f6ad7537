"""A mirror of a run: its URL, whether it is required, and the store behind it.

Rules:
* A required mirror must be able to compare and swap; otherwise two attempts could not see one another.
* Stores are opened here and nowhere else in flow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptmirror.core.errors import ConfigError
from ckptmirror.stores import normalise_url, open_store
from ckptmirror.stores.base import Store

__all__ = ["Mirror", "MirrorSpec", "close_mirrors", "mirror_specs", "open_mirrors"]


@dataclass(frozen=True)
class MirrorSpec:
    """A mirror as configured: its URL, and whether a save must be there before its local copy may go."""

    url: str
    required: bool = True


@dataclass(frozen=True)
class Mirror:
    """An open mirror."""

    url: str
    required: bool
    store: Store


def mirror_specs(mirrors: Iterable[str | MirrorSpec]) -> list[MirrorSpec]:
    """Normalise what a user configured.

    Raises:
        ConfigError: A URL is not understood, or one is given twice.
    """
    if isinstance(mirrors, str | MirrorSpec):
        raise ConfigError("mirrors is a list of URLs, not one URL.", hint="Write mirrors=[...].")
    specs: list[MirrorSpec] = []
    for given in mirrors:
        spec = given if isinstance(given, MirrorSpec) else MirrorSpec(given)
        spec = MirrorSpec(normalise_url(spec.url), spec.required)
        if any(other.url == spec.url for other in specs):
            raise ConfigError(f"The mirror {spec.url} is configured twice.", hint="List each mirror once.")
        specs.append(spec)
    return specs


def open_mirrors(specs: Iterable[MirrorSpec]) -> list[Mirror]:
    """Open the store behind each mirror, in order.

    Raises:
        ConfigError: A required mirror cannot compare and swap.
    """
    mirrors = []
    for spec in specs:
        store = open_store(spec.url)
        if spec.required and not store.capabilities.compare_and_swap:
            raise ConfigError(
                f"The mirror {spec.url} cannot replace an object at a given generation, so two writers could not see "
                "one another.",
                hint="Configure it with required=False, beside a mirror that can.",
            )
        mirrors.append(Mirror(spec.url, spec.required, store))
    return mirrors


def close_mirrors(mirrors: Sequence[Mirror]) -> None:
    """Close every store."""
    for mirror in mirrors:
        mirror.store.close()
