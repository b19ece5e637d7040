"""The forecast of `parallel.engine: deepspeed` is that of DeepSpeed, with the strategies that it has."""

from shoal.config.load import load_config
from shoal.plan.report import make_plan

RUN = [
    "model.shape=llama3-8b",
    "parallel.strategy=zero3",
    "hardware={gpu: a100-80gb, devices: 8}",
    "train.micro_batch=1",
    "train.compile=false",
]


def test_the_engine_is_forecast_as_like_deepspeed_and_compared_with_what_it_has() -> None:
    plan = make_plan(load_config(None, [*RUN, "parallel.engine=deepspeed"])).as_dict()
    like = make_plan(load_config(None, RUN), system="deepspeed").as_dict()
    assert (plan["memory"], plan["speed"]) == (like["memory"], like["speed"])
    assert {one["strategy"] for one in plan["alternatives"]} <= {"ddp", "zero1", "zero2", "zero3", "fsdp"}
    assert all(one["mesh"]["tp"] * one["mesh"]["pp"] == 1 for one in plan["alternatives"] if "mesh" in one)
    assert not any("not for shoal" in note for note in plan["notes"])


def test_blocks_are_not_compiled_under_the_engine_and_auto_stays_data_parallel() -> None:
    compiled = [one for one in RUN if "compile" not in one]
    plan = make_plan(load_config(None, [*compiled, "parallel.engine=deepspeed"])).as_dict()
    assert plan["speed"] == make_plan(load_config(None, [*RUN, "parallel.engine=deepspeed"])).as_dict()["speed"]
    large = ["model.shape=llama3-70b", "parallel.engine=deepspeed", "hardware={gpu: a100-40gb, devices: 8}"]
    assert make_plan(load_config(None, large)).choice.mesh.tp == 1
