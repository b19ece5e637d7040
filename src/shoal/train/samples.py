"""Texts that the model writes at evaluations, for `eval.prompts`: greedy, and without a cache, since they are short.

Every rank runs the same forward passes, as FSDP needs: the head is applied while its weights are gathered.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.data.formats.chat_template import tokenizer_template
from shoal.data.formats.choose import prompt_of
from shoal.data.loader import MicroBatch
from shoal.models.loss import HeadAndLoss
from shoal.observe.events import SAMPLE, EventLog
from shoal.observe.logs import current_events
from shoal.train.job import Job


def write_samples(job: Job) -> None:
    """Continue every prompt, and record the texts as events of this step."""
    prompts = job.config.eval.prompts
    if not prompts:
        return
    mesh = job.resolved.mesh  # strategy auto may have chosen one that the config does not name
    if not job.model.anatomy.linear_head or mesh.tp * mesh.pp * mesh.cp > 1:
        if job.progress.evaluated_at is None:  # once
            why = "model parallelism" if job.model.anatomy.linear_head else "a head that is more than one matrix"
            job.reporter.warn(f"eval.prompts has no effect with {why}; use shoal generate {job.run.path}.")
        return
    written = continue_prompts(job, [_tokens(job, prompt) for prompt in prompts], job.config.eval.tokens)
    if not job.ranks.first:
        return
    step, tokenizer = job.progress.step, job.inputs.tokenizer
    events = current_events() or EventLog(job.run.path, job.log.attempt)
    for prompt, ids in zip(prompts, written, strict=True):
        text = tokenizer.decode(ids, keep_special=False)
        events.write(SAMPLE, step=step, prompt=prompt, text=text)
        job.reporter.say(f"step {step}  sample: {prompt!r} → {text!r}")


def continue_prompts(job: Job, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """The most probable tokens after each prompt, up to the end token or `tokens` of them."""
    model, tokenizer = job.model, job.inputs.tokenizer
    head = next(one for module in model.modules for one in module.modules() if isinstance(one, HeadAndLoss))
    length = max(len(ids) for ids in prompts) + tokens
    length = model.sequence_length or -(-length // model.sequence_multiple) * model.sequence_multiple
    rows = [ids[: max(1, length - tokens)] for ids in prompts]
    begins = [len(row) for row in rows]
    ended = [False] * len(rows)
    for _ in range(min(tokens, length - max(begins))):
        job.hooks.on_activity(job.progress.step, "evaluating")
        found = _next_tokens(job, head, rows, length)
        for index, token in enumerate(found):
            ended[index] = ended[index] or token == tokenizer.end
            rows[index].append(tokenizer.end if ended[index] else token)
        if all(ended):
            break
    written = (row[begin:] for row, begin in zip(rows, begins, strict=True))
    return [ids[: ids.index(tokenizer.end)] if tokenizer.end in ids else ids for ids in written]


def _next_tokens(job: Job, head: HeadAndLoss, rows: Sequence[list[int]], length: int) -> list[int]:
    """The most probable token after each row, by one forward pass. Padding follows the tokens, which do not see it."""
    inputs = torch.full((len(rows), length), job.inputs.tokenizer.pad)
    for index, row in enumerate(rows):
        inputs[index, : len(row)] = torch.tensor(row)
    last = torch.tensor([len(row) - 1 for row in rows])
    found: list[Tensor] = []

    def look(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        hidden = given[0]
        ends = hidden[torch.arange(len(rows), device=hidden.device), last.to(hidden.device)]
        found.append(head.head(ends.to(head.head.weight.dtype)).float().argmax(-1))

    handle = head.register_forward_pre_hook(look)
    try:
        job.model.measure([MicroBatch(inputs, inputs.clone())])  # its loss is of no interest
    finally:
        handle.remove()
    return [int(token) for token in found[0].tolist()]


def _tokens(job: Job, prompt: str) -> list[int]:
    """The prompt in the format of the training data, as `shoal generate` has it."""
    tokenizer, text = job.inputs.tokenizer, prompt
    trained = job.inputs.sets.training.summary.format
    template = tokenizer_template(tokenizer) if trained == "chat" else None
    if template is not None:
        return list(tokenizer.encode(template.render([{"role": "user", "content": prompt}], prompt=True)[0]).tolist())
    written = prompt_of(trained)
    ids: list[int] = tokenizer.encode(text if written is None else written(text)).tolist()
    if tokenizer.prepends_begin and tokenizer.begin is not None:
        ids.insert(0, tokenizer.begin)
    return ids or [tokenizer.end]
