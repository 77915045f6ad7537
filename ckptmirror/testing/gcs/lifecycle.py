"""Lifecycle rules of a bucket, as far as they are checked and kept: nothing here ever happens to an object by one.

Source: https://cloud.google.com/storage/docs/lifecycle and
https://cloud.google.com/storage/docs/json_api/v1/buckets#lifecycle
"""

from __future__ import annotations

import re
from typing import Any

from ckptmirror.testing.gcs.answers import bad_request

__all__ = ["read_lifecycle"]

_ACTIONS = ("Delete", "SetStorageClass", "AbortIncompleteMultipartUpload")
_CLASSES = ("STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE")
_DAYS = ("age", "daysSinceCustomTime", "daysSinceNoncurrentTime", "numNewerVersions")
_DATES = ("createdBefore", "customTimeBefore", "noncurrentTimeBefore")
_LISTS = ("matchesPrefix", "matchesSuffix", "matchesStorageClass")
_OF_AN_UPLOAD = frozenset({"age", "matchesPrefix", "matchesSuffix"})
_RULES_LIMIT = 100


def read_lifecycle(name: str, value: Any, _earlier: Any) -> dict[str, Any]:
    """The rules of a bucket's resource; they are replaced whole.

    Raises:
        ApiError: 400.
    """
    rules = value.get("rule", []) if isinstance(value, dict) and not set(value) - {"rule"} else None
    if not isinstance(rules, list) or len(rules) > _RULES_LIMIT:
        raise bad_request(f"Invalid value for {name}: {value}")
    for rule in rules:
        if not isinstance(rule, dict) or set(rule) != {"action", "condition"}:
            raise bad_request(f"Invalid value for {name}: a rule has an action and a condition: {rule}")
        _check_action(rule["action"])
        _check_condition(rule["condition"])
        if rule["action"]["type"] == _ACTIONS[2] and set(rule["condition"]) - _OF_AN_UPLOAD:
            raise bad_request(f"The action {_ACTIONS[2]} takes only the conditions {', '.join(sorted(_OF_AN_UPLOAD))}.")
    return {"rule": rules} if rules else {}


def _check_action(action: Any) -> None:
    fields = {"type", "storageClass"} if isinstance(action, dict) and action.get("type") == _ACTIONS[1] else {"type"}
    if not isinstance(action, dict) or set(action) != fields or action["type"] not in _ACTIONS:
        raise bad_request(f"Invalid action of a lifecycle rule: {action}")
    if action.get("storageClass", "STANDARD") not in _CLASSES:
        raise bad_request(f"Invalid storage class of a lifecycle rule: {action}")


def _check_condition(condition: Any) -> None:
    if not isinstance(condition, dict) or not condition:
        raise bad_request("A lifecycle rule needs a condition.")
    for key, value in condition.items():
        if key in _DAYS:
            good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        elif key in _DATES:
            good = isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None
        elif key in _LISTS:
            good = isinstance(value, list) and all(isinstance(one, str) and one for one in value)
        else:
            good = key == "isLive" and isinstance(value, bool)
        if not good:
            raise bad_request(f"Invalid condition of a lifecycle rule: {key}: {value}")
