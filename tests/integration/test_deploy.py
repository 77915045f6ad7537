"""The files in deploy/ name verbs, options and exit codes that exist, and have the syntax of who reads them."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.cli._program import program
from ckptmirror.core import errors, names

HOME = Path(__file__).resolve().parents[2]
UNITS = sorted((HOME / "deploy" / "systemd").iterdir())


def settings(unit: Path) -> dict[str, str]:
    lines = [line for line in unit.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_verb_with_options_that_exist(unit: Path):
    words = shlex.split(settings(unit)["ExecStart"])
    assert words[0].endswith("/bin/ckptmirror")
    command = program.get_command(click.Context(program), words[1])
    assert command is not None
    assert command.make_context(words[1], words[2:]).params["root"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_again_after_what_a_wait_may_mend_and_after_nothing_else(unit: Path):
    again = set(map(int, settings(unit)["RestartForceExitStatus"].split()))
    never = set(map(int, settings(unit)["RestartPreventExitStatus"].split()))
    classes = [getattr(errors, name) for name in errors.__all__]
    assert again == {5, 8, 11}
    assert again | never == {cls.exit_code for cls in classes}
    assert not again & never
    assert settings(unit)["StartLimitIntervalSec"] == "0", "after a limit, systemd never starts it again"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_waits_for_what_is_mounted_from_elsewhere(unit: Path):
    assert "remote-fs.target" in settings(unit)["After"].split()


def test_what_the_readme_lets_a_unit_write_to_is_mounted_first():
    drop_in = (HOME / "deploy" / "README.md").read_text().partition("```ini")[2].partition("```")[0]
    written, waited_for = (re.findall(rf"{name}=(\S+)", drop_in) for name in ("ReadWritePaths", "RequiresMountsFor"))
    assert written == waited_for == ["/nfs/run-17"]


def test_a_unit_starts_where_a_trainer_has_its_table_elsewhere_too(tmp_path: Path):
    (unit,) = UNITS
    (value,) = {line.split("=|%f/")[1] for line in unit.read_text().splitlines() if "ConditionPathExists=|" in line} - {
        names.TABLE_NAME
    }
    assert value == names.TABLE_NOTE_NAME
    table = tmp_path / "state"
    with CheckpointManager(tmp_path / "root", state_dir=table) as manager:
        manager.resume(TrainState(model=torch.nn.Linear(1, 1)))
    assert not (tmp_path / "root" / names.TABLE_NAME).exists()
    assert (tmp_path / "root" / value).exists()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    program_path = shutil.which("true")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/ckptmirror/bin/ckptmirror", str(program_path)))
    instance = tmp_path / unit.name.replace("@.", "@local\\x2dssd-run\\x2d17.")
    command = ["systemd-analyze", "verify", "--man=no", str(instance)]
    instance.symlink_to(copy.name)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    complaints = [line for line in done.stderr.splitlines() if unit.stem.partition("@")[0] in line]
    assert complaints == []
    assert done.returncode == 0, done.stderr


def agent_of(command: list[str]) -> argparse.Namespace:
    """What torchrun understands of a command line."""
    assert command[0] == "torchrun"
    return get_args_parser().parse_args(command[1:])


def test_slurm_starts_an_agent_on_each_node_with_options_that_torchrun_has() -> None:
    script = HOME / "deploy" / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    text = script.read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    words = shlex.split(line.removesuffix("&"))
    agent = agent_of(words[words.index("torchrun") :])
    assert (agent.nnodes, agent.rdzv_backend, agent.training_script) == ("$SLURM_NNODES", "c10d", "train.py")
    assert agent.nproc_per_node == "${SLURM_GPUS_ON_NODE:-1}"
    assert "#SBATCH --ntasks-per-node=1\n" in text


# -- kubernetes ---------------------------------------------------------------------------------------------

TEXTS = {"": str}  # any names
POD = {
    "subdomain": str,
    "restartPolicy": ("OnFailure", "Never"),  # of a job, never Always
    "terminationGracePeriodSeconds": int,
    "containers": [
        {
            "name": str,
            "image": str,
            "command": [str],
            "env": [{"name": str, "value": str}],
            "volumeMounts": [{"name": str, "mountPath": str}],
        }
    ],
    "volumes": [{"name": str, "hostPath": {"path": str, "type": ("Directory",)}}],
}
JOB = {
    "completions": int,
    "parallelism": int,
    "completionMode": ("Indexed",),
    "backoffLimit": int,
    "template": {"spec": POD},
}
# The fields that the files use, as the references of the two APIs have them: a misspelt field is ignored, or refused.
FIELDS: dict[str, dict[str, Any]] = {
    "v1/Service": {"clusterIP": ("None",), "publishNotReadyAddresses": bool, "selector": TEXTS},
    "batch/v1/Job": JOB,
    "jobset.x-k8s.io/v1alpha2/JobSet": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}


def check_fields(value: Any, allowed: Any, at: str) -> None:
    if isinstance(allowed, dict):
        assert isinstance(value, dict), at
        for name, inner in value.items():
            assert name in allowed or allowed is TEXTS, f"{at} has no field {name}"
            check_fields(inner, allowed.get(name, str), f"{at}.{name}")
    elif isinstance(allowed, list):
        assert isinstance(value, list), at
        for inner in value:
            check_fields(inner, allowed[0], at)
    elif isinstance(allowed, tuple):
        assert value in allowed, f"{at} is {value!r}"
    else:
        assert type(value) is allowed, f"{at} is {value!r}"


def documents(name: str) -> list[Any]:
    """The documents of a file, whose fields exist."""
    found = list(yaml.safe_load_all((HOME / "deploy" / "kubernetes" / name).read_text()))
    for one in found:
        assert set(one) == {"apiVersion", "kind", "metadata", "spec"}
        check_fields(one["metadata"], {"name": str}, "metadata")
        check_fields(one["spec"], FIELDS[f"{one['apiVersion']}/{one['kind']}"], one["kind"])
    return found


def check_pods(job: Any, first: str) -> None:
    """Each pod of a job starts an agent; all of them meet in the first pod, and each has its own disk."""
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    agent = agent_of(container["command"])
    assert int(agent.nnodes) == job["completions"] == job["parallelism"]
    assert agent.rdzv_endpoint.partition(":")[0] == first
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    values = {one["name"]: one["value"] for one in container["env"]}
    assert values["LOCAL_SSD"].startswith(container["volumeMounts"][0]["mountPath"] + "/")
    assert int(values["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]


def test_a_job_of_kubernetes_starts_an_agent_in_each_pod_and_all_find_the_first_one() -> None:
    service, job = documents("train.yaml")
    name, domain = job["metadata"]["name"], service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert job["spec"]["template"]["spec"]["subdomain"] == domain
    check_pods(job["spec"], f"{name}-0.{domain}")


def test_a_jobset_starts_an_agent_in_each_pod_and_all_find_the_first_one() -> None:
    (jobset,) = documents("jobset.yaml")
    (nodes,) = jobset["spec"]["replicatedJobs"]
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    domain = jobset["spec"]["network"]["subdomain"]
    check_pods(nodes["template"]["spec"], f"{jobset['metadata']['name']}-{nodes['name']}-0-0.{domain}")


def test_a_field_that_kubernetes_does_not_have_is_found() -> None:
    (jobset,) = documents("jobset.yaml")
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimits"] = 0
    with pytest.raises(AssertionError, match="no field backoffLimits"):
        check_fields(jobset["spec"], FIELDS["jobset.x-k8s.io/v1alpha2/JobSet"], "JobSet")
