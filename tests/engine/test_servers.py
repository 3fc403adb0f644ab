"""Servers of several processes, two servers of one predictor, and a server within a program."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.engine.kinds import BIN, settings
from tests.engine.serving import (
    CHECKED,
    LONG_PROMPT,
    SEVERAL_HTTP_PROCESSES,
    SHORT_PROMPT,
    SageServer,
    generate,
    post,
    states,
    wait_until,
    warmed_store,
)
from tests.nursery import Nursery


def test_both_replicas_serve_take_new_settings_and_lose_nothing(replicas: SageServer) -> None:
    """SGLang gives each request to a rank, and each rank has its own order."""
    for policy in ("fcfs", "sage"):
        settings(replicas, {"schedule_policy": policy})
        assert [state["sage"]["schedule_policy"] for state in states(replicas)] == [policy] * 2
        answers = generate(replicas, [f"{SHORT_PROMPT} ({i})" for i in range(48)])
        assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}
        assert len(answers) == 48
    samples = generate(replicas, SHORT_PROMPT, sampling_params={"n": 3, "temperature": 1})
    assert len(samples) == 3
    for rank in (1, 1, 0, 1):
        answer = generate(replicas, SHORT_PROMPT, routed_dp_rank=rank)
        assert answer["meta_info"]["dp_rank"] == rank


def test_the_engine_api(nursery: Nursery, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "sage.yaml"
    config.write_text(f"store: {{path: {warmed_store(tmp_path / 'store')}}}\n")
    code = f"""
import json
import sglang
if __name__ == "__main__":
    engine = sglang.Engine(model_path={str(model)!r}, schedule_policy="makespan", device="cpu",
                           mem_fraction_static=0.1, max_total_tokens=4096)
    prompts = [{SHORT_PROMPT!r}, {LONG_PROMPT!r}]
    answers = engine.generate(prompts, {{"max_new_tokens": 3, "n": 4, "temperature": 1.0}})
    assert len(answers) == 8
    print(json.dumps(engine.get_server_info()["internal_states"][0]["sage"]))
    engine.shutdown()
"""
    result = nursery.run(code, SAGE_CONFIG=str(config))
    assert result.returncode == 0, result.stderr
    stats = json.loads(result.stdout.strip().splitlines()[-1])
    # SGLang first prefills each prompt by a request of its own.
    assert sum(stats["num_predicted"].values()) == 2 * (4 + 1)


def asked(server: SageServer, prompts: Sequence[str]) -> list[int]:
    """Return the lengths of answers, three tokens if all is well."""
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: generate(server, prompt, 3), prompts))
    return [answer["meta_info"]["completion_tokens"] for answer in answers]


def wait_for_both(server: SageServer, name: str, is_enough: Callable[[list[int]], bool]) -> None:
    """Wait until the counter is high enough in both HTTP processes, which answer at random."""
    seen: dict[int, int] = {}

    def both() -> bool:
        found = server.stats()["predictor"]
        seen[found["http_process"]] = found[name]
        return len(seen) == 2 and is_enough([*seen.values()])

    wait_until(both)


@SEVERAL_HTTP_PROCESSES
def test_several_http_processes_share_one_worker(several: SageServer) -> None:
    settings(several, {"schedule_policy": "sage"})
    num_before = len(several.history())  # of SGLang's own requests
    assert asked(several, [SHORT_PROMPT, LONG_PROMPT] * 16) == [3] * 32
    wait_until(lambda: len(several.history()) >= num_before + 32)
    stats = several.stats()
    assert stats["num_predicted"].get("warm", 0) + stats["num_predicted"].get("history", 0) >= 32
    assert stats["num_policy_errors"] == 0
    # Both have the records of either.
    wait_for_both(several, "num_recorded", lambda nums: min(nums) >= 32)


@SEVERAL_HTTP_PROCESSES
def test_no_abort_is_lost_by_which_http_process_it_comes_to(several: SageServer) -> None:
    """Aborts come while predictions are awaited, half of them to the other process."""
    settings(several, {"schedule_policy": "sage"})
    rids = [f"awaited-{number}" for number in range(12)]
    with ThreadPoolExecutor(len(rids)) as pool, several.without_predictions():
        calls = [pool.submit(generate, several, SHORT_PROMPT, 200, rid=rid) for rid in rids]
        wait_for_both(several, "num_awaited", lambda nums: sum(nums) == len(rids))
        for rid in rids:
            post(several, "/abort_request", {"rid": rid})
    for call in calls:
        meta = call.result()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["completion_tokens"] <= 1


@contextmanager
def service(folder: Path, address: str) -> Iterator[subprocess.Popen[str]]:
    config = folder / "service.toml"
    config.write_text(f'[store]\npath = "{folder / "store"}"\n')
    flags = ["--listen", address, "--sage-config", str(config)]
    with subprocess.Popen(
        [str(BIN / "sage-sched"), "predictor", "serve", *flags], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert address in process.stdout.readline()
            yield process
        finally:
            process.terminate()


def test_two_servers_on_one_service(model: Path, tmp_path: Path) -> None:
    address = str(tmp_path / "predictor.socket")
    by_service = f'[predictor]\ndeadline_ms = 600000.0\nservice = "{address}"\n'

    def server(name: str) -> SageServer:
        folder = tmp_path / name
        folder.mkdir()
        flags = ["--served-model-name", name]
        return SageServer(
            model, folder, folder / "unused", flags=flags, env=CHECKED, settings=by_service
        )

    with server("one") as one:
        # There is no service yet. The server serves all the same, and finds the service later.
        assert asked(one, [SHORT_PROMPT] * 4) == [3] * 4
        assert one.stats()["predictor"]["num_predicted_prior"] >= 4
        with service(tmp_path, address) as serving, server("other") as other:
            wait_until(lambda: one.stats()["predictor"]["worker_alive"] == 1)
            for each in (one, other):
                assert asked(each, [SHORT_PROMPT] * 8) == [3] * 8
                wait_until(lambda each=each: each.stats()["predictor"]["num_recorded"] == 8)
            assert not (tmp_path / "one" / "unused").exists()

            # The service is killed. Both go on with the prior, and find it again when it is back.
            serving.kill()
            serving.wait()
            for each in (one, other):
                assert asked(each, [SHORT_PROMPT] * 4) == [3] * 4
                counted = each.stats()["predictor"]
                assert counted["num_predicted_prior"] + counted["num_unsent"] >= 4
                wait_until(lambda each=each: not each.stats()["predictor"]["worker_alive"])
            with service(tmp_path, address):
                for each in (one, other):
                    wait_until(lambda each=each: each.stats()["predictor"]["worker_alive"] == 1)
                    before = each.stats()["predictor"]
                    assert before["num_worker_restarts"] == 1
                    assert asked(each, [SHORT_PROMPT] * 4) == [3] * 4
                    after = each.stats()["predictor"]
                    assert after["num_predicted_prior"] == before["num_predicted_prior"]
