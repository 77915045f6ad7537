"""deploy/gcs/apply.py makes the bucket and gives the roles of its files, and each role is just enough for its use."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.testing import Fault, GcsServerProcess
from tests.integration.test_gcs_roles import TRAIN
from tests.kit.cli import clean_environment
from tests.kit.servers import credential_files
from tests.kit.servers.fake_google import fake_google

pytestmark = pytest.mark.long

HOME = Path(__file__).resolve().parents[2]
GCS = HOME / "deploy" / "gcs"
USES = json.loads((GCS / "uses.json").read_text())
ROLES = {use: json.loads((GCS / "roles" / f"{use}.json").read_text()) for use in USES}
MEMBERS = {use: f"serviceAccount:{use}@p.iam.gserviceaccount.com" for use in USES}
WHOLE = ["bucket", "--project", "p", *(word for use in USES for word in (f"--{use}", MEMBERS[use]))]
CHANGES = ("POST", "PUT", "PATCH", "DELETE")


def apply(
    server: GcsServerProcess, *arguments: str, script: Path = GCS / "apply.py"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    env = clean_environment(**server.environment)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GcsServerProcess]:
    with GcsServerProcess(tmp_path / "gcs") as running:
        yield running


def bucket_of(server: GcsServerProcess) -> Any:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    options = {"api_endpoint": server.url}
    return storage.Client(project="p", credentials=AnonymousCredentials(), client_options=options).bucket("bucket")


def changes(server: GcsServerProcess) -> list[str]:
    return [entry["operation"] for entry in server.log() if entry["method"] in CHANGES]


def test_a_dry_run_prints_the_plan_and_changes_nothing(server: GcsServerProcess) -> None:
    done = apply(server, *WHOLE, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "+ gs://bucket in us-central1, project p" in done.stdout
    assert f"+ roles/storage.objectViewer for {MEMBERS['eval']}" in done.stdout
    assert changes(server) == []


def test_a_bucket_is_made_as_the_files_say_and_a_second_run_changes_nothing(server: GcsServerProcess) -> None:
    done = apply(server, *WHOLE)
    assert done.returncode == 0, done.stderr
    bucket = bucket_of(server)
    bucket.reload()
    assert bucket.location == "US-CENTRAL1"
    assert bucket.iam_configuration.uniform_bucket_level_access_enabled
    assert bucket.iam_configuration.public_access_prevention == "enforced"
    assert bucket.soft_delete_policy.retention_duration_seconds == 7 * 86400
    assert [dict(rule) for rule in bucket.lifecycle_rules] == json.loads((GCS / "bucket.json").read_text())[
        "lifecycle"
    ]["rule"]
    given = {
        binding["role"]: binding["members"] for binding in bucket.get_iam_policy(requested_policy_version=3).bindings
    }
    assert given["roles/storage.objectUser"] == {MEMBERS["trainer"], MEMBERS["janitor"]}
    assert given["roles/storage.objectViewer"] == {MEMBERS["eval"]}
    server.clear_log()
    again = apply(server, *WHOLE)
    assert (again.returncode, again.stdout, again.stderr) == (0, "Nothing to change.\n", "")
    assert changes(server) == []


def test_what_drifted_is_shown_and_mended_and_what_others_set_stays(server: GcsServerProcess) -> None:
    server.create_bucket("bucket", location="US-CENTRAL1", labels={"team": "theirs"})
    bucket = bucket_of(server)
    bucket.add_lifecycle_delete_rule(age=30)
    bucket.patch()
    policy = bucket.get_iam_policy(requested_policy_version=3)
    policy.bindings.append({"role": "roles/storage.objectViewer", "members": {"user:other@p.example"}})
    bucket.set_iam_policy(policy)
    refused = apply(server, *WHOLE)
    assert refused.returncode == 1
    assert "has lifecycle rules of its own; --replace" in refused.stderr
    done = apply(server, *WHOLE, "--replace")
    assert done.returncode == 0, done.stderr
    assert '~ iamConfiguration.publicAccessPrevention: "inherited" -> "enforced"' in done.stdout
    assert '"age": 30' in done.stdout
    bucket.reload()
    assert bucket.labels == {"team": "theirs"}
    assert all("age" not in rule["condition"] or rule["action"]["type"] != "Delete" for rule in bucket.lifecycle_rules)
    given = {
        binding["role"]: binding["members"] for binding in bucket.get_iam_policy(requested_policy_version=3).bindings
    }
    assert given["roles/storage.objectViewer"] == {"user:other@p.example", MEMBERS["eval"]}
    assert "roles/storage.legacyBucketOwner" in given
    assert apply(server, *WHOLE).stdout == "Nothing to change.\n"


@pytest.mark.parametrize(
    ("condition", "is_refused"),
    [
        ({"age": 30}, True),
        ({"createdBefore": "2020-01-01"}, True),
        ({"matchesPrefix": ["parts/"]}, True),
        ({"isLive": True, "age": 1}, True),
        ({"isLive": False}, False),
        ({"numNewerVersions": 3}, False),
    ],
)
def test_a_rule_that_could_delete_a_live_save_is_refused(
    condition: dict[str, Any], is_refused: bool, server: GcsServerProcess, tmp_path: Path
) -> None:
    wanted = json.loads((GCS / "bucket.json").read_text())
    wanted["lifecycle"]["rule"].append({"action": {"type": "Delete"}, "condition": condition})
    (tmp_path / "bucket.json").write_text(json.dumps(wanted))
    done = apply(server, *WHOLE, "--bucket-file", str(tmp_path / "bucket.json"))
    assert done.returncode == int(is_refused), done.stderr
    assert ("would delete live saves" in done.stderr) == is_refused
    assert (changes(server) == []) == is_refused


def test_a_bucket_that_lies_elsewhere_is_not_touched(server: GcsServerProcess) -> None:
    server.create_bucket("bucket", location="EU")
    server.clear_log()
    done = apply(server, *WHOLE)
    assert done.returncode == 1
    assert "a bucket cannot move" in done.stderr
    assert changes(server) == []


@pytest.mark.parametrize("operation", ["bucket.patch", "bucket.set_policy"])
def test_what_somebody_changes_at_the_same_time_is_not_overwritten(operation: str, server: GcsServerProcess) -> None:
    server.create_bucket("bucket", location="US-CENTRAL1")
    server.faults([Fault(operation=operation, status=412)])
    done = apply(server, *WHOLE)
    assert done.returncode == 1
    assert "run it again" in done.stderr
    assert apply(server, *WHOLE).returncode == 0
    query = next(entry["query"] for entry in server.log("bucket.patch"))
    assert "ifMetagenerationMatch" in query


def test_whoever_may_not_is_told_who_and_which_permission_in_one_line(tmp_path: Path) -> None:
    access = {"tokens": {"secret": {"name": "me@p.example", "permissions": ["storage.buckets.get"]}}}
    facts = {"service_account": "secret", "public_key": credential_files.PUBLIC_KEY}
    with GcsServerProcess(tmp_path / "gcs", access=access) as server, fake_google(**facts) as google:
        env = credential_files.write(tmp_path / "key.json", credential_files.service_account(google.url))
        env["API_ENDPOINT_OVERRIDE"] = server.url  # the client library's own: another endpoint, with credentials
        command = [sys.executable, str(GCS / "apply.py"), *WHOLE]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=clean_environment(**env), check=False
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "me@p.example does not have storage.buckets.create access" in line


# -- the roles are enough, and none of their permissions is too much -----------------------------------------


def janitor(prefix: str) -> str:
    """What ends a run: every object under its prefix, at the generation that was listed."""
    return (
        "from ckptmirror.stores import open_store\n"
        f"store = open_store({prefix!r}, retry=False)\n"
        "for info in list(store.list()): store.delete(info.name, generation=info.generation)\n"
        "print(len(list(store.list())))"
    )


FLOWS: dict[str, list[list[str]]] = {
    "trainer": [
        ["-c", TRAIN, "ROOT", "20"],
        ["-c", TRAIN, "ROOT", "20"],
        ["-m", "ckptmirror", "drain", "--root", "ROOT"],
    ],
    "eval": [
        ["-m", "ckptmirror", "ls", "gs://bucket/run"],
        ["-m", "ckptmirror", "verify", "gs://bucket/run"],
        ["-m", "ckptmirror", "stage", "--step", "latest", "--mirror", "gs://bucket/run", "--dest", "EVAL"],
    ],
    "janitor": [["-c", janitor("gs://bucket/run")]],
}
CASES = [(use, missing) for use in USES for missing in (None, *ROLES[use]["includedPermissions"])]


def access_of(use: str, missing: str | None) -> dict[str, Any]:
    """The roles as they are but for one permission of a use; who has the token of the use, and an administrator."""
    roles = {
        f"projects/p/roles/{USES[one]['custom']}": [
            permission for permission in ROLES[one]["includedPermissions"] if (one, permission) != (use, missing)
        ]
        for one in USES
    }
    return {
        "tokens": {"secret": {"name": MEMBERS[use].partition(":")[2], "permissions": []}},
        "anonymous": {"roles": ["roles/storage.admin"]},
        "roles": roles,
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What a server keeps of a bucket on which apply.py gave each use its own role: empty, and with a run in it."""
    folder = tmp_path_factory.mktemp("prepared")
    with GcsServerProcess(folder / "empty", access=access_of("trainer", None)) as server:
        done = apply(server, *WHOLE, "--custom-roles", "p")
        assert done.returncode == 0, done.stderr
        for use in USES:
            assert f"+ projects/p/roles/{USES[use]['custom']} for {MEMBERS[use]}" in done.stdout
    shutil.copytree(folder / "empty", folder / "with a run")
    with GcsServerProcess(folder / "with a run", access=access_of("trainer", None)) as server:
        put = run(["-c", TRAIN, str(folder / "theirs"), "20"], folder, server.environment)
        assert put.returncode == 0, put.stderr
    return {use: folder / ("empty" if use == "trainer" else "with a run") for use in USES}


