"""`shoal submit` without a cluster: the script it writes, and what it refuses. None of this imports torch."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli import main
from shoal.config.run import RunDirectory
from shoal.mistakes import RunFailed

SHAPE = {"family": "llama", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 88, "vocab": 260}
# What an interpreter without torch does: a login node may have none.
PROGRAM = "import sys; sys.modules['torch'] = None; from shoal.cli import main; main()"
SINFO = "gpu*|4|64|500000|2-00:00:00|gpu:h200:8(S:0-1)|h200\nold|2|16|60000|infinite|gpu:2|(null)\n"


def write(folder: Path, **changes: Any) -> None:
    config: dict[str, Any] = {
        "model": {"shape": {**SHAPE, "positions": 512, "tied": True}, "tokenizer": "bytes"},
        "data": {"source": "text", "path": "text.txt", "max_length": 96},
        "train": {"steps": 4, "global_batch": 32, "micro_batch": 1},
        "hardware": {"nodes": 2, "devices": 4, "gpu": "h200"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump({**config, **changes}))


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def shoal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command, in this process, on a machine that has only the programs in `commands`."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, commands: Path = tmp_path) -> Done:
        monkeypatch.setenv("PATH", str(commands))
        monkeypatch.setattr(sys, "argv", ["shoal", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code is None or isinstance(ended.value.code, int)
        return Done(ended.value.code or 0, *capsys.readouterr())

    return call


def commands(folder: Path, **programs: str) -> Path:
    """A folder with programs that print a text."""
    (folder / "bin").mkdir()
    for name, text in programs.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return folder / "bin"


def options(script: str) -> dict[str, str]:
    """The options of sbatch in the script."""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    words = [word for line in lines for word in shlex.split(line)]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def test_the_script_requests_one_task_per_device_and_time_to_save(shoal: Callable[..., Done], tmp_path: Path) -> None:
    slurm = {"partition": "gpu", "account": "lab", "qos": "long", "constraint": "h200&ib", "time": "1-12:00:00"}
    slurm |= {"cpus_per_task": 12, "mem": "900G", "gpu_type": "h200", "signal": 300, "cpu_bind": "cores"}
    slurm |= {"setup": ["module load cuda/12.4", 'source "$HOME/my env/bin/activate"'], "extra": ["--exclusive"]}
    write(tmp_path, slurm=slurm | {"env": {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_IB_DISABLE": 1}})
    done = shoal("submit", "run.yaml", "name=odd.name", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert options(done.stdout) == {
        "--job-name": "odd.name",
        "--partition": "gpu",
        "--account": "lab",
        "--qos": "long",
        "--constraint": "h200&ib",
        "--nodes": "2",
        "--ntasks-per-node": "4",
        "--gpus-per-node": "h200:4",
        "--cpus-per-task": "12",
        "--mem": "900G",
        "--time": "1-12:00:00",
        "--signal": "USR1@300",
        "--chdir": str(tmp_path),
        "--output": f"{tmp_path}/runs/odd.name/logs/slurm-%j.out",
        "--open-mode": "append",
        "--requeue": "",
        "--exclusive": "",
    }
    lines = done.stdout.splitlines()
    assert "export NCCL_SOCKET_IFNAME=ib0" in lines
    assert "export NCCL_IB_DISABLE=1" in lines
    assert lines.index("module load cuda/12.4") + 1 == lines.index('source "$HOME/my env/bin/activate"')
    started = next(shlex.split(line) for line in lines if line.startswith("srun "))
    assert started[1:4] == ["--kill-on-bad-exit=1", "--cpus-per-task=12", "--cpu-bind=cores"]
    assert started[4:] == [
        *(sys.executable, "-m", "shoal", "train"),
        f"{tmp_path}/runs/odd.name/config.yaml",
        *("--resume", "auto"),
    ]
    assert subprocess.run(["/bin/bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("image", "runtime", "words"),
    [
        ("/images/torch 2.sif", "auto", ["apptainer", "exec", "--nv", "--pwd={0}", "--bind={0}:{0}", "--bind=/d:/d"]),
        ("docker://nvcr.io/nvidia/pytorch:26.01-py3", "singularity", ["apptainer", "exec", "--nv"]),
        ("/images/torch.sqsh", "auto", ["--container-mounts={0}:{0},/d:/d", "--container-workdir={0}"]),
        ("nvcr.io#nvidia/pytorch:26.01-py3", "enroot", ["--container-image=nvcr.io#nvidia/pytorch:26.01-py3"]),
    ],
)
def test_a_container_has_the_folders_of_the_run_and_its_own_python(
    image: str, runtime: str, words: list[str], shoal: Callable[..., Done], tmp_path: Path
) -> None:
    write(tmp_path, slurm={"container": image, "container_runtime": runtime, "container_mounts": ["/d:/d"]})
    done = shoal("submit", "run.yaml", "--dry-run", "--json")
    script = json.loads(done.stdout)["text"]
    started = next(shlex.split(line) for line in script.splitlines() if line.startswith("srun "))
    position = started.index(words[0].format(tmp_path))
    assert started[position : position + len(words)] == [word.format(tmp_path) for word in words]
    assert any(image in word for word in started)
    assert started[started.index("-m") - 1] == "python"


def test_no_command_for_jobs_imports_torch(tmp_path: Path) -> None:
    write(tmp_path)
    for command in (["submit", "run.yaml", "--dry-run"], ["status"]):
        program = [sys.executable, "-c", PROGRAM, *command]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


def test_without_slurm_it_is_shown_but_not_submitted(shoal: Callable[..., Done], tmp_path: Path) -> None:
    write(tmp_path)
    done = shoal("submit", "run.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "shoal: The cluster's partitions cannot be read: there is no sinfo on this machine; run this on a login node "
        "of the cluster. shoal submit --dry-run shows the script without Slurm.\n"
    )
    # Slurm's programs may be installed where there is no cluster.
    there = commands(tmp_path, sinfo="echo 'sinfo: error: Could not establish a configuration source' >&2; exit 1")
    assert shoal("submit", "run.yaml", commands=there).stderr == (
        "shoal: The cluster's partitions cannot be read: sinfo says: Could not establish a configuration source; run "
        "this on a login node of the cluster. shoal submit --dry-run shows the script without Slurm.\n"
    )
    assert not (tmp_path / "runs").exists()


def test_what_does_not_fit_is_submitted_only_anyway(shoal: Callable[..., Done], tmp_path: Path) -> None:
    write(
        tmp_path,
        model={"shape": "llama3-70b", "tokenizer": "bytes"},
        train={"micro_batch": 8, "global_batch": 64, "steps": 4},
    )
    there = commands(tmp_path, sinfo=f"printf '{SINFO}'", sbatch="echo 4711", squeue="echo '4711|PENDING|Priority|'")
    refused = shoal("submit", "run.yaml", "parallel.strategy=ddp", commands=there)
    assert (refused.returncode, refused.stdout) == (3, "")
    assert refused.stderr.endswith(
        "shoal: The run does not fit by the forecast; change it, or submit it with --anyway.\n"
    )
    assert not (tmp_path / "runs").exists()
    done = shoal("submit", "run.yaml", "parallel.strategy=ddp", "--anyway", "--json", commands=there)
    found = json.loads(done.stdout)
    assert (done.returncode, found["job"], found["plan"]["fits"]) == (0, "4711", False)
    assert Path(found["file"]).read_text() == found["text"]
    assert yaml.safe_load((tmp_path / "runs" / "run" / "config.yaml").read_text())["hardware"]["devices"] == 4
    second = shoal("submit", "run.yaml", "--anyway", commands=there)
    assert second.returncode == 2
    assert "has job 4711 already, which is pending" in second.stderr
    status = json.loads(shoal("status", "run", "--json", commands=there).stdout)
    assert (status["state"], status["detail"]) == ("pending", "Priority")


def test_devices_that_are_left_to_the_cluster_are_those_of_its_nodes(
    shoal: Callable[..., Done], tmp_path: Path
) -> None:
    write(tmp_path, hardware={"nodes": 2})
    there = commands(tmp_path, sinfo=f"printf '{SINFO}'")
    found = json.loads(shoal("submit", "run.yaml", "--dry-run", "--json", commands=there).stdout)
    assert (found["nodes"], found["devices"], found["plan"]["hardware"]["gpu"]) == (2, 8, "h200")
    old = shoal("submit", "run.yaml", "slurm.partition=old", "--dry-run", commands=there)
    assert options(old.stdout)["--gpus-per-node"] == "2"
    assert "set hardware.gpu" in old.stderr


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("slurm.time=1", "too short: the run is asked to save slurm.signal 120 seconds before the limit"),
        ("slurm.time=soon", "must be a time in Slurm's notation, such as 90 (minutes), 02:00:00 or 1-12:00:00."),
        ("slurm.mem=much", "a size in Slurm's notation, such as 64G"),
        ("slurm.env={A B: c}", "names of environment variables"),
        ('slurm.partition="a\\n#SBATCH --uid=0"', "printable text in one line"),
        ('slurm.extra=["--x\\n--y"]', "slurm.extra has an option with a line break"),
    ],
)
def test_mistakes_in_the_block_are_found_before_the_queue(
    override: str, sentence: str, shoal: Callable[..., Done], tmp_path: Path
) -> None:
    write(tmp_path)
    done = shoal("submit", "run.yaml", override, "--dry-run")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_step_that_is_longer_than_the_time_to_save_is_refused(shoal: Callable[..., Done], tmp_path: Path) -> None:
    write(tmp_path, model={"shape": "llama3-8b", "tokenizer": "bytes"})
    batch = ["train.global_batch=8192", "data.max_length=8192", "slurm.time=1-00:00:00"]
    done = shoal("submit", "run.yaml", *batch, "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert "too late to finish one and save; raise slurm.signal." in done.stderr
    assert shoal("submit", "run.yaml", *batch, "slurm.signal=3600", "--dry-run").returncode == 0


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The folder of a run that has logged steps, whose job is over."""
    run = tmp_path / "runs" / "run"
    (run / "checkpoints").mkdir(parents=True)
    write(tmp_path)
    shutil.copy(tmp_path / "run.yaml", run / "config.yaml")
    (run / "metrics.jsonl").write_text('{"step": 7, "loss": 2.5}\n')
    return run


