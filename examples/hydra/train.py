"""Hydra composes the config, shoal trains it, and submitit runs it: here, in a process, or on a Slurm cluster.

python train.py                                                              # one run, in this process
python train.py -m trainer.lr=1e-4,3e-4                                      # two runs, one after another
python train.py -m trainer.lr=1e-4,3e-4 hydra/launcher=submitit_local        # two processes
python train.py -m trainer.lr=1e-4,3e-4 hydra/launcher=submitit_slurm        # two jobs of an array
"""

import hydra
from omegaconf import DictConfig

from shoal.launch import submitit_task


@hydra.main(config_path="conf", config_name="config")
def main(config: DictConfig) -> float | None:
    # Called, not submitted: Hydra's launcher submits this function, and requeues it when the job is preempted. The
    # same call then resumes the run.
    summary = submitit_task(config.run)()
    return summary["eval_loss"]  # what Hydra's own sweepers minimize


if __name__ == "__main__":
    main()
