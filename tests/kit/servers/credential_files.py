"""Credentials files of every kind, whose services are ``tests/kit/servers/fake_google.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

SUBJECT_TYPE = "urn:ietf:params:oauth:token-type:jwt"
AUDIENCE = "//iam.googleapis.com/projects/123/locations/global/workloadIdentityPools/pool/providers/cluster"
_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
PUBLIC_KEY = (
    _KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()
)


def service_account(url: str) -> dict[str, Any]:
    """A key file."""
    secret = _KEY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "1",
        "private_key": secret.decode(),
        "client_email": "trainer@p.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": f"{url}/token",
    }


def login(refresh_token: str = "good") -> dict[str, Any]:
    """What `gcloud auth application-default login` leaves. It names no token service: that is always Google's."""
    return {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": refresh_token}


def impersonation_url(url: str) -> str:
    return f"{url}/v1/projects/-/serviceAccounts/trainer@p.iam.gserviceaccount.com:generateAccessToken"


def impersonated(url: str, source: dict[str, Any]) -> dict[str, Any]:
    """What `gcloud auth application-default login --impersonate-service-account` leaves."""
    return {
        "type": "impersonated_service_account",
        "service_account_impersonation_url": impersonation_url(url),
        "delegates": [],
        "source_credentials": source,
    }


def workload(url: str, source: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What `gcloud iam workload-identity-pools create-cred-config` writes."""
    return {
        "type": "external_account",
        "audience": AUDIENCE,
        "subject_token_type": SUBJECT_TYPE,
        "token_url": f"{url}/sts/token",
        "credential_source": source,
        **more,
    }


def write(path: Path, facts: dict[str, Any]) -> dict[str, str]:
    """Write the file; return the environment that names it."""
    path.write_text(json.dumps(facts))
    return {"GOOGLE_APPLICATION_CREDENTIALS": str(path)}
