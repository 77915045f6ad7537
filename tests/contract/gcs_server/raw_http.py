"""A bare HTTP connection to the server, for what the real client hides."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from ckptmirror.testing import GcsServerProcess


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Raw:
    """Requests exactly as written; one connection each."""

    def __init__(self, server: GcsServerProcess, bucket: str) -> None:
        self.server = server
        self.bucket = bucket

    def __call__(
        self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = 30
    ) -> Answer:
        if target.startswith("http"):
            parts = urlsplit(target)
            target = f"{parts.path}?{parts.query}"
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=timeout_s)
        try:
            connection.request(method, target, body=body, headers=headers or {})
            response = connection.getresponse()
            found = {key.lower(): value for key, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def object_path(self, name: str) -> str:
        return f"/storage/v1/b/{self.bucket}/o/{quote(name, safe='')}"

    def upload_path(self, kind: str, **query: str) -> str:
        text = "".join(f"&{key}={quote(value, safe='')}" for key, value in query.items())
        return f"/upload/storage/v1/b/{self.bucket}/o?uploadType={kind}{text}"

    def put(self, name: str, data: bytes, **query: str) -> Answer:
        return self("POST", self.upload_path("media", name=name, **query), data, {"Content-Type": "x/y"})

    def start(
        self, name: str, resource: dict[str, Any] | None = None, headers: dict[str, str] | None = None, **query: str
    ):
        body = json.dumps({"name": name, **(resource or {})})
        answer = self("POST", self.upload_path("resumable", **query), body, headers)
        assert answer.status == 200, answer
        return answer.headers["location"]

    def chunk(self, session: str, data: bytes, content_range: str, **headers: str) -> Answer:
        return self("PUT", session, data, {"Content-Range": f"bytes {content_range}", **headers})

    def ask(self, session: str, total: int | str = "*") -> Answer:
        return self("PUT", session, b"", {"Content-Range": f"bytes */{total}"})
