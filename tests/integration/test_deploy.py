"""The files in deploy/ name verbs, options and exit codes that exist, and have the syntax of who reads them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import yaml
from torch.distributed.run import get_args_parser

from ckptmirror.cli._program import program
from ckptmirror.core import errors

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


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_waits_for_what_is_mounted_from_elsewhere(unit: Path):
    assert "remote-fs.target" in settings(unit)["After"].split()


def test_what_the_readme_lets_a_unit_write_to_is_mounted_first():
    drop_in = (HOME / "deploy" / "README.md").read_text().partition("```ini")[2].partition("```")[0]
    written, waited_for = (re.findall(rf"{name}=(\S+)", drop_in) for name in ("ReadWritePaths", "RequiresMountsFor"))
    assert written == waited_for == ["/nfs/run-17"]


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


def test_slurm_starts_an_agent_on_each_node_with_options_that_torchrun_has() -> None:
    script = HOME / "deploy" / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    text = script.read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    words = shlex.split(line)
    agent = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    assert (agent.nnodes, agent.rdzv_backend, agent.training_script) == ("$SLURM_NNODES", "c10d", "train.py")
    assert "#SBATCH --ntasks-per-node=1\n" in text


def test_kubernetes_starts_an_agent_in_each_pod_and_all_find_the_first_one() -> None:
    service, job = yaml.safe_load_all((HOME / "deploy" / "kubernetes" / "train.yaml").read_text())
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert (job["kind"], job["spec"]["completionMode"]) == ("Job", "Indexed")
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["command"][0] == "torchrun"
    agent = get_args_parser().parse_args(container["command"][1:])
    assert int(agent.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert agent.rdzv_endpoint.startswith(f"{name}-0.{service['metadata']['name']}:")
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    root = next(one["value"] for one in container["env"] if one["name"] == "LOCAL_SSD")
    assert root.startswith(container["volumeMounts"][0]["mountPath"] + "/")
