"""The Python API: the functions that the commands call.

    import shoal.api

    config = shoal.api.load_config("run.yaml", ["train.lr=3e-4"])
    summary = shoal.api.train(config)
    shoal.api.export(summary.run, "model")

Importing this module is cheap; torch is imported by the functions that need it.
"""

from shoal.api.checking import doctor, doctor_report
from shoal.api.custom import init_run
from shoal.api.data import data_preview, data_stats
from shoal.api.encoders import embed, predict
from shoal.api.evaluation import evaluate, evaluate_answers, evaluate_tasks
from shoal.api.folders import (
    checkpoints,
    describe_import,
    export,
    import_checkpoint,
    import_config,
    is_foreign_config,
    merge,
)
from shoal.api.generation import chat, generate, load_run
from shoal.api.jobs import cancel, log_records, logs, status, status_of_all, submit, view
from shoal.api.measuring import bench_batch, bench_collectives, bench_hardware, bench_rank, bench_scaling, bench_train
from shoal.api.reporting import report
from shoal.api.sources import download, download_packaged, init, recipes
from shoal.api.sweeping import sweep
from shoal.api.training import dry_run, plan, read_profile, train
from shoal.config import Config, config_from_mapping, config_to_yaml, config_values, json_schema, load_config

__all__ = [
    "Config",
    "bench_batch",
    "bench_collectives",
    "bench_hardware",
    "bench_rank",
    "bench_scaling",
    "bench_train",
    "cancel",
    "chat",
    "checkpoints",
    "config_from_mapping",
    "config_to_yaml",
    "config_values",
    "data_preview",
    "data_stats",
    "describe_import",
    "doctor",
    "doctor_report",
    "download",
    "download_packaged",
    "dry_run",
    "embed",
    "evaluate",
    "evaluate_answers",
    "evaluate_tasks",
    "export",
    "generate",
    "import_checkpoint",
    "import_config",
    "init",
    "init_run",
    "is_foreign_config",
    "json_schema",
    "load_config",
    "load_run",
    "log_records",
    "logs",
    "merge",
    "plan",
    "predict",
    "read_profile",
    "recipes",
    "report",
    "status",
    "status_of_all",
    "submit",
    "sweep",
    "train",
    "view",
]
