"""Google's token services, as far as credentials need them, in a process of their own.

It answers by the JSON of its first argument:

* ``POST /token``: a service account's signed assertion (``public_key`` checks it) or a login's ``refresh_token``;
* ``POST /sts/token``: the exchange of somebody else's token, ``subject``, for a federated one;
* ``POST …/EMAIL:generateAccessToken``: impersonation, for a caller with ``may_impersonate``;
* ``GET /subject``: where a workload finds its own token; ``GET /computeMetadata/…``: a virtual machine's;
* ``GET /asked``: what was asked for so far.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import parse_qs

from tests.kit.servers.small_server import Answers, SmallServer, running, serve

EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
JWT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
# The token service of a login, and impersonation: neither a file nor a variable can set their addresses.
GOOGLES_NAMES = ("oauth2.googleapis.com", "iamcredentials.googleapis.com")


class Google(Answers):
    def do_GET(self) -> None:
        if self.path == "/asked":
            return super().do_GET()
        self.asked.append(self.path.partition("?")[0])
        is_machine = self.headers.get("Metadata-Flavor") == "Google"
        if self.path == "/subject":
            return self.say(200, self.facts["subject"], "text/plain")
        if not is_machine or "machine" not in self.facts:
            return self.say(404, {})
        if "/token" in self.path:
            return self.say(200, {"access_token": self.facts["machine"], "expires_in": 3000, "token_type": "Bearer"})
        if "project-id" in self.path or self.path == "/":
            return self.say(200, "p", "text/plain")
        return self.say(200, {"email": "vm@p.iam.gserviceaccount.com", "scopes": [], "aliases": ["default"]})

    def do_POST(self) -> None:
        self.asked.append(self.path.partition("?")[0])
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if self.path == "/token":
            return self.grant({key: values[0] for key, values in parse_qs(body).items()})
        if self.path == "/sts/token":
            return self.exchange({key: values[0] for key, values in parse_qs(body).items()})
        if self.path.endswith(":generateAccessToken"):
            return self.impersonate(json.loads(body))
        return self.say(404, {})

    def grant(self, form: dict[str, str]) -> None:
        if form["grant_type"] == JWT:
            from google.auth import jwt

            audience = f"https://{GOOGLES_NAMES[0]}/token"
            claims = jwt.decode(form["assertion"], certs=self.facts["public_key"].encode(), audience=audience)
            if not claims.get("scope"):
                return self.say(400, {"error": "invalid_scope"})
            if self.facts.get("disabled"):
                return self.say(400, {"error": "invalid_grant", "error_description": "The account is disabled."})
            return self.give("service_account")
        if form["grant_type"] == "refresh_token" and form["refresh_token"] == "good":
            return self.give("login")
        return self.say(400, {"error": "invalid_grant", "error_description": "Token has been expired or revoked."})

    def exchange(self, form: dict[str, str]) -> None:
        if form["grant_type"] != EXCHANGE or form["subject_token"] != self.facts["subject"]:
            return self.say(400, {"error": "invalid_request", "error_description": "The subject token is not ours."})
        return self.give("federated", issued_token_type="urn:ietf:params:oauth:token-type:access_token")

    def impersonate(self, body: dict[str, Any]) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.facts['may_impersonate']}":
            message = "Permission 'iam.serviceAccounts.getAccessToken' denied on resource (or it may not exist)."
            return self.say(403, {"error": {"code": 403, "message": message, "status": "PERMISSION_DENIED"}})
        assert body["scope"]
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
        return self.say(200, {"accessToken": self.facts["impersonated"], "expireTime": until})

    def give(self, which: str, **more: Any) -> None:
        return self.say(200, {"access_token": self.facts[which], "expires_in": 3600, "token_type": "Bearer", **more})

    def say(self, status: int, body: Any, content_type: str = "application/json", **headers: str) -> None:
        super().say(status, body, content_type, Metadata_Flavor="Google", **headers)


def fake_google(**facts: Any) -> AbstractContextManager[SmallServer]:
    """Run it.

    Args:
        facts: The tokens that it gives, and what it checks; ``certificate`` is a file with which it answers over TLS
            too, on another port, under the name that it has at Google.
    """
    return running("tests.kit.servers.fake_google", facts)


if __name__ == "__main__":
    serve(Google)
