"""The main job, end to end: `make demo`.

Real servers under four stock policies and ours, on the same work at twice what the stock server
sustains. Prompts and lengths are real where ../shared/data is beside the checkout, else generated.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.command import DEFAULT_POLICIES, compare_and_report, load_workload
from bench.compare import Settings
from bench.model import write_model
from bench.policy_server import CPU_ENV, CPU_FLAGS, CPU_MODEL, CPU_SAGE, PolicyServers
from bench.server import ServerError

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
OUTPUT = ROOT / "results" / "demo"

# Together about 40 minutes on 2 cores.
RATES = ("2x",)
NUM_SEEDS = 5
NUM_REQUESTS = 200


def main() -> int:
    data = DATA if DATA.is_dir() else None
    print(f"{len(DEFAULT_POLICIES)} policies x {NUM_SEEDS} seeds x {NUM_REQUESTS} requests on real")
    print(
        f"servers, {f'prompts of {data}' if data else 'generated prompts'}: about 40 minutes on 2"
    )
    print("cores. Each run starts a server of its own.\n", flush=True)
    settings = Settings(
        workload=load_workload(data),
        servers=PolicyServers(
            model=write_model(OUTPUT / "model", **CPU_MODEL),
            folder=OUTPUT,
            flags=CPU_FLAGS,
            env=CPU_ENV,
            sage=CPU_SAGE,
        ),
        policies=DEFAULT_POLICIES,
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
