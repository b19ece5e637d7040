"""Lightning's Trainer in YAML: LightningCLI's files, and Hydra's."""

import pytest

from tests.convert.configs.translated import holds, keys_of, translated

CLI = """
seed_everything: 7
trainer:
  accelerator: gpu
  strategy:
    class_path: lightning.pytorch.strategies.FSDPStrategy
    init_args: {sharding_strategy: SHARD_GRAD_OP, cpu_offload: true, state_dict_type: sharded, timeout: null}
  devices: 4
  num_nodes: 2
  precision: bf16-mixed
  max_steps: 2000
  accumulate_grad_batches: 4
  val_check_interval: 400
  limit_val_batches: 20
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {monitor: val_loss, save_top_k: 2, every_n_train_steps: 500, filename: null}
    - {class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: val_loss, patience: 5}}
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
    - class_path: own.Confetti
  logger: {class_path: lightning.pytorch.loggers.WandbLogger, init_args: {project: own}}
model: {class_path: own.Model, init_args: {model_name_or_path: gpt2, learning_rate: 3.0e-4, own_option: 3}}
data: {class_path: own.Data, init_args: {batch_size: 8, max_length: 512}}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1.0e-4, weight_decay: 0.1}}
ckpt_path: null
"""


def test_a_config_of_lightning_cli(tmp_path):
    found = translated(tmp_path, CLI)
    holds(found, seed=7, parallel__strategy="fsdp", parallel__sharding="shard_grad_op", parallel__offload="cpu")
    holds(found, hardware__devices=4, hardware__nodes=2, train__precision="bf16-mixed", train__steps=2000)
    # 8 per device, 4 batches per step, 8 devices; val_check_interval counts batches.
    holds(found, train__global_batch=256, eval__every=100, eval__batches=20, checkpoint__format="sharded")
    holds(found, checkpoint__keep_best=2, checkpoint__every=500, train__early_stop__patience=5, log__to=["wandb"])
    holds(found, model__from_="gpt2", data__max_length=512, train__lr=1e-4, train__optimizer__weight_decay=0.1)
    # Lightning clips nothing and keeps the learning rate unless it is told to.
    holds(found, train__clip=None, train__schedule__name="constant", train__schedule__warmup=0)
    python = {"model.class_path", "model.init_args.own_option", "data.class_path", "trainer.callbacks.3"}
    assert keys_of(found, "not carried") == python
    assert "model.init_args.learning_rate" in keys_of(found, "no meaning")  # LightningCLI's optimizer replaces it
    assert found.missing == ("data.path",)


def test_hydra_with_a_trainer(tmp_path):
    composed = """
task_name: own run
trainer:
  _target_: lightning.pytorch.trainer.Trainer
  strategy: ddp_find_unused_parameters_false
  accelerator: gpu
  devices: [0, 1]
  max_epochs: 3
  precision: 16
  val_check_interval: 0.5
callbacks:
  model_checkpoint: {_target_: lightning.pytorch.callbacks.ModelCheckpoint, save_top_k: -1, monitor: val/acc, mode: max}
logger: {csv: {_target_: lightning.pytorch.loggers.csv_logs.CSVLogger}, comet: {_target_: x.CometLogger}}
model: {_target_: own.Module, optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.01}}
seed: 3
"""
    found = translated(tmp_path, composed)
    holds(found, name="own-run", parallel__strategy="ddp", hardware__devices=2, train__epochs=3, seed=3)
    holds(found, train__precision="16-mixed", log__to=["csv"], train__lr=0.01, train__optimizer__name="adamw")
    checkpoint = "callbacks.model_checkpoint"
    lost = {f"{checkpoint}.save_top_k", f"{checkpoint}.monitor", f"{checkpoint}.mode", "logger.comet"}
    lost |= {"trainer.val_check_interval", "model._target_"}
    assert keys_of(found, "not carried") == lost


def test_a_file_of_the_group_trainer_alone(tmp_path):
    found = translated(tmp_path, "_target_: lightning.pytorch.trainer.Trainer\nmax_epochs: 10\ndevices: 1\n")
    holds(found, train__epochs=10, hardware__devices=1, train__precision="32-true")


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("auto", {}),
        ("ddp_spawn", {"strategy": "ddp"}),
        ("fsdp_cpu_offload", {"strategy": "fsdp", "offload": "cpu"}),
        ("deepspeed_stage_1", {"strategy": "zero1"}),
        ("deepspeed_stage_2_offload", {"strategy": "zero2", "offload": "optimizer"}),
        ("deepspeed_stage_3_offload", {"strategy": "zero3", "offload": "cpu"}),
        ("{class_path: a.DeepSpeedStrategy, init_args: {stage: 3}}", {"strategy": "zero3"}),
        ("{_target_: a.ModelParallelStrategy, tensor_parallel_size: 2}", {"strategy": "fsdp", "tp": 2}),
        ("xla", {}),
    ],
)
def test_strategies(strategy, expected, tmp_path):
    found = translated(tmp_path, f"trainer: {{strategy: {strategy}, devices: 4, max_steps: 5}}\n")
    assert found.config.get("parallel", {}) == expected
    assert keys_of(found, "not carried") == ({"trainer.strategy"} if strategy == "xla" else set())
