"""The location of a bucket-like mirror: ``scheme://bucket/prefix``, read exactly.

Rules:
* A prefix is literal text, never percent-decoded: an object's name is what the URL shows.
* A URL with what could be a secret (a user, a query) is refused, and the message never repeats it. A password may have
  a slash: so an ``@`` is part of a prefix only if the bucket before it has no colon.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptmirror.core.errors import BrokenMeta, ConfigError
from ckptmirror.core.names import check_relative_path

__all__ = ["BucketLocation", "is_object_name", "parse_location"]


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """A bucket and the prefix of a mirror's objects ("" or ``a/b``, without slashes around it)."""

    scheme: str
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """The normalised URL."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def object_name(self, name: str) -> str:
        """Return the name in the bucket of the mirror's object ``name``.

        Raises:
            BrokenMeta: The name would leave the prefix, or no store could hold it.
        """
        return self.under(check_relative_path(name))

    def under(self, text: str) -> str:
        """Return ``text`` below the prefix, unchecked: for listings, where it may be a part of a name."""
        return f"{self.prefix}/{text}" if self.prefix else text

    def relative(self, object_name: str) -> str:
        """The inverse of :meth:`under`. A name outside the prefix gets a ``/`` in front, which no name of ours has."""
        prefix = self.under("")
        return object_name.removeprefix(prefix) if object_name.startswith(prefix) else f"/{object_name}"


def is_object_name(name: str) -> bool:
    """Whether a name that was found on a mirror could be one of ours; a listing omits all others."""
    try:
        check_relative_path(name)
    except BrokenMeta:
        return False
    return True


def parse_location(url: str, bucket_pattern: str) -> BucketLocation:
    """Read ``scheme://bucket/prefix``.

    Raises:
        ConfigError: There is no bucket, its name is not allowed, or the URL has a user, query or fragment.
    """
    scheme, separator, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    user = rest if ":" in bucket else bucket
    if "@" in user or "%40" in user or any(mark in rest for mark in "?#"):
        raise ConfigError(f"A {scheme}:// URL is a bucket and a prefix, without user, query or fragment.")
    if not separator or not re.fullmatch(bucket_pattern, bucket):
        raise ConfigError(f"{url!r} does not name a valid bucket.", hint=f"Write {scheme}://bucket/prefix.")
    prefix = prefix.rstrip("/")
    if prefix:
        try:
            check_relative_path(prefix)
        except BrokenMeta as error:
            raise ConfigError(f"The prefix of {url!r} cannot be used: {error}") from error
    return BucketLocation(scheme, bucket, prefix)
