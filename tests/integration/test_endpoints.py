"""Where a bucket is asked: an IPv6 address, and through a proxy that the standard variables name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmirror.core.errors import ConfigError
from ckptmirror.stores.gs_endpoint import Endpoint
from ckptmirror.testing import GcsServerProcess
from tests.kit.cli import IMPATIENT, assert_explains, assert_tells, run
from tests.kit.roots import content, make_pending
from tests.kit.servers.forward_proxy import forward_proxy
from tests.kit.servers.small_server import SmallServer

pytestmark = pytest.mark.long

URL = "gs://test-bucket/run"


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServerProcess]:
    with GcsServerProcess(buckets=["test-bucket"]) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_proxy_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def proxy() -> Iterator[SmallServer]:
    with forward_proxy() as found:
        yield found


def there_and_back(folder: Path, url: str, env: dict[str, str]) -> None:
    """Upload a save and stage it, each by a verb in a process of its own."""
    root, _ = make_pending(folder, url, 200, kinds=("model",), size_bytes=2_000_000)
    drained = run("drain", "--root", root, env=env)
    assert drained.returncode == 0, drained.stderr
    staged = run("stage", "--step", "200", "--full", "--mirror", url, "--dest", folder / "eval", env=env)
    assert staged.returncode == 0, staged.stderr
    assert content(folder / "eval")["model_000200.pt"] == content(root)["model_000200.pt"]


def test_an_ipv6_endpoint_serves_uploads_and_stages(tmp_path: Path) -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with GcsServerProcess(tmp_path / "server", buckets=["test-bucket"], options=["--host", "::1"]) as server:
        there_and_back(tmp_path, URL, server.environment | {"STORAGE_EMULATOR_HOST": f"http://[::1]:{server.port}"})


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    "endpoint", ["http://::1:4443", "http://[::1", "http://h:port", "http://h:99999", "ftp://h", "http://"]
)
def test_an_endpoint_that_is_no_endpoint_is_a_setting_to_correct(endpoint: str, tmp_path: Path) -> None:
    ended = run("ls", URL, env={"STORAGE_EMULATOR_HOST": endpoint})
    assert_tells(ended, 10, "STORAGE_EMULATOR_HOST is not http://host:port.", "Correct STORAGE_EMULATOR_HOST.")


def test_an_ipv6_endpoint_that_does_not_answer_is_temporary() -> None:
    ended = run("ls", URL, env=IMPATIENT | {"STORAGE_EMULATOR_HOST": "http://[::1]:1"})
    assert_tells(ended, 5, "http://[::1]:1")


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy"])
def test_every_request_goes_through_the_proxy_that_is_named(
    variable: str, proxy: SmallServer, server: GcsServerProcess, tmp_path: Path
) -> None:
    server.clear_log()
    there_and_back(
        tmp_path,
        f"gs://test-bucket/{variable.lower()}-{variable.isupper()}",
        server.environment | {variable: proxy.url},
    )
    asked = proxy.asked()
    assert len(asked) == len(server.log())
    assert all(f" {server.url}/" in line for line in asked)
    assert {line.partition(" ")[0] for line in asked} >= {"GET", "PUT", "POST"}


@pytest.mark.parametrize("exempt", ["127.0.0.1", "*", "example.com,127.0.0.1"])
def test_no_proxy_is_honoured(exempt: str, proxy: SmallServer, server: GcsServerProcess) -> None:
    env = server.environment | {"HTTP_PROXY": proxy.url, "NO_PROXY": exempt}
    assert run("ls", "gs://test-bucket/empty", env=env).returncode == 0
    assert proxy.asked() == []


def test_a_proxy_for_https_is_none_for_http(proxy: SmallServer, server: GcsServerProcess) -> None:
    env = server.environment | {"HTTPS_PROXY": proxy.url}
    assert run("ls", "gs://test-bucket/empty", env=env).returncode == 0
    assert proxy.asked() == []


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "HTTPS_PROXY"])
def test_a_proxy_that_does_not_answer_is_named_and_temporary(variable: str) -> None:
    endpoint = "http://storage.example:80" if variable == "HTTP_PROXY" else "https://storage.example"
    env = IMPATIENT | {"STORAGE_EMULATOR_HOST": endpoint, variable: "http://127.0.0.1:1"}
    assert_tells(run("ls", URL, env=env), 5, "through the proxy http://127.0.0.1:1", "network")


def test_a_proxy_that_is_no_url_is_a_setting_to_correct(
    monkeypatch: pytest.MonkeyPatch, server: GcsServerProcess
) -> None:
    for variable, endpoint in (("HTTP_PROXY", "http://h"), ("HTTPS_PROXY", "https://h")):
        monkeypatch.setenv(variable, "socks5://127.0.0.1:1080")
        with pytest.raises(ConfigError) as caught:
            Endpoint.parse(endpoint).proxy()
        assert_explains(caught.value, 10, f"{variable} is not http://host:port")
        assert f"Correct {variable}" in caught.value.hint
    ended = run("ls", URL, env=server.environment | {"HTTP_PROXY": "not a url"})
    assert_tells(ended, 10, "HTTP_PROXY is not http://host:port.")
