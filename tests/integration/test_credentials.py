"""Credentials by each of the usual ways: the bucket gets exactly the token that was given, or there is a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.stores import open_store
from ckptmirror.stores.gs_auth import GoogleTokens
from ckptmirror.testing import Fault, GcsServerProcess
from tests.contract.stores_under_test import upload_of
from tests.kit.cli import IMPATIENT, assert_tells, run
from tests.kit.roots import content, make_pending
from tests.kit.servers import credential_files as files
from tests.kit.servers.certificates import make_certificate
from tests.kit.servers.connect_proxy import connect_proxy
from tests.kit.servers.fake_google import GOOGLES_NAMES, fake_google
from tests.kit.servers.small_server import SmallServer

pytestmark = pytest.mark.long

URL = "gs://bucket/run"
TOKENS = {
    "service_account": "token-of-the-service-account",
    "login": "token-of-the-login",
    "federated": "token-of-the-federation",
    "impersonated": "token-by-impersonation",
    "machine": "token-of-the-machine",
}
FACTS = TOKENS | {"public_key": files.PUBLIC_KEY, "subject": "the-token-of-the-cluster"}


@contextmanager
def mirror(folder: Path, let_in: str, *roles: str) -> Iterator[GcsServerProcess]:
    """A bucket that lets one token in and knows no other."""
    grants = {"name": "trainer@p.iam.gserviceaccount.com", "roles": list(roles or ["roles/storage.objectUser"])}
    with GcsServerProcess(folder / "gcs", buckets=["bucket"], access={"tokens": {TOKENS[let_in]: grants}}) as server:
        yield server


def service_account(_folder: Path, google: SmallServer) -> dict[str, Any]:
    return files.service_account(google.url)


def workload_by_file(folder: Path, google: SmallServer) -> dict[str, Any]:
    (folder / "cluster-token").write_text(str(FACTS["subject"]))
    return files.workload(google.url, {"file": str(folder / "cluster-token")})


def workload_by_url(_folder: Path, google: SmallServer) -> dict[str, Any]:
    return files.workload(google.url, {"url": f"{google.url}/subject", "format": {"type": "text"}})


def workload_and_impersonation(folder: Path, google: SmallServer) -> dict[str, Any]:
    url = files.impersonation_url(google.url)
    return workload_by_file(folder, google) | {"service_account_impersonation_url": url}


WAYS: dict[str, tuple[Callable[[Path, SmallServer], dict[str, Any]], str, str]] = {  # the file, whose token, who may
    "a service account's key": (service_account, "service_account", ""),
    "workload identity, from a file": (workload_by_file, "federated", ""),
    "workload identity, from a URL": (workload_by_url, "federated", ""),
    "workload identity, then impersonation": (workload_and_impersonation, "impersonated", "federated"),
}


def there_and_back(folder: Path, server: GcsServerProcess, env: dict[str, str]) -> None:
    """Push, list and stage with these credentials; what is staged is what was saved."""
    root, _ = make_pending(folder / "made", URL, 100)
    server.clear_log()
    env = {"CKPTMIRROR_GCS_ENDPOINT": server.url, **env}
    pushed = run("push", "--root", root, "--mirror", URL, env=env)
    assert pushed.returncode == 0, pushed.stderr
    listed = run("ls", URL, "--json", env=env)
    assert listed.returncode == 0, listed.stderr
    assert [save["step"] for save in json.loads(listed.stdout)["saves"]] == [100]
    staged = run("stage", "--step", "100", "--kind", "dcp", "--mirror", URL, "--dest", folder / "eval", env=env)
    assert staged.returncode == 0, staged.stderr
    assert content(folder / "eval")["dcp_000100/.metadata"] == content(root)["dcp_000100/.metadata"]
    assert {entry["status"] for entry in server.log()} <= {200, 204, 206, 404, 412}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_credentials_file_stands_for_is_what_the_bucket_gets(way: str, tmp_path: Path) -> None:
    make, whose, may = WAYS[way]
    facts = FACTS | ({"may_impersonate": TOKENS[may]} if may else {})
    with mirror(tmp_path, whose) as server, fake_google(**facts) as google:
        there_and_back(tmp_path, server, files.write(tmp_path / "key.json", make(tmp_path, google)))
        assert google.asked()


@contextmanager
def googles_name(folder: Path, **more: Any) -> Iterator[tuple[SmallServer, dict[str, str]]]:
    """The token services under the names that they have at Google, reached as from inside a company: proxy and TLS."""
    certificate = make_certificate(folder / "google.pem", *GOOGLES_NAMES)
    with fake_google(**FACTS, **more, certificate=str(certificate)) as google:
        places = {f"{name}:443": f"127.0.0.1:{google.tls_port}" for name in GOOGLES_NAMES}
        with connect_proxy(places) as proxy:
            trust = {"REQUESTS_CA_BUNDLE": str(certificate)}
            yield google, {"HTTPS_PROXY": proxy.url, "NO_PROXY": "127.0.0.1"} | trust
            asked = {place for place, _ in proxy.asked()}
            assert asked
            assert asked <= set(places)


@pytest.mark.parametrize("place", ["named", "where gcloud leaves it"])
def test_a_login_is_found_and_refreshed_at_google(place: str, tmp_path: Path) -> None:
    with mirror(tmp_path, "login") as server, googles_name(tmp_path) as (google, env):
        (tmp_path / "gcloud").mkdir()
        named = files.write(tmp_path / "gcloud" / "application_default_credentials.json", files.login())
        env |= named if place == "named" else {"CLOUDSDK_CONFIG": str(tmp_path / "gcloud")}
        there_and_back(tmp_path, server, env)
        assert set(google.asked()) == {"/token"}


@pytest.mark.parametrize("who", ["login", "service_account"])
def test_who_may_impersonates_a_service_account(who: str, tmp_path: Path) -> None:
    may = {"may_impersonate": TOKENS[who]}
    with mirror(tmp_path, "impersonated") as server, googles_name(tmp_path, **may) as (google, env):
        source = files.login() if who == "login" else files.service_account(google.url)
        env |= files.write(tmp_path / "key.json", files.impersonated(google.url, source))
        there_and_back(tmp_path, server, env)
        assert any(path.endswith(":generateAccessToken") for path in google.asked())


def test_a_virtual_machine_or_a_pod_uses_its_own_account(tmp_path: Path) -> None:
    with mirror(tmp_path, "machine") as server, fake_google(**FACTS) as google:
        there_and_back(
            tmp_path,
            server,
            {
                "CLOUDSDK_CONFIG": str(tmp_path),
                "GCE_METADATA_HOST": google.host,
                "GCE_METADATA_IP": google.host,
                "GCE_METADATA_TIMEOUT": "30",
            },
        )
        assert any(path.endswith("/token") for path in google.asked())


def test_a_public_bucket_wants_no_credentials(tmp_path: Path) -> None:
    access = {"tokens": {}, "anonymous": {"roles": ["roles/storage.objectUser"]}}
    with GcsServerProcess(tmp_path / "gcs", buckets=["bucket"], access=access) as server:
        broken = {"GOOGLE_APPLICATION_CREDENTIALS": "/not/there"}
        there_and_back(tmp_path, server, broken | {"CKPTMIRROR_GCS_CREDENTIALS": "anonymous"})


def test_an_emulator_gets_credentials_only_where_they_are_asked_for(tmp_path: Path) -> None:
    with mirror(tmp_path, "service_account") as server, fake_google(**FACTS) as google:
        env = files.write(tmp_path / "key.json", files.service_account(google.url)) | server.environment
        assert run("ls", URL, env=env).returncode == 12
        assert google.asked() == []
        there_and_back(tmp_path, server, {"CKPTMIRROR_GCS_ENDPOINT": "", "CKPTMIRROR_GCS_CREDENTIALS": "default"} | env)
        assert google.asked()


# -- what is refused, and how it is told ---------------------------------------------------------------------


def told(env: dict[str, str], exit_code: int, *words: str) -> None:
    ended = run("ls", URL, env=env)
    assert_tells(ended, exit_code, *words)
    assert len(ended.stderr.splitlines()) == 2, ended.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["GOOGLE_APPLICATION_CREDENTIALS names", "No such file"]),
        ("", ["holds no credentials"]),
        ("{", ["holds no credentials"]),
        ("\udcff\udcfe", ["holds no credentials"]),
        ("[]", ["holds no credentials"]),
        ("{}", ["holds no credentials"]),
        ('{"type": "service_account"}', ["holds no credentials"]),
        (
            '{"type": "service_account", "client_email": "a@b", "token_uri": "http://x", "private_key": "no"}',
            ["holds no"],
        ),
        ('{"type": "authorized_user"}', ["holds no credentials"]),
        ('{"type": "external_account"}', ["holds no credentials"]),
        ('{"type": "external_account", "audience": 1, "credential_source": []}', ["holds no credentials"]),
        ('{"type": "impersonated_service_account"}', ["holds no credentials"]),
        ('{"type": "impersonated_service_account", "source_credentials": []}', ["holds no credentials"]),
        ('{"type": "something_else"}', ["holds no credentials", "something_else"]),
    ],
)
def test_a_credentials_file_that_is_none_is_one_sentence_with_its_name(
    text: str | None, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "key.json"
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    env = {"GOOGLE_APPLICATION_CREDENTIALS": str(path), "CKPTMIRROR_GCS_ENDPOINT": "http://127.0.0.1:9"}
    told(env, 12, str(path), *words)


def test_a_directory_in_the_place_of_a_key_is_one_sentence(tmp_path: Path) -> None:
    env = {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path), "CKPTMIRROR_GCS_ENDPOINT": "http://127.0.0.1:9"}
    told(env, 12, str(tmp_path), "Is a directory")


def test_no_credentials_at_all_are_told_soon_with_every_way_out(tmp_path: Path) -> None:
    env = {
        "CLOUDSDK_CONFIG": str(tmp_path),
        "HOME": str(tmp_path),
        "GCE_METADATA_IP": "127.0.0.1:9",  # nobody listens: as on a machine that is not Google's
        "CKPTMIRROR_GCS_ENDPOINT": "http://127.0.0.1:9",
    }
    words = ("gcloud auth application-default login", "GOOGLE_APPLICATION_CREDENTIALS", "CKPTMIRROR_GCS_CREDENTIALS")
    told(env, 12, "No credentials", *words)


def test_a_login_that_was_revoked_is_one_sentence(tmp_path: Path) -> None:
    with mirror(tmp_path, "login") as server, googles_name(tmp_path) as (_, env):
        env |= files.write(tmp_path / "key.json", files.login("revoked")) | {"CKPTMIRROR_GCS_ENDPOINT": server.url}
        told(env, 12, "refused", "Token has been expired or revoked")


def test_an_account_that_was_disabled_is_one_sentence(tmp_path: Path) -> None:
    with mirror(tmp_path, "service_account") as server, fake_google(**FACTS, disabled=True) as google:
        env = files.write(tmp_path / "key.json", files.service_account(google.url))
        told(env | {"CKPTMIRROR_GCS_ENDPOINT": server.url}, 12, "refused", "The account is disabled")


def test_who_may_not_impersonate_is_told_which_permission_is_missing(tmp_path: Path) -> None:
    may = {"may_impersonate": "another"}
    with mirror(tmp_path, "impersonated") as server, googles_name(tmp_path, **may) as (google, env):
        env |= files.write(tmp_path / "key.json", files.impersonated(google.url, files.login()))
        told(env | {"CKPTMIRROR_GCS_ENDPOINT": server.url}, 12, "iam.serviceAccounts.getAccessToken")


def test_a_cluster_token_that_is_not_there_or_not_accepted_is_one_sentence(tmp_path: Path) -> None:
    with mirror(tmp_path, "federated") as server, fake_google(**FACTS) as google:
        (tmp_path / "stale").write_text("another")
        for source, words in (
            ({"file": str(tmp_path / "missing")}, ["missing"]),
            ({"file": str(tmp_path / "stale")}, ["The subject token is not ours"]),
        ):
            env = files.write(tmp_path / "key.json", files.workload(google.url, source))
            told(env | {"CKPTMIRROR_GCS_ENDPOINT": server.url}, 12, *words)


def test_who_lacks_a_permission_is_told_who_and_which(tmp_path: Path) -> None:
    role = "roles/storage.objectCreator"
    with mirror(tmp_path, "service_account", role) as server, fake_google(**FACTS) as google:
        env = files.write(tmp_path / "key.json", files.service_account(google.url))
        words = ("trainer@p.iam.gserviceaccount.com", "storage.objects.get", "Storage Object Viewer")
        told(env | {"CKPTMIRROR_GCS_ENDPOINT": server.url}, 12, *words)


def test_a_token_service_that_does_not_answer_is_temporary(tmp_path: Path) -> None:
    with mirror(tmp_path, "service_account") as server:
        env = files.write(tmp_path / "key.json", files.service_account("http://127.0.0.1:9"))
        told(env | IMPATIENT | {"CKPTMIRROR_GCS_ENDPOINT": server.url}, 5, "127.0.0.1:9")


def test_a_setting_that_is_not_understood_or_dangerous_is_one_sentence(tmp_path: Path) -> None:
    env = {"CKPTMIRROR_GCS_ENDPOINT": "http://127.0.0.1:9"}
    told(env | {"CKPTMIRROR_GCS_CREDENTIALS": "none"}, 10, "CKPTMIRROR_GCS_CREDENTIALS=none")
    told({"CKPTMIRROR_GCS_ENDPOINT": "ftp://x"}, 10, "CKPTMIRROR_GCS_ENDPOINT")
    told(env | {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:8"}, 10, "both set")
    told({"CKPTMIRROR_GCS_ENDPOINT": "http://elsewhere.example"}, 10, "without encryption")


@pytest.mark.parametrize("variable", ["CKPTMIRROR_GCS_CREDENTIALS", "GOOGLE_APPLICATION_CREDENTIALS"])
def test_a_key_in_place_of_its_file_is_not_repeated(variable: str) -> None:
    key = json.dumps({"type": "service_account", "private_key": "-----BEGIN hush"}, indent=1)
    for value in (key, key.replace("\n", ""), "-----BEGIN hush\nhush"):
        ended = run("ls", URL, env={"CKPTMIRROR_GCS_ENDPOINT": "http://127.0.0.1:9", variable: value})
        assert_tells(ended, 10, variable, "names the file")
        assert "hush" not in ended.stderr


# -- tokens that end -----------------------------------------------------------------------------------------


def test_a_token_that_ends_in_the_middle_of_an_upload_is_replaced_and_the_upload_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"x" * (20 << 20)
    with GcsServerProcess(tmp_path / "gcs", options=["--require-auth"]) as server:
        for name, value in files.write(tmp_path / "key.json", files.service_account(server.url)).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
        monkeypatch.setenv("CKPTMIRROR_GCS_ENDPOINT", server.url)
        tokens = GoogleTokens()
        server.create_bucket("bucket", token=tokens.headers()["Authorization"].removeprefix("Bearer "))
        server.clear_log()
        sent: list[int] = []

        def end_the_token(sent_bytes: int) -> None:
            if not sent:
                server.faults([Fault(unauthorised_after_s=0.0, times=0)])
            sent.append(sent_bytes)

        store = open_store(URL, retry=False)
        info = store.upload(upload_of("big", data, on_progress=end_the_token))
        assert info.size_bytes == len(data)
        assert 0 < sent[0] < len(data)
        assert [fault["fired"] > 0 for fault in server.faults_seen()] == [True]
        assert len(server.log("token")) == 2
