"""`shoal submit --to` Kubernetes, SkyPilot and Ray: the generated files, by what these systems accept."""

import ast
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import settings, train_on, weights
from tests.launch.command import Command, Ended, environment, forked_shoal, write_config

SCHEMA = json.loads((Path(__file__).parent / "jobset_schema.json").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
# Where these may be installed besides the environment of Python: they are large, and no dependencies.
RAY = os.environ.get("SHOAL_TEST_RAY", "")
SKYPILOT = os.environ.get("SHOAL_TEST_SKYPILOT") or importlib.util.find_spec("sky")


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "data.txt").write_text("a shoal turns as one\n" * 400)
    slurm = {"container": "ghcr.io/me/shoal:1", "container_mounts": [f"training:{folder}"], "mem": "400G"}
    given = {
        "train__global_batch": 64,
        "hardware__devices": 8,
        "hardware__nodes": 2,
        "hardware__gpu": "h200",
        "slurm": {**slurm, "setup": ["nvidia-smi"], "env": {"NCCL_SOCKET_IFNAME": "eth0"}},
    }
    return settings(folder / "data.txt", name="Tiny_Run.1", **{**given, **changes})


def submit(folder: Path, to: str, *options: str, env: dict[str, str] | None = None, **changes: Any) -> Ended:
    write_config(folder, config(folder, **changes))
    return forked_shoal(folder, "submit", "run.yaml", "--to", to, *options, env=env)


def rendered(folder: Path, to: str, **changes: Any) -> Any:
    ended = submit(folder, to, "--dry-run", **changes)
    assert ended.status == 0, ended.err
    assert not (folder / "runs").exists()
    return yaml.safe_load(ended.out)


