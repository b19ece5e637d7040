"""What the configs of public repositories have that the systems' documentation does not show first."""

import json

import pytest

from shoal import api
from shoal.mistakes import UserMistake
from tests.convert.configs.translated import holds, keys_of, translated


def test_datasets_of_trl_are_concatenated(tmp_path):
    two = """
model_name_or_path: m/x
output_dir: out/x
dataset_mixture:
  datasets:
    - {id: own/chats, config: all, split: train, columns: [messages], weight: 0.5}
    - {path: own/tasks, name: hard, data_dir: x}
  test_split_size: 0.01
  seed: 0
chat_template: "{% for message in messages %}{{ message }}{% endfor %}"
eos_token: <|im_end|>
"""
    found = translated(tmp_path, two)
    first, second = {"path": "own/chats", "subset": "all", "split": "train"}, {"path": "own/tasks", "subset": "hard"}
    assert found.config["data"]["source"] == [first, second]
    holds(found, data__mixing__when_exhausted="end", data__validation=0.01)
    mixture = "dataset_mixture.datasets"
    assert keys_of(found, "not carried") == {f"{mixture}.weight", f"{mixture}.data_dir", "chat_template", "eos_token"}


def test_what_is_too_long_is_cut_or_split_as_trl_does(tmp_path):
    trl = "trl sft --model_name_or_path m/x --dataset_name a/b --output_dir out/x"
    holds(translated(tmp_path, command=trl), data__long_documents="truncate", data__pack=False)
    wrapped = f"{trl} --packing --packing_strategy wrapped"
    holds(translated(tmp_path, command=wrapped), data__long_documents="split", data__pack=True)
    one = '{"path": "own/tasks", "split": "all"}'
    found = translated(tmp_path, "#!/bin/sh\n" + f"{trl} --datasets '[{one}]'\n")
    holds(found, data__path="own/tasks", data__split="all")


def test_the_old_mixer_of_alignment_handbook(tmp_path):
    old = (
        "model_name_or_path: m/x\noutput_dir: out/x\ndataset_mixer: {own/pairs: 1.0}\n"
        "dataset_splits: [train_prefs, test_prefs]\n"
    )
    holds(translated(tmp_path, old), data__path="own/pairs", data__split="train_prefs")


def test_deepspeed_is_a_switch_and_its_json_another_flag(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": 64}))
    script = (
        "#!/bin/bash\nrm -rf out\nmkdir -p out\n"
        "deepspeed --num_accelerators 8 train.py --deepspeed --deepspeed_config ds.json --lr 1e-4 &> out/log.txt\n"
    )
    found = translated(tmp_path, script)
    holds(found, parallel__strategy="zero2", train__global_batch=64, hardware__devices=8, train__lr=1e-4)
    assert keys_of(found, "not carried") == set()
    # Commands beside it are said, and nothing is made of them.
    assert "commands" in keys_of(found, "no meaning")


def test_a_redirection_is_no_argument(tmp_path):
    script = (
        "#!/bin/bash\ntorchrun --nproc_per_node 2 run.py --model_name_or_path m/x --learning_rate 1e-4 "
        "--output_dir out/x &> out/x/log.txt\n"
    )
    holds(translated(tmp_path, script), run_dir="out", name="x")


def test_new_keys_of_deepspeed(tmp_path):
    given = {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "leaf_module": {"names": []}},
        "compile": {"deepcompile": True, "double_buffer": False},
        "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.001, "ns_method": "gram"}},
        "gradient_allreduce_op": "sum",
        "comet": {"enabled": True, "project": "own"},
        "seq_parallel_communication_data_type": "bf16",
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": 0.1}},
    }
    found = translated(tmp_path, given)
    holds(found, train__precision="bf16-true", parallel__offload="cpu", train__compile=True)
    holds(found, train__optimizer__name="muon", train__lr=0.02)
    assert "schedule" not in found.config["train"]  # the warmup is of other schedules than OneCycle
    lost = {"optimizer.params.adam_lr", "gradient_allreduce_op", "comet.enabled", "scheduler.type"}
    cycle = {"scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr"}
    assert keys_of(found, "not carried") == lost | cycle


def test_autocast_and_tensor_parallelism_of_deepspeed(tmp_path):
    given = {"zero_optimization": {"stage": 1}, "torch_autocast": {"enabled": True, "dtype": "float16"}}
    given["tensor_parallel"] = {"tp": {"tp_size": 2}}
    holds(translated(tmp_path, given), train__precision="16-mixed", parallel__tp=2)


def test_axolotl_loggers_tokens_and_what_is_too_long(tmp_path):
    given = """
base_model: m/x
datasets: [{path: a.jsonl, type: alpaca}]
sequence_len: 64
learning_rate: 1e-4
use_wandb: true
wandb_project: own
use_mlflow: true
use_tensorboard: false
use_swanlab: true
swanlab_project: own
special_tokens: {pad_token: <pad>}
excess_length_strategy: truncate
activation_offloading: legacy
lisa_n_layers: 2
"""
    found = translated(tmp_path, given)
    holds(found, log__to=["wandb", "mlflow"], data__long_documents="truncate", train__recompute="offload")
    assert keys_of(found, "not carried") == {"use_swanlab", "swanlab_project", "lisa_n_layers"}
    texts = given.replace("type: alpaca", "type: completion").replace("excess_length_strategy: truncate\n", "")
    assert "long_documents" not in translated(tmp_path, texts).config["data"]  # texts are split there too


def test_a_script_of_other_commands_is_refused_with_a_sentence(tmp_path):
    file = tmp_path / "a.sh"
    file.write_text("#!/bin/bash\npython -c 'import torch'\nsudo ls\n")
    with pytest.raises(UserMistake, match="which is not a command that shoal translates"):
        api.import_config([file])


def test_options_of_accelerate_launch(tmp_path):
    command = (
        "accelerate launch --use_fsdp --num_processes 8 --fsdp_activation_checkpointing_offload true "
        "--use_parallelism_config --parallelism_config_tp_size 2 --dynamo_mode default train.py --learning_rate 1e-4"
    )
    found = translated(tmp_path, command=command)
    holds(found, parallel__strategy="fsdp", parallel__tp=2, train__recompute="offload", hardware__devices=8)
    assert keys_of(found, "not carried") == set()
