"""The models of public scripts by the same census, to calibrate it by their logged step times.

    PEER=CLONE python -m benchmarks.gpu_model.public_models --model pr1493_loop

CLONE is a work tree of github.com/openai/parameter-golf, from which the scripts are loaded: the challenge's
baseline, and settings and model of the record of PR #1493, which ships its script compressed. Their code runs
here only to be traced; none of it is part of this repository.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import lzma
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_model import fake_gpu
from benchmarks.gpu_model.roofline import CARDS

if TYPE_CHECKING:  # it imports torch, which must wait for the fake GPU
    from benchmarks.gpu_model.tracer import Tracer

# Milliseconds of a step on 8 H100 in the training logs of these records, optimizer and all-reduce included.
LOGGED_MS = {"baseline": 43.54, "pr1493": 102.1, "pr1493_loop": 150.5}
BASELINE_TOKENS = 65_536  # of one GPU and step
PR1493_TOKENS = 786_432 // 8
PR1493_RECORD = "track_10min_16mb/2026-04-09_SP8192_3LayerRecur_ParResid_QK525_LegalTTT"
# Parameters with these in their names stay in fp32 there, as do vectors and the weights of linear layers.
FP32_NAMES = ("scale", "mix", "gain", "skip")


def load_script(path: Path, name: str) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a path that ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def unpack_pr1493(clone: Path, folder: Path) -> Path:
    """Settings and model of PR #1493, as a file in `folder`.

    The record's script is a base-85 string of LZMA data. Its other parts have f-strings of Python 3.12.
    """
    shipped = (clone / "records" / PR1493_RECORD / "train_gpt.py").read_text(encoding="utf-8")
    packed = re.search(r'b85decode\("(.*?)"\)', shipped, re.DOTALL)
    if packed is None:
        raise RuntimeError(f"{clone}: the script of {PR1493_RECORD} is not the packed one that is expected")
    filters = [{"id": lzma.FILTER_LZMA2}]
    code = lzma.decompress(base64.b85decode(packed[1]), format=lzma.FORMAT_RAW, filters=filters).decode()
    settings = code[: code.index("_logger_hparams=None")]
    model = code[code.index("class RMSNorm") : code.index("@torch.compile\ndef zeropower")]
    restore = code[code.index("def restore_fp32_params") : code.index("def collect_hessians")]
    path = folder / "pr1493.py"
    path.write_text(settings + "CONTROL_TENSOR_NAME_PATTERNS=()\n" + model + restore, encoding="utf-8")
    return path


def build_baseline(clone: Path) -> tuple[Any, Any, int]:
    """Module, model and tokens of one pass of the challenge's baseline."""
    script = load_script(clone / "train_gpt.py", "public_baseline")
    settings = script.Hyperparameters
    names = (
        "vocab_size num_layers model_dim num_heads num_kv_heads mlp_mult tie_embeddings tied_embed_init_std "
        "logit_softcap rope_base qk_gain_init"
    ).split()
    model = script.GPT(**{name: getattr(settings, name) for name in names})
    return script, model, BASELINE_TOKENS


def build_pr1493(clone: Path, folder: Path, looping: bool) -> tuple[Any, Any, int]:
    """Module, model and tokens of one pass of PR #1493."""
    script = load_script(unpack_pr1493(clone, folder), "public_pr1493")
    model = script.GPT(script.Hyperparameters)
    model.looping_active = looping
    return script, model, PR1493_TOKENS


def move_to_gpu(model: Any, linear: type) -> None:
    """Parameters and buffers on the fake GPU, in the types that those scripts train with."""
    import torch

    in_fp32 = set()
    for module in model.modules():
        if isinstance(module, linear):
            in_fp32.update(id(parameter) for parameter in module.parameters(recurse=False))
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or any(part in name for part in FP32_NAMES):
            in_fp32.add(id(parameter))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            dtype = torch.float32 if id(parameter) in in_fp32 else torch.bfloat16
            moved = torch.empty(parameter.shape, dtype=dtype, device="cuda")
            module._parameters[name] = torch.nn.Parameter(moved)
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = torch.empty(buffer.shape, device="cuda")


