"""Writes docs/coming-from.md: the words of other systems and ours, from the tables that translate."""

from collections.abc import Iterator

from shoal.convert.configs.launchers import LAUNCHER
from shoal.convert.configs.recognise import SYSTEMS
from shoal.convert.configs.rules import Rule, System
from shoal.convert.configs.trainer import TRL

TITLES = {
    "a DeepSpeed config": "DeepSpeed (JSON)",
    "an Accelerate config": "Accelerate (YAML)",
    "arguments of the Hugging Face Trainer": "Hugging Face Trainer and TRL (JSON, YAML, flags)",
    "a Hydra config with trainer.dist": "Hydra with `trainer.dist` and submitit",
    "a LitGPT config": "LitGPT (commands and YAML)",
    "an scModelForge config": "scModelForge (YAML)",
    "an axolotl config": "axolotl (YAML)",
    "a torchtune config": "torchtune (YAML)",
    "a launcher": "torchrun, accelerate launch, deepspeed, sbatch",
}

# Blocks whose keys are those of another table.
ELSEWHERE = {
    "a Hydra config with trainer.dist": ("trainer.", "training.", "lora."),
    "a launcher": ("accelerate.",),
    "an Accelerate config": ("parallelism_config.parallelism_config_",),
}

INTRODUCTION = """# Coming from another system

`shoal import` translates the config or the command that you have to a YAML file of ours. It prints what each key
became, what has no meaning here and why, and what it could not carry; nothing is dropped silently. The file passes
validation, or it is not written.

<!-- not run: needs files of other systems; tests/convert/configs runs this command -->
```bash
shoal import ds_config.json                                # DeepSpeed → ds_config.shoal.yaml, beside it
shoal import accelerate.yaml ds_config.json -- accelerate launch train.py --per_device_train_batch_size 4
shoal import -- litgpt finetune_lora meta-llama/Llama-2-7b-hf --devices 8 --train.global_batch_size 16
shoal import job.sbatch --output run.yaml --overwrite      # the command in a script, and its #SBATCH lines
shoal import axolotl.yml --json                            # the same report as one JSON object
```

What it reads: DeepSpeed's JSON, Accelerate's YAML, arguments of the Hugging Face Trainer and of TRL (files and
flags), Hydra configs with `trainer.dist`, LitGPT (commands and YAML), axolotl, torchtune and scModelForge (YAML),
commands with torchrun, accelerate launch, deepspeed or srun, and batch scripts. The system is recognised by its keys.
A command stands behind two dashes, or in a file. Nothing in a file is run; variables of a script are replaced where
their value is in it.

<!-- not run: needs files of other systems; tests/convert/configs runs this command -->
```console
$ shoal import ds_config.json
ds_config.json: a DeepSpeed config

became
  train_batch_size: 256                            train.global_batch: 256
  zero_optimization.stage: 2                       parallel.strategy: zero2
  zero_optimization.offload_optimizer.device: cpu  parallel.offload: optimizer
  …
has no meaning here
  zero_optimization.overlap_comm                   built in: communication overlaps with compute, in buckets of the …
could not be carried
  gradient_accumulation_steps: 4                   follows from train.global_batch 256, …
missing: model.from, data.path; set them in the file, or behind it: model.from=… data.path=…

wrote ds_config.shoal.yaml
```

- **Files that belong together** are given at once and merged; so is a file that another one names (`deepspeed:
  ds.json`, `--config_file accelerate.yaml`), if it is there. Where two of them disagree, the report says so under
  *contradictions*, and which value is used. `auto` in DeepSpeed's JSON is what the Trainer's arguments say.
- **Their defaults are kept.** Where a system does something else than shoal when a key is left out (a learning rate
  of 5e-5, no clipping, a linear schedule), the file has it, marked *(default)* in the report.
- **The batch.** Sequences per device × gradient accumulation steps × devices becomes `train.global_batch` where the
  devices are known, and `train.micro_batch` with `train.grad_accum` where they are not. scModelForge's `num_gpus` and
  Accelerate's `num_processes` are totals, LitGPT's `devices` and our `hardware.devices` are per node.
- **DeepSpeed itself** can run what its JSON became: `shoal train ds_config.shoal.yaml parallel.engine=deepspeed`
  ([docs/parallel.md](parallel.md#deepspeed-as-the-engine-engine)). The default is our own implementation of its stages.
- **What is not built** is named with what to use meanwhile, and left out of the file.
- **Missing** keys, such as the model in a DeepSpeed config, can be given behind the file: `shoal plan
  ds_config.shoal.yaml model.from=… data.path=…`, or another file includes it.

An existing file is replaced only with `--overwrite`. In Python: `shoal.api.import_config([files], command)`. Weights
of other systems are imported with the same command ([docs/use.md](use.md)).

## Words

Their key, ours, and what to know. This part is generated by `make docs` from the tables that translate
(`src/shoal/convert/configs/`). Keys with the same answer stand together. Keys of FSDP are read with and without the
prefix `fsdp_`; in Hydra, `trainer` also has the keys of the Trainer, and `accelerate launch` those of Accelerate's
file.
"""


def document() -> str:
    """The page as Markdown."""
    lines = [INTRODUCTION]
    for system in (*(one for one in SYSTEMS if one is not TRL), LAUNCHER):
        lines += [f"### {TITLES[system.name]}", "", "| theirs | ours | |", "| --- | --- | --- |", *_rows(system), ""]
    return "\n".join(lines).rstrip() + "\n"


def _rows(system: System) -> Iterator[str]:
    groups: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, rule in system.keys.items():
        if name.startswith(ELSEWHERE.get(system.name, ())) and not name.startswith("trainer.dist"):
            continue
        block, _, last = name.rpartition(".")
        if last.startswith("fsdp_") and f"{block}.{last.removeprefix('fsdp_')}" in system.keys:
            continue  # the same with and without the prefix
        groups.setdefault((rule.ours, _says(rule)), []).append(name)
    # What becomes a key first, what does not behind it.
    for (ours, says), names in sorted(groups.items(), key=lambda item: not item[0][0]):
        theirs = ", ".join(f"`{name}`" for name in names)
        yield f"| {theirs} | {', '.join(f'`{key}`' for key in ours)} | {says} |"


def _says(rule: Rule) -> str:
    return rule.says.replace("|", "\\|")


if __name__ == "__main__":
    print(document(), end="")
