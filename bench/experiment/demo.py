"""The main job, end to end: `make demo`.

Real servers under stock policies, one of them tuned, and ours, on the same work, on the device
clock of a GPU whose memory the model nearly fills: that is where scheduling matters. Prompts and
lengths are real where ../shared/data is beside the checkout, else generated.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.engines.clock.device import Device
from bench.engines.clock.priority import go_first
from bench.engines.server.model import write_model
from bench.engines.server.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    CPU_MODEL,
    PolicyServers,
)
from bench.engines.server.server import ServerError
from bench.engines.server.side_by_side import Settings
from bench.experiment.compare import compare_and_report
from bench.workloads.named import load_workload
from sage_sched.config import SageConfig

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
OUTPUT = ROOT / "results" / "demo"

DEVICE = Device.named("h800-80gb-qwen3-32b", speed=6.0)
POLICIES = ("fcfs", "fcfs@conservativeness=0.1", "shortest-prefill-first", "sage")
# More than twice what fcfs sustains.
RATES = ("4",)
NUM_SEEDS = 3
NUM_REQUESTS = 120


def main() -> int:
    go_first()
    data = DATA if DATA.is_dir() else None
    prompts = f"prompts of {data}" if data else "generated prompts"
    print(
        f"{len(POLICIES)} policies x {NUM_SEEDS} seeds x {NUM_REQUESTS} requests on real servers,"
    )
    print(f"{prompts}: about 7 minutes on 2 cores.\n", flush=True)
    settings = Settings(
        workload=load_workload(data),
        servers=PolicyServers(
            model=write_model(OUTPUT / "model", **CPU_MODEL),
            folder=OUTPUT,
            flags=CPU_ENGINE_FLAGS,
            env=CPU_ENV,
            sage=SageConfig(),
            device=DEVICE,
        ),
        policies=POLICIES,
        rates=RATES,
        num_seeds=NUM_SEEDS,
        num_requests=NUM_REQUESTS,
    )
    try:
        return compare_and_report(settings, OUTPUT / "summary.json")
    except ServerError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
