"""Fork ranks from a process with all imports done, so that a distributed test takes about a second.

Ranks are initialized as by our launcher (the same environment, a FileStore) and train through the public API, so a
test sees what a user sees: the files of a run.
"""

import faulthandler
import importlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import accelerate.utils.other
import pytest
import torch
from safetensors import safe_open
from transformers import (
    BertConfig,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import shoal.launch.run
from shoal import api
from shoal.checkpoint.layout import SliceReader
from shoal.config import Config, Mesh
from shoal.config.schema_base import Block
from shoal.launch.environment import LAUNCH_FOLDER
from shoal.models.emulate import slow_dtypes
from shoal.models.prepare import PreparedModel
from shoal.objectives.causal_lm import CausalLM
from shoal.parallel import apply
from shoal.parallel.model import ParallelModel
from shoal.parallel.ranks import Ranks

# Imported above so that forked ranks have them already: transformers imports a model's code when it is first used.
IMPORTED = (
    BertConfig,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    shoal.launch.run,
)

# What every rank would import and build again: modules that are imported when first used, the validators of the
# config's blocks, and what torch and transformers keep of the first model on the meta device.
for _module in (
    "encodings.utf_8_sig",
    "importlib.readers",
    "pydantic.dataclasses",
    "pydantic.plugin._loader",
    "rich._emoji_codes",
    "shoal.checkpoint.inspect",
    "shoal.data.first_look",
    "shoal.launch.custom",
    "torch.distributed.pipelining",
    "torch.profiler._cupti_monitor",
    "transformers.models.auto.tokenization_auto",
    "typer._click.decorators",
):
    if find_spec(_module) is not None:  # torch 2.11 does not have all of them
        importlib.import_module(_module)
for _block in Block.__subclasses__():
    _block.model_rebuild()
with torch.device("meta"):
    LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=32))
get_checkpoint_conversion_mapping("llama")
# Else every save_pretrained imports DeepSpeed, if it is installed, and MLflow with it, in five seconds.
accelerate.utils.other.is_deepspeed_available = bool

NEEDS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton, whose interpreter runs kernels on a CPU"
)
PATIENCE = 180
POOLED = "pooled rank"  # the name of the processes that stay
# Gloo keeps threads of every process group, which wake up all the time: ranks that have had this many are replaced.
RUNS_OF_A_POOL = 8

LLAMA = {"family": "llama", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 88, "vocab": 260}
PYTHIA = {"family": "neox", "hidden": 32, "layers": 2, "heads": 4, "ffn": 128, "vocab": 260}


def slow(*values: Any, id: str | None = None) -> Any:
    """A case of a parametrized test that `make test` leaves out."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def run_ranks(world_size: int, function: Callable[[], Any]) -> list[Any]:
    """Call `function` on `world_size` forked ranks and return what each returned; a rank's exception is raised here."""
    slow_dtypes()  # measured once: on a busy machine two ranks, or two runs, could decide differently
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            fork.Process(target=_be_rank, args=(rank, world_size, folder, function, pipes[rank][1]))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        answers = [_receive(receiver, process) for (receiver, _), process in zip(pipes, processes, strict=True)]
        for process in processes:
            process.join(timeout=10)
            process.kill()
    # One that died first: the others only lost their connection to it.
    for kind, value in answers:
        assert kind in ("returned", "raised"), value
    raised = [value for kind, value in answers if kind == "raised"]
    if raised:
        raise min(raised, key=lambda error: "Connection closed by peer" in str(error))
    return [value for _, value in answers]


def _receive(receiver: Connection, process: BaseProcess) -> tuple[str, Any]:
    if not receiver.poll(PATIENCE):
        os.kill(process.pid, signal.SIGABRT)  # so that it prints its stacks
        return ("hung", f"a rank gave no answer in {PATIENCE} seconds")
    try:
        answer: tuple[str, Any] = receiver.recv()
    except EOFError:
        process.join(timeout=10)
        return ("died", f"a rank ended without an answer, with status {process.exitcode}")
    return answer


