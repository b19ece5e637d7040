"""Hugging Face's Trainer as its documentation shows it: bf16, fused AdamW, sdpa; with Liger, peft, bitsandbytes."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from peers.clock import Clock
from peers.models import add_adapter, build, quantize
from peers.rows import read_batch
from peers.task import BETAS, CLIP, EPSILON, RATE, SEED, WEIGHT_DECAY, Task


class RowSet(Dataset):
    """Rows in their order. `shift_labels` is transformers' own name for labels that are shifted already."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        inputs, labels = read_batch(self.rows, row, 1)
        return {"input_ids": inputs[0], "labels": labels[0], "shift_labels": labels[0]}


class MeasuredTrainer(Trainer):
    """The Trainer, with the loss of each step kept on the device."""

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
    """Options: `liger`, `adapter` (lora, qlora), `optimizer` (its name for the Trainer), `recompute`, `dtype`."""
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
            per_device_train_batch_size=task.rows,
            train_sampling_strategy="sequential",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPSILON,
            max_grad_norm=CLIP,
            optim=options.get("optimizer", "adamw_torch_fused"),
            bf16=True,
            use_liger_kernel=bool(options.get("liger")),
            # Triton's interpreter, which stands in for a GPU in `--tiny`, cannot run these two.
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
        train_dataset=RowSet(np.load(task.rows_file)),
        callbacks=[callback],
    )
    callback.trainer = trainer
    clock.begin()
    trainer.train()
