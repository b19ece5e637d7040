"""What `sweep.py` measures: the forecast of many runs compared with measurements on one GPU.

`rows` lists the runs, `worker` measures several of them in one process, `forecast` computes the forecast of a recorded
run without a GPU, and `report` compares both. Only `worker` imports torch.
"""
