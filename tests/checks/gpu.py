"""Runs all checks that need a GPU: `make gpu-check`.

Each check has a name, prints a line, and adds an entry to one JSON file with the hardware and
versions. A check that cannot run here is skipped, and its entry gives the reason. Exit status 1 if
a check failed; skipped checks do not count as failures.

`--device cpu` tries the same paths without a GPU, on a small model and few records. Its figures
mean nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from bench.engines.server import fit
from bench.engines.server.facts import host_facts, version_of
from bench.engines.server.model import write_model
from bench.engines.server.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    CPU_FLAGS,
    CPU_MODEL,
    PolicyServers,
    scheduler_state,
)
from bench.experiment.run import changed
from bench.experiment.run import run as run_experiment
from bench.experiment.spec import Experiment, Options
from bench.simulator.presets import PRESETS
from bench.workloads.prompt_source import load_workload
from predictor_store.probe.file import fingerprint
from predictor_store.torchvision_schemas import define_missing
from sage_sched.app.config import DecodeConfig, ProbeConfig, SageConfig
from sage_sched.slo.classes import SloClass, SloConfig
from sage_sched.steps import StepTime, attended_pairs
from tests.checks import exactness
from tests.predictor_store.probes import probe

# Measured step times are compared with it.
_PRESET = "h100-llama-3.1-8b"
_PACKAGES = ("flashinfer-python", "triton")
# Llama 3.1 8B (its config.json); with --load-format dummy it needs no weights.
_LLAMA_31_8B = {
    "num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32,
    "num_kv_heads": 8, "vocab_size": 128256, "context_length": 8192, "dtype": "bfloat16",
    "weights": False,
}  # fmt: skip
# Four heads give a head size that a GPU's kernels support.
_GPU_HIDDEN_SIZE = 512
# Two layers, because the last one's states cannot be read.
_TINY = {**CPU_MODEL, "num_layers": 2, "weights": False}
# A KV pool of about 200 requests of the workload. At twice the capacity it is full, as on a busy
# server, without the minutes that filling a large GPU's whole memory would take.
_GPU_FLAGS = ("--max-total-tokens", "131072", "--max-running-requests", "256")
# Steps for the comparison with presets: prefilled tokens; requests and KV tokens of a decode step.
_PREFILLS = (512, 4096)
_DECODES = ((1, 1_000), (64, 64_000), (128, 128_000))


class Mode(NamedTuple):
    """A way to run a server. sage: its settings. on_cpu: whether a CPU runs it, too."""

    flags: tuple[str, ...] = ()
    policy: str = "sage"
    sage: SageConfig = SageConfig()
    on_cpu: bool = False


_NGRAM = ("--speculative-algorithm", "NGRAM")
_DRAFTS = ("--speculative-draft-model-path", "{drafts}", "--speculative-num-steps", "3")
_EAGLE = ("--speculative-algorithm", "EAGLE", *_DRAFTS, "--speculative-eagle-topk", "1")
# For every request, because none names a class.
_DEADLINES = SloConfig(
    default="all", classes={"all": SloClass(ttft_slo_ms=500.0, tpot_slo_ms=50.0)}
)
MODES = {
    # With CUDA graphs on, hidden states are read, and prompts are cut so that no answer pauses.
    "tap": Mode(policy="trail", sage=SageConfig(probe=ProbeConfig("{probe}")), on_cpu=True),
    "cuts": Mode(
        flags=("--chunked-prefill-size", "256"),
        sage=SageConfig(decode=DecodeConfig(max_gap_ms=1.0)),
        on_cpu=True,
    ),
    "proserve": Mode(policy="proserve", sage=SageConfig(slo=_DEADLINES), on_cpu=True),
    "ngram": Mode(flags=_NGRAM),
    "ngram_without_overlap": Mode(flags=(*_NGRAM, "--disable-overlap-schedule")),
    "own_drafts": Mode(
        flags=("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "{model}")
    ),
    "eagle": Mode(flags=(*_EAGLE, "--speculative-num-draft-tokens", "4")),
    "hicache": Mode(flags=("--enable-hierarchical-cache",)),
    # flashinfer's attention cannot read such KV.
    "fp4_kv": Mode(flags=("--kv-cache-dtype", "fp4_mx_block16", "--attention-backend", "triton")),
}
# Tokens of a preempted request.
_MOVED_TOKENS = 1_000


class SkippedError(Exception):
    """The reason why a check does not run here."""


class Checks:
    """All checks of one device, with their files in one folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder: Path = args.output
        self.on_gpu = args.device == "cuda"
        self.shape: dict[str, Any] = _LLAMA_31_8B if self.on_gpu else _TINY

    def kv_move(self) -> dict[str, Any]:
        """Check that KV moves to host memory and back unchanged. Measure the speed of the copy and
        the bus."""
        define_missing()
        from tests.checks import kv_move

        found = kv_move.measure(
            self.args.device,
            num_layers=self.shape["num_layers"],
            num_heads=self.shape["num_kv_heads"],
            head_dim=self.shape["hidden_size"] // self.shape["num_heads"],
            num_tokens=8192 if self.on_gpu else 256,
        )
        if not found["bit_exact"]:
            raise AssertionError(f"KV came back changed: {found}")
        return found

    def serve(self) -> dict[str, Any]:
        """Run six loads on a server with flashinfer under `sage`.

        Return the learned step times, their ratios to a preset's, and the time of a move in decode
        steps.
        """
        if self.on_gpu and "flashinfer" in self.args.kernels and find_spec("flashinfer") is None:
            raise SkippedError("flashinfer is not installed (--kernels names others)")
        state = fit.learn(self._servers(), load_workload(None, "generated"))
        learned = state["step_time"]["latest"]
        measured = StepTime(**{name[:-3] + "_s": ms / 1e3 for name, ms in learned.items()})
        decode_s = measured.decode_s(*_DECODES[1])
        move_s = _MOVED_TOKENS * state["preemption"]["swap_token_us"] / 1e6
        return {
            **{name: state[name] for name in ("num_predicted", "step_time", "preemption")},
            "preset": _PRESET,
            "measured_over_preset": ratios(measured, PRESETS[_PRESET].step_time),
            "move_over_decode_step": move_s / decode_s if decode_s else None,
        }

    def exactness(self, *flags: str) -> dict[str, Any]:
        """Check that answers keep every token when requests are preempted all the time."""
        host = ("--mem-fraction-static", "0.1", *self.args.kernels)
        dtype = "bfloat16" if self.on_gpu else "float32"
        model = self.args.model_path or write_model(
            self.folder / "exactness" / "model", dtype=dtype,
            hidden_size=_GPU_HIDDEN_SIZE if self.on_gpu else 128,
        )  # fmt: skip
        servers = PolicyServers(
            model=model,
            folder=self.folder / "exactness",
            flags=(*(host if self.on_gpu else CPU_ENGINE_FLAGS), "--dtype", dtype, *flags),
            env=exactness.STRICT | ({} if self.on_gpu else CPU_ENV),
            sage=SageConfig(),
        )
        sampling = [{"ignore_eos": self.args.model_path is None}]  # a real model ends them itself
        return exactness.measure(servers, 300 if self.on_gpu else 150, sampling)

    def fp8_kv(self) -> dict[str, Any]:
        """Run the same check with KV of eight bits."""
        return self.exactness("--kv-cache-dtype", "fp8_e5m2")

    def mode(self, name: str) -> dict[str, Any]:
        """Compare the answers of a server under our policy with those under `fcfs`. They may differ
        by rounding, because batches differ."""
        mode, servers = MODES[name], self._servers()
        if not (self.on_gpu or mode.on_cpu):
            raise SkippedError("no CPU runs it")
        sage, filled = mode.sage, {"model": str(servers.model)}
        if sage.probe.file:
            shape = json.loads((servers.model / "config.json").read_text(encoding="utf-8"))
            written = probe(fingerprint(servers.model), hidden_size=shape["hidden_size"])
            written.write(self.folder / "probe")
            sage = replace(sage, probe=ProbeConfig(str(self.folder / "probe")))
        if "{drafts}" in mode.flags:
            filled["drafts"] = str(self._drafts())
        flags = (*servers.flags, *(flag.format(**filled) for flag in mode.flags))
        servers = replace(servers, flags=flags, sage=sage)
        asked, answers, state = exactness.crowd(48), [], {}
        # Every third prompt is long.
        asked[::3] = [(prompt * 20, length) for prompt, length in asked[::3]]
        for policy in ("fcfs", mode.policy):
            with servers.server(policy, f"{name}-{policy}") as server:
                answers.append(exactness.ask(server, asked, 24))
                state = scheduler_state(server)
        if state["num_policy_errors"] or (state["probe"] and not state["probe"]["num_scores"]):
            raise AssertionError(f"the policy failed, or no hidden states were read: {state}")
        num_different, largest = exactness.differences(answers[0], answers[1])
        different = {"num_different": num_different, "largest_difference": largest}
        kept = ("step_time", "preemption", "gaps", "slo", "probe")
        return different | {of: state[of] for of in kept}

    def _drafts(self) -> Path:
        """Write a model of one layer that drafts for ours, as in EAGLE."""
        if self.args.model_path is not None:
            raise SkippedError("it takes a model that drafts for the one of --model-path")
        folder = write_model(self.folder / "drafts", **self.shape | {"num_layers": 1})
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        config["architectures"] = ["LlamaForCausalLMEagle"]
        file.write_text(json.dumps(config), encoding="utf-8")
        return folder

    def comparison(self) -> dict[str, Any]:
        """Compare `fcfs`, tuned and not, with `sage` on the same requests of recorded lengths."""
        servers, changes = self._servers(), {"rates": ["2x"], "num_requests": 300}
        if not self.on_gpu:
            changes |= {"num_requests": 24, "max_new_tokens": 64}
        arms = ["fcfs", "fcfs@clip=256", "sage"]
        experiment = changed(Experiment.read("compare", changes), arms=arms, seeds=1)
        options = Options(
            output=self.folder, model=servers.model, server_flags=servers.flags,
            server_env=servers.env,
        )  # fmt: skip
        made = run_experiment(experiment, options, lambda _: None)
        if problems := [record.problem for record in made if record.problem]:
            raise AssertionError(problems)
        return {record.arm: dict(record.metrics) for record in made}

    def _servers(self) -> PolicyServers:
        weights = () if self.args.model_path else ("--load-format", "dummy")
        host = (*self.args.kernels, *_GPU_FLAGS) if self.on_gpu else CPU_FLAGS
        return PolicyServers(
            model=self.args.model_path or write_model(self.folder / "model", **self.shape),
            folder=self.folder / "serve",
            flags=(*weights, *host),
            env={} if self.on_gpu else CPU_ENV,
            sage=SageConfig(),
        )