def _be_rank(rank: int, world_size: int, folder: str, function: Callable[[], Any], sender: Connection) -> None:
    _prepare_rank(rank, world_size)
    os.environ[LAUNCH_FOLDER] = folder
    _answer(sender, function)
    sys.stdout.flush()
    os._exit(0)


def _prepare_rank(rank: int, world_size: int) -> None:
    # Here and not in the parent: after a fork the first threads that use the parent's pool replace it, and with two at
    # once there was sometimes none.
    torch.set_num_threads(1)
    faulthandler.enable(sys.__stderr__)  # a test may have replaced sys.stderr with an object without a file descriptor
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))


def _answer(sender: Connection, function: Callable[[], Any]) -> None:
    try:
        sender.send(("returned", function()))
    except Exception as error:
        try:
            sender.send(("raised", error))
        except Exception:
            sender.send(("failed", traceback.format_exc()))


def settings(data: Path, **changes: Any) -> dict[str, Any]:
    """A tiny run; `changes` are dotted keys with __ for the dot: train__steps=3."""
    config: dict[str, Any] = {
        "name": "run",
        "model": {"shape": {**LLAMA, "positions": 512, "tied": True}, "tokenizer": "bytes"},
        "data": {
            "source": "json" if data.suffix == ".jsonl" else "text",
            "path": str(data),
            "max_length": 144 if data.suffix == ".jsonl" else 96,
            "pack": False,
            "validation": 0,
            "workers": 0,
        },
        "train": {
            "steps": 4,
            "global_batch": 8,
            "micro_batch": 4,
            "lr": 3e-3,
            "precision": "32-true",
            "deterministic": True,
            "schedule": {"warmup": 2},
        },
        "log": {"every": 1, "to": []},
    }
    for key, value in changes.items():
        block = config
        *parents, last = key.split("__")
        for parent in parents:
            block = block.setdefault(parent, {})
        block[last] = value
    return config


@cache
def import_compiler() -> None:
    """Import what torch.compile imports when it is first used: hundreds of modules, which each rank would import."""
    import torch._dynamo.backends.common
    import torch._dynamo.backends.debugging
    import torch._functorch.aot_autograd
    import torch._inductor.lowering  # noqa: F401


def _prepare_compiler() -> None:
    import_compiler()
    # A test that compiled blocks in this process has left the sizes it saw: ranks would compile for sizes that vary at
    # once, in four times the time.
    torch.compiler.reset()


def train_on(world_size: int, config: dict[str, Any], runs: Path, **options: Any) -> Path:
    """Train on forked ranks; returns the run's folder."""
    if config["train"].get("compile"):
        _prepare_compiler()
    run_ranks(world_size, lambda: api.train(api.config_from_mapping(config), runs=runs, **options).as_dict())
    return runs / config["name"]


def train_in_whole_graphs(world_size: int, config: dict[str, Any], runs: Path) -> Path:
    """As `train_on`, with compiled blocks. One that cannot be compiled as a whole runs eagerly, which only its speed
    shows: here it is an error."""

    def train() -> dict[str, int]:
        api.train(api.config_from_mapping(config), runs=runs)
        counted = torch._dynamo.utils.counters
        assert counted["stats"]["unique_graphs"] > 0, "nothing was compiled"
        return dict(counted["graph_break"])

    _prepare_compiler()
    assert run_ranks(world_size, train) == [{}] * world_size
    return runs / config["name"]


