"""Preference tuning through the public door: under every strategy, resumed, evaluated, and learning its preference."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.mistakes import UserMistake
from shoal.objectives.references import Known, References
from tests.checkpoint.cut import cut, hold_bitwise
from tests.harness import lines, settings, slow, train_again_on, train_on

METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected",
)  # fmt: skip
STEPS, CUT = 3, 2


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chosen answers are of one colour, rejected ones of another; their lengths differ."""
    source = random.Random(3)
    words = ["tall", "small", "kind", "old", "new"]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    with path.open("w") as file:
        for _ in range(90):
            asked = " ".join(source.choices(words, k=source.randint(1, 3)))
            answers = {
                key: f" {word}" * source.randint(1, 3) for key, word in (("chosen", "red"), ("rejected", "blue"))
            }
            file.write(json.dumps({"prompt": f"{asked}:", **answers}) + "\n")
    return path


def config_of(pairs: Path, objective: str, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "data__max_length": 128, "data__pack": True, "data__validation": 0.2, "train__objective": objective,
        "train__steps": STEPS, "train__global_batch": 4, "train__micro_batch": 2, "eval__every": STEPS,
        "checkpoint__every": CUT, "checkpoint__keep": 9,
    }  # fmt: skip
    return settings(pairs, **{**given, **changes})