def ratios(measured: StepTime, preset: StepTime) -> dict[str, float]:
    """Return the ratios of step times measured here to those of the preset."""

    def of(method: str, *step: int) -> float:
        return float(getattr(measured, method)(*step) / getattr(preset, method)(*step))

    prefills = {f"prefill {n}": of("prefill_s", 1, n, attended_pairs(0, n)) for n in _PREFILLS}
    decodes = {f"decode {n} x {kv // n}": of("decode_s", n, kv) for n, kv in _DECODES}
    return prefills | decodes


# The order of the checks: short ones first.
NAMES = ("kv_move", "serve", "exactness", "fp8_kv", *MODES, "comparison")


def outcome(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run one check and return its entry, also if it fails or is skipped."""
    started = time.monotonic()
    try:
        entry = {"status": "ok", "found": check()}
    except SkippedError as why:
        entry = {"status": "skipped", "why": str(why)}
    except Exception:  # the other checks should run, and this error be reported
        entry = {"status": "failed", "why": traceback.format_exc()}
    return entry | {"seconds": round(time.monotonic() - started, 1)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--model-path", type=Path, help="default: Llama 3.1 8B's shape, with dummy weights"
    )
    parser.add_argument(
        "--kernels", type=shlex.split, default=["--attention-backend", "flashinfer"],
        help="flags that choose a GPU's kernels (default: flashinfer's)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("results/gpu"), metavar="DIR")
    args = parser.parse_args(argv)
    if args.device == "cuda" and host_facts()["gpu"] == "none":
        print("gpu-check: this host has no GPU that torch can use (--device cpu tries the paths)")
        return 0
    checks, found = Checks(args), dict[str, Any]()
    known = {**host_facts(), **{name: version_of(name) for name in _PACKAGES}}
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "gpu-check.json"
    for name in args.only:
        check = partial(checks.mode, name) if name in MODES else getattr(checks, name)
        found[name] = outcome(check)
        print(f"{found[name]['status']:8}{name:22}{found[name].get('why', '')}", flush=True)
        # Written after each check, in case a later one hangs.
        report = {"device": args.device, "facts": known, "checks": found}
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(file)
    return int(any(entry["status"] == "failed" for entry in found.values()))


if __name__ == "__main__":
    sys.exit(main())
