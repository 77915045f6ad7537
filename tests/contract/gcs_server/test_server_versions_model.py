"""Any history of one bucket, against a model of what the pages on versions and soft deletion say.

Sources: https://cloud.google.com/storage/docs/object-versioning and https://cloud.google.com/storage/docs/soft-delete
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_http import Raw

NAMES = ("a", "b")
KINDS = ("put", "put", "put", "delete", "delete version", "copy", "move", "compose", "restore", "versioning", "soft")
_numbers = itertools.count()


@dataclass
class Version:
    name: str
    generation: str
    body: bytes
    state: str = "live"  # live, noncurrent, soft, gone


class Model:
    """What a bucket should hold."""

    def __init__(self) -> None:
        self.versions: list[Version] = []
        self.versioning = False
        self.soft = False

    def live(self, name: str) -> Version | None:
        return next((one for one in self.versions if (one.name, one.state) == (name, "live")), None)

    def in_state(self, *states: str) -> list[Version]:
        return [one for one in self.versions if one.state in states]

    def take_away(self, version: Version | None, *, for_good: bool = False) -> None:
        if version is not None:
            kept = self.versioning and not for_good
            version.state = "noncurrent" if kept else "soft" if self.soft else "gone"

    def add(self, name: str, generation: str, body: bytes) -> None:
        self.take_away(self.live(name))
        self.versions.append(Version(name, generation, body))


class Bucket:
    """The real one beside its model; every step is done to both."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw
        self.model = Model()

    def step(self, kind: str, name: str, choice: int) -> None:
        model, raw, path, other = self.model, self.raw, self.raw.object_path(name), NAMES[name == "a"]
        live = model.live(name)
        if kind == "put":
            body = f"{name} {choice}".encode()
            model.add(name, raw.put(name, body).json()["generation"], body)
        elif kind == "delete":
            assert raw("DELETE", path).status == (204 if live else 404)
            model.take_away(live)
        elif kind == "delete version":
            self._delete_version(choice)
        elif kind == "restore":
            self._restore(choice)
        elif kind == "compose":
            answer = raw(
                "POST", f"{raw.object_path(other)}/compose", json.dumps({"sourceObjects": [{"name": name}] * 2})
            )
            self._made(answer, other, live, 2)
        elif kind == "copy":
            self._made(raw("POST", f"{path}/copyTo/b/{raw.bucket}/o/{other}"), other, live)
        elif kind == "move":
            self._made(raw("POST", f"{path}/moveTo/o/{other}"), other, live)
            model.take_away(live)
        elif kind == "versioning":
            model.versioning = not model.versioning
            self._set({"versioning": {"enabled": model.versioning}})
        else:
            model.soft = not model.soft
            self._set({"softDeletePolicy": {"retentionDurationSeconds": 604800 if model.soft else 0}})

    def _made(self, answer, name: str, source: Version | None, times: int = 1) -> None:
        assert answer.status == (200 if source else 404), answer
        if source is not None:
            self.model.add(name, answer.json()["generation"], source.body * times)

    def _delete_version(self, choice: int) -> None:
        versions = self.model.in_state("live", "noncurrent")
        if versions:
            one = versions[choice % len(versions)]
            assert self.raw("DELETE", f"{self.raw.object_path(one.name)}?generation={one.generation}").status == 204
            self.model.take_away(one, for_good=True)

    def _restore(self, choice: int) -> None:
        versions = self.model.in_state("soft")
        if versions:
            one = versions[choice % len(versions)]
            path = f"{self.raw.object_path(one.name)}/restore?generation={one.generation}"
            self._made(self.raw("POST", path), one.name, one)

    def _set(self, change) -> None:
        assert self.raw("PATCH", f"/storage/v1/b/{self.raw.bucket}", json.dumps(change)).status == 200

    def check(self) -> None:
        for query, states in (
            ("", ["live"]),
            ("versions=true", ["live", "noncurrent"]),
            ("softDeleted=true", ["soft"]),
        ):
            wanted = {(one.name, one.generation): one.body for one in self.model.in_state(*states)}
            assert self._listed(query) == sorted(wanted, key=lambda key: (key[0], int(key[1]))), query
            for (name, generation), body in wanted.items():
                answer = self.raw("GET", f"{self.raw.object_path(name)}?alt=media&generation={generation}")
                assert (answer.status, answer.body) == ((404, answer.body) if states == ["soft"] else (200, body))

    def _listed(self, query: str) -> list[tuple[str, str]]:
        found, token = [], ""
        while token is not None:
            page = self.raw("GET", f"/storage/v1/b/{self.raw.bucket}/o?maxResults=3&pageToken={token}&{query}").json()
            found += [(item["name"], item["generation"]) for item in page.get("items", [])]
            token = page.get("nextPageToken")
        return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES), st.integers(0, 99)), max_size=25))
def test_after_any_history_the_listings_and_the_bytes_are_those_of_the_model(server, history) -> None:
    """Documented at https://cloud.google.com/storage/docs/object-versioning."""
    name = f"history-{next(_numbers)}"
    server.create_bucket(name)
    bucket = Bucket(Raw(server, name))
    for kind, object_name, choice in history:
        bucket.step(kind, object_name, choice)
    bucket.check()