def fill_rotary_caches(model: Any, length: int, heads_first: bool) -> None:
    """Cosines and sines as after a first step; computed within the graph they would break it."""
    import torch

    for module in model.modules():
        if type(module).__name__ != "Rotary":
            continue
        half = module.inv_freq.numel()
        shape = (1, 1, length, half) if heads_first else (1, length, 1, half)
        module._cos_cached = torch.empty(shape, device="cuda")
        module._sin_cached = torch.empty(shape, device="cuda")
        module._seq_len_cached = length


def replace_functions(keep_autocast: bool) -> None:
    """Let torch give these scripts what they had on their GPUs."""
    import torch
    import torch.nn.functional as F

    from benchmarks.gpu_model import stand_ins

    stand_ins.install_flash_attention()
    F.scaled_dot_product_attention = stand_ins.causal_sdpa
    # Orthogonal start values ask for numbers, which fake tensors have not.
    torch.nn.init.orthogonal_ = lambda weights, gain=1.0: weights
    if keep_autocast:
        return
    # Autocast of torch 2.13 computes rms_norm in fp32; that of 2.9.1, which the logs are of, did not. With it
    # activations would be twice as large here as they were there (logged peaks: 10,184 and 39,046 MiB).
    plain = F.rms_norm

    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        with torch.autocast("cuda", enabled=False):
            return plain(x, shape, weight, eps)

    F.rms_norm = rms_norm


def trace(tracer: Tracer, clone: Path, name: str) -> tuple[int, dict[str, int]]:
    """Trace one step of a public model into `tracer.graphs`; its tokens and widths."""
    import torch

    with tracer.fake_mode:
        if name == "baseline":
            script, model, tokens = build_baseline(clone)
        else:
            script, model, tokens = build_pr1493(clone, tracer.folder, name == "pr1493_loop")
        settings = script.Hyperparameters
        length = settings.train_seq_len
        move_to_gpu(model, script.CastedLinear)
        fill_rotary_caches(model, length, heads_first=name == "baseline")
    inputs_BT = tracer.empty(tokens // length, length)
    targets_BT = tracer.empty(tokens // length, length)
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend=tracer.backend)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = compiled(inputs_BT, targets_BT)
    loss.backward()
    hidden = int(settings.model_dim * settings.mlp_mult)
    return tokens, {"vocabulary": settings.vocab_size, "mlp": hidden, "gate": 0}


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="pr1493_loop", choices=sorted(LOGGED_MS))
    parser.add_argument("--card", default="h100", choices=sorted(CARDS))
    parser.add_argument("--keys", type=float, default=0.0, help="mean keys a token attends to; 0: half a row")
    parser.add_argument(
        "--keep-autocast", action="store_true", help="rms_norm as this torch has it: these scripts today"
    )
    fake_gpu.add_arguments(parser)
    options = parser.parse_args(arguments)
    clone = Path(os.environ.get("PEER", "")).expanduser()
    if not os.environ.get("PEER") or not (clone / "train_gpt.py").exists():
        print(f"PEER={os.environ.get('PEER', '')}: expected a work tree of github.com/openai/parameter-golf; "
              "clone it and name its folder", file=sys.stderr)  # fmt: skip
        return 1
    card, folder = fake_gpu.prepare(options.card, options.out)
    from benchmarks.gpu_model.report import report
    from benchmarks.gpu_model.tracer import Tracer

    replace_functions(options.keep_autocast)
    tracer = Tracer(card, folder, attention_keys=options.keys)
    tracer.start(options.model)
    tokens, sizes = trace(tracer, clone, options.model)
    total = report(options.model, tokens, tracer.graphs, folder, sizes)
    logged_ms = LOGGED_MS[options.model]
    modelled_ms = total.microseconds / 1e3
    print(f"logged {logged_ms} ms a step, with optimizer and all-reduce; modelled {modelled_ms:.1f} ms, both "
          f"passes alone; logged / modelled {logged_ms / modelled_ms:.3f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