class _Pool:
    """Ranks that train one run after another."""

    def __init__(self, world_size: int) -> None:
        slow_dtypes()
        fork = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        self._runs = 0
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        for rank in range(world_size):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_serve, args=(rank, world_size, ours, theirs), name=POOLED, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def train(self, config: dict[str, Any], runs: Path) -> None:
        self._runs += 1
        folder = Path(self._folder.name) / str(self._runs)  # ranks meet in a folder once
        folder.mkdir()
        try:
            for _, pipe in self._ranks:
                pipe.send((str(folder), config, runs))
            waiting = {pipe: process for process, pipe in self._ranks}
            while waiting:
                ready = wait([*waiting, *(process.sentinel for process in waiting.values())], PATIENCE)
                answers = [_receive(pipe, waiting.pop(pipe)) for pipe in list(waiting) if pipe in ready]
                for kind, value in answers:
                    if kind == "raised":
                        raise value
                    assert kind == "returned", value
                assert answers, "a rank died or hangs"
        except BaseException:  # the other ranks may wait forever for the one that failed
            self._end()
            raise
        if len(self._ranks) > 1 and self._runs == RUNS_OF_A_POOL:
            self._end()

    def _end(self) -> None:
        for process, _ in self._ranks:
            process.kill()
        for process, pipe in self._ranks:
            process.join()
            pipe.close()
        self._folder.cleanup()
        del _POOLS[len(self._ranks)]


_POOLS: dict[int, _Pool] = {}  # by world size


def _serve(rank: int, world_size: int, other_end: Connection, pipe: Connection) -> None:
    other_end.close()  # so that this one reads its end when the test process has ended
    _prepare_rank(rank, world_size)
    while True:
        try:
            os.environ[LAUNCH_FOLDER], config, runs = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        _answer(pipe, lambda: api.train(api.config_from_mapping(config), runs=runs).as_dict())  # noqa: B023
        sys.stdout.flush()


def train_again_on(world_size: int, config: dict[str, Any], runs: Path) -> Path:
    """As `train_on`, on ranks that have trained before, in half the time. For whole runs whose files are compared: they
    do not see what the test has patched, nor its environment, and what they print is not captured."""
    if config["train"].get("compile") or world_size > 2:
        return train_on(world_size, config, runs)
    if world_size not in _POOLS:
        _POOLS[world_size] = _Pool(world_size)
    _POOLS[world_size].train(config, runs)
    return runs / config["name"]


def reference_run(config: dict[str, Any], world_size: int = 1) -> Path:
    """The run of this config, trained once in a test session: read only, and nothing may be patched meanwhile."""
    return _trained(json.dumps(config, sort_keys=True), world_size)


@cache
def _trained(config: str, world_size: int) -> Path:
    return train_again_on(
        world_size, json.loads(config), Path(tempfile.mkdtemp(prefix="reference-", dir=os.environ["SHOAL_CACHE"]))
    )


def lines(run: Path) -> list[dict[str, Any]]:
    """The training lines of a run's metrics, the last one of each step."""
    found = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return list({line["step"]: line for line in found if "loss" in line}.values())


def written_slices(folder: Path) -> list[dict[str, tuple[int, int]]]:
    """For every file of a checkpoint: tensor → (elements in this file, elements in total)."""
    found = []
    for path in sorted(folder.glob("rank-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            wholes = {key: entry["whole"] for key, entry in json.loads(file.metadata()["slices"]).items()}
            here = {key: math.prod(file.get_slice(key).get_shape()) for key in wholes}
        table: dict[str, tuple[int, int]] = {}
        for key, whole in wholes.items():
            name = key.partition("#")[0]
            table[name] = (table.get(name, (0, 0))[0] + here[key], math.prod(whole))
        found.append(table)
    return found


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The model in the run's newest checkpoint, assembled from its slices."""
    newest = (run / "checkpoints" / "latest").read_text().strip()
    reader = SliceReader(run / "checkpoints" / newest)
    return {name: reader.read_whole("model." + name) for name in reader.shapes("model.")}


def parallelized(
    prepared: PreparedModel, config: Config, *, ranks: Ranks | None = None, **options: Any
) -> ParallelModel:
    """The model as a run of this config trains it: on one CPU device, if the options do not say otherwise."""
    alone = {"strategy": "single", "mesh": Mesh(), "micro_batch": 1, "grad_accum_steps": 1}
    ranks = ranks or Ranks(0, 1, 0, torch.device("cpu"))
    return apply.parallelize(prepared, config, objective=CausalLM(), ranks=ranks, **{**alone, **options})


def compared_in_interpreter(script: Path) -> int:
    """How many comparisons a script of Triton's interpreter made, all of them equal."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.count("the same:")
