"""Make or mend a bucket for ckptmirror: ``python deploy/gcs/apply.py my-bucket --project my-project …``.

What the bucket shall be stands in ``bucket.json``, who gets which role in ``uses.json``.

Rules:
* The plan is printed first, one line per difference; ``--dry-run`` ends there. A second run finds nothing to change.
* A role is given, never taken: what others have in the bucket stays, and is theirs to look after.
* Changes carry the generation or etag that the plan was made from: what somebody changed meanwhile is not overwritten.
* No lifecycle rule that could delete a live object is applied: the newest save of a run that pauses is as old as its
  pause.
* It needs the client library alone, and the permissions of Storage Admin.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.api_core.exceptions import Conflict, GoogleAPICallError, NotFound, PreconditionFailed
from google.auth.exceptions import GoogleAuthError
from google.cloud import storage

HERE = Path(__file__).parent
_ONLY_NONCURRENT = ("daysSinceNoncurrentTime", "noncurrentTimeBefore", "numNewerVersions")
_PUBLIC = ("allUsers", "allAuthenticatedUsers")


class Refused(Exception):
    """It is not done, and the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, print, apply; return the exit code."""
    options = _parse(arguments)
    try:
        wanted = json.loads(options.bucket_file.read_text())
        check_lifecycle(wanted)
        client = storage.Client(project=options.project)
        bucket = _bucket(client, options.bucket)
        changed = _settle(client, bucket, wanted, options)
        changed += _grant(bucket, _roles(options), options, exists=bucket.exists())
    except Refused as refusal:
        print(f"apply.py: {refusal}", file=sys.stderr)
        return 1
    except (PreconditionFailed, Conflict) as error:
        print(f"apply.py: somebody else changed it at the same time, run it again: {error.message}", file=sys.stderr)
        return 1
    except (GoogleAPICallError, GoogleAuthError, OSError, ValueError) as error:
        print(f"apply.py: {error}", file=sys.stderr)
        return 1
    if not changed:
        print("Nothing to change.")
    elif options.dry_run:
        print("Nothing was changed: --dry-run.")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make or mend a bucket for ckptmirror.")
    parser.add_argument("bucket", help="its name, without gs://")
    parser.add_argument("--project", required=True, help="where it is made")
    parser.add_argument("--location", default="us-central1", help="the region of the machines that train")
    for use in _uses():
        parser.add_argument(f"--{use}", action="append", default=[], metavar="MEMBER", help="serviceAccount:a@b; again")
    parser.add_argument(
        "--custom-roles", metavar="PROJECT", help="give the roles of deploy/gcs/roles, made there before"
    )
    parser.add_argument("--bucket-file", type=Path, default=HERE / "bucket.json", help="another bucket.json")
    parser.add_argument(
        "--replace", action="store_true", help="replace lifecycle rules, versioning or soft deletion that a bucket has"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and change nothing")
    return parser.parse_args(arguments)


def _uses() -> dict[str, dict[str, str]]:
    uses: dict[str, dict[str, str]] = json.loads((HERE / "uses.json").read_text())
    return uses


def _roles(options: argparse.Namespace) -> dict[str, list[str]]:
    """Members by the role that they shall have."""
    roles: dict[str, list[str]] = {}
    for use, names in _uses().items():
        own = f"projects/{options.custom_roles}/roles/{names['custom']}"
        role = own if options.custom_roles else names["predefined"]
        roles.setdefault(role, []).extend(getattr(options, use))
    return {role: members for role, members in roles.items() if members}


def check_lifecycle(wanted: Mapping[str, Any]) -> None:
    """Refuse a rule that could delete a live object.

    Raises:
        Refused: There is one.
    """
    for rule in wanted.get("lifecycle", {}).get("rule", []):
        condition = rule["condition"]
        spares_live = condition.get("isLive") is False or any(condition.get(name) for name in _ONLY_NONCURRENT)
        if rule["action"]["type"] == "Delete" and not spares_live:
            raise Refused(f"this lifecycle rule would delete live saves, so nothing is done: {json.dumps(rule)}")


def _bucket(client: storage.Client, name: str) -> storage.Bucket:
    bucket = client.bucket(name)
    try:
        bucket.reload()
    except NotFound:
        return client.bucket(name)
    return bucket


def _settle(client: storage.Client, bucket: storage.Bucket, wanted: dict[str, Any], options: argparse.Namespace) -> int:
    """Make the bucket, or give it the settings that it lacks; return how many lines the plan has."""
    exists = bucket.metageneration is not None
    if exists and bucket.location.upper() != options.location.upper():
        raise Refused(f"gs://{bucket.name} lies in {bucket.location}, and a bucket cannot move to {options.location}")
    plan = list(differences(wanted, bucket._properties if exists else {}))
    if not exists:
        print(f"+ gs://{bucket.name} in {options.location}, project {options.project}")
    for line in plan:
        print(f"{'~' if exists else '+'} {line}")
    if options.dry_run or (exists and not plan):
        return len(plan) + (not exists)
    own = list(_taken_away(wanted, bucket._properties)) if exists else []
    if own and not options.replace:
        raise Refused(
            f"gs://{bucket.name} has {' and '.join(own)} of its own; --replace puts what is above in their place"
        )
    _set(bucket, wanted)
    if exists:
        bucket.patch(if_metageneration_match=bucket.metageneration)
    else:
        client.create_bucket(bucket, project=options.project, location=options.location)
    return len(plan) + (not exists)


def _taken_away(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what somebody has set on a bucket, perhaps on purpose, that these settings would end."""
    if any(rule not in wanted["lifecycle"]["rule"] for rule in found.get("lifecycle", {}).get("rule", [])):
        yield "lifecycle rules"
    if found.get("versioning", {}).get("enabled") and not wanted["versioning"]["enabled"]:
        yield "versioning"
    retention = "retentionDurationSeconds"
    if int(found.get("softDeletePolicy", {}).get(retention, 0)) > int(wanted["softDeletePolicy"][retention]):
        yield "a longer soft deletion"


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yield a line for each setting of ``wanted`` that ``found`` lacks; what only ``found`` has is left alone."""
    for key, value in wanted.items():
        now = found.get(key)
        if isinstance(value, dict):
            yield from differences(value, now if isinstance(now, dict) else {}, f"{at}{key}.")
        elif now != value and (now or value):
            yield f"{at}{key}: {json.dumps(now)} -> {json.dumps(value)}"


def _set(bucket: storage.Bucket, wanted: Mapping[str, Any]) -> None:
    """Say every setting on the client's bucket, which sends those that it is told."""
    access = wanted["iamConfiguration"]
    bucket.storage_class = wanted["storageClass"]
    bucket.iam_configuration.uniform_bucket_level_access_enabled = access["uniformBucketLevelAccess"]["enabled"]
    bucket.iam_configuration.public_access_prevention = access["publicAccessPrevention"]
    soft_delete = bucket.soft_delete_policy
    soft_delete.retention_duration_seconds = int(wanted["softDeletePolicy"]["retentionDurationSeconds"])
    bucket.versioning_enabled = wanted["versioning"]["enabled"]
    bucket.lifecycle_rules = wanted["lifecycle"]["rule"]


def _grant(bucket: storage.Bucket, roles: Mapping[str, list[str]], options: argparse.Namespace, *, exists: bool) -> int:
    """Bind members to roles; return how many lines the plan has."""
    policy = bucket.get_iam_policy(requested_policy_version=3) if exists else None
    bindings = policy.bindings if policy is not None else []
    lines = 0
    for role, members in roles.items():
        binding = next((one for one in bindings if one["role"] == role and not one.get("condition")), None)
        missing = [member for member in dict.fromkeys(members) if binding is None or member not in binding["members"]]
        for member in missing:
            print(f"+ {role} for {member}")
        lines += len(missing)
        if missing and binding is None:
            bindings.append({"role": role, "members": set(missing)})
        elif missing and binding is not None:
            binding["members"] = {*binding["members"], *missing}
    for binding in bindings:
        for member in sorted(set(binding["members"]).intersection(_PUBLIC)):
            print(f"! {member} has {binding['role']}: everybody gets in", file=sys.stderr)
    if lines and policy is not None and not options.dry_run:
        policy.bindings = bindings
        bucket.set_iam_policy(policy)
    return lines


if __name__ == "__main__":
    sys.exit(main())
