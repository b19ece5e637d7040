"""The Python API: the functions that the commands call.

    import shoal.api

    config = shoal.api.load_config("run.yaml", ["train.lr=3e-4"])
    summary = shoal.api.train(config)
    shoal.api.export(summary.run, "model")

Importing this module is cheap; torch is imported by the functions that need it.
"""

from shoal.api.checking import doctor, doctor_report
from shoal.api.data import data_preview, data_stats
from shoal.api.evaluation import evaluate, evaluate_answers, evaluate_tasks
from shoal.api.folders import checkpoints, export, import_checkpoint, merge
from shoal.api.generation import chat, generate, load_run
from shoal.api.jobs import cancel, logs, status, status_of_all, submit
from shoal.api.measuring import bench_collectives, bench_rank, bench_train
from shoal.api.sources import download, download_packaged, init, recipes
from shoal.api.sweeping import sweep
from shoal.api.training import dry_run, plan, train
from shoal.config import Config, config_from_mapping, config_to_yaml, config_values, json_schema, load_config

__all__ = [
    "Config",
    "bench_collectives",
    "bench_rank",
    "bench_train",
    "cancel",
    "chat",
    "checkpoints",
    "config_from_mapping",
    "config_to_yaml",
    "config_values",
    "data_preview",
    "data_stats",
    "doctor",
    "doctor_report",
    "download",
    "download_packaged",
    "dry_run",
    "evaluate",
    "evaluate_answers",
    "evaluate_tasks",
    "export",
    "generate",
    "import_checkpoint",
    "init",
    "json_schema",
    "load_config",
    "load_run",
    "logs",
    "merge",
    "plan",
    "recipes",
    "status",
    "status_of_all",
    "submit",
    "sweep",
    "train",
]
