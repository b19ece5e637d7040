"""Training loops of one's own (`shoal.init`) on this GPU: `python benchmarks/gpu/own_loops.py OUTPUT_FOLDER`.

The examples of `examples/loops` and two loops of this file, which use the rest of the API (a frozen part, a schedule,
weights, accumulation, workers with pinned memory, evaluation, resume), are trained by shoal and by a plain loop of
torch alone: autocast, GradScaler, clipping and AdamW on the same samples. Their losses are compared. Two processes
share the GPU where there is one; each claims to be on a different node, because NCCL does not allow it otherwise.

The overhead of `run.steps` is measured on a step of about 20 ms, and on one of a small model, where all that the host
does shows. Writes own_loops.json after every case. `--tiny`: small sizes, also on a CPU, to see that every case runs.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "src"))

STEPS, SEED = 12, 7
# Number of cases that run concurrently, and the time limit of a case in seconds.
AT_ONCE, PATIENCE = 4, 240
EXAMPLES = ("mlp", "vit", "diffusion", "after")
OWN = ("sequences", "weighted")
# By name: processes, and overrides of the run. One process is `single`, whatever the strategy.
PLACES: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "one process, strategy ddp": (1, ["parallel.strategy=ddp"]),
    "one process, strategy fsdp": (1, ["parallel.strategy=fsdp"]),
    "one process, fsdp with everything on the host": (1, ["parallel.offload=cpu"]),
    "ddp": (2, ["parallel.strategy=ddp"]),
    "zero1": (2, ["parallel.strategy=zero1"]),
    "fsdp": (2, ["parallel.strategy=fsdp"]),
}
ONE, SEVERAL = "one process", ("ddp", "fsdp")
# The largest relative difference of a loss from the plain loop's. In 16 bits a difference of rounding grows by step.
BOUNDS = {"32-true": 1e-4, "bf16-mixed": 0.03, "16-mixed": 0.03}
OVERHEAD_LIMIT = 0.02  # of a step of about 20 ms


def cases() -> Iterator[tuple[str, str, str, list[str]]]:
    """Loop, precision, place and further overrides."""
    for place in PLACES:
        yield "sequences", "bf16-mixed", place, []
    for name in (*EXAMPLES, "weighted"):
        for place in (ONE, *SEVERAL):
            yield name, "bf16-mixed", place, []
    for precision in ("32-true", "16-mixed"):
        for name in ("vit", "sequences"):
            for place in (ONE, *SEVERAL):
                yield name, precision, place, []
    for override in ("train.compile=true", "train.recompute=full", "train.micro_batch=2"):
        for place in (ONE, "fsdp"):
            yield "sequences", "bf16-mixed", place, [override]


class PlainRun:
    """What `shoal.init` returns, as a loop of torch alone on one device: the whole global batch in one forward pass."""

    rank, world_size, first = 0, 1, True
    losses: ClassVar[list[float]] = []

    def __init__(self, *, precision: str, steps: int, clip: float, seed: int, folder: Path) -> None:
        import torch

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.low = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "16-mixed")
        self.total_steps, self.clip, self.seed, self.folder = steps, clip, seed, folder
        torch.manual_seed(seed)

    def prepare(self, model: Any, optimizer: Any, loader: Any, schedule: Any = None) -> tuple[Any, ...]:
        import torch

        from shoal.data.custom_loader import CustomLoader, Share, order_of
        from shoal.parallel.custom import _cast

        self.model, self.optimizer = model.to(self.device), optimizer
        if self.low is not None:
            forward, low = model.forward, self.low

            def autocast(*inputs: Any, **named: Any) -> Any:
                with torch.autocast(self.device.type, low):
                    found = forward(*inputs, **named)
                return _cast(found, torch.float32)

            model.forward = autocast
        # The samples are shoal's: which ones a step has is not what is compared.
        batch = loader.batch_size
        self.loader = CustomLoader(loader, Share(order_of(loader, self.seed), batch, batch, 0, 1, self.seed))
        return (model, optimizer, self.loader) if schedule is None else (model, optimizer, self.loader, schedule)

    def steps(self, loader: Any) -> Iterator[Any]:
        from shoal.train.custom_evaluation import to_device

        for batch in loader.micro_batches(0, self.total_steps):
            yield to_device(batch, self.device)

    def backward(self, loss: Any, weight: Any = None) -> None:
        self.scaler.scale(loss).backward()
        PlainRun.losses.append(float(loss))

    def step(self, optimizer: Any, schedule: Any = None) -> bool:
        import torch

        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        return True

    def evaluate(self, compute: Callable[[Any], Any], loader: Any) -> float:
        import torch

        from shoal.train.custom_evaluation import to_device

        total, count = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for batch in loader:
                total += float(compute(to_device(batch, self.device))) * len(batch[0])
                count += len(batch[0])
        self.model.train()
        return total / count

    def log_evaluation(self, loss: float, **others: float) -> None:
        pass

    def save_weights(self, path: Path) -> None:
        pass


def sequences(overrides: list[str], evaluated: list[float]) -> None:
    """A transformer with a frozen embedding, a schedule, workers with pinned memory, and a held-out set."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import shoal

    run = shoal.init(name="sequences", overrides=overrides)
    model = Sequences() if torch.cuda.is_available() else Sequences(32, 2, 64)
    model.embedding.requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=4)
    tokens = torch.randint(0, 64, (160, 33), generator=torch.Generator().manual_seed(1))
    tokens[:, 1::2] = (tokens[:, ::2][:, :16] * 7 + 3) % 64  # every second token follows from the one before
    pinned = torch.cuda.is_available()
    loader = DataLoader(TensorDataset(tokens[:128]), batch_size=16, shuffle=True, num_workers=1, pin_memory=pinned)
    held_out = DataLoader(TensorDataset(tokens[128:]), batch_size=10)

    def loss_of(batch: Any) -> Any:
        logits = model(batch[0][:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    model, optimizer, loader, schedule = run.prepare(model, optimizer, loader, schedule)
    for batch in run.steps(loader):
        run.backward(loss_of(batch))
        run.step(optimizer, schedule)
    evaluated.append(run.evaluate(loss_of, held_out))
    run.save_weights(run.folder / "weights.safetensors")


def weighted(overrides: list[str], evaluated: list[float]) -> None:
    """A loss that is a mean over what counts in a batch, given with its weight."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import shoal

    run = shoal.init(name="weighted", resume="auto", overrides=overrides)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    points = torch.rand(256, 8, generator=torch.Generator().manual_seed(2))
    counts = (points[:, :1] > 0.4).float()
    data = TensorDataset(points, points.square().sum(1, keepdim=True), counts)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=32, shuffle=True))
    for inputs, targets, counted in run.steps(loader):
        number = counted.sum()
        run.backward((counted * (model(inputs) - targets).square()).sum() / number, weight=number)
        run.step(optimizer)


def Sequences(width: int = 256, layers: int = 4, feed_forward: int = 1024) -> Any:
    """A small causal transformer; a function, so that this file starts without torch."""
    import torch
    from torch import nn

    class Block(nn.TransformerEncoderLayer):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
            self.blocks = nn.ModuleList(
                Block(width, 4, feed_forward, dropout=0.0, batch_first=True, norm_first=True) for _ in range(layers)
            )

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(tokens)
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
            for block in self.blocks:
                hidden = block(hidden, src_mask=mask)
            return self.head(hidden)

    return Model()


def train(spec: dict[str, Any]) -> None:
    """One process of a case: writes result.json in its folder if it is the first."""
    import shoal

    folder, name = Path(spec["folder"]), spec["loop"]
    if spec["plain"]:
        steps, precision = spec["steps"], spec["precision"]
        shoal.init = lambda **_: PlainRun(precision=precision, steps=steps, clip=1.0, seed=SEED, folder=folder)
    evaluated: list[float] = []
    if name in OWN:
        globals()[name](spec["overrides"], evaluated)
    else:
        place = importlib.util.spec_from_file_location(name, REPOSITORY / "examples" / "loops" / f"{name}.py")
        assert place is not None
        assert place.loader is not None
        module = importlib.util.module_from_spec(place)
        sys.modules[name] = module
        place.loader.exec_module(module)
        module.main(spec["overrides"])
    if int(os.environ.get("RANK", "0")) == 0:
        losses = PlainRun.losses if spec["plain"] else losses_of(Path(spec["runs"]) / name)
        (folder / "result.json").write_text(json.dumps({"losses": losses, "evaluated": evaluated}))


def losses_of(run: Path) -> list[float]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in found if "loss" in line]


def measure_overhead(spec: dict[str, Any]) -> None:
    """Wall time per step of run.steps and of the plain loop, in turns; the device is waited for at the end of each."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import shoal

    cuda, large = torch.cuda.is_available(), spec["loop"] == "large"
    width, steps, rounds = (1024 if cuda else 64) if large else 64, spec["steps"], spec["rounds"]

    def parts() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        layers = 24 if large and cuda else 3
        model = nn.Sequential(
            *(
                one
                for _ in range(layers)
                for one in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            )
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
        data = TensorDataset(torch.randn(512, 128 if large and cuda else 4, width))
        return model, optimizer, DataLoader(data, batch_size=64, shuffle=True, pin_memory=cuda)

    def loop(run: Any) -> float:
        times = []
        model, optimizer, loader = run.prepare(*parts())
        for number, (inputs,) in enumerate(run.steps(loader)):
            if number in (steps // 4, steps - 1):
                if cuda:
                    torch.cuda.synchronize()
                times.append(time.perf_counter())
            run.backward(model(inputs).square().mean())
            run.step(optimizer)
        return 1e3 * (times[1] - times[0]) / (steps - 1 - steps // 4)

    class Plain(PlainRun):
        done = 0

        def backward(self, loss: Any, weight: Any = None) -> None:
            loss.backward()
            self.done += 1
            if self.done % 10 == 0:
                float(loss)  # as progress lines do

        def step(self, optimizer: Any, schedule: Any = None) -> bool:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()
            return True

    found: dict[str, list[float]] = {"plain": [], "run.steps": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            plain = Plain(precision="bf16-mixed", steps=steps, clip=1.0, seed=SEED, folder=Path(folder))
            found["plain"].append(loop(plain))
            config = {"log": {"every": 10, "to": []}, "checkpoint": {"every": 10**9, "at_end": False}}
            options: dict[str, Any] = {"steps": steps, "precision": "bf16-mixed", "compile": False}
            with shoal.init(run_dir=folder, train=options, **config) as run:
                found["run.steps"].append(loop(run))
    Path(spec["folder"], "result.json").write_text(json.dumps(found))


def start(spec: dict[str, Any], processes: int) -> dict[str, Any]:
    """Run a case in processes of its own; its result, or why there is none."""
    folder = Path(spec["folder"])
    folder.mkdir(parents=True)
    (folder / "case.json").write_text(json.dumps(spec))
    workers, logs = [], [folder / f"rank-{rank}.log" for rank in range(processes)]
    for rank, log in enumerate(logs):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if processes > 1:
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": "0", "SHOAL_LAUNCH": str(folder)}
            # With different host ids, NCCL treats the processes as different nodes and does not check for a shared GPU.
            environment |= {**ranks, "NCCL_HOSTID": f"machine-{rank}"}
        command = [sys.executable, __file__, "--work", str(folder / "case.json")]
        with log.open("w") as output:
            workers.append(
                subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
            )
    deadline, late = time.monotonic() + PATIENCE, False
    for worker in workers:
        try:
            worker.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
    if late or any(worker.returncode for worker in workers):
        written = [one for one in (*logs, *folder.glob("runs/*/logs/*")) if one.stat().st_size]
        why = f"more than {PATIENCE} seconds" if late else "a process failed"
        return {"failed": why, "log": [one.read_text(errors="replace")[-1500:] for one in written]}
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def spec_of(
    folder: Path,
    loop: str,
    precision: str,
    overrides: list[str],
    *,
    plain: bool = False,
    steps: int,
    runs: Path | None = None,
) -> dict[str, Any]:
    runs = runs or folder / "runs"
    common = ["log.every=1", "log.to=[]", f"run_dir={runs}", "checkpoint.at_end=false", f"seed={SEED}"]
    length = ["train.epochs=null", f"train.steps={steps}", f"train.precision={precision}"]
    compiled = [] if any(one.startswith("train.compile") for one in overrides) else ["train.compile=false"]
    return {
        "loop": loop,
        "precision": precision,
        "plain": plain,
        "steps": steps,
        "folder": str(folder),
        "runs": str(runs),
        "overrides": [*common, *length, *compiled, *overrides],
    }


def difference(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected), f"{len(found)} losses for {len(expected)} steps"
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def compare(work: Path, only: list[str], steps: int, at_once: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every case beside the plain loop of the same precision."""
    chosen = [
        (", ".join([loop, precision, place, *more]), loop, precision, place, more)
        for loop, precision, place, more in cases()
    ]
    chosen = [one for one in chosen if not only or any(word in one[0] for word in only)]
    with ThreadPoolExecutor(at_once) as pool:
        plain = {
            (loop, precision): pool.submit(
                start, spec_of(work / f"plain-{loop}-{precision}", loop, precision, [], plain=True, steps=steps), 1
            )
            for loop, precision in dict.fromkeys((one[1], one[2]) for one in chosen)
        }
        started = []
        for number, (name, loop, precision, place, more) in enumerate(chosen):
            processes, overrides = PLACES[place]
            spec = spec_of(work / f"case-{number}", loop, precision, [*overrides, *more], steps=steps)
            started.append((name, loop, precision, processes, pool.submit(start, spec, processes)))
        for name, loop, precision, processes, case in started:
            yield name, judge(case.result(), plain[loop, precision].result(), precision, processes)


def judge(found: dict[str, Any], reference: dict[str, Any], precision: str, processes: int) -> dict[str, Any]:
    if failed := next((one for one in (found, reference) if "failed" in one), None):
        return failed
    record: dict[str, Any] = {
        "processes": processes,
        "loss": float(f"{difference(found['losses'], reference['losses']):.2e}"),
        "first_and_last": [round(found["losses"][index], 6) for index in (0, -1)],
    }
    if reference["evaluated"]:
        record["evaluation"] = float(f"{difference(found['evaluated'], reference['evaluated']):.2e}")
    worst = max(record["loss"], record.get("evaluation", 0.0))
    record["passed"] = worst <= BOUNDS[precision]
    return record


def resume(work: Path, steps: int) -> dict[str, Any]:
    """A run that stops halfway and is resumed has the losses of one that does not, bitwise."""
    settings = ["train.deterministic=true", "checkpoint.at_end=true"]
    parts = work / "parts"
    lengths: dict[str, tuple[int, Path | None]] = {
        "whole": (steps, None),
        "first": (steps // 2, parts),
        "second": (steps, parts),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, (length, runs) in lengths.items():
        found[name] = start(spec_of(work / name, "weighted", "bf16-mixed", settings, steps=length, runs=runs), 1)
        if "failed" in found[name]:
            return found[name]
    losses, expected = found["second"]["losses"], found["whole"]["losses"]
    return {"passed": losses == expected, "loss": difference(losses, expected)}


def overhead(work: Path, kind: str, steps: int, rounds: int) -> dict[str, Any]:
    spec = {"loop": kind, "overhead": True, "steps": steps, "rounds": rounds, "folder": str(work / f"overhead-{kind}")}
    found = start(spec, 1)
    if "failed" in found:
        return found
    plain, ours = (statistics.median(found[name]) for name in ("plain", "run.steps"))
    record = {"plain_ms": round(plain, 3), "run_steps_ms": round(ours, 3), "added_ms": round(ours - plain, 3)}
    record |= {"overhead": round(ours / plain - 1, 4), "steps": steps, "rounds": found}
    if kind == "large":
        record["limit"], record["passed"] = OVERHEAD_LIMIT, ours / plain - 1 <= OVERHEAD_LIMIT
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name has one of these words")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    file, steps = args.output / "own_loops.json", 4 if args.tiny else STEPS
    import torch

    machine: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.cuda.is_available()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    kept: dict[str, Any] = json.loads(file.read_text())["cases"] if file.exists() else {}

    def record(name: str, found: dict[str, Any]) -> None:
        kept[name] = found
        report = {"machine": machine, "bounds": BOUNDS, "cases": kept}
        file.write_text(json.dumps(report, indent=1) + "\n")
        verdict = found.get("failed") or {True: "passed", False: "NOT WITHIN THE BOUND"}.get(found.get("passed"), "")
        shown = {key: value for key, value in found.items() if key not in ("log", "rounds", "passed", "failed")}
        print(f"{name}: {verdict} {json.dumps(shown)}", flush=True)
        for log in found.get("log", []):
            print(log, flush=True)

    with tempfile.TemporaryDirectory(prefix="own-loops-") as folder:
        work = Path(folder)
        for kind in ("large", "small"):
            if not args.only or f"overhead {kind}" in args.only:
                record(f"overhead {kind}", overhead(work, kind, *((12, 1) if args.tiny else (120, 5))))
        if not args.only or "resume" in args.only:
            record("resume", resume(work, steps))
        for name, found in compare(work, args.only, steps, 1 if args.tiny else AT_ONCE):
            record(name, found)
    return 0 if all(one.get("passed", "failed" not in one) for one in kept.values()) else 1


def run_worker(file: Path) -> None:
    spec = json.loads(file.read_text())
    measure_overhead(spec) if spec.get("overhead") else train(spec)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        run_worker(Path(sys.argv[2]))
    else:
        sys.exit(main())
