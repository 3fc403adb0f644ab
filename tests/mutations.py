"""Deliberate breaks of ours, each of which a test has to notice: `python -m tests.mutations`.

Each breaks one promise of docs/failures.md in a copy of the checkout and runs the test that is to
fail there. It takes many minutes, as some tests start servers, so it is not part of the suite; that
the broken lines are still there is (tests/test_mutations.py). `--quick` leaves out the breaks that
only a server's test notices.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from tests.nursery import Nursery

ROOT = Path(__file__).parents[1]
_COPIED = (
    "sage_sched", "predictor_store", "patches", "bench", "tests", "docs", "pyproject.toml",
    "setup.py", "MANIFEST.in", "README.md", "LICENSE",
)  # fmt: skip
# pytest's exit code where tests ran and some failed; others mean that they did not run.
_FAILED = 1
# Some breaks make a test wait for ever, which counts as noticed. By a thread, that ends pytest.
_TIMEOUT = ("-otimeout=300", "-otimeout_method=thread")
_OURS = ("sage_sched", "predictor_store", "patches", "bench", "tests")
# SGLang is there already (tests/cradle.py), and a platform of ours with it; of ours the copy's
# modules are meant.
_PYTEST = f"""
import os, sys
os.chdir(os.environ["CHECKOUT"])
for name in [*sys.modules]:
    if name.partition(".")[0] in {_OURS}:
        del sys.modules[name]
sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "_PartsFinder"]
import pytest
sys.exit(pytest.main([*{_TIMEOUT!r}, "-x", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One break. old: text that occurs once in `file`; test: what has to fail with `new`."""

    breaks: str
    file: str
    old: str
    new: str
    test: str


_CLIENT, _STORE = (
    "tests/predictor_store/service/test_client.py",
    "tests/predictor_store/store/test_store.py",
)
_SERVER, _WORKER = (
    "tests/predictor_store/service/test_server.py",
    "tests/predictor_store/service/test_worker.py",
)
_STATE, _CARRIER = "tests/patches/scheduler/test_state.py", "tests/patches/test_carrier.py"
_FAILURES = "tests/engine/test_preemption_failures.py"
_PREEMPTION = "tests/engine/test_preemption.py"
_PROBE = "tests/patches/probe/test_setup.py"
_ROUTER, _DISPATCH = (
    "tests/sage_sched/routing/test_router.py",
    "tests/patches/http/test_dispatch.py",
)
_DEPARTURE = "tests/sage_sched/test_departure.py"
_SWITCH, _SWITCHED = "tests/patches/scheduler/test_switch.py", "tests/engine/test_switch.py"
_LINES, _EARLY = (
    "tests/patches/test_json_lines.py",
    "tests/patches/scheduler/test_early_aborts.py",
)
_QLLM, _CORE_SLICES = (
    "tests/sage_sched/best_effort/test_policy.py",
    "tests/bench/engines/simulator/test_passing.py",
)
_URGENCY = "tests/sage_sched/urgency/test_policy.py"
_GUESS, _HEAD = (
    "tests/patches/http/test_urgency.py",
    "tests/predictor_store/urgency/test_head.py",
)

_PLUGIN = "tests/patches/test_plugin.py"
_ASKED_WHAT_IF = "tests/bench/whatif/test_answer.py"

MUTATIONS = (
    Mutation(
        "a promised TPOT that steps cannot keep stops all prefills",
        "sage_sched/gap.py",
        "max(promised_s, least_bound_s(decode_s, step_time, cuts)),",
        "promised_s,",
        "tests/sage_sched/test_gap.py::test_a_promised_tpot_is_a_bound_too",
    ),
    Mutation(
        "a policy of deadlines is held to promised TPOTs at any price",
        "sage_sched/config.py",
        "self.max_gap_ms / 1e3, not policy.has_deadlines",
        "self.max_gap_ms / 1e3, True",
        "tests/sage_sched/test_gap.py"
        "::test_a_policy_of_deadlines_decides_itself_what_a_promised_tpot_is_worth",
    ),
    Mutation(
        "batches are short though first tokens are worth more",
        "sage_sched/slo/policy.py",
        "return max(eta, _ETA_OF_PREFILLS)",
        "return eta",
        "tests/sage_sched/slo/test_policy.py::test_a_batch_is_longer_while_first_tokens_are_worth_"
        "more_than_those_that_are_late_by_it",
    ),
    Mutation(
        "somebody leaves before the engine has to retract",
        "patches/scheduler/view.py",
        "if running_batch.is_empty() or scheduler._reqs_finishing_inflight(running_batch):",
        "if any(req.next_output_finishes_by_length() for req in running_batch.reqs):",
        f"{_STATE}::test_memory_runs_out_beside_a_last_token_unless_that_is_on_its_way",
    ),
    Mutation(
        "what is prefilled while a decode step is on its way counts for nothing",
        "patches/scheduler/state.py",
        "        self.gaps.stepped(batch)\n",
        "        self.gaps.stepped(batch)\n        self.policy.gap.decoded()\n",
        "tests/engine/test_gap.py::test_who_runs_gets_tokens_while_others_are_prefilled",
    ),
    Mutation(
        "what commands draw with is not installed with them",
        "pyproject.toml",
        '    "matplotlib",\n    "msgspec",\n',
        '    "msgspec",\n',
        "tests/test_package.py::test_a_documented_install_has_all_that_its_commands_need",
    ),
    Mutation(
        "who stops reading gets a traceback",
        "sage_sched/cli.py",
        "    except BrokenPipeError:\n        terminal.stop_printing()\n",
        "    except BrokenPipeError:\n        raise\n",
        "tests/test_cli.py::test_who_stops_reading_gets_no_traceback",
    ),
    Mutation(
        "a ratio of two answers is exported",
        "patches/http/metrics.py",
        "if num_scored >= LEAST_TO_TELL and measure in quality:",
        "if measure in quality:",
        "tests/patches/http/test_metrics.py::test_a_ratio_of_few_answers_is_not_said",
    ),
    Mutation(
        "caps that the log does not say are taken for none",
        "bench/whatif/answer.py",
        'caps = {"": cap_tokens} if cap_tokens else _supposed_caps(fits)',
        'caps = {"": cap_tokens}',
        f"{_ASKED_WHAT_IF}::test_where_the_log_says_no_caps_there_are_two_answers_the_less_"
        "flattering_first",
    ),
    Mutation(
        "where nothing can be written is known once all is simulated",
        "bench/whatif/command.py",
        "    _prepare(args.output)\n",
        "",
        f"{_ASKED_WHAT_IF}::test_what_cannot_be_said_is_known_before_anything_is_simulated",
    ),
    Mutation(
        "a store in use is known once the model is loaded",
        "patches/plugin.py",
        "        _refuse_store(server_args)\n",
        "        pass\n",
        f"{_PLUGIN}::test_a_store_in_use_is_said_in_one_line",
    ),
    Mutation(
        "serve's help has none of ours",
        "patches/ops/serve_command.py",
        '"from sglang.srt.plugins import load_plugins; load_plugins(); "',
        '""',
        f"{_PLUGIN}::test_the_help_of_serve_ends_with_what_is_ours",
    ),
    Mutation(
        "best effort may be overtaken by twice its bound",
        "sage_sched/best_effort/policy.py",
        "(0.0 if self.passes(job) else self._piece_tokens)",
        "(0.0 if self.passes(job) else 2 * self._piece_tokens)",
        f"{_QLLM}::test_nobody_is_overtaken_by_more_than_the_bound",
    ),
    Mutation(
        "the most urgent go ahead without end",
        "sage_sched/urgency/policy.py",
        "        return job.served_at_arrival_tokens // self._piece_tokens + self.level(job)",
        "        return self.level(job)",
        f"{_URGENCY}::test_a_flood_of_the_most_urgent_goes_ahead_by_two_pieces_of_work",
    ),
    Mutation(
        "a level is worth two pieces of work",
        "sage_sched/urgency/policy.py",
        "self._piece_tokens + self.level(job)",
        "self._piece_tokens + 2 * self.level(job)",
        f"{_URGENCY}::test_a_piece_of_work_is_worth_a_level",
    ),
    Mutation(
        "what a change of settings raises ends the scheduler",
        "patches/scheduler/switch.py",
        "    except Exception as error:\n        logger",
        "    except OSError as error:\n        logger",
        f"{_SWITCH}::test_a_scheduler_lives_on_whatever_a_switch_raises",
    ),
    Mutation(
        "noise hides what a token takes",
        "sage_sched/step_learner.py",
        "max(found[of_tokens], least_s)",
        "found[of_tokens]",
        "tests/sage_sched/test_step_fit.py::test_noise_hides_no_slope",
    ),
    Mutation(
        "a token may take no time, and its worth is divided by that",
        "sage_sched/slo/policy.py",
        "_LEAST_EXEC_S = 1e-9",
        "_LEAST_EXEC_S = 0.0",
        "tests/bench/engines/simulator/test_extremes.py::"
        "test_steps_that_take_as_long_whatever_is_in_them_can_be_gone_by",
    ),
    Mutation(
        "one that runs yields to whoever has waited for longer",
        "sage_sched/urgency/policy.py",
        "        if self.level(waiting) >= self.level(running):\n",
        "        if self.key(waiting, view) >= self.key(running, view):\n",
        f"{_URGENCY}::test_one_yields_to_a_more_urgent_one_alone",
    ),
    Mutation(
        "a guess at urgency that raises costs its request",
        "patches/http/urgency.py",
        "        except Exception:",
        "        except ValueError:",
        f"{_GUESS}::test_a_guess_that_fails_is_counted_and_its_request_is_as_most",
    ),
    Mutation(
        "guesses are judged on what they were learned from",
        "predictor_store/urgency/head.py",
        "train, test = fold != number, fold == number",
        "train, test = fold >= 0, fold == number",
        f"{_HEAD}::test_levels_are_held_out_when_they_are_judged",
    ),
    Mutation(
        "a parked prefill is passed however long it has been overtaken",
        "sage_sched/best_effort/policy.py",
        "return is_sensitive and place_of(job, self, view) < first",
        "return is_sensitive",
        f"{_CORE_SLICES}::test_nobody_passes_best_effort_that_has_been_overtaken_for_long_enough",
    ),
    Mutation(
        "the simulator forgets the answers of a parked prefill",
        "bench/engines/simulator/prefill_adder.py",
        "[*state.running_jobs(), *(progress.job for progress in state.parked)]",
        "state.running_jobs()",
        "tests/bench/engines/simulator/test_slices.py"
        "::test_nobody_passes_without_a_slot_or_memory_for_the_parked_ones_answer",
    ),
    Mutation(
        "GoRouting fills the nodes that are full already",
        "sage_sched/routing/router.py",
        "fits = is_candidate & (load_s + view.prefill_s <= self.lambda_ * view.ttft_s)",
        "fits = is_candidate",
        f"{_ROUTER}::test_gorouting_is_algorithm_2",
    ),
    Mutation(
        "what a node has worked off since it was heard of counts as work",
        "sage_sched/routing/router.py",
        "view.by_queue(view.exec_s) + view.decode_s - view.queue_age_s",
        "view.by_queue(view.exec_s) + view.decode_s",
        f"{_ROUTER}::test_what_was_worked_off_since_is_taken_off",
    ),
    Mutation(
        "a router goes on counting what has ended",
        "patches/http/dispatch.py",
        "            if has_ended:\n",
        "            if False:\n",
        f"{_DISPATCH}::test_what_has_ended_counts_no_more",
    ),
    Mutation(
        "answers that are not streamed count as waiting until their 50th token",
        "sage_sched/routing/ledger.py",
        "untold = np.flatnonzero(num_more > 0)",
        "untold = np.flatnonzero(num_more < 0)[:0]",
        f"{_DISPATCH}::test_a_snapshot_says_that_answers_have_begun_of_which_nothing_was_heard",
    ),
    Mutation(
        "a router thinks that a prefill holds up nobody but its own request",
        "sage_sched/routing/router.py",
        "(1 + view.by_node()) * view.prefill_s + slower_s",
        "view.prefill_s + slower_s",
        f"{_ROUTER}::test_a_prefix_draws_requests_as_far_as_it_saves_time",
    ),
    Mutation(
        "requests are sent to a replica that has died",
        "patches/http/dispatch.py",
        "            self._alive.remove(rank)\n",
        "            pass\n",
        f"{_DISPATCH}::test_nothing_is_sent_to_the_dead",
    ),
    Mutation(
        "a controller waits for ever to send to a replica that has died",
        "patches/http/replica_watch.py",
        "        taken.recv()\n",
        "        return\n",
        "tests/patches/http/test_replica_watch.py"
        "::test_the_controller_tells_of_a_death_and_is_never_stuck_on_the_dead",
    ),
    Mutation(
        "who asks all replicas waits for the dead one too",
        "patches/http/dispatch.py",
        "            communicator.set_fan_out(num_alive)\n",
        "",
        "tests/patches/http/test_replica_watch.py"
        "::test_what_all_were_asked_is_answered_by_those_that_are_left",
    ),
    Mutation(
        "a router overrules the rank that a client gives",
        "patches/http/dispatch.py",
        "        if given is None:\n",
        "        if True:\n",
        f"{_DISPATCH}::test_a_request_goes_where_less_work_is_foreseen",
    ),
    Mutation(
        "somebody's own package is taken for ours",
        "sage_sched/parts_finder.py",
        "sys.meta_path.insert(0, _PartsFinder)",
        "sys.meta_path.append(_PartsFinder)",
        "tests/test_package.py::test_sglang_knows_the_policies_beside_somebodys_own_packages",
    ),
    Mutation(
        "a wheel leaves the predictor's data behind",
        "pyproject.toml",
        'predictor_store = ["predict/*.json",',
        'predictor_store = ["predict/*.toml",',
        "tests/test_package.py::test_the_wheel_holds_every_file_of_the_packages_and_nothing_else",
    ),
    Mutation(
        "a changed function that is called is noticed only when a request yields",
        "patches/plugin.py",
        "    check_calls()\n",
        "    pass\n",
        "tests/patches/test_plugin.py::test_a_hook_that_sglang_renamed_is_refused_by_name",
    ),
    Mutation(
        "a model is predicted from another's answers",
        "predictor_store/service/worker.py",
        'key = model if self._by_model else ""',
        'key = ""',
        f"{_SERVER}::test_models_are_told_apart_and_clients_of_one_share",
    ),
    Mutation(
        "a score is fitted to answers that go on",
        "predictor_store/predict/history.py",
        "ended = np.flatnonzero(~self.unfinished[: len(self)])",
        "ended = np.arange(len(self))",
        "tests/predictor_store/predict/test_history.py::test_no_score_is_fitted_to_answers_that_go_on",
    ),
    Mutation(
        "an answer that went on is a record twice",
        "predictor_store/predict/model.py",
        "if place is None or not self._history.amend(place, record):",
        "if True:",
        "tests/predictor_store/service/test_worker.py::"
        "test_an_answer_that_went_on_is_one_record_in_the_end",
    ),
    Mutation(
        "others may connect to a service's socket",
        "predictor_store/service/sockets.py",
        "mask = os.umask(0o177)",
        "mask = os.umask(0)",
        f"{_SERVER}::test_a_unix_socket_is_its_owners_alone",
    ),
    Mutation(
        "any token will do",
        "predictor_store/service/connection.py",
        "if protocol.is_same(proof, expected):",
        "if proof:",
        f"{_SERVER}::test_over_tcp_alone_a_token_is_asked_for",
    ),
    Mutation(
        "a byte is as good as a hello",
        "predictor_store/service/server.py",
        'talk = talk_in_lines if first == b"{" else http.talk',
        'talk = [client.allow(None), talk_in_lines if first == b"{" else http.talk][1]',
        f"{_SERVER}::test_who_has_not_said_all_in_time_is_hung_up_on",
    ),
    Mutation(
        "strangers keep others out",
        "predictor_store/service/server.py",
        "if not client.is_known and client.task is not None:",
        "if False:",
        f"{_SERVER}::test_strangers_keep_nobody_out",
    ),
    Mutation(
        "a body is read without the token",
        "predictor_store/service/http.py",
        'raise RequestError(HTTPStatus.UNAUTHORIZED, "the token is not the service\'s")',
        "self._connection.allow(None)",
        f"{_SERVER}::test_the_token_comes_before_the_body",
    ),
    Mutation(
        "predictions worse than none are used",
        "predictor_store/predict/model.py",
        "return forecast.blind if self._quality.widened else forecast.said",
        "return forecast.said",
        f"{_WORKER}::test_a_poisoned_history_is_seen_through",
    ),
    Mutation(
        "thinking, tools and formats make no difference before a regression is fitted",
        "predictor_store/predict/predictor.py",
        "(foreign, _FOREIGN_WORTH), (other, _OTHER_WORTH)",
        "(foreign, _FOREIGN_WORTH),",
        "tests/predictor_store/predict/test_asked.py"
        "::test_the_same_words_asked_otherwise_are_answered_otherwise",
    ),
    Mutation(
        "a class is granted beyond its share",
        "sage_sched/slo/classes.py",
        "            name = config.default\n            self._num_demoted",
        "            self._num_demoted",
        "tests/sage_sched/slo/test_classes.py"
        "::test_if_all_claim_the_best_class_those_beyond_its_share_get_the_default",
    ),
    Mutation(
        "a client says of which class it is",
        "patches/carrier.py",
        "_hints(custom_params, CLIENTS_HINTS)",
        "_hints(custom_params, _HINTS)",
        f"{_CARRIER}::test_no_client_names_its_class",
    ),
    Mutation(
        "a stamp from another clock makes a request an hour late",
        "patches/carrier.py",
        "now_s - _MOST_AGE_S <= came_s <= now_s",
        "came_s == came_s",
        f"{_CARRIER}::test_a_stamp_that_cannot_be_counts_as_now",
    ),
    Mutation(
        "a pass does not know what time it is",
        "patches/scheduler/view.py",
        "now_s=jobs.now_s,",
        "now_s=0.0,",
        f"{_STATE}::test_a_tick_dates_those_that_came_with_it",
    ),
    Mutation(
        "a request that can no longer be in time shortens everybody's batch",
        "sage_sched/slo/slide.py",
        "in_time = queue.remain_s >= queue.exec_s + self.fixed_s",
        "in_time = queue.remain_s >= -math.inf",
        "tests/sage_sched/slo/test_slide.py::test_the_order_is_that_of_algorithm_1",
    ),
    Mutation(
        "a prompt that is found to be cached loses its place",
        "sage_sched/slo/policy.py",
        "            promised.looked_at = NEVER",
        "            promised.looked_at, promised.key = NEVER, 0.0",
        "tests/sage_sched/slo/test_policy.py"
        "::test_what_is_found_to_be_cached_in_a_pass_takes_nobody_out_of_the_order",
    ),
    Mutation(
        "scores of hidden states are told once, and lost if SGLang skips the broadcast",
        "patches/probe/scores.py",
        '            steps=b"".join(row.tobytes() for row in self._steps),',
        '            steps=b"".join([self._steps.pop().tobytes() for _ in self._arrivals]),',
        f"{_PROBE}::test_scores_are_told_until_they_have_come_and_once_applied",
    ),
    Mutation(
        "scores that are no numbers count",
        "patches/probe/scores.py",
        "if not np.isfinite(logits[row]).all():",
        "if False:",
        f"{_PROBE}::test_scores_that_are_no_numbers_are_counted_and_dropped",
    ),
    Mutation(
        "scores count alike at all ages",
        "sage_sched/probe/posterior.py",
        "log_seen = reading.gamma * log_seen + self._beta[band, None] * seen",
        "log_seen = reading.gamma * log_seen + self._beta.max() * seen",
        "tests/sage_sched/probe/test_posterior.py"
        "::test_scores_count_as_much_as_those_of_their_band_of_ages",
    ),
    Mutation(
        "scores that are held back for a pass are lost",
        "patches/probe/scores.py",
        "        if not held:\n            self._num_held_back = 0\n",
        "        if held:\n            self._drop(len(self._steps))\n",
        f"{_PROBE}::test_where_many_run_scores_are_told_every_few_passes_together",
    ),
    Mutation(
        "a probe of another model is taken",
        "patches/probe/setup.py",
        "        if of_probe != of_model:",
        "        if False:",
        f"{_PROBE}::test_a_probe_of_another_model_stops_the_start_and_both_values_are_named",
    ),
    Mutation(
        "a late prediction costs the request its prior",
        "predictor_store/service/client.py",
        "answer.set_result(Prediction(handle, self._prior))",
        "answer.set_result(Prediction(handle, None))",
        f"{_CLIENT}::test_a_hung_worker_costs_the_prediction_alone",
    ),
    Mutation(
        "a late prediction is not counted",
        "predictor_store/service/client.py",
        'self._counts["num_deadline_misses"] += 1',
        "pass",
        f"{_CLIENT}::test_a_hung_worker_costs_the_prediction_alone",
    ),
    Mutation(
        "memory that runs out while nothing else has happened is seen too late",
        "sage_sched/decide.py",
        "        and not view.is_short\n",
        "",
        f"{_DEPARTURE}::test_it_is_asked_in_a_full_batch_in_which_nothing_else_has_happened",
    ),
    Mutation(
        "as memory runs out the first of the order leave",
        "sage_sched/departure.py",
        "for position in reversed(order):",
        "for position in order:",
        f"{_DEPARTURE}::test_as_many_yield_as_it_takes_for_the_headroom_of_the_others",
    ),
    Mutation(
        "those who leave for lack of memory fill host memory beyond its size",
        "sage_sched/departure.py",
        "host_free_tokens -= leaving.host_tokens",
        "pass",
        f"{_DEPARTURE}::test_what_host_memory_has_no_room_for_is_computed_again",
    ),
    Mutation(
        "the price of a departure counts for nothing",
        "sage_sched/admission.py",
        "price_s = _price_s(view, kv_tokens // num_running)",
        "price_s = 0.01",
        "tests/sage_sched/test_admission.py::test_it_is_larger_where_a_departure_is_dearer",
    ),
    Mutation(
        "a document that many ask about at once is computed for each",
        "patches/scheduler/view.py",
        "return common_length(ids, other_ids)",
        "return 0",
        "tests/engine/test_twins.py",
    ),
    Mutation(
        "what is asked beside a prompt's words never reaches the worker",
        "predictor_store/service/client.py",
        '            "asked": msgspec.to_builtins(asked),\n',
        "",
        f"{_CLIENT}::test_what_is_asked_beside_the_words_comes_along",
    ),
    Mutation(
        "each request waits in vain for a worker that hangs",
        "predictor_store/service/client.py",
        "if self._is_silent:",
        "if False:",
        f"{_CLIENT}::test_a_hung_worker_costs_the_prediction_alone",
    ),
    Mutation(
        "requests wait for a worker that has died",
        "predictor_store/service/client.py",
        "            _settle(answer, Prediction(None, self._prior))",
        "            pass",
        f"{_CLIENT}::test_a_killed_worker_costs_the_prediction_alone_and_comes_back",
    ),
    Mutation(
        "a worker's restart is not counted",
        "predictor_store/service/client.py",
        'self._counts["num_worker_restarts"] += before is not None',
        "pass",
        f"{_CLIENT}::test_a_killed_worker_costs_the_prediction_alone_and_comes_back",
    ),
    Mutation(
        "what a full disk did not take is forgotten",
        "predictor_store/store/store.py",
        "            self._tell(error)\n            self._retry_at",
        "            self._unwritten.clear()\n            self._retry_at",
        f"{_STORE}::test_a_full_disk_delays_writing_and_is_logged_once",
    ),
    Mutation(
        "a damaged record is read",
        "predictor_store/store/file.py",
        "if not sound or _crc32(record_id, *fields) != crc32:",
        "if not sound:",
        f"{_STORE}::test_a_record_with_flipped_bits_is_refused",
    ),
    Mutation(
        "a store of another embedder is read",
        "predictor_store/store/store.py",
        "    if made_with[0] != made_with[1]:",
        "    if made_with[0] != made_with[0]:",
        f"{_STORE}::test_a_store_of_another_embedder_is_refused",
    ),
    Mutation(
        "a malformed carrier is an error that nobody expects",
        "sage_sched/distribution.py",
        "except (KeyError, TypeError, OverflowError) as error:",
        "except KeyError as error:",
        f"{_CARRIER}::test_a_malformed_carrier_is_an_error_that_the_scheduler_expects",
    ),
    Mutation(
        "a malformed carrier is not counted",
        "patches/scheduler/jobs.py",
        "self._num_malformed += 1",
        "pass",
        f"{_STATE}::test_what_cannot_be_ranked_keeps_its_place",
    ),
    Mutation(
        "a client writes himself a short job",
        "patches/carrier.py",
        "if not (isinstance(key, str) and key.startswith(_PREFIX))",
        "if isinstance(key, str)",
        f"{_CARRIER}::test_reserved_keys_are_stripped_and_the_others_kept",
    ),
    Mutation(
        "a policy that raises takes the scheduler along",
        "patches/scheduler/state.py",
        '            self.failures.count("plan a pass")\n',
        "            raise\n",
        f"{_STATE}::test_a_failing_policy_means_order_of_arrival_and_one_log_line",
    ),
    Mutation(
        "a job is sorted by a clock",
        "patches/scheduler/jobs.py",
        "served_at_arrival_tokens=self.served_tokens,",
        "served_at_arrival_tokens=time.perf_counter_ns() % 100_000,",
        f"{_STATE}::test_two_ranks_that_see_the_same_decide_alike",
    ),
    Mutation(
        "jobs stay ranked by old step times",
        "sage_sched/line.py",
        "                policy.on_forecast(job)\n",
        "",
        "tests/sage_sched/test_ranked_anew.py",
    ),
    Mutation(
        "one stall counts as much as a hundred steps",
        "sage_sched/step_learner.py",
        "counts = np.minimum(1.0, _OUTLIER * spread / np.maximum(errors, 1e-12))",
        "counts = np.ones_like(errors)",
        "tests/sage_sched/test_step_fit.py::test_stalls_hardly_count",
    ),
    Mutation(
        "rank 0 goes by what it has learned before the others do",
        "patches/scheduler/calibration.py",
        "        self._news = StepTimes(",
        "        self.step_time = step_time\n        self._news = StepTimes(",
        "tests/patches/scheduler/test_calibration.py::test_it_is_said_again_until_it_has_come_back",
    ),
    Mutation(
        "step times are said once, and lost where a rank skips the broadcast",
        "patches/scheduler/calibration.py",
        "        return self._news\n",
        "        news, self._news = self._news, None\n        return news\n",
        "tests/patches/scheduler/test_calibration.py::test_it_is_said_again_until_it_has_come_back",
    ),
    Mutation(
        "a file of step times, or an encoder, is reached through a link",
        "predictor_store/cached_file.py",
        "flags | os.O_NOFOLLOW | os.O_NONBLOCK",
        "flags | os.O_NONBLOCK",
        "tests/patches/scheduler/test_step_time_file.py::test_a_link_is_followed_neither_way",
    ),
    Mutation(
        "a speculative step counts as one token of each request",
        "patches/scheduler/calibration.py",
        "*(self._mean_tokens * n for n in work[4:])",
        "*work[4:]",
        "tests/patches/scheduler/test_calibration.py::test_seconds_a_token_are_right_where_a_step_gives_several",
    ),
    Mutation(
        "one attention group waits for all others to move KV",
        "patches/scheduler/kv_copy.py",
        "    group = scheduler.attn_tp_group\n",
        "    group = scheduler.tp_group\n",
        "tests/engine/test_modes.py::test_each_attention_group_decides_for_itself_and_its_ranks_alike",
    ),
    Mutation(
        "what an aborted request has of the hierarchical cache's host memory is never given back",
        "patches/scheduler/hooks.py",
        "        if is_swapped(req):\n",
        "        if False:\n",
        "tests/engine/test_modes.py::test_a_hierarchical_cache_takes_what_leaves_the_device",
    ),
    Mutation(
        "requests come back to a decode server with more adapters than a batch has room for",
        "patches/scheduler/decode_pass.py",
        "if not has_adapter(",
        "if False and not has_adapter(",
        "tests/engine/test_pair.py::test_adapters_of_which_a_batch_has_room_for_one",
    ),
    Mutation(
        "on decode servers the starved have all of the work for their share",
        "sage_sched/slo/slide.py",
        "(first.served_tokens or first in view.running)",
        "first.served_tokens",
        "tests/sage_sched/slo/test_policy.py::test_one_that_has_room_on_a_decode_server_has_had_its_turn",
    ),
    Mutation(
        "a batch gets more adapters than it has room for",
        "patches/scheduler/kv_copy.py",
        "    if not scheduler.enable_lora:",
        "    if not scheduler.enable_lora or others:",
        "tests/engine/test_modes.py::test_adapters_of_which_a_batch_has_room_for_one",
    ),
    Mutation(
        "prompts of embeddings and of tokens share a prefill, which ends SGLang's scheduler",
        "patches/scheduler/admission.py",
        "    if others and (",
        "    if False and (",
        "tests/engine/test_modes.py::test_prompts_of_embeddings_are_served_and_stay",
    ),
    Mutation(
        "a copy of KV counts as a step's time",
        "patches/scheduler/calibration.py",
        "    def interrupted(self) -> None:\n"
        '        """Something that is no part of a step takes time."""\n'
        "        self._since_s = None\n",
        "    def interrupted(self) -> None:\n        pass\n",
        "tests/patches/scheduler/test_step_meter.py::test_a_step_that_something_came_into_is_not_told_of",
    ),
    Mutation(
        "a hook that is gone is not missed",
        "patches/hook.py",
        '        raise _misfit(use, target, f"is not there ({why})") from error',
        "        return",
        "tests/patches/test_plugin.py::test_a_hook_that_sglang_renamed_is_refused_by_name",
    ),
    Mutation(
        "a prompt that others read counts as given back",
        "patches/scheduler/kv_copy.py",
        "    return alone + unlocked\n",
        "    return int(req.kv.kv_allocated_len)\n",
        "tests/patches/scheduler/test_kv_copy.py::test_a_shared_prompt_is_freed_by_the_last_that_reads_it",
    ),
    Mutation(
        "the order is that of a queue that one rank alone has reordered",
        "sage_sched/order.py",
        "line.walk(view, policy)",
        "view.waiting",
        f"{_STATE}::test_the_order_does_not_depend_on_how_the_queue_was_ordered_before",
    ),
    Mutation(
        "a request yields that asks for experts, which are kept by slot",
        "patches/scheduler/survival.py",
        "value is not unused and (type(value) is not type(unused) or value != unused)",
        "value is None",
        "tests/patches/scheduler/test_survival.py",
    ),
    Mutation(
        "an abort that overtakes its request is lost",
        "patches/scheduler/early_aborts.py",
        "            scheduler.abort_request(AbortReq(rid=request.rid))\n",
        "            pass\n",
        "tests/engine/test_prediction.py::"
        "test_an_abort_that_comes_while_the_prediction_is_awaited_is_not_lost",
    ),
    Mutation(
        "whoever asks a server how it goes can end it",
        "patches/scheduler/hooks.py",
        "        except Exception as error:  # whoever",
        "        except OSError as error:  # whoever",
        "tests/patches/scheduler/test_hooks.py::"
        "test_a_scheduler_goes_on_though_what_it_counts_cannot_be_told",
    ),
    Mutation(
        "replicas keep to themselves how long their steps take",
        "patches/scheduler/hooks.py",
        "return news if dispatches(scheduler.server_args, config) else None",
        "return None",
        f"{_DISPATCH}::test_the_http_process_hears_of_steps_where_it_dispatches_alone",
    ),
    Mutation(
        "what waits at a replica is as long as it was by other steps",
        "sage_sched/routing/ledger.py",
        "        self._server = replace(self._server, step_time=step_time)\n",
        "        pass\n",
        f"{_DISPATCH}::test_deadlines_are_told_by_the_replicas_own_steps",
    ),
    Mutation(
        "a prompt without a token reaches a scheduler",
        "patches/http/door.py",
        "    if ids is not None and not len(ids) and",
        "    if ids is None and not len(ids) and",
        "tests/patches/http/test_door.py::test_an_empty_prompt_is_refused",
    ),
    Mutation(
        "an abort that comes to another HTTP process and overtakes its request is lost",
        "patches/http/hooks.py",
        'rid != "" and manager.server_args.tokenizer_worker_num > 1',
        "False",
        f"{_EARLY}::test_schedulers_hear_of_what_may_be_too_early",
    ),
    Mutation(
        "whoever takes an id that was aborted is aborted",
        "patches/scheduler/early_aborts.py",
        "(came_s if begins else begun_s) <= self._sent_s[begins]",
        "True",
        f"{_EARLY}::test_who_was_given_up_goes_and_nobody_else",
    ),
    Mutation(
        "one that finds no room loses its copy",
        "patches/scheduler/kv_copy.py",
        "    if not _given_room(scheduler, req, num_tokens, kept):\n",
        "    if not _given_room(scheduler, req, num_tokens, kept):\n        drop(scheduler, req)\n",
        f"{_FAILURES}::test_one_that_finds_no_room_keeps_its_copy_and_tries_again",
    ),
    Mutation(
        "who comes back takes for its own what was computed anew",
        "patches/scheduler/kv_copy.py",
        "    num_same = int((left[: len(slots)] == slots).cumprod(0).sum())\n",
        "    num_same = len(slots)\n",
        "tests/patches/scheduler/test_kv_copy.py::test_kv_that_was_computed_anew_is_not_its_own",
    ),
    Mutation(
        "others yield to one whose adapter finds no room",
        "sage_sched/adapters.py",
        "if view.has_adapter(position := positions.of(job)) and fits(position):",
        "if True:",
        "tests/sage_sched/test_decide.py::test_nobody_yields_to_one_whose_adapter_finds_no_room",
    ),
    Mutation(
        "the newest prompt of a burst goes first",
        "predictor_store/service/worker.py",
        "                following = next(iter(queue))\n",
        "                following = next(reversed(queue))\n",
        "tests/predictor_store/service/test_worker.py"
        "::test_prompts_are_predicted_in_the_order_in_which_they_came",
    ),
    Mutation(
        "a picture that nobody reads lets any token in",
        "patches/http/door.py",
        "    return manager.mm_processor is not None and bool(obj.contains_mm_input())\n",
        "    return bool(obj.contains_mm_input())\n",
        "tests/patches/http/test_door.py::test_a_picture_lets_no_token_in_where_it_is_not_read",
    ),
    Mutation(
        "a wrong length is restored",
        "patches/scheduler/kv_copy.py",
        "    req.kv.kv_committed_len = num_tokens\n",
        "    req.kv.kv_committed_len = num_tokens - 1\n",
        f"{_PREEMPTION}::test_an_answer_is_the_same_whoever_it_yielded_to",
    ),
    Mutation(
        "one token's KV is not copied",
        "patches/scheduler/kv_copy.py",
        "        restored = True\n",
        "        row = pool.req_to_token[req.kv.req_pool_idx]\n"
        "        allocator.get_kvcache().k_buffer[0][row[num_tokens // 2]] = 0\n"
        "        restored = True\n",
        f"{_PREEMPTION}::test_an_answer_is_the_same_whoever_it_yielded_to",
    ),
    Mutation(
        "a chunk goes on without room",
        "patches/scheduler/executor.py",
        "self._retract_for_chunk(budget) if self.is_chunking else []",
        "[]",
        "tests/patches/scheduler/test_executor.py"
        "::test_the_last_of_the_order_leave_before_a_chunk_that_has_no_room",
    ),
    Mutation(
        "a slot is given back twice",
        "patches/scheduler/kv_copy.py",
        "    retract(running_batch, req)\n    return True\n",
        "    retract(running_batch, req)\n"
        "    free = scheduler.req_to_token_pool.free_slots\n    free += free[-1:]\n"
        "    return True\n",
        f"{_PREEMPTION}::test_an_answer_is_the_same_whoever_it_yielded_to",
    ),
    Mutation(
        "the KV of a copy that failed on one rank is given up on the other",
        "patches/scheduler/kv_copy.py",
        "    return int(numbers.item())",
        "    return number",
        f"{_FAILURES}::test_where_the_copy_fails_on_one_rank_both_go_on",
    ),
    Mutation(
        "what is penalized is forgotten at a return",
        "patches/scheduler/kv_copy.py",
        "        said = torch.tensor(reqs[0].output_ids[:-1],",
        "        said = torch.tensor(reqs[0].output_ids[:0],",
        f"{_PREEMPTION}::TestPagesOf16WithoutOverlapAndLittleHostMemory::"
        "test_penalties_go_on_where_what_was_said_decides_at_every_step",
    ),
    Mutation(
        "a policy is switched to that needs a probe which there is not",
        "patches/scheduler/switch.py",
        "    require(not reason,",
        "    require(True,",
        f"{_SWITCH}::test_a_refused_value_changes_nothing_and_says_why",
    ),
    Mutation(
        "who runs never meets the policy that was switched to",
        "patches/scheduler/switch.py",
        "        *(req for batch in batches for req in batch.reqs),",
        "        *(),",
        f"{_SWITCH}::test_who_runs_and_who_waits_for_a_grammar_meets_the_new_policy_too",
    ),
    Mutation(
        "a promise ends with the policy that made it",
        "sage_sched/job.py",
        "        self.is_ranked = True\n        self.refined = None\n",
        "        self.is_ranked, self.has_promise = True, False\n        self.refined = None\n",
        f"{_SWITCH}::test_a_promise_stands",
    ),
    Mutation(
        "the least priority goes first",
        "patches/scheduler/priorities.py",
        "else -req.priority",
        "else req.priority",
        "tests/patches/scheduler/test_priorities.py",
    ),
    Mutation(
        "requests yield though that was switched off",
        "sage_sched/decide.py",
        "yields = view.may_leave and willing",
        "yields = willing",
        "tests/sage_sched/test_decide.py"
        "::test_if_preemption_is_switched_off_nobody_yields_and_those_that_have_come_back",
    ),
    Mutation(
        "the last chunk of a prompt is charged by its cap",
        "patches/scheduler/hooks.py",
        '    @hooks.at(f"{_ADDER}.add_chunked_req", AROUND, "req")\n',
        "",
        "tests/patches/scheduler/test_admission.py"
        "::test_the_last_chunk_of_a_prompt_reserves_the_headroom_and_not_the_cap",
    ),
    Mutation(
        "what is in host memory is prefilled again under SGLang's own order",
        "patches/scheduler/state.py",
        "return not self.settings.is_stock or self.preemption is not None",
        "return not self.settings.is_stock",
        f"{_SWITCHED}::test_those_in_host_memory_come_back_under_sglangs_own_order",
    ),
    Mutation(
        "anybody may change settings where there are several HTTP processes",
        "patches/http/settings_route.py",
        "auth_level=AuthLevel.ADMIN_OPTIONAL,",
        "auth_level=AuthLevel.NORMAL,",
        f"{_SWITCH}::test_who_may_change_settings",
    ),
    Mutation(
        "the rank that speaks on /metrics goes on with other ages than the others",
        "patches/scheduler/metrics.py",
        "    job: Job = copy(req.sage.job)",
        "    job: Job = req.sage.job",
        "tests/patches/scheduler/test_metrics.py"
        "::test_the_rank_that_speaks_goes_on_as_the_others_do",
    ),
    Mutation(
        "anybody may read a trace or a shadow record",
        "patches/json_lines.py",
        "os.fchmod(file.fileno(), 0o600)",
        "os.fchmod(file.fileno(), 0o644)",
        f"{_LINES}::test_only_its_owner_may_read_it_and_no_link_is_followed",
    ),
    Mutation(
        "a trace grows until the disk is full",
        "patches/json_lines.py",
        "if file.tell() + len(self._lines[0]) > self._max_bytes:",
        "if file.tell() < 0:",
        f"{_LINES}::test_it_grows_to_its_limit_and_keeps_what_is_latest",
    ),
    Mutation(
        "a disk that hangs fills the scheduler's memory",
        "patches/json_lines.py",
        "len(self._lines) >= _MOST_WAITING:",
        "len(self._lines) < 0:",
        f"{_LINES}::test_a_disk_that_hangs_costs_lines_and_no_memory",
    ),
    Mutation(
        "one tenant's flood holds up all others",
        "sage_sched/line.py",
        "if (turn := next(turns[of_class], None)) is not None:",
        "if (turn := job) is not None:",
        "tests/sage_sched/fairness/test_tenants.py::test_a_flood_of_one_tenant_does_not_hold_up_another",
    ),
    Mutation(
        "of too many tenants one that waits is forgotten",
        "sage_sched/fairness/tenants.py",
        "if name not in busy)",
        "if name)",
        "tests/sage_sched/fairness/test_tenants.py::test_who_waits_or_runs_is_not_forgotten_however_many_come",
    ),
    Mutation(
        "who comes while nobody waits begins with nothing had",
        "sage_sched/fairness/tenants.py",
        "waited & names.keys() or waited)",
        "waited & names.keys())",
        "tests/sage_sched/fairness/test_tenants.py::test_nor_by_coming_while_nobody_waits",
    ),
    Mutation(
        "the KV of a session that is away counts as that of one that is here",
        "sage_sched/admission.py",
        "if least_rate < returns.rate(session, view.now_s) < math.inf",
        "if least_rate < returns.rate(session, view.now_s)",
        "tests/sage_sched/test_returns.py::"
        "test_nobody_enters_for_kv_that_is_worth_more_unless_nobody_runs",
    ),
    Mutation(
        "a chat that names no session is nobody's",
        "patches/http/predict.py",
        "    if not hints.session:",
        "    if False and not hints.session:",
        "tests/engine/test_sessions.py::"
        "test_the_kv_of_a_session_that_will_soon_be_back_outlives_that_of_others",
    ),
    Mutation(
        "nobody's first answer is the last",
        "sage_sched/returns.py",
        "(1 + num_known - num_second)",
        "1.0",
        "tests/sage_sched/test_returns.py::test_how_many_come_back_after_a_first_answer_is_learned",
    ),
    Mutation(
        "the branch that a session has left is kept for it",
        "patches/scheduler/session_kv.py",
        '                    node.sage_session = ""',
        "                    pass",
        "tests/engine/test_sessions.py::"
        "test_the_kv_of_a_session_that_will_soon_be_back_outlives_that_of_others",
    ),
    Mutation(
        "the copy outlives a flush",
        "patches/scheduler/hooks.py",
        "            self.sage.preemption.forget_copies()",
        "            pass",
        f"{_PREEMPTION}::test_what_a_flush_makes_stale_is_computed_again",
    ),
    Mutation(
        "whatif foresees an answer by others that have not ended",
        "bench/whatif/foresight.py",
        "while running and running[0][0] <= request.arrival_s:",
        "while running:",
        "tests/bench/whatif/test_answer.py::"
        "test_a_prompt_is_foreseen_by_answers_that_had_ended_and_by_no_other",
    ),
    Mutation(
        "the shadow writes into requests",
        "patches/ops/shadow.py",
        "state.prediction = asyncio.ensure_future(predicted)",
        'obj.sampling_params["custom_params"] = {"sage": predicted}',
        "tests/engine/test_shadow_mode.py::"
        "test_the_shadow_changes_nothing_and_writes_down_what_it_said",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Break it on purpose: does a test notice?")
    parser.add_argument("words", nargs="*", help="only the breaks whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="none that needs a server's test")
    args = parser.parse_args()
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not args.words or any(word in mutation.breaks for word in args.words)
        if not (args.quick and mutation.test.startswith("tests/engine/"))
    ]
    survivors = []
    nursery = Nursery()
    with tempfile.TemporaryDirectory(prefix="mutated-") as name:
        checkout = Path(name)
        _copy(checkout)
        code, output = _run(nursery, checkout, *sorted({mutation.test for mutation in chosen}))
        if code != 0:
            print(f"a test fails on what is not broken:\n{output}")
            return 2
        for mutation in (progress := tqdm(chosen, desc="broken", unit="break")):
            progress.set_postfix_str(mutation.breaks)
            caught, output = caught_in(nursery, checkout, mutation)
            tqdm.write(f"{'caught' if caught else 'NOT CAUGHT'}: {mutation.breaks}")
            if not caught:
                survivors.append(mutation.breaks)
                tqdm.write(output)
    nursery.close()
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} breaks caught")
    return int(bool(survivors))


def caught_in(nursery: Nursery, checkout: Path, mutation: Mutation) -> tuple[bool, str]:
    """Whether the test fails with the break, and what it said. The break is mended again."""
    path = checkout / mutation.file
    sound = path.read_text(encoding="utf-8")
    if sound.count(mutation.old) != 1:
        return False, f"{mutation.file} does not have it once: {mutation.old}"
    path.write_text(sound.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        code, output = _run(nursery, checkout, mutation.test)
    finally:
        path.write_text(sound, encoding="utf-8")
    return code == _FAILED, output


def _copy(checkout: Path) -> None:
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, checkout / name, ignore=ignored)
        else:
            shutil.copy(source, checkout / name)


def _run(nursery: Nursery, checkout: Path, *tests: str) -> tuple[int, str]:
    """pytest's exit code and the end of what it said, with the copy's modules before ours."""
    environment = {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    done = nursery.run(_PYTEST, *tests, CHECKOUT=str(checkout), **environment)
    return done.returncode, done.stdout[-3000:] + done.stderr[-1000:]


if __name__ == "__main__":
    sys.exit(main())