def test_an_existing_run_is_continued_or_replaced_as_by_train(
    shoal: Callable[..., Done], tmp_path: Path, trained: Path
) -> None:
    there = commands(tmp_path, sinfo=f"printf '{SINFO}'", sbatch="echo 4711", squeue="true")
    refused = shoal("submit", "run.yaml", commands=there)
    assert refused == Done(
        2,
        "",
        "shoal: runs/run already holds a run; add --resume to continue it, --overwrite to delete it, or another "
        "name=…\n",
    )
    both = shoal("submit", "run.yaml", "--resume", "--overwrite", commands=there)
    assert (both.returncode, both.stdout) == (2, "")
    assert shoal("submit", "run.yaml", "--overwrite", "--dry-run", commands=there).returncode == 0
    assert (trained / "metrics.jsonl").exists(), "a dry run changes nothing"
    done = shoal("submit", "run.yaml", "--overwrite", commands=there)
    assert done.returncode == 0, done.stderr
    aside = trained.with_name("run~replaced")
    assert f"The old run is in {aside} until this one has a complete checkpoint." in done.stderr
    assert (aside / "metrics.jsonl").read_text() == '{"step": 7, "loss": 2.5}\n'
    assert (trained / "job.sbatch").is_file()
    assert not (trained / "metrics.jsonl").exists()
    # The job starts, and does not take the run that it replaces for one that a killed start has left.
    run, said = RunDirectory(trained), list[str]()
    run.recover(said.append)
    # It fails before its first step: its folder keeps the log that says why.
    with pytest.raises(RunFailed), run.replacing(restores=True, say=said.append, warn=said.append):
        raise RunFailed
    assert (trained / "job.sbatch").is_file()
    assert [sentence.partition(":")[0] for sentence in said] == [f"the run that this one replaced is still in {aside}"]
    nothing = shoal("submit", "run.yaml", "name=other", "--resume", commands=there)
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert nothing.stderr == "shoal: --resume: there is no run in runs/other; start it without --resume.\n"


def test_a_job_that_is_not_accepted_leaves_the_run_that_it_would_replace(
    shoal: Callable[..., Done], tmp_path: Path, trained: Path
) -> None:
    refusing = "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1"
    there = commands(tmp_path, sinfo=f"printf '{SINFO}'", sbatch=refusing, squeue="true")
    done = shoal("submit", "run.yaml", "--overwrite", commands=there)
    assert done == Done(
        2, "", "shoal: The job cannot be submitted: sbatch says: Batch job submission failed: Invalid account.\n"
    )
    assert (trained / "metrics.jsonl").is_file()
    assert [path.name for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")] == ["run"]


def test_an_unknown_scheduler_is_refused_with_those_there_are(shoal: Callable[..., Done], tmp_path: Path) -> None:
    write(tmp_path)
    done = shoal("submit", "run.yaml", "--to", "slurn", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shoal: No scheduler is called slurn; the names are slurm")
    assert done.stderr.endswith("Did you mean slurm?\n")
