"""What an eager LoRA step of torchtune does on a GPU, kernel by kernel, with random weights.

Rotary embeddings, norm, repeated keys, attention (also flex attention on packed documents) and an adapted layer alone;
whole steps of Llama 3.2 1B with six sequences of 2,048 tokens, packed and not, and of eight blocks of Llama 3.1 8B with
eight sequences of 450 tokens, with activation checkpointing and without; and single elementwise kernels. The modules
are torchtune's, of which only those that PyTorch alone can run are imported.

    pip download --no-deps torchtune==0.6.1      # and unpack it into SITE
    python benchmarks/gpu/torchtune_kernels.py FOLDER --site SITE [--tiny]
"""

import argparse
import importlib
import json
import sys
import time
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def stub(name, folder=None, **members):
    """A module without code of its own, whose submodules are in `folder`."""
    module = types.ModuleType(name)
    if folder is not None:
        module.__path__ = [str(folder)]
    for key, value in members.items():
        setattr(module, key, value)
    sys.modules[name] = module
    return module


def load(site):
    """torchtune's modules, without the packages around them, which need torchao and datasets."""
    root = site / "torchtune"
    stub("torchtune", root)
    stub("torchtune.utils", root / "utils")
    modules = stub("torchtune.modules", root / "modules")
    peft = stub("torchtune.modules.peft", root / "modules" / "peft")
    stub("torchtune.modules.low_precision", _register_nf4_dispatch_ops=None)
    stub("torchtune.modules.loss", root / "modules" / "loss")
    stub("torchtune.models", root / "models")
    stub("torchtune.models.llama3_1", root / "models" / "llama3_1")
    stub("torchao", root)
    stub("torchao.dtypes", root)
    stub("torchao.dtypes.nf4tensor", linear_nf4=None, to_nf4=None)
    found = types.SimpleNamespace()
    found.attention_utils = importlib.import_module("torchtune.modules.attention_utils")
    found.MultiHeadAttention = importlib.import_module("torchtune.modules.attention").MultiHeadAttention
    modules.MultiHeadAttention = found.MultiHeadAttention
    found.RMSNorm = importlib.import_module("torchtune.modules.rms_norm").RMSNorm
    found.FeedForward = importlib.import_module("torchtune.modules.feed_forward").FeedForward
    transformer = importlib.import_module("torchtune.modules.transformer")
    found.Layer, found.Decoder = transformer.TransformerSelfAttentionLayer, transformer.TransformerDecoder
    peft.AdapterModule = importlib.import_module("torchtune.modules.peft._utils").AdapterModule
    found.LoRALinear = importlib.import_module("torchtune.modules.peft.lora").LoRALinear
    found.Rope = importlib.import_module("torchtune.models.llama3_1._position_embeddings").Llama3ScaledRoPE
    found.Loss = importlib.import_module("torchtune.modules.loss.ce_chunked_output_loss").CEWithChunkedOutputLoss
    return found


parser = argparse.ArgumentParser()
parser.add_argument("results", type=Path)
parser.add_argument("--site", type=Path, required=True, help="the folder that has torchtune's package")
parser.add_argument("--tiny", action="store_true")
arguments = parser.parse_args()
TINY = arguments.tiny or not torch.cuda.is_available()
DEVICE = "cpu" if TINY else "cuda"
tune = load(arguments.site)
RESULTS = {"torch": torch.__version__, "device": "cpu" if TINY else torch.cuda.get_device_name()}


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(work, repeats=20, warm=4):
    """(seconds on the device, seconds of the host until all is launched), the median of repeats."""
    repeats = 2 if TINY else repeats
    for _ in range(1 if TINY else warm):
        work()
    synchronize()
    device, host = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        host.append(time.perf_counter() - begin)
        synchronize()
        device.append(time.perf_counter() - begin)
    return {"seconds": sorted(device)[repeats // 2], "host": sorted(host)[repeats // 2]}


def kernels(work, repeats=3):
    """Kernels by name: launches and microseconds per call of `work`."""
    if TINY:
        work()
        return {}
    work()
    synchronize()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            work()
        synchronize()
    found = {}
    for event in profiler.key_averages():
        total = getattr(event, "self_device_time_total", 0.0)
        if total:
            name = event.key[:150]
            count, before = found.get(name, (0, 0.0))
            found[name] = (count + event.count / repeats, before + total / repeats)
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:40])


def save():
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "kernels.json").write_text(json.dumps(RESULTS, indent=1))


def record(name, work, **more):
    try:
        RESULTS[name] = {**timed(work), **more, "kernels": kernels(work)}
        print(name, RESULTS[name]["seconds"], RESULTS[name]["host"], flush=True)
    except Exception as error:  # the rest is worth having
        RESULTS[name] = {"error": repr(error)[:500]}
        print(name, repr(error)[:300], flush=True)
    save()


