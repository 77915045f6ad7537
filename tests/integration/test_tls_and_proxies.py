"""Certificates and proxies by the usual variables: each alone reaches both ways that a mirror is talked to."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from ckptmirror.core.errors import ConfigError, StoreTemporary
from ckptmirror.stores import open_store
from ckptmirror.stores.gs_trust import CA_VARIABLES
from ckptmirror.testing import GcsServerProcess
from tests.kit.cli import IMPATIENT, assert_tells, run
from tests.kit.roots import content, make_pending
from tests.kit.servers.certificates import make_certificate
from tests.kit.servers.connect_proxy import connect_proxy

pytestmark = pytest.mark.long

URL = "gs://bucket/run"
HOST = "storage.example"  # which is nowhere but behind the proxy
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy")


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CA_VARIABLES, *PROXIES, "SSL_CERT_DIR", "STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls") / "server.pem", HOST)


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls") / "another.pem", HOST)


@pytest.fixture(scope="module")
def server(certificate: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServerProcess]:
    with GcsServerProcess(tmp_path_factory.mktemp("gcs"), buckets=["bucket"], certificate=certificate) as running:
        yield running


def there_and_back(folder: Path, url: str, env: dict[str, str]) -> None:
    """Push, list and stage; what is staged is what was saved."""
    root, _ = make_pending(folder / "made", url, 100)
    for verb in (
        ("push", "--root", root, "--mirror", url),
        ("ls", url),
        ("stage", "--step", "100", "--kind", "dcp", "--mirror", url, "--dest", folder / "eval"),
    ):
        ended = run(*verb, env=env)
        assert ended.returncode == 0, ended.stderr
    assert content(folder / "eval")["dcp_000100/.metadata"] == content(root)["dcp_000100/.metadata"]


@pytest.mark.parametrize("variable", CA_VARIABLES)
def test_any_one_variable_with_the_right_certificate_is_enough(
    variable: str, server: GcsServerProcess, certificate: Path, tmp_path: Path
) -> None:
    env = {"STORAGE_EMULATOR_HOST": server.url, variable: str(certificate)}
    there_and_back(tmp_path, f"gs://bucket/{variable.lower()}", env)


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", None])
def test_a_server_that_is_not_trusted_is_one_sentence_that_names_the_variable(
    variable: str | None, server: GcsServerProcess, another: Path
) -> None:
    env = IMPATIENT | {"STORAGE_EMULATOR_HOST": server.url} | ({variable: str(another)} if variable else {})
    by = f"not trusted by {variable}={another}" if variable else "not trusted by the system's certificates"
    assert_tells(run("ls", URL, env=env), StoreTemporary.exit_code, by, "REQUESTS_CA_BUNDLE")


@pytest.mark.parametrize("variable", CA_VARIABLES)
def test_both_ways_of_talking_say_which_certificates_do_not_trust_the_server(
    variable: str, server: GcsServerProcess, another: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    monkeypatch.setenv(variable, str(another))
    store = open_store(URL, retry=False)
    for ask in (lambda: store.stat("x"), lambda: store.write("x", b"1", if_generation=0)):
        with pytest.raises(StoreTemporary, match=f"not trusted by {variable}="):
            ask()


@pytest.mark.parametrize("variable", CA_VARIABLES)
@pytest.mark.parametrize("what", ["missing", "empty", "nonsense"])
def test_a_bundle_that_is_none_is_one_sentence_that_names_the_variable(
    variable: str, what: str, server: GcsServerProcess, tmp_path: Path
) -> None:
    path = tmp_path / "bundle.pem"
    if what != "missing":
        path.write_text("" if what == "empty" else "nonsense")
    env = {"STORAGE_EMULATOR_HOST": server.url, variable: str(path)}
    assert_tells(run("ls", URL, env=env), ConfigError.exit_code, f"{variable} names {path}", f"unset {variable}")


def test_a_directory_of_certificates_will_do_as_well(
    server: GcsServerProcess, certificate: Path, tmp_path: Path
) -> None:
    import shutil
    import subprocess

    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path / "certificates"
    folder.mkdir()
    (folder / "server.pem").write_bytes(certificate.read_bytes())
    subprocess.run(["openssl", "rehash", str(folder)], check=True, capture_output=True)
    env = {"STORAGE_EMULATOR_HOST": server.url, "REQUESTS_CA_BUNDLE": str(folder)}
    there_and_back(tmp_path, "gs://bucket/directory", env)


# -- proxies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy"])
def test_everything_goes_through_the_tunnel_of_the_proxy(
    variable: str, server: GcsServerProcess, certificate: Path, tmp_path: Path
) -> None:
    with connect_proxy({f"{HOST}:443": f"127.0.0.1:{server.port}"}) as proxy:
        env = {"STORAGE_EMULATOR_HOST": f"https://{HOST}", variable: proxy.url, "REQUESTS_CA_BUNDLE": str(certificate)}
        there_and_back(tmp_path, f"gs://bucket/through-{variable}", env)
        assert {place for place, _ in proxy.asked()} == {f"{HOST}:443"}


@pytest.mark.parametrize(("secret", "bare"), [("pass:w@rd", ""), ("pa/ss", "/"), ("p#a?s@s://x", "#?@:/")])
def test_a_proxy_with_a_login_gets_it_from_both_ways_and_nobody_reads_it(
    secret: str, bare: str, server: GcsServerProcess, certificate: Path, tmp_path: Path
) -> None:
    with connect_proxy({f"{HOST}:443": f"127.0.0.1:{server.port}"}) as proxy:
        url = proxy.url.replace("://", f"://me:{quote(secret, safe=bare)}@")
        env = {"STORAGE_EMULATOR_HOST": f"https://{HOST}", "HTTPS_PROXY": url, "REQUESTS_CA_BUNDLE": str(certificate)}
        there_and_back(tmp_path, f"gs://bucket/with-login-{len(bare)}", env)
        wanted = "Basic " + base64.b64encode(f"me:{secret}".encode()).decode()
        assert {header for _, header in proxy.asked()} == {wanted}
        refused = run("ls", URL, env=env | IMPATIENT | {"REQUESTS_CA_BUNDLE": ""})
        assert refused.returncode == StoreTemporary.exit_code
        assert quote(secret, safe="") not in refused.stderr
        assert secret not in refused.stderr


def test_a_host_in_no_proxy_is_asked_directly(server: GcsServerProcess, certificate: Path, tmp_path: Path) -> None:
    with connect_proxy() as proxy:
        env = {
            "STORAGE_EMULATOR_HOST": server.url,
            "HTTPS_PROXY": proxy.url,
            "NO_PROXY": "elsewhere.example,127.0.0.1",
            "REQUESTS_CA_BUNDLE": str(certificate),
        }
        there_and_back(tmp_path, "gs://bucket/directly", env)
        assert proxy.asked() == []
        env["NO_PROXY"] = "elsewhere.example"
        assert run("ls", "gs://bucket/directly", env=env).returncode == 0
        assert {place for place, _ in proxy.asked()} == {f"127.0.0.1:{server.port}"}


def test_a_proxy_that_finds_nothing_is_one_sentence(certificate: Path) -> None:
    with connect_proxy({f"{HOST}:443": "127.0.0.1:9"}) as proxy:
        env = {"STORAGE_EMULATOR_HOST": f"https://{HOST}", "HTTPS_PROXY": proxy.url}
        env |= {"REQUESTS_CA_BUNDLE": str(certificate)}
        assert_tells(run("ls", URL, env=env | IMPATIENT), StoreTemporary.exit_code, HOST, "502")
        assert os.environ.get("HTTPS_PROXY") is None
