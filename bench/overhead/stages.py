"""What sage-sched adds to a request, stage by stage: `python -m bench.overhead.stages`.

Each node of a cluster predicts and schedules for itself, so what a request pays does not grow with
the number of nodes (SageSched, Fig. 12, has one scheduler for all: 100 ms a request at 64 nodes).
One thread each, as in a server. The prompts are generated ones of all lengths; the history holds
10,000 records and the queue 1,000 requests, as there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from bench.overhead import queue_pass
from bench.overhead.full_server import NUM_RUNNING
from bench.workloads import synthetic
from patches.carrier import decode, encode
from predictor_store.predict import predictor
from predictor_store.predict.embedder import Embedder, embedding_dimension
from predictor_store.predict.general_length import GeneralLength
from predictor_store.predict.history import History
from predictor_store.service import protocol
from predictor_store.service.protocol import LineReader
from sage_sched.config import PredictorConfig

NUM_RECORDS = 10_000
NUM_WAITING = 1_000
_NUM_PROMPTS = 300


def each_ms(
    action: Callable[[int], object], times: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Milliseconds of each time, of so many, by a clock of seconds."""
    spent = []
    for i in range(times):
        started = clock()
        action(i)
        spent.append((clock() - started) * 1e3)
    return spent


def measure() -> dict[str, list[float]]:
    """Milliseconds of each stage, one value a request."""
    config = PredictorConfig()
    embedder = Embedder(num_threads=1)
    prompts = [r.prompt for r in synthetic.generate(3 * _NUM_PROMPTS, seed=1).evaluation]
    prompts = prompts[:_NUM_PROMPTS]
    vectors = embedder.embed(prompts)
    rng = np.random.default_rng(0)
    history = History.of_encoder(config.encoder, NUM_RECORDS, GeneralLength.shipped(config.encoder))
    dimension = embedding_dimension(config.encoder)
    for i in range(NUM_RECORDS):
        embedding, features = np.split(vectors[i % len(vectors)], [dimension])
        noisy = embedding + rng.normal(0, 0.03, dimension).astype(np.float32)
        vector = np.append(noisy / np.linalg.norm(noisy), features)
        history.add(vector, int(rng.lognormal(5, 1)) + 1, False, "history")
    history.fit()
    predicted = [predictor.predict(history, vector) for vector in vectors]
    lengths = [found for found in predicted if found is not None]
    admissions_ms, passes_ms = queue_pass.measure(NUM_WAITING)
    return {
        "embedding, one prompt": each_ms(lambda i: embedder.embed([prompts[i]]), len(prompts)),
        "embedding, in batches of 32": [
            spent / 32
            for spent in each_ms(
                lambda i: embedder.embed(prompts[32 * i : 32 * i + 32]), len(prompts) // 32
            )
        ],
        "search and distribution": each_ms(
            lambda i: predictor.predict(history, vectors[i]), len(prompts)
        ),
        "worker's messages": each_ms(
            lambda i: (
                list(LineReader().feed(protocol.encode({"predict": i, "text": prompts[i]}))),
                protocol.encode({"distribution": protocol.encode_distribution(lengths[i])}),
            ),
            len(lengths),
        ),
        "carrier, both ends": each_ms(lambda i: decode(encode(lengths[i])), len(lengths)),
        "admission: costs and index": admissions_ms,
        f"a pass, {NUM_RUNNING} running": passes_ms,
    }


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as a worker has it
    print(f"{'stage':32} {'least ms':>9} {'median':>8} {'p99':>8}")
    measured = measure()
    for stage, spent_ms in measured.items():
        least, median, p99 = np.quantile(spent_ms, [0, 0.5, 0.99])
        print(f"{stage:32} {least:9.3f} {median:8.3f} {p99:8.3f}")
    of_worker = ("embedding, in batches of 32", "search and distribution", "worker's messages")
    for name, at in (("median", 0.5), ("at best", 0.0)):
        total_ms = sum(float(np.quantile(measured[stage], at)) for stage in of_worker)
        print(f"a worker's predictions/s, by the stages' {name}: {1e3 / total_ms:.0f}")


if __name__ == "__main__":
    main()
