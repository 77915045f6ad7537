"""The test server as a process of its own, which a test can script, kill and start again.

Rules:
* Standard library only; the server's libraries are imported in its process alone.
* ``restart`` keeps port, directory and options, so that URLs, sessions and objects stay good.
* The server ends with this process, however it ends.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ckptmirror.testing.fault import Fault

__all__ = ["GcsServerProcess"]

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0


class GcsServerProcess:
    """A running ``python -m ckptmirror.testing.gcs``; a context manager.

    Args:
        directory: Where it keeps everything; a temporary directory, removed at the end, if None.
        buckets: Created if they are missing.
        options: More arguments of the command line (``["--no-md5"]``).
        access: Who may do what, as in a tokens file: ``{"tokens": {"SECRET": {"name": …, "roles": […]}}}``.
        certificate: A PEM file with a key and a certificate for 127.0.0.1 that is its own authority: answer over TLS.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        buckets: Sequence[str] = (),
        options: Sequence[str] = (),
        access: Mapping[str, Any] | None = None,
        certificate: Path | None = None,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="gcs-server-") if directory is None else None
        self.directory = Path(self._temporary.name) if self._temporary else Path(directory or ".")
        self._arguments = [argument for name in buckets for argument in ("--bucket", name)] + list(options)
        self._access = access
        self._certificate = certificate
        if access is not None:
            self._arguments += ["--tokens-file", str(self.directory / "tokens.json")]
        if certificate is not None:
            self._arguments += ["--tls-cert", str(certificate)]
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """For ``STORAGE_EMULATOR_HOST`` or ``client_options={"api_endpoint": …}``."""
        return f"{'https' if self._certificate else 'http'}://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What makes the Google libraries of a child process talk to this server and to nothing else."""
        trust = dict.fromkeys(("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"), str(self._certificate))
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA": "true",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            **(trust if self._certificate else {}),
        }

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._running().pid

    @property
    def stderr_path(self) -> Path:
        """What the server had to say."""
        return self.directory / "server.stderr"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ValueError("the server is not running")
        return self._process

    def start(self) -> GcsServerProcess:
        """Start and wait until it listens."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._access is not None:
            (self.directory / "tokens.json").write_text(json.dumps(self._access))
        command = [sys.executable, "-m", "ckptmirror.testing.gcs", "--exit-with-stdin", "--dir", str(self.directory)]
        command += ["--port", str(self.port), *self._arguments]
        package_root = str(Path(__file__).resolve().parents[2])
        search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        with self.stderr_path.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": search_path},
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(_START_TIMEOUT_S)
            self._forget()
            raise OSError(f"the server did not start: {self.stderr_path.read_text(errors='replace')[-2000:]}")
        self.port = int(json.loads(line)["port"])
        return self

    def stop(self) -> None:
        """End it in order."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._forget()

    def kill(self) -> None:
        """SIGKILL, at any moment."""
        self._running().kill()
        self._forget()

    def wait_killed(self, timeout_s: float = 30.0) -> None:
        """Wait until a scripted ``kill`` fault has struck."""
        self._running().wait(timeout_s)
        self._forget()

    def _forget(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.wait(_STOP_TIMEOUT_S)
            pipes: Iterable[IO[bytes] | None] = (process.stdin, process.stdout)
            for pipe in pipes:
                if pipe is not None:
                    pipe.close()

    def restart(self) -> GcsServerProcess:
        """Start again on the same port and directory, after ``kill`` or instead of a running one."""
        self.stop()
        return self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> GcsServerProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers or {}, method=method)
        context = ssl.create_default_context(cafile=self._certificate) if self._certificate else None
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(request, timeout=30) as answer:
            raw = answer.read()
        return json.loads(raw) if raw else None

    def create_bucket(self, name: str, *, token: str | None = None, **settings: Any) -> None:
        """Create a bucket; ``settings`` are fields of its resource (``versioning={"enabled": True}``)."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._call("POST", "/storage/v1/b?project=test", {"name": name, **settings}, headers)

    def faults(self, script: Iterable[Fault]) -> None:
        """Add to the fault script."""
        self._call("POST", "/_faults", [fault.to_json() for fault in script])

    def faults_seen(self) -> list[dict[str, Any]]:
        """The script, each fault with ``seen`` (requests that matched) and ``fired`` (to which all of it happened)."""
        faults: list[dict[str, Any]] = self._call("GET", "/_faults")
        return faults

    def clear_faults(self) -> None:
        """Forget the script."""
        self._call("DELETE", "/_faults")

    def log(self, operation: str | None = None) -> list[dict[str, Any]]:
        """The requests seen since the start or ``clear_log``, oldest first; only those of ``operation`` if given."""
        entries: list[dict[str, Any]] = self._call("GET", "/_log")
        return [entry for entry in entries if operation in (None, entry["operation"])]

    def clear_log(self) -> None:
        """Forget the requests seen."""
        self._call("DELETE", "/_log")