def faults(schema: dict[str, Any], value: Any, path: str = "") -> list[str]:
    """Where `value` is not as the schema says. A field that the schema does not have is a fault: the API server would
    drop it."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{path} is neither a number nor text"]
    if not isinstance(value, TYPES[schema["type"]]) or (schema["type"] == "integer" and isinstance(value, bool)):
        return [f"{path} is {value!r}, not a {schema['type']}"]
    found = [f"{path} is {value}, not one of {schema['enum']}"] if value not in schema.get("enum", [value]) else []
    if isinstance(value, dict):
        found += [f"{path}.{name} is missing" for name in schema.get("required", []) if name not in value]
        for name, inner in value.items():
            known = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if known is not None:
                found += faults(known, inner, f"{path}.{name}")
            elif "properties" in schema:
                found.append(f"{path}.{name} is unknown")
    if isinstance(value, list):
        for index, inner in enumerate(value):
            found += faults(schema["items"], inner, f"{path}[{index}]")
    return found


def test_a_jobset_is_as_its_crd_says(tmp_path: Path) -> None:
    found = rendered(tmp_path, "kubernetes")
    assert faults(SCHEMA, found) == []
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert found["metadata"]["name"] == "tiny-run-1"  # as DNS allows
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    assert job["activeDeadlineSeconds"] == 7200
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": 64, "memory": "400Gi", "nvidia.com/gpu": 8}
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"} in container["env"]
    mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in job["template"]["spec"]["volumes"]}
    assert mounted == {"shared-memory": "/dev/shm", "volume-0": str(tmp_path)}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory"}
    assert volumes["volume-0"]["persistentVolumeClaim"] == {"claimName": "training"}


def test_the_script_of_a_node_trains_and_asks_for_another_start_when_stopped(tmp_path: Path) -> None:
    """The script is run with a `python` that prints its arguments, and as one that was stopped early."""
    found = rendered(tmp_path, "kubernetes", slurm={"container": "x", "container_mounts": [f"/lustre:{tmp_path}"]})
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][1]["hostPath"] == {"path": "/lustre"}
    *shell, script = pod["containers"][0]["command"]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n[ -z "$STOPS" ] || touch "$SHOAL_STOPPED"\nexit "${FAILS:-0}"\n')
    python.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SHOAL_STOPPED": str(tmp_path / "stopped"),
        "JOB_COMPLETION_INDEX": "0",
    }
    ended = subprocess.run([*shell, script], env=variables, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (
        "-m torch.distributed.run --nnodes=2 --nproc-per-node=8 --node-rank=0 "
        "--master-addr=tiny-run-1-node-0-0.tiny-run-1 --master-port=29500 -m shoal train "
        f"{tmp_path}/runs/Tiny_Run.1/config.yaml --resume auto\n"
    )
    for variable, status in (("STOPS", 75), ("FAILS", 1)):
        again = subprocess.run([*shell, script], env={**variables, variable: "1"}, capture_output=True)
        assert again.returncode == status


def test_kubectl_gets_the_manifest_and_is_asked_for_the_state(tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncase "$1" in\n'
        "create) echo jobset.jobset.x-k8s.io/tiny-run-1 ;;\n"
        """get) echo '{"status": {"conditions": [{"type": "Failed", "status": "True", "message": "no image"}]}}' ;;\n"""
        "esac\n"
    )
    kubectl.chmod(0o755)
    env = environment(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    ended = submit(tmp_path, "kubernetes", "--anyway", env=env)
    assert ended.status == 0, ended.err
    assert ended.out.startswith("job tiny-run-1: 2 nodes × 8 devices, ")
    file = tmp_path / "runs" / "Tiny_Run.1" / "jobset.yaml"
    assert (tmp_path / "asked").read_text() == f"create --output=name --filename={file}\n"
    assert yaml.safe_load(file.read_text())["kind"] == "JobSet"
    assert yaml.safe_load((file.parent / "config.yaml").read_text())["hardware"]["devices"] == 8
    told = json.loads(forked_shoal(tmp_path, "status", "Tiny_Run.1", "--json", env=env).out)
    assert "no image" in json.dumps(told)


@pytest.mark.parametrize(
    ("to", "changes", "sentence"),
    [
        ("kubernetes", {"slurm": {}}, "A pod needs an image with shoal in it; set slurm.container."),
        ("kubernetes", {"slurm": {"container": "x"}}, "The working folder {folder} is on no volume of the pods; "),
        ("kubernetes", {"hardware__devices": "auto"}, "hardware.devices is auto, but kubernetes has to be told; "),
        ("kubernetes", {"slurm": {"qos": "x"}}, "slurm.qos means nothing to kubernetes; remove it, or submit with "),
        ("skypilot", {"hardware__gpu": "auto"}, "hardware.gpu is auto, but a cloud has many kinds; "),
        ("skypilot", {"run_dir": "/elsewhere", "slurm": {}}, "The run folder /elsewhere/Tiny_Run.1 is neither inside "),
        ("ray", {}, "slurm.setup means nothing to ray, whose workers are started already; remove it."),
        ("kubernetes", {"slurm": {"container_mounts": ["x"], "container": "x"}}, "slurm.container_mounts x: write it "),
    ],
)
def test_what_a_scheduler_cannot_do_is_a_sentence(
    to: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    ended = submit(tmp_path, to, "--dry-run", **changes)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"shoal: {sentence.format(folder=tmp_path)}"), ended.err


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    ended = submit(tmp_path, "kubernetes", "--anyway", env=environment(tmp_path, PATH="/nowhere"))
    assert ended.status == 2
    assert "The job cannot be submitted: there is no kubectl on this machine; install it, or print " in ended.err


def test_a_task_of_skypilot_has_its_fields(tmp_path: Path) -> None:
    slurm = {"container": "docker://me/shoal:1", "container_mounts": ["s3://bucket/runs:/runs"]}
    found = rendered(tmp_path, "skypilot", slurm=slurm, run_dir="/runs", hardware__gpu="a100-80gb")
    assert found.keys() == {"name", "num_nodes", "resources", "workdir", "file_mounts", "envs", "run"}
    assert (found["name"], found["num_nodes"], found["workdir"]) == ("tiny-run-1", 2, str(tmp_path))
    assert found["resources"] == {"accelerators": "A100-80GB:8", "cpus": "64+", "image_id": "docker:me/shoal:1"}
    assert found["file_mounts"] == {
        "/runs": {"source": "s3://bucket/runs", "mode": "MOUNT"},
        "/runs/Tiny_Run.1/config.yaml": "/runs/Tiny_Run.1/config.yaml",
    }
    assert "-m shoal train /runs/Tiny_Run.1/config.yaml --resume auto" in found["run"]
    assert '--node-rank="$SKYPILOT_NODE_RANK"' in found["run"]


def test_without_a_bucket_skypilot_uses_the_copied_working_folder(tmp_path: Path) -> None:
    found = rendered(tmp_path, "skypilot", slurm={}, hardware__nodes=1, hardware__gpu="h100-80gb")
    assert found["resources"]["accelerators"] == "H100:8"
    here = f"{tmp_path}/runs/Tiny_Run.1/config.yaml"
    assert found["file_mounts"] == {"~/sky_workdir/runs/Tiny_Run.1/config.yaml": here}
    assert found["envs"] == {"SHOAL_STOPPED": "runs/Tiny_Run.1/stopped"}
    assert (
        "python -m torch.distributed.run --nnodes=1 --nproc-per-node=8 --standalone -m shoal train runs/"
        in (found["run"])
    )


@pytest.mark.slow
def test_skypilot_accepts_the_task(tmp_path: Path) -> None:
    """By its own reader, in a process of its own: it brings other versions of what we use."""
    program = "import sky; sky.Task.from_yaml('task.yaml'); print('accepted')"
    env = {**os.environ, "PYTHONPATH": os.environ.get("SHOAL_TEST_SKYPILOT", "")}
    if not SKYPILOT:
        pytest.skip("skypilot is not installed: pip install it, or name its folder in SHOAL_TEST_SKYPILOT")
    found = rendered(tmp_path, "skypilot", slurm={"container_mounts": ["s3://bucket/runs:/runs"]}, run_dir="/runs")
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(found))
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.stdout.endswith("accepted\n"), ended.stderr


def test_the_program_for_ray_is_python_that_reads_well(tmp_path: Path) -> None:
    ended = submit(tmp_path, "ray", "--dry-run", slurm={"cpus_per_task": 4, "env": {"NCCL_DEBUG": "WARN"}})
    assert ended.status == 0, ended.err
    call = ast.parse(ended.out).body[-2]
    assert isinstance(call, ast.Assign)
    assert "num_workers=16,\n        use_gpu=True,\n" in ended.out
    assert 'resources_per_worker={"CPU": 4, "GPU": 1},' in ended.out
    assert '"NCCL_DEBUG": "WARN"' in ended.out
    assert "max_failures=100" in ended.out
    assert ended.out.index("RAY_USAGE_STATS_ENABLED") < ended.out.index("from ray")


@pytest.mark.long
@pytest.mark.slow
def test_ray_trains_the_weights_of_ddp(tmp_path: Path, text: Path) -> None:
    """For real, on two workers of this machine."""
    if importlib.util.find_spec("ray") is None and not (RAY and (Path(RAY) / "ray").is_dir()):
        pytest.skip("ray is not installed: pip install 'ray[train]', or name its folder in SHOAL_TEST_RAY")
    given = settings(text, name="ray", train__steps=3, parallel={"strategy": "ddp"}, hardware={"devices": 2})
    expected = weights(train_on(2, {**given, "name": "ddp"}, tmp_path))
    given["hardware"]["gpu"] = "cpu"
    write_config(tmp_path, {**given, "slurm": {"cpus_per_task": 1, "requeue": False}})
    program = tmp_path / "ray"
    program.write_text('#!/bin/sh\necho "$@" > asked\n')
    program.chmod(0o755)
    ended = forked_shoal(
        tmp_path,
        "submit",
        "run.yaml",
        "--to",
        "ray",
        env=environment(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}"),
    )
    assert ended.status == 0, ended.err
    job, _, command = (tmp_path / "asked").read_text().strip().partition(" -- ")
    assert job.startswith("job submit --no-wait --submission-id=ray-")
    paths = [path for path in (RAY, os.environ.get("PYTHONPATH")) if path]
    # Ray's workers have the lowest priority by default.
    variables = {"PYTHONPATH": os.pathsep.join(paths), "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
    with Command(tmp_path, shlex.split(command), environment(tmp_path, **variables)) as trainer:
        ended = trainer.wait()
    assert ended.status == 0, ended.err
    trained = weights(tmp_path / "runs" / "ray")
    assert trained.keys() == expected.keys()
    assert all(trained[name].equal(expected[name]) for name in expected)
