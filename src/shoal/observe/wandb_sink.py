"""Metrics to Weights & Biases, online or offline. Used only where `log.to` names it."""

import json
import os
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

from shoal.files import write_atomically
from shoal.observe.background import SinkFailed
from shoal.observe.metrics import Line

if TYPE_CHECKING:
    from shoal.observe.metrics import About

FILE = "wandb.json"  # in the run's folder: the ID of its run at Weights & Biases
PROJECT = "shoal"
PATIENCE = 20  # seconds for its server to answer
# Errors of the library would be reported to its makers. It is read when wandb is imported.
REPORTING = "WANDB_ERROR_REPORTING"


class WeightsAndBiases:
    name = "wandb"

    def __init__(self, about: "About") -> None:
        os.environ[REPORTING] = "false"
        os.environ.setdefault("WANDB_SILENT", "true")  # of its greetings; its errors are exceptions
        import wandb

        # Of those in the config, and then of those in the variables that wandb itself reads.
        project = about.wandb.get("project") or os.environ.get("WANDB_PROJECT") or PROJECT
        identifier, continues = os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8], False
        with suppress(OSError, ValueError, KeyError, TypeError):
            identifier, continues = str(json.loads((about.run / FILE).read_text())["id"]), True
        # Steps that a resumed run computes again are on the curve already.
        self._after = about.newest_step if continues else 0
        try:
            self._run = wandb.init(
                project=project,
                entity=about.wandb.get("entity"),
                mode=about.wandb.get("mode"),  # type: ignore[arg-type]
                id=identifier,
                name=os.environ.get("WANDB_NAME") or about.name,
                resume="allow",
                dir=str(about.run / "logs"),
                config={**about.config, "plan": dict(about.plan)},
                # What is printed, and the user's code, stay here.
                settings=wandb.Settings(
                    console="off", save_code=False, silent=True, x_save_requirements=False, init_timeout=PATIENCE
                ),
            )
        except wandb.errors.CommError as error:
            server = os.environ.get("WANDB_BASE_URL", "its server")
            raise SinkFailed(f"{server} does not answer; log.wandb.mode=offline writes to files: {error}") from error
        # A rollback goes back in steps, which wandb's own step cannot.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        write_atomically(about.run / FILE, json.dumps({"id": self._run.id, "project": project}) + "\n")

    def write(self, line: Line) -> None:
        step = line["step"]
        if step is not None and step > self._after:
            self._run.log({name: value for name, value in line.items() if value is not None and name != "time"})

    def close(self) -> None:
        self._run.finish()
