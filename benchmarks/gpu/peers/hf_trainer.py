"""Hugging Face's Trainer as documented: bf16, fused AdamW, sdpa; optionally with Liger, peft and bitsandbytes."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from peers.clock import Clock
from peers.models import add_adapter, build, quantize
from peers.sequences import read_batch
from peers.task import BETAS, CLIP, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY, Task


class SequenceDataset(Dataset):
    """Sequences in order. `shift_labels` is transformers' name for labels that are already shifted."""

    def __init__(self, sequences: np.ndarray) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, labels = read_batch(self.sequences, index, 1)
        return {"input_ids": inputs[0], "labels": labels[0], "shift_labels": labels[0]}


class MeasuredTrainer(Trainer):
    """The Trainer, which also keeps the loss of the last step on the device."""

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        self.last_loss = super().training_step(*arguments, **named)
        return self.last_loss


class StepEnd(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.trainer: MeasuredTrainer | None = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        self.clock.step_done(self.trainer.last_loss)


def run(task: Task, clock: Clock) -> None:
    """Options: `liger`, `adapter` (lora, qlora), `optimizer` (the Trainer's name for it), `recompute`, `dtype`."""
    options = task.options
    model = build(task, getattr(torch, options.get("dtype", "float32")))
    if options.get("adapter") == "qlora":
        quantize(model)
    if options.get("adapter"):
        model = add_adapter(model)
    callback = StepEnd(clock)
    trainer = MeasuredTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=task.folder,
            max_steps=task.steps,
            per_device_train_batch_size=task.micro_batch,
            train_sampling_strategy="sequential",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPSILON,
            max_grad_norm=CLIP,
            optim=options.get("optimizer", "adamw_torch_fused"),
            bf16=True,
            use_liger_kernel=bool(options.get("liger")),
            # Triton's interpreter, which replaces the GPU in `--tiny`, cannot run these.
            liger_kernel_config=None if clock.cuda else {"rms_norm": False, "swiglu": False, "rope": False},
            gradient_checkpointing=bool(options.get("recompute")),
            seed=SEED,
            use_cpu=not clock.cuda,
            remove_unused_columns=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=SequenceDataset(np.load(task.sequences_file)),
        callbacks=[callback],
    )
    callback.trainer = trainer
    clock.begin()
    trainer.train()
