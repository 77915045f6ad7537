"""``python -m tests.contract.in_bucket BUCKET``: the store contract suite in a bucket of yours (``make test-gcs``).

Rules:
* It works under a new prefix, and deletes there at the end what it finds, each object at the generation that it listed.
* Credentials and endpoint are those of the environment, as for every verb.
* Without a bucket it says so and does nothing; that is no failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.stores import normalise_url, open_store

SUITE = Path(__file__).with_name("test_store_contract.py")


def main(arguments: Sequence[str]) -> int:
    """Run the suite; return pytest's exit code, or that of what kept it from the bucket."""
    bucket = next(iter(arguments), "")
    if not bucket:
        print("Skipped: no bucket is named. Say make test-gcs BUCKET=my-bucket, or BUCKET=gs://my-bucket/prefix.")
        return 0
    try:
        url = _new_place(bucket)
        _ask(url)
    except CkptMirrorError as error:
        print(f"{error}\n  {error.hint}", file=sys.stderr)
        return error.exit_code
    print(f"The store contract, under {url}", flush=True)
    try:
        return _run(f"{url}/{{number}}", arguments[1:])
    finally:
        _remove(url)


def _new_place(bucket: str) -> str:
    url = bucket if "://" in bucket else f"gs://{bucket}"
    name = f"ckptmirror-contract-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid4().hex[:8]}"
    return normalise_url(f"{url.rstrip('/')}/{name}")


def _ask(url: str) -> None:
    """List the place, so that what is missing is said once, not by each test."""
    store = open_store(url)
    try:
        if next(iter(store.list()), None) is not None:
            raise CkptMirrorError(f"{url} is not empty.", hint="Run it again: the next name is another.")
    finally:
        store.close()


def _run(url: str, more: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=600", str(SUITE), *more]
    environment = os.environ | {"CKPTMIRROR_CONTRACT_URL": url}
    return subprocess.run(command, env=environment, cwd=SUITE.parents[2], check=False).returncode


def _remove(url: str) -> None:
    store = open_store(url)
    try:
        found = list(store.list())
        for info in found:
            store.delete(info.name, generation=info.generation)
        print(f"The {len(found)} objects under {url} are removed.")
    except CkptMirrorError as error:
        print(f"Not removed: {error}\n  gcloud storage rm --recursive {url}", file=sys.stderr)
    finally:
        store.close()


if __name__ == "__main__":
    sys.exit(main([argument for argument in sys.argv[1:] if argument]))
