"""Metrics to MLflow: the store of MLFLOW_TRACKING_URI, or a database beside the runs. Used only where `log.to` names
it."""

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shoal.files import write_atomically
from shoal.observe.metrics import Line

if TYPE_CHECKING:
    from shoal.observe.metrics import About

FILE = "mlflow.json"  # in the run's folder: the ID of its run at MLflow
EXPERIMENT = "shoal"
LONGEST = 500  # characters of a parameter
AT_ONCE = 100  # parameters of one request


class MLflow:
    name = "mlflow"

    def __init__(self, about: "About") -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # usage reports to its makers; read when mlflow is imported
        # Where the run can be seen would be printed to standard output, in the middle of what `--json` prints.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        here = about.run.resolve().parent  # mlflow ui --backend-store-uri sqlite:///runs/mlflow.db shows it
        own = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None if own else (here / "mlartifacts").as_uri()
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client = MlflowClient(own or f"sqlite:///{here / 'mlflow.db'}")
        self._after = 0
        known = self._known(about)
        if known is not None:
            self._id = known
            # Steps that a resumed run computes again are on the curve already.
            self._after = about.newest_step
            self._client.update_run(self._id, status="RUNNING")
        else:
            name = about.mlflow.get("experiment") or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found is not None else self._client.create_experiment(name, artifacts)
            self._id = self._client.create_run(experiment, run_name=about.name).info.run_id
            values = list(flattened(about.config).items())
            for first in range(0, len(values), AT_ONCE):
                params = [Param(key, text[:LONGEST]) for key, text in values[first : first + AT_ONCE]]
                self._client.log_batch(self._id, params=params)
            write_atomically(about.run / FILE, json.dumps({"id": self._id}) + "\n")
        self._client.log_dict(self._id, dict(about.config), "config.json")
        self._client.log_dict(self._id, dict(about.plan), "plan.json")

    def _known(self, about: "About") -> str | None:
        """The run that this one continues, if the server still has it."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            identifier = str(json.loads((about.run / FILE).read_text())["id"])
            with suppress(Exception):  # mlflow's own, for a run that was deleted there
                self._client.get_run(identifier)
                return identifier
        return None

    def write(self, line: Line) -> None:
        step, when = line["step"], line.get("time")
        if step is None or step <= self._after:
            return
        milliseconds = round(1000 * (when or 0))
        metrics = [
            self._metric(name, value, milliseconds, int(step))
            for name, value in line.items()
            if value is not None and name not in ("step", "time")
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key → value as text."""
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(flattened(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = str(value)
    return found
