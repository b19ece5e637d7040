"""The reference log-probabilities of preference tuning, where an adapter cannot be switched off: computed before the
first step by the model that is about to be trained, and read back when the run is resumed."""

import numpy as np
import torch

from shoal.data.loader import IGNORED, evaluation_share
from shoal.data.sequences import Sequences
from shoal.objectives.preference import PairModel, Preference
from shoal.objectives.references import Known, References
from shoal.train.job import Job
from shoal.train.save import checkpoint_folders

# Steps more than the run has, at least and as a share: after a rollback others take the place of bad ones.
SPARE_STEPS, SPARE_SHARE = 4, 0.05


def provide_references(job: Job) -> None:
    """Give the objective its reference log-probabilities, if it needs any."""
    objective = job.objective
    if not isinstance(objective, Preference) or not objective.precomputes:
        return
    if job.saved is not None and job.saved.parent in checkpoint_folders(job.config, job.run):
        objective.references = References.read(job.run.path)
        for sequences, sequence_ids in wanted_sequences(job, spare=0):
            objective.references.require(sequences, sequence_ids)
        return
    sets = wanted_sequences(job, spare=max(SPARE_STEPS, int(job.inputs.steps * SPARE_SHARE)))
    total = sum(len(sequence_ids) for _, sequence_ids in sets)
    job.reporter.say(f"Computing the reference log-probabilities of {total:,} sequences.")
    found = References({sequences.summary.content: compute(job, objective, sequences, ids) for sequences, ids in sets})
    if job.ranks.first:
        try:
            found.write(job.run.path)
        except OSError as error:
            raise job.run.unwritable(error) from None
    objective.references = found
    job.log.restart_clock()


def wanted_sequences(job: Job, *, spare: int) -> list[tuple[Sequences, np.ndarray]]:
    """The sequences that the run trains on, and in `spare` steps more, and those that are held out."""
    sets, steps = job.inputs.sets, job.inputs.steps + spare
    trained = sets.order.training_sequences(0, steps * job.resolved.global_batch, job.progress.left_out)
    held_out = sets.order.validation_sequences()
    if sets.validation is None:
        return [(sets.training, np.unique(trained))]
    if sets.validation is sets.training:
        return [(sets.training, np.union1d(trained, held_out))]
    return [(sets.training, np.unique(trained)), (sets.validation, np.unique(held_out))]


def compute(job: Job, objective: Preference, sequences: Sequences, sequence_ids: np.ndarray) -> Known:
    """The log-probabilities of these sequences, each computed by one data-parallel rank."""
    counts = objective.count(sequences, sequence_ids)
    begins = np.cumsum(counts) - counts
    values = torch.zeros(int(counts.sum()), 2, dtype=torch.float64)
    scores: list[torch.Tensor] = []
    models = [one for module in job.model.modules for one in module.modules() if isinstance(one, PairModel)]
    for one in models:
        one.scores = scores
    dims, at_once = job.model.parallel_dims, job.resolved.grad_accum_steps
    shares = evaluation_share(
        len(sequence_ids), micro_batch=job.resolved.micro_batch, rank=dims.data_rank, ranks=job.resolved.data_parallel
    )
    for first in range(0, len(shares), at_once):
        indices = shares[first : first + at_once]
        job.hooks.on_activity(job.progress.step, "computing the reference")
        batches = []
        for some in indices:
            real = some < len(sequence_ids)
            batch = objective.collate(
                sequences,
                sequence_ids[np.where(real, some, 0)],
                pad=job.inputs.tokenizer.pad,
                length=job.model.sequence_length,
                multiple=job.model.sequence_multiple,
            )
            batch.labels[torch.from_numpy(~real)] = IGNORED
            batches.append(batch)
        job.model.measure(batches)
        if scores and dims.reports_loss and dims.coordinate["cp"] == 0:  # in a pipeline, the last stage has them
            for some, found in zip(indices, scores, strict=False):
                for index, logps in zip(some.tolist(), found.cpu(), strict=True):
                    if index < len(sequence_ids):
                        begin, count = int(begins[index]), int(counts[index])
                        values[begin : begin + count] = logps[:count]
        scores.clear()
    for one in models:
        one.scores = None
    everything = job.ranks.sum(values.to(job.ranks.device)).cpu().numpy()
    return Known(sequence_ids.astype(np.int64), counts.astype(np.int64), everything)