@contextmanager
def applied(
    prepared: dict[str, Path], folder: Path, use: str, missing: str | None
) -> Iterator[tuple[GcsServerProcess, dict[str, str]]]:
    """Such a bucket, and the environment of who has the role of the use, but for one permission of it.

    Whoever has the token may what the bucket's policy says; the administrator has none.
    """
    shutil.copytree(prepared[use], folder / "gcs")
    with (
        GcsServerProcess(folder / "gcs", access=access_of(use, missing)) as server,
        fake_google(service_account="secret", public_key=credential_files.PUBLIC_KEY) as google,
    ):
        env = credential_files.write(folder / "key.json", credential_files.service_account(google.url))
        yield server, env | {"CKPTMIRROR_GCS_ENDPOINT": server.url}


def run(words: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    named = {"ROOT": str(folder / "root"), "EVAL": str(folder / "eval")}
    return subprocess.run(
        [sys.executable, *(named.get(word, word) for word in words)],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(HOME), **env),
        check=False,
    )


@pytest.mark.parametrize(("use", "missing"), CASES)
def test_a_use_works_with_its_role_and_not_without_one_permission_of_it(
    use: str, missing: str | None, prepared: dict[str, Path], tmp_path: Path
) -> None:
    flow = [[word if word != "20" or missing is None else "2" for word in words] for words in FLOWS[use]]
    with applied(prepared, tmp_path, use, missing) as (server, env):
        ended = []
        for words in flow:
            ended.append(run(words, tmp_path, env))
            if ended[-1].returncode:
                break
        if missing is None:
            assert [one.returncode for one in ended] == [0] * len(flow), ended[-1].stderr
        else:
            assert ended[-1].returncode != 0
            refused = [entry for entry in server.log() if entry["status"] == 403]
            assert refused


def test_the_janitor_leaves_nothing_of_the_run_and_all_of_the_others(prepared: dict[str, Path], tmp_path: Path) -> None:
    with applied(prepared, tmp_path, "janitor", None) as (server, env):
        bucket_of(server).blob("run-2/theirs").upload_from_string(b"1")
        done = run(["-c", janitor("gs://bucket/run")], tmp_path, env)
        assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
        assert [blob.name for blob in bucket_of(server).list_blobs()] == ["run-2/theirs"]


def test_the_script_needs_nothing_but_its_files_and_the_client_library(
    server: GcsServerProcess, tmp_path: Path
) -> None:
    shutil.copytree(GCS, tmp_path / "copy")
    text = (GCS / "apply.py").read_text()
    assert "ckptmirror" not in [line.split()[1].partition(".")[0] for line in text.splitlines() if "import" in line[:6]]
    done = apply(server, *WHOLE, script=tmp_path / "copy" / "apply.py")
    assert done.returncode == 0, done.stderr