def both(function, *inputs):
    """Forward and backward pass with a gradient of ones that is made before."""
    with torch.no_grad():
        gradient = torch.ones_like(function(*inputs))

    def work():
        for one in inputs:
            one.grad = None
        function(*inputs).backward(gradient)

    return work


def tensor(*shape, dtype=torch.bfloat16, grad=True):
    return torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_(grad)


KEYS = ("hidden", "heads", "kv", "ffn", "head", "batch", "length", "blocks", "rank", "vocab")
SHAPES = {
    "1b": dict(zip(KEYS, (2048, 32, 8, 8192, 64, 6, 2048, 16, 64, 128256), strict=True)),
    "8b": dict(zip(KEYS, (4096, 32, 8, 14336, 128, 8, 450, 8, 8, 128256), strict=True)),
}
if TINY:
    for one in SHAPES.values():
        one.update(zip(KEYS, (64, 4, 2, 128, 16, 2, 32, 2, 4, 512), strict=True))


def rope(s):
    return tune.Rope(s["head"], max_seq_len=max(s["length"], 128)).to(DEVICE)


def linear(s, inputs, outputs, adapted=True):
    if adapted:
        return tune.LoRALinear(inputs, outputs, rank=s["rank"], alpha=2 * s["rank"])
    return nn.Linear(inputs, outputs, bias=False)


def layer(s, positions):
    width, narrow = s["heads"] * s["head"], s["kv"] * s["head"]
    attention = tune.MultiHeadAttention(
        embed_dim=s["hidden"],
        num_heads=s["heads"],
        num_kv_heads=s["kv"],
        head_dim=s["head"],
        q_proj=linear(s, s["hidden"], width),
        k_proj=linear(s, s["hidden"], narrow, False),
        v_proj=linear(s, s["hidden"], narrow),
        output_proj=linear(s, width, s["hidden"]),
        pos_embeddings=positions,
        max_seq_len=s["length"],
        attn_dropout=0.0,
    )
    mlp = tune.FeedForward(
        gate_proj=linear(s, s["hidden"], s["ffn"]),
        down_proj=linear(s, s["ffn"], s["hidden"]),
        up_proj=linear(s, s["hidden"], s["ffn"]),
    )
    return tune.Layer(attn=attention, mlp=mlp, sa_norm=tune.RMSNorm(s["hidden"]), mlp_norm=tune.RMSNorm(s["hidden"]))


def model(s):
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        positions = rope(s)
        positions.to(torch.float32)
        positions.rope_init()
        layers = nn.ModuleList([layer(s, positions) for _ in range(s["blocks"])])
        made = tune.Decoder(
            tok_embeddings=nn.Embedding(s["vocab"], s["hidden"]),
            layers=layers,
            max_seq_len=s["length"],
            num_heads=s["heads"],
            head_dim=s["head"],
            norm=tune.RMSNorm(s["hidden"]),
            output=nn.Linear(s["hidden"], s["vocab"], bias=False),
        )
    torch.set_default_dtype(torch.float32)
    positions.to(DEVICE)
    positions.cache.data = positions.cache.float()
    made.set_num_output_chunks(8)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return made.train()


def documents(s, each):
    lengths = []
    left = s["length"]
    while left > 0:
        lengths.append(min(each, left))
        left -= lengths[-1]
    return [torch.tensor(lengths) for _ in range(s["batch"])]


def positions_of(s, each):
    one = torch.arange(s["length"], device=DEVICE) % each
    return one.expand(s["batch"], -1).contiguous()


