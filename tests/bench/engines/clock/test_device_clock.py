"""The device clock's arithmetic, with a host whose time is the test's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bench.engines.clock.device import Device, DeviceUse, device_note
from bench.engines.clock.device_clock import STATE, DeviceClock, DeviceModel
from bench.policies.fastserve import FastServeParameters
from bench.simulator.host import Host as ServerHost
from bench.simulator.presets import Engine
from sage_sched.app.config import SageConfig, StepTimeConfig
from sage_sched.overload import OverloadConfig
from sage_sched.policies.sage import SageParameters
from sage_sched.steps import StepTime

# Prefill: 1 s, 0.1 a request, 0.01 a token, 0.001 a pair. Decode: 2 s, 0.2 a request, 0.001 a
# token of KV.
MODEL = DeviceModel(StepTime(1.0, 0.1, 0.01, 0.001, 2.0, 0.2, 0.001), swap_token_s=0.05)
DECODE_S = 2.0 + 2 * 0.2 + 300 * 0.001


class Host:
    """A host whose clocks advance only if a test says so, or it sleeps."""

    def __init__(self, model: DeviceModel = MODEL) -> None:
        self.now_s, self.cpu_s = 100.0, 5.0
        self.clock = DeviceClock(
            model, now=lambda: self.now_s, cpu=lambda: self.cpu_s, sleep=self.wait
        )

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds

    def work(self, seconds: float) -> str:
        self.now_s += seconds
        self.cpu_s += seconds
        return "done"

    def step(self, compute_s: float, *, after_idle: bool = False, overlaps: bool = True) -> float:
        """Launch a decode step, and return when the device will be done with it."""
        result, done_s = self.clock.run(
            decode_batch(100, 200), lambda: self.work(compute_s),
            after_idle=after_idle, overlaps=overlaps,
        )  # fmt: skip
        assert result == "done"
        return done_s


def batch(mode: str, **fields: Any) -> Any:
    forward_mode = SimpleNamespace(
        is_extend_without_speculative=lambda: mode != "decode", is_mixed=lambda: mode == "mixed"
    )
    return SimpleNamespace(forward_mode=forward_mode, **fields)


def decode_batch(*kv_tokens: int) -> Any:
    reqs = [SimpleNamespace(kv=SimpleNamespace(kv_committed_len=n)) for n in kv_tokens]
    return batch("decode", reqs=reqs)


def test_step_times() -> None:
    assert MODEL.step_s(decode_batch(100, 200)) == pytest.approx(DECODE_S)
    prefill = batch("extend", reqs=[1, 2], prefix_lens=[0, 50], extend_lens=[10, 20])
    prefill_s = 1.0 + 2 * 0.1 + 30 * 0.01 + (10 * 5 + 20 * (50 + 10)) * 0.001
    assert MODEL.step_s(prefill) == pytest.approx(prefill_s)
    # The same with two requests that decode: the weights are read once.
    mixed = batch(
        "mixed", reqs=[1, 2, 3, 4], prefix_lens=[0, 50, 100, 200], extend_lens=[10, 20, 1, 1],
        decoding_reqs=[3, 4],
    )  # fmt: skip
    assert MODEL.step_s(mixed) == pytest.approx(prefill_s + DECODE_S - 1.0)
    quick = MODEL.times(0.25)
    times = (quick.step_s(mixed), quick.swap_token_s)
    assert times == pytest.approx((MODEL.step_s(mixed) / 4, MODEL.swap_token_s / 4))


def test_the_modelled_host_delays_steps_and_moves() -> None:
    host = Host(replace(MODEL, host=ServerHost(move_s=0.7)))
    done_s = [
        host.clock.run(decode_batch(100, 200), lambda: None, after_idle=True, overlaps=True,
                       host_s=s)[1]
        for s in (DECODE_S - 0.1, DECODE_S + 0.1)
    ]  # fmt: skip
    assert done_s == pytest.approx([100 + DECODE_S, 100 + 2 * DECODE_S + 0.1])
    host.clock.move(2, lambda: None)
    assert host.clock.stats.moved_s == pytest.approx(2 * 0.05 + 0.7)
    quick = replace(MODEL, host=ServerHost(step_s=1.0, drains=True)).times(0.25)
    assert quick.host == ServerHost(step_s=0.25, drains=True)


@pytest.mark.parametrize(
    ("events", "overlaps", "later_s", "late_s"),
    [
        # Steps follow one another, however fast the host is. Its own work hides behind them.
        ("idle 0.5, step 0.5, see 1, work 0.3, step 0.5, see 1", True, (0, 0, 0), 0),
        ("idle 0.1, see 1, wait 50, idle 0.1", True, (0, 50), 0),  # nothing to do until then
        ("idle 0.1, see 1, work 0.5, step 0.1", True, (0, 0.5), 0.5),  # launched late
        # Without overlap a GPU would wait for results and the next pass too, but not while another
        # process has the core.
        ("idle 0.1, see 1, work 0.7, wait 0.5, step 0.1", False, (0, 1.2), 0.5),
        (f"idle {DECODE_S + 0.5}", True, (0.5,), 0.5),  # computed after the device
    ],
)
def test_steps_follow_one_another_and_a_slow_host_is_late(
    events: str, overlaps: bool, later_s: tuple[float, ...], late_s: float
) -> None:
    host, done_s = Host(), list[float]()
    for event in events.split(", "):
        what, number = event.split()
        if what in ("idle", "step"):
            done_s.append(host.step(float(number), after_idle=what == "idle", overlaps=overlaps))
        elif what == "see":
            host.clock.wait_until(done_s[int(number) - 1])
        else:
            getattr(host, what)(float(number))
    assert done_s == pytest.approx([100 + n * DECODE_S + s for n, s in enumerate(later_s, 1)])
    stats, number_of = host.clock.stats, len(done_s)
    assert (stats.num_steps, stats.device_s) == (number_of, pytest.approx(number_of * DECODE_S))
    assert (stats.num_late, stats.late_s) == (int(late_s > 0), pytest.approx(late_s))


def test_moves_go_one_after_the_other_and_delay_the_device() -> None:
    host = Host()
    running_until = host.step(0.1, after_idle=True)
    assert host.clock.move(10, lambda: host.work(0.1)) == "done"
    assert host.now_s == pytest.approx(100.1 + 0.5)  # the host waited for the copy
    host.clock.move(4, lambda: host.work(0.9))  # the copy takes longer here than there
    assert host.now_s == pytest.approx(100.6 + 0.9)
    assert host.step(0.1) == pytest.approx(running_until + 0.5 + 0.2 + DECODE_S)
    assert (host.clock.stats.num_moves, host.clock.stats.moved_s) == (2, pytest.approx(0.7))


def state(**fields: float) -> dict[str, Any]:
    names = ("num_steps", "device_s", "num_late", "late_s", "num_moves", "moved_s", "cpu_s")
    return {STATE: dict.fromkeys(names, 0.0) | fields}


def test_a_run_that_the_host_delayed_is_invalid() -> None:
    before = state(num_steps=10, device_s=5.0, late_s=1.0, num_late=7, cpu_s=3.0)
    after = state(num_steps=110, device_s=30.0, late_s=1.5, num_late=9, num_moves=1, cpu_s=8.0)
    use = DeviceUse.between(before, after, speed=2.0)  # real time, except the host's own seconds
    assert (use, use.problem()) == (DeviceUse(100, 50.0, 2, 1.0, 1, 0.0, 5.0), "")
    assert "1.2 s of 50.0 s (2.4%" in replace(use, late_s=1.2).problem()
    with pytest.raises(KeyError):
        DeviceUse.between({}, {}, speed=1.0)  # a server without the clock


def test_all_times_of_a_server_are_divided_by_its_speed() -> None:
    device = Device.named("h800-qwen3-32b", speed=4.0)
    assert device.sped_up(SageConfig()).step_time is None  # the server learns them
    given = SageConfig(
        step_time=StepTimeConfig(decode_base_ms=8.0),
        overload=OverloadConfig(enabled=True, max_ttft_ms=2000.0),
    )
    told = device.sped_up(given)
    assert told.step_time is not None
    assert told.step_time.decode_base_ms == 2.0
    assert told.predictor.deadline_ms == given.predictor.deadline_ms / 4
    assert told.policy["fastserve"] == FastServeParameters(quantum_ms=25.0)
    assert told.policy["sage"] == SageParameters(ttft_ms=500.0)
    assert told.overload == OverloadConfig(enabled=True, max_ttft_ms=500.0)
    assert told.store == given.store


def test_flags_and_note_of_a_device() -> None:
    engine = Engine(
        MODEL.step_time, 4096, 8, 16, 512, 2048, mixed_chunk=True, max_queued_requests=5
    )
    flags = " ".join(Device("", 1.0, engine).flags())
    assert flags == (
        "--sleep-on-idle --stream-interval 64 --max-total-tokens 4096 --max-running-requests 8 "
        "--page-size 16 --chunked-prefill-size 512 --max-prefill-tokens 2048 --enable-mixed-chunk "
        "--max-queued-requests 5"
    )
    assert device_note({}) == ""
    paces = [device_note({"device clock": "x", "speed": speed})[:40] for speed in (1.0, 2.5)]
    assert paces == [
        "device clock: x (real servers with a sma", "device clock: x, 2.5 times as fast as re",
    ]  # fmt: skip
