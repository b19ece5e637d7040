"""Run training in several processes on this node, and restart them with a smaller micro-batch if memory runs out."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.config.resolve import with_global_batch
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.launch.join import first_device
from shoal.launch.processes import RanOut, run_processes
from shoal.launch.rank import (
    Request,
    begin_logs,
    check_folder,
    own_folder,
    settle_adapter,
    settle_precision,
    warn_of_settings,
)
from shoal.mistakes import RunFailed, UserMistake
from shoal.observe.events import FAULT, RESTART, launcher_events, read_events
from shoal.observe.progress import Reporter
from shoal.parallel.device import inspect_device
from shoal.train.inputs import read_inputs
from shoal.train.loop import Summary
from shoal.train.preflight import preflight


@dataclass(frozen=True)
class LocalProcesses:
    """Starts `shoal.launch.worker` once per device."""

    processes: int

    def launch(self, request: Request) -> Summary:
        """Run the ranks until they end. A run that was asked to stop returns a summary that says so."""
        refuse_hooks(request, self.processes)
        reporter = Reporter(enabled=True)
        with prepared(request, self.processes, reporter) as config:
            reporter.say(f"Starting {self.processes} {'process' if self.processes == 1 else 'processes'} …")
            return self._run(request, patience=config.train.hang_timeout, reporter=reporter)

    def _run(self, request: Request, *, patience: float, reporter: Reporter) -> Summary:
        """`patience`: seconds for ranks to finish a step and save after a request to stop."""
        max_restarts, overrides = request.max_restarts, None
        while True:
            try:
                summary = run_processes(
                    "shoal.launch.worker",
                    worker_arguments(request, overrides),
                    self.processes,
                    max_restarts=max_restarts,
                    patience=patience,
                    speaks=True,
                    warn=partial(record_restart, request.run, reporter),
                    crashes=request.run.logs,
                )
            except RanOut as failure:
                # Ranks cannot decide this: all must have the same micro-batch.
                smaller = failure.found["smaller"]
                if request.config.train.on_oom != "shrink" or smaller is None:
                    raise
                max_restarts -= failure.restarts
                overrides = smaller["overrides"]
                record_restart(request.run, reporter, restart_sentence(failure.found))
                continue
            if summary is None:
                raise RunFailed("The run was stopped before it could save.")
            return Summary(**summary)


def refuse_hooks(request: Request, processes: int) -> None:
    """A UserMistake if hooks or an objective are given for a run of other processes."""
    if request.hooks or request.objective is not None:
        instead = (
            "start the program with torchrun, so that every rank has its own"
            if processes > 1
            else "leave out max_restarts and train.on_oom shrink, which start another process"
        )
        raise UserMistake(
            f"Hooks and objectives are objects of this process, but others would train this run; {instead}."
        )


@contextmanager
def prepared(request: Request, processes: int, reporter: Reporter) -> Iterator[Config]:
    """Find errors, tokenize the data and create the run's folder, before several processes start; the folder is theirs
    meanwhile."""
    run, begin = request.run, request.start
    device = inspect_device(first_device())
    config = with_global_batch(request.config, processes)
    config = settle_adapter(config, run, resume=begin.resume)
    config = settle_precision(config, run, device, resume=begin.resume)
    warn_of_settings(config, processes, device, reporter)
    check_folder(request, config, reporter, resume=begin.resume, overwrite=request.overwrite)
    inputs = read_inputs(config, reporter)
    preflight(config, inputs, processes, device, start_from=begin.checkpoint, resume=begin.resume)
    inputs.sets.stand_by()
    folder = own_folder(request, config, inputs, reporter, resume=begin.resume, overwrite=request.overwrite)
    with closing(inputs.sets), folder:
        run.create(config, overwrite=request.overwrite, say=reporter.say)
        begin_logs(run, rank=None)
        try:
            yield config
        except RunFailed as failure:
            record_failure(run, str(failure))
            raise


def record_failure(run: RunDirectory, why: str) -> None:
    """Why the ranks ended: rank 0 may not have lived to write it, or knows only that another rank is gone."""
    last = read_events(run.path)[-1:]
    if not any(why in (one.get("text"), one.get("error")) for one in last):
        launcher_events(run.path).write(FAULT, text=why)


def record_restart(run: RunDirectory, reporter: Reporter, why: str) -> None:
    """Warn that all processes are restarted, which is an event of its own."""
    reporter.warn(why, event=False)
    launcher_events(run.path).write(RESTART, text=why)


def restart_sentence(found: Mapping[str, Any]) -> str:
    """What is restarted after a rank ran out of memory, of which `found` is its report."""
    smaller = found["smaller"]
    return (
        f"{found['sentence']} Restarting all processes with train.micro_batch "
        f"{smaller['micro_batch']} and {smaller['grad_accum_steps']} gradient accumulation steps, from the "
        f"newest checkpoint if there is one. The global batch stays {smaller['global_batch']}."
    )


def worker_arguments(request: Request, overrides: Mapping[str, Any] | None) -> list[str]:
    """The arguments of the worker. The config is in the run directory."""
    flags = ["--resume"] if request.start.resume else []
    if request.start.checkpoint is not None:
        flags += ["--from", str(request.start.checkpoint)]
    if request.profile is not None:
        flags += ["--profile", str(request.profile)]
    if overrides is not None:
        flags += ["--overrides", json.dumps(dict(overrides))]
    if request.command:
        flags += ["--command", json.dumps(list(request.command))]
    return [str(request.run.path), *flags]