def pieces(name, s):
    batch, length = s["batch"], s["length"]
    x = tensor(batch, length, s["hidden"])
    q, k = tensor(batch, length, s["heads"], s["head"]), tensor(batch, length, s["kv"], s["head"])
    turn, at = rope(s), positions_of(s, max(1, length // 10))
    record(f"{name} rotary of queries", both(lambda q: turn(q), q), elements=q.numel())
    record(f"{name} rotary of queries, packed", both(lambda q: turn(q, input_pos=at), q), elements=q.numel())
    norm = tune.RMSNorm(s["hidden"]).to(DEVICE, torch.bfloat16).requires_grad_(False)
    record(f"{name} norm", both(norm, x), elements=x.numel())
    shape = (batch, s["kv"], s["heads"] // s["kv"], length, s["head"])

    def repeat(k):
        return k.transpose(1, 2).unsqueeze(2).expand(shape).flatten(1, 2)

    record(f"{name} repeated keys", both(repeat, k), elements=q.numel())
    wide = [tensor(batch, s["heads"], length, s["head"]) for _ in range(3)]
    causal = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    record(f"{name} attention, as it is", both(causal, *wide))
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def flash(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return causal(q, k, v)

    if not TINY:
        record(f"{name} flash attention", both(flash, *wide))
        for each in (length // 20, length // 10, length // 4, length):
            mask = tune.attention_utils.packed_block_causal_mask(documents(s, each))
            flex = lambda q, k, v: tune.attention_utils.compile_friendly_flex_attention(q, k, v, block_mask=mask)  # noqa: E731, B023
            record(f"{name} flex attention, documents of {each}", both(flex, *wide))
        record(f"{name} block mask", lambda: tune.attention_utils.packed_block_causal_mask(documents(s, length // 10)))
    with torch.device(DEVICE):
        adapted = linear(s, s["hidden"], s["ffn"]).to(torch.bfloat16)
    for key, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in key)
    record(f"{name} adapted gate", both(adapted, x))
    plain = nn.Linear(s["hidden"], s["ffn"], bias=False, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    record(f"{name} plain gate", both(plain, x))


def steps(name, s, *, packed, checkpointed):
    made = model(s)
    trained = [one for one in made.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=not TINY)
    loss_of = tune.Loss()
    tokens = torch.randint(0, s["vocab"], (s["batch"], s["length"]), device=DEVICE)
    labels = tokens.roll(-1, 1)
    more = {}
    if packed:
        each = max(1, s["length"] // 10)
        more["input_pos"] = positions_of(s, each)
        if not TINY:
            more["mask"] = tune.attention_utils.packed_block_causal_mask(documents(s, each))
    if checkpointed:
        for one in made.layers:
            inner = one.forward
            one.forward = lambda *a, inner=inner, **kw: checkpoint(inner, *a, use_reentrant=False, **kw)

    def micro():
        loss = loss_of(made(tokens, **more), labels)
        (loss * tokens.numel()).backward()
        return loss

    def update():
        for parameter in made.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1e-4)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step():
        loss = micro()
        update()
        loss.item()

    record(f"{name} step", step, tokens=tokens.numel())
    record(f"{name} micro-batch", micro)
    record(f"{name} update", lambda: (optimizer.step(), None)[1])
    if not TINY:
        RESULTS[f"{name} step"]["allocated"] = torch.cuda.max_memory_allocated()
        RESULTS[f"{name} step"]["reserved"] = torch.cuda.max_memory_reserved()
        # Clocks while it runs for three seconds, with what NVML says of them.
        try:
            import subprocess

            begin = time.perf_counter()
            asked = subprocess.Popen(
                ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader", "-lms", "200"],
                stdout=subprocess.PIPE,
                text=True,
            )
            while time.perf_counter() - begin < 3:
                step()
            asked.terminate()
            RESULTS[f"{name} step"]["clocks"] = asked.communicate()[0].split("\n")
        except Exception as error:
            RESULTS[f"{name} step"]["clocks"] = repr(error)
    save()
    if not TINY:
        for one in made.layers:
            one.__dict__.pop("forward", None)  # a checkpointed layer refers to itself
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def rates():
    """Kernels of one kind over 64 Mi elements: bytes that each moves are counted by the reader."""
    size = 64 << 10 if TINY else 64 << 20
    a, b = torch.randn(size, device=DEVICE), torch.randn(size, device=DEVICE)
    h = a.to(torch.bfloat16)
    pairs, cosines = a.view(-1, 64, 2), torch.randn(64, 2, device=DEVICE)
    strided = pairs[..., 0]
    out = torch.zeros_like(pairs)
    chosen = {
        "product": lambda: a * b,
        "product of 16 bits": lambda: h * h,
        "negated": lambda: -a,
        "zeros": lambda: torch.zeros_like(a),
        "cast up": lambda: h.float(),
        "cast down": lambda: a.to(torch.bfloat16),
        "pairs times cosines": lambda: pairs[..., 0] * cosines[..., 0],
        "pairs copied into": lambda: out[..., 0].copy_(strided),
        "halves copied into pairs": lambda: out[..., 0].copy_(a[: size // 2].view(-1, 64)),
        "stacked": lambda: torch.stack([a[: size // 2], b[: size // 2]], -1),
        "row times weight": lambda: a.view(-1, 4096 if size > 4096 else 64) * h[: 4096 if size > 4096 else 64],
        "sum of groups": lambda: h.view(-1, 8, 4, 128 if not TINY else 4, 64 if not TINY else 8).sum(2),
        "mean of rows": lambda: a.view(-1, 4096).mean(-1),
    }
    for name, work in chosen.items():
        record(f"rate of {name}", work, elements=size)


rates()
for size, one in SHAPES.items():
    pieces(size, one)
steps("1b packed", SHAPES["1b"], packed=True, checkpointed=False)
steps("1b", SHAPES["1b"], packed=False, checkpointed=False)
steps("8b checkpointed", SHAPES["8b"], packed=False, checkpointed=True)
steps("8b", SHAPES["8b"], packed=False, checkpointed=False)
save()
