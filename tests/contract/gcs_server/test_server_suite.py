"""The suite about itself, and the server's manners as a package."""

import ast
import base64
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmirror.testing.fixtures import GCS_BUCKET

_HERE = Path(__file__).parent


_OWN = (
    "test_server_suite.py",
    "test_server_survives.py",
    "test_server_survives_copies.py",
    "test_server_reference.py",
    "test_server_faults.py",
    "test_server_fault_fields.py",
)


@pytest.mark.parametrize(
    "module", sorted({path.name for path in _HERE.glob("test_*.py")} - {*_OWN, "test_server_auth.py"})
)
def test_every_behaviour_names_the_page_that_documents_it(module):
    tree = ast.parse((_HERE / module).read_text())
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    missing = [
        test.name for test in tests if "https://cloud.google.com/storage/docs/" not in (ast.get_docstring(test) or "")
    ]
    assert tests
    assert missing == []


def test_importing_the_package_imports_no_server_and_nothing_else_of_ckptmirror():
    program = (
        "import sys; from ckptmirror.testing import Fault, GcsServerProcess; "
        "print([n for n in sys.modules if n.split('.')[0] in ('aiohttp', 'torch', 'google_crc32c', 'google')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    program = (
        "import sys; import ckptmirror.testing.gcs.__main__; "
        "print([n for n in sys.modules if n == 'torch' or n.startswith('awscrt') or "
        "n.startswith('ckptmirror.') and not n.startswith('ckptmirror.testing')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_server_that_cannot_start_says_why(tmp_path):
    from ckptmirror.testing import GcsServerProcess

    with pytest.raises(OSError, match="unrecognized arguments"):
        GcsServerProcess(tmp_path, options=["--nonsense"]).start()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--mutations-per-s", "0"], "more than 0"),
        (["--bucket-settings", "[]"], "not a JSON object"),
        (["--bucket", "bucket-1", "--bucket-settings", '{"lifecycle": {"rule": [{}]}}'], "lifecycle"),
        (["--bucket", "UPPER"], "Invalid bucket name"),
        (["--tls-cert", "/absent.pem"], "No such file"),
    ],
)
def test_options_that_make_no_sense_stop_the_start(tmp_path, options, reason):
    from ckptmirror.testing import GcsServerProcess

    with pytest.raises(OSError, match=reason):
        GcsServerProcess(tmp_path, options=options).start()


def test_a_directory_of_another_version_of_the_server_is_refused(tmp_path):
    import sqlite3

    from ckptmirror.testing import GcsServerProcess

    with sqlite3.connect(tmp_path / "index.db") as db:
        db.execute("CREATE TABLE objects (name TEXT)")
    with pytest.raises(OSError, match="another version of this server"):
        GcsServerProcess(tmp_path).start()


def test_two_servers_do_not_share_a_directory(tmp_path):
    from ckptmirror.testing import GcsServerProcess

    with GcsServerProcess(tmp_path), pytest.raises(OSError, match="another server is using"):
        GcsServerProcess(tmp_path).start()


def test_without_md5_a_declared_one_is_still_checked(tmp_path):
    from raw_http import Raw

    from ckptmirror.testing import GcsServerProcess

    with GcsServerProcess(tmp_path, buckets=["bucket-1"], options=["--no-md5"]) as server:
        raw = Raw(server, "bucket-1")
        assert "md5Hash" not in raw.put("x", b"data").json()
        assert raw("POST", raw.upload_path("media", name="y"), b"data", {"Content-MD5": "A" * 22 + "=="}).status == 400
        right = {"Content-MD5": base64.b64encode(hashlib.md5(b"data").digest()).decode()}
        assert raw("POST", raw.upload_path("media", name="y"), b"data", right).status == 200


def test_the_fixture_points_the_real_client_at_the_server(gcs_server):
    from google.cloud import storage

    storage.Client.create_anonymous_client().bucket(GCS_BUCKET).blob("x").upload_from_string(b"data")
    assert [entry["operation"] for entry in gcs_server.log()] == ["upload.multipart"]


def test_many_connections_are_served_at_once(server, raw):
    import http.client

    raw.put("x", b"data")
    connections = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=30) for _ in range(400)]
    for connection in connections:
        connection.request("GET", raw.object_path("x") + "?alt=media")
    assert [connection.getresponse().read() for connection in connections] == [b"data"] * 400
    for connection in connections:
        connection.close()