@pytest.fixture(scope="module")
def trained(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run of an objective in one process."""
    found: dict[str, Path] = {}

    def train(objective: str) -> Path:
        if objective not in found:
            found[objective] = train_again_on(1, config_of(pairs, objective), tmp_path_factory.mktemp(objective))
        return found[objective]

    return train


def evaluation(run: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(found) if "eval_loss" in line)


MESHES = {
    "ddp": (2, {"parallel__strategy": "ddp"}),
    "fsdp": (2, {"parallel__strategy": "fsdp"}),
    "tp": (2, {"parallel__tp": 2}),
    "pp": (2, {"parallel__pp": 2}),
    "cp": (2, {"parallel__cp": 2}),
    "ulysses": (2, {"parallel__cp": 2, "parallel__cp_method": "ulysses", "train__loss_impl": "chunked"}),
    "pp cp": (4, {"parallel__pp": 2, "parallel__cp": 2}),
    "chunked": (2, {"parallel__strategy": "fsdp", "train__loss_impl": "chunked"}),
    "tp chunked": (2, {"parallel__tp": 2, "train__loss_impl": "chunked"}),
    "recomputed": (2, {"parallel__strategy": "fsdp", "train__recompute": "full"}),
    "fsdp tp": (4, {"parallel__strategy": "fsdp", "parallel__tp": 2}),
    "fsdp pp": (4, {"parallel__strategy": "fsdp", "parallel__pp": 2}),
}
QUICK = {("dpo", "fsdp"), ("dpo", "cp")}


@pytest.mark.parametrize(
    ("objective", "mesh"),
    [
        (objective, mesh) if (objective, mesh) in QUICK else slow(objective, mesh)
        for objective in ("dpo", "simpo")
        for mesh in MESHES
    ],
)
def test_every_strategy_equals_one_process(
    objective: str, mesh: str, trained: Any, pairs: Path, tmp_path: Path
) -> None:
    world_size, changes = MESHES[mesh]
    expected = trained(objective)
    run = train_again_on(world_size, config_of(pairs, objective, **changes), tmp_path)
    one, many = lines(expected), lines(run)
    assert [line["loss_tokens"] for line in many] == [line["loss_tokens"] for line in one]
    assert [line["loss"] for line in many] == pytest.approx([line["loss"] for line in one], rel=5e-6)
    assert [line["grad_norm"] for line in many] == pytest.approx([line["grad_norm"] for line in one], rel=2e-5)
    for key in METRICS:
        wanted = [line[key] for line in one]
        assert [line[key] for line in many] == pytest.approx(wanted, rel=1e-4, abs=1e-5), key
        assert evaluation(run)[f"eval_{key}"] == pytest.approx(evaluation(expected)[f"eval_{key}"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("precision", [slow("bf16-mixed"), slow("16-mixed"), slow("bf16-true")])
@pytest.mark.parametrize(("mesh", "loss_impl"), [("ddp", "plain"), ("fsdp", "chunked")])
def test_in_low_precision_a_run_is_nearly_the_same(
    precision: str, mesh: str, loss_impl: str, trained: Any, pairs: Path, tmp_path: Path
) -> None:
    world_size, changes = MESHES[mesh]
    config = config_of(pairs, "dpo", train__precision=precision, train__loss_impl=loss_impl, **changes)
    found, wanted = lines(train_again_on(world_size, config, tmp_path)), lines(trained("dpo"))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=2e-2)
    assert [line["grad_norm"] for line in found] == pytest.approx([line["grad_norm"] for line in wanted], rel=5e-2)


@pytest.mark.slow
def test_a_schedule_with_two_backward_passes_equals_one_process(pairs: Path, tmp_path: Path) -> None:
    runs = []
    for name, world_size, parallel in (("one", 1, {}), ("two", 2, {"pp": 2, "pp_schedule": "zero-bubble"})):
        config = config_of(pairs, "dpo", train__loss_impl="chunked", parallel=parallel)
        config["model"]["shape"] = {**config["model"]["shape"], "layers": 4}
        runs.append(lines(train_again_on(world_size, config, tmp_path / name)))
    for key, bound in (("loss", 5e-6), ("grad_norm", 2e-5)):
        assert [line[key] for line in runs[1]] == pytest.approx([line[key] for line in runs[0]], rel=bound)


LORA = {"adapter": {"kind": "lora", "rank": 4, "targets": "all-linear"}, "train__lr": 0.02}


@pytest.fixture(scope="module")
def adapted(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_again_on(1, config_of(pairs, "dpo", **LORA), tmp_path_factory.mktemp("adapted"))


@pytest.mark.parametrize(
    "mesh", ["fsdp", slow("pp"), slow("ddp"), slow("tp"), slow("cp"), slow("chunked"), slow("recomputed")]
)
def test_the_base_of_an_adapter_is_the_reference(mesh: str, adapted: Path, pairs: Path, tmp_path: Path) -> None:
    """Each step switches the adapter off. A pipeline computes the same before the first step."""
    world_size, changes = MESHES[mesh]
    run = train_again_on(world_size, config_of(pairs, "dpo", **LORA, **changes), tmp_path)
    assert (run / "reference.safetensors").exists() == (mesh == "pp")
    assert not (adapted / "reference.safetensors").exists()
    one, many = lines(adapted), lines(run)
    assert one[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert one[-1]["rewards/margins"] > 0.01
    for key in ("loss", *METRICS):
        wanted = [line[key] for line in one]
        assert [line[key] for line in many] == pytest.approx(wanted, rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize("objective", ["dpo", slow("ipo"), slow("orpo")])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    objective: str, trained: Any, pairs: Path, tmp_path: Path
) -> None:
    copy = cut(trained(objective), CUT, tmp_path)
    train_on(1, config_of(pairs, objective), tmp_path, resume=True)
    hold_bitwise(copy, trained(objective))
    assert evaluation(copy)["eval_loss"] == evaluation(trained(objective))["eval_loss"]


def test_the_reference_is_that_of_the_start_on_another_number_of_ranks(
    trained: Any, pairs: Path, tmp_path: Path
) -> None:
    copy = cut(trained("dpo"), CUT, tmp_path)
    before = (copy / "reference.safetensors").read_bytes()
    train_on(2, config_of(pairs, "dpo", parallel__strategy="fsdp"), tmp_path, resume=True)
    assert (copy / "reference.safetensors").read_bytes() == before
    found, wanted = lines(copy), lines(trained("dpo"))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=5e-6)


@pytest.mark.slow
def test_a_run_without_its_reference_is_not_resumed(trained: Any, pairs: Path, tmp_path: Path) -> None:
    (cut(trained("dpo"), CUT, tmp_path) / "reference.safetensors").unlink()
    with pytest.raises(UserMistake, match=r"reference.safetensors is missing: .* or start another run"):
        train_on(1, config_of(pairs, "dpo"), tmp_path, resume=True)


@pytest.mark.slow
def test_a_run_is_not_made_longer_than_its_reference(trained: Any, pairs: Path, tmp_path: Path) -> None:
    cut(trained("dpo"), CUT, tmp_path)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    known = References.read(tmp_path / "run").known
    ((content, part),) = known.items()
    References({content: Known(part.sequence_ids[:9], part.counts[:9], part.values[: part.counts[:9].sum()])}).write(
        tmp_path / "run"
    )
    with pytest.raises(UserMistake, match=r"There are no reference log-probabilities of \d+ of .* lower train.steps"):
        train_on(1, config_of(pairs, "dpo"), tmp_path, resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_missing_or_damaged_reference_is_refused(trained: Any, tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match=r"reference.safetensors is missing: .* or start another run"):
        References.read(tmp_path)
    content = bytearray((trained("dpo") / "reference.safetensors").read_bytes())
    content[-3] ^= 1
    (tmp_path / "reference.safetensors").write_bytes(content)
    with pytest.raises(UserMistake, match=r"reference.safetensors is damaged: .* or start another run"):
        References.read(tmp_path)
    (tmp_path / "reference.safetensors").write_bytes(content[:50])
    with pytest.raises(UserMistake, match=r"reference.safetensors is damaged"):
        References.read(tmp_path)


@pytest.mark.slow
def test_packed_pairs_are_trained_as_single_ones(trained: Any, pairs: Path, tmp_path: Path) -> None:
    """All pairs in one step: the order and the padding differ."""
    common = {"train__steps": 1, "data__validation": 0, "checkpoint__at_end": False}
    found = {}
    for pack in (True, False):
        config = config_of(pairs, "dpo", data__pack=pack, **common)
        for key in ("global_batch", "micro_batch"):
            config["train"][key] = 90 if not pack else sequences_of(pairs)
        (found[pack],) = lines(train_again_on(1, config, tmp_path / str(pack)))
    assert found[True]["loss_tokens"] == found[False]["loss_tokens"] == 90
    for key in ("loss", "grad_norm", "logps/chosen", "logps/rejected"):
        assert found[True][key] == pytest.approx(found[False][key], rel=2e-5), key


def sequences_of(pairs: Path) -> int:
    found = api.data_stats(None, [f"data.path={pairs}", "data.max_length=128", "train.objective=dpo"])
    return found.sequences


def test_the_first_loss_is_that_of_equal_models(trained: Any) -> None:
    """Policy and reference are the same before the first step: rewards are zero, and the loss is log 2."""
    first = lines(trained("dpo"))[0]
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert abs(first["rewards/chosen"]) + abs(first["rewards/rejected"]) < 1e-4


@pytest.mark.parametrize("objective", ["dpo", slow("ipo"), slow("orpo"), slow("simpo")])
def test_the_model_learns_to_prefer_chosen_answers(objective: str, pairs: Path, tmp_path: Path) -> None:
    config = config_of(pairs, objective, train__steps=16, train__lr=0.01, eval__every=16, checkpoint__every=16)
    run = train_again_on(1, config, tmp_path)
    assert sum(line["rewards/accuracies"] for line in lines(run)[:3]) / 3 < 0.75
    assert evaluation(run)["eval_rewards/accuracies"] > 0.9
    assert evaluation(run)["eval_rewards/margins"] > 0


def test_a_run_is_evaluated_against_its_own_reference(trained: Any, pairs: Path) -> None:
    run = trained("dpo")
    found = api.evaluate(run).as_dict()
    wanted = evaluation(run)
    for key in ("eval_loss", *(f"eval_{one}" for one in METRICS)):
        assert found[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), key
    with pytest.raises(UserMistake, match=r"There are no reference log-probabilities of this data"):
        api.evaluate(run, [f"data.path={pairs}", "data.max_length=200"])
