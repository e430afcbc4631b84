"""Removes each guard of the service once, and shows that the test of it fails: `make controls`.

A test that passes without what it is there for proves nothing. The tree is copied, a guard in the
copy is replaced by what a careless change would leave, and the test that is named beside it runs.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_LIMIT_S = 120  # a test that hangs without its guard has noticed, too


class Guard(NamedTuple):
    """A piece of code that a test is there for.

    Attributes:
        file: It stands in.
        code: It, as it stands there, once.
        without: What takes its place.
        test: That must fail then.
    """

    file: str
    code: str
    without: str
    test: str


_T = "tests/service/"

GUARDS = (
    # Batches: faults, bounds, those who leave.
    Guard(
        "service/batching.py",
        "elif len(entries) > 1:",
        "elif False:",
        f"{_T}test_batching_faults.py::test_only_the_request_with_the_guilty_item_fails",
    ),
    Guard(
        "service/batching.py",
        "            await self._check_run(lane)\n",
        "",
        f"{_T}test_app.py::test_an_engine_that_fails_on_everything_turns_readiness_off_and_says_so",
    ),
    Guard(
        "service/batching.py",
        "while (failure := await self._in_thread(lane, _error_of, self._probe)) is not None:",
        "while (failure := None) is not None:",
        f"{_T}test_batching_faults.py::test_a_run_that_raises_on_anything_stops_the_batcher_and_says_so",
    ),
    Guard(
        "service/batching.py",
        "            self._cancel()\n",
        "",
        f"{_T}test_batching_faults.py::"
        "test_a_run_that_takes_too_long_is_cancelled_and_only_its_request_fails",
    ),
    Guard(
        "service/batching.py",
        "asyncio.wait([runs], timeout=began + self._timeout_s - time.perf_counter())",
        "asyncio.wait([runs])",
        f"{_T}test_app.py::test_an_engine_that_hangs_fails_its_callers_and_turns_readiness_off",
    ),
    Guard(
        "service/batching.py",
        "if not failure.is_own:",
        "if False:",
        f"{_T}test_batching_faults.py::test_what_is_cancelled_for_the_sake_of_another_lane_is_run_again",
    ),
    Guard(
        "service/batching.py",
        "raise QueueFull",
        "pass",
        f"{_T}test_batching.py::test_a_full_queue_refuses_and_takes_again_when_it_has_room",
    ),
    Guard(
        "service/batching.py",
        "            self._former.remove(places)\n",
        "",
        f"{_T}test_batching.py::test_cancelled_callers_leave_the_queue",
    ),
    Guard(
        "service/batching.py",
        "wanted = [entry for entry in entries if not entry.request.done.done()]",
        "wanted = list(entries)",
        f"{_T}test_batching_faults.py::test_what_has_failed_is_not_run_any_further",
    ),
    Guard(
        "service/batching.py",
        "                request.done.set_exception(Stopped())",
        "                pass",
        f"{_T}test_batching_faults.py::test_a_defect_of_the_batcher_fails_all_callers_and_is_told",
    ),
    Guard(
        "service/batching.py",
        "if len(results) != len(wanted):",
        "if False:",
        f"{_T}test_batching_faults.py::test_a_run_with_the_wrong_number_of_results_is_a_failure",
    ),
    Guard(
        "service/batch_former.py",
        "self._ring.append(places)\n                return",
        "self._ring.appendleft(places)\n                return",
        f"{_T}test_batch_former.py::test_a_huge_request_holds_a_small_one_for_one_batch_at_most",
    ),
    Guard(
        "service/batching.py",
        "if failure.is_own:\n                raise",
        "if True:\n                raise",
        f"{_T}test_batching_faults.py::"
        "test_a_probe_that_is_cancelled_for_the_sake_of_another_lane_is_run_again",
    ),
    Guard(
        "service/batching.py",
        "entry.request.started or lane.began",
        "lane.began",
        f"{_T}test_batching.py::"
        "test_the_times_of_a_split_request_are_those_from_its_first_batch_on",
    ),
    Guard(
        "service/batching.py",
        "        self._cancel()\n        self._threads",
        "        self._threads",
        f"{_T}test_batching.py::test_closing_cancels_what_runs",
    ),
    Guard(
        "service/batch_former.py",
        "        self._drop_taken()\n",
        "",
        f"{_T}test_batch_former.py::"
        "test_what_has_been_removed_is_kept_no_longer_though_others_wait",
    ),
    Guard(
        "service/middleware.py",
        'self._direct.get((scope["method"], scope["path"]), self._app)',
        "self._app",
        f"{_T}test_routing.py::test_vectors_do_not_come_through_the_application_s_layers",
    ),
    Guard(
        "service/__main__.py",
        "        gc.freeze()\n",
        "",
        f"{_T}test_process.py::test_what_was_loaded_is_not_searched_for_garbage",
    ),
    Guard(
        "service/batching.py",
        "if not self.is_alive:\n            raise Stopped",
        "if False:\n            raise Stopped",
        f"{_T}test_batching_faults.py::test_a_run_that_does_not_come_back_fails_all_callers_and_then_says_so",
    ),
    Guard(
        "service/batching.py",
        "if runs.done() or lane.began > began:",
        "if runs.done():",
        f"{_T}test_batching_faults.py::test_each_of_many_batches_has_the_whole_time_for_itself",
    ),
    Guard(
        "service/batching.py",
        "if took_too_long and not runs.done():",
        "if not runs.done():",
        f"{_T}test_batching_faults.py::"
        "test_a_run_that_comes_back_late_and_unharmed_is_not_taken_for_one_that_does_not",
    ),
    Guard(
        "service/batching.py",
        "took_too_long = lane.began == began",
        "took_too_long = runs.done()",
        f"{_T}test_batching_faults.py::test_what_a_late_cancellation_hits_is_run_again",
    ),
    Guard(
        "service/batching.py",
        "            self._cancel()\n            self._cancellations += 1",
        "            self._cancellations += 1\n            self._cancel()",
        f"{_T}test_batching_faults.py::test_what_begins_during_a_cancellation_is_run_again",
    ),
    Guard(
        "service/batch_former.py",
        "self._lock = threading.Lock()",
        "self._lock = __import__('contextlib').nullcontext()",
        f"{_T}test_batch_former.py::"
        "test_threads_that_add_and_take_at_once_lose_nothing_and_give_nothing_twice",
    ),
    Guard(
        "service/batch_former.py",
        "self._running_tokens -= ended.tokens",
        "pass",
        f"{_T}test_batch_former.py::"
        "test_a_batch_leaves_the_other_lanes_their_share_of_what_waits_and_runs",
    ),
    # What an engine gives.
    Guard(
        "service/runtime.py",
        "if not np.isfinite(vectors).all():",
        "if False:",
        f"{_T}test_app.py::test_a_fault_on_one_input_names_it_and_the_next_request_works",
    ),
    Guard(
        "service/runtime.py",
        "return [results[place] for place in range(len(batch))]",
        "return list(results.values())[::-1]",
        f"{_T}test_faults.py",
    ),
    Guard(
        "models/engines/__init__.py",
        "if not worst >= bound:",
        "if False:",
        "tests/models/test_engines.py",
    ),
    Guard(
        "models/engines/with_onnxruntime.py",
        "options.terminate = True",
        "pass",
        "tests/models/test_engines.py",
    ),
    Guard(
        "models/engines/with_onnxruntime.py",
        'if "CUDAExecutionProvider" not in session.get_providers():',
        "if False:",
        "tests/models/test_engines.py",
    ),
    Guard(
        "models/engines/with_onnxruntime.py",
        "enable_fallback=0,",
        "enable_fallback=1,",
        "tests/models/test_engines.py",
    ),
    # Admission.
    Guard(
        "service/encoding.py",
        "if runtime.batcher.is_full:",
        "if False:",
        f"{_T}test_app.py::test_a_full_queue_is_told_before_anything_is_tokenised",
    ),
    Guard(
        "service/encoding.py",
        "        async with asyncio.timeout(seconds):\n            return await work",
        "        return await work",
        f"{_T}test_app.py::"
        "test_a_deadline_that_passes_is_a_504_and_takes_the_work_out_of_the_queue",
    ),
    Guard(
        "service/encoding.py",
        "await _within(_seconds_allowed(request), _in_tokenizer(request, work, inputs))",
        "await _in_tokenizer(request, work, inputs)",
        f"{_T}test_app.py::test_what_only_the_tokenizer_does_has_a_deadline_too",
    ),
    Guard(
        "service/encoding.py",
        "return min(int(given) / 1e3, longest)",
        "return int(given) / 1e3",
        f"{_T}test_app.py::test_nobody_may_ask_for_more_time_than_the_service_gives",
    ),
    Guard(
        "service/routing.py",
        "if not is_over:",
        "if True:",
        f"{_T}test_routing.py::"
        "test_a_client_that_goes_away_as_the_work_ends_cancels_nothing_that_follows",
    ),
    Guard(
        "service/routing.py",
        "            caller.uncancel()\n",
        "",
        f"{_T}test_routing.py::"
        "test_work_is_cancelled_when_its_client_goes_away_and_its_task_is_not",
    ),
    Guard(
        "service/encoding.py",
        "await while_connected(request, submit(runtime, rows, output))",
        "await submit(runtime, rows, output)",
        f"{_T}test_disconnects.py",
    ),
    Guard(
        "service/encoding.py",
        "return await backlog.run(work, characters)",
        "return work()",
        f"{_T}test_app.py::test_others_are_answered_while_a_large_request_is_tokenised_and_written",
    ),
    Guard(
        "service/backlog.py",
        "if self._size and self._size + size > self._most:",
        "if False:",
        f"{_T}test_app.py::"
        "test_long_inputs_wait_for_the_tokenizer_in_bounds_and_short_ones_do_not_wait",
    ),
    Guard(
        "service/backlog.py",
        "return await asyncio.shield(thread)",
        "return await thread",
        f"{_T}test_backlog.py::test_it_counts_until_its_thread_is_done_even_if_its_caller_has_left",
    ),
    # Bodies.
    Guard(
        "service/body.py",
        "            json.loads(body, object_pairs_hook=_unique)\n",
        "            pass\n",
        f"{_T}test_bad_input.py::test_a_body_that_is_not_json_is_a_400",
    ),
    Guard(
        "service/body.py",
        "    except RecursionError:",
        "    except ZeroDivisionError:",
        f"{_T}test_bad_input.py::test_a_body_that_is_nested_too_deeply_is_refused",
    ),
    Guard(
        "service/body.py",
        "        async with asyncio.timeout(seconds):\n            body =",
        "        if True:\n            body =",
        f"{_T}test_process.py::"
        "test_a_body_that_does_not_come_is_given_up_and_the_connection_closed",
    ),
    Guard(
        "service/body.py",
        "        if len(body) > max_bytes:",
        "        if False:",
        f"{_T}test_bad_input.py::test_a_body_over_the_limit_is_a_413_with_and_without_a_length",
    ),
    Guard(
        "service/body.py",
        "    if media_type != JSON:",
        "    if False:",
        f"{_T}test_bad_input.py::test_anything_but_plain_json_is_a_415",
    ),
    Guard(
        "service/body.py",
        "error.errors(include_url=False, include_input=False)[0]",
        'error.errors(include_url=False)[0]; found["msg"] += repr(found["input"])',
        f"{_T}test_bad_input.py::test_an_error_never_repeats_what_was_sent",
    ),
    Guard(
        "service/tokenizer.py",
        "        self._check_ids(inputs)\n",
        "",
        f"{_T}test_bad_input.py::test_a_wrong_value_is_a_422_that_names_the_index",
    ),
    # The layer around every request.
    Guard(
        "service/middleware.py",
        'return ServiceError("the service failed; its log says why")',
        "raise",
        f"{_T}test_app.py::test_an_error_that_nobody_foresaw_is_a_500_without_a_word_of_it",
    ),
    Guard(
        "service/middleware.py",
        'route = getattr(scope.get("route"), "path", "none")',
        'route = scope["path"]',
        f"{_T}test_attacks.py::test_names_that_clients_make_up_do_not_grow_the_metrics",
    ),
    Guard(
        "service/middleware.py",
        'return names_one_of(Headers(scope=scope).get("host", ""), self._hosts)',
        "return True",
        f"{_T}test_browsers.py::test_only_the_host_names_that_are_set_are_answered_to",
    ),
    Guard(
        "service/tokenizer.py",
        'raise RuntimeError("the tokenizer panicked") from panic',
        "raise",
        f"{_T}test_app.py::test_a_panic_of_the_tokenizer_is_a_500_and_the_next_request_works",
    ),
    # Keys.
    Guard(
        "service/auth.py",
        "if scope not in matches[0].scopes:",
        "if False:",
        f"{_T}test_auth.py::test_a_route_opens_to_its_scope_alone",
    ),
    Guard(
        "service/routes.py",
        '    summary="What is served",\n    dependencies=[scope("encode")],\n',
        '    summary="What is served",\n',
        f"{_T}test_auth.py::test_every_route_declares_one_scope_or_is_known_to_be_public",
    ),
    # The artifact, and the twin that has to be its model.
    Guard(
        "models/artifact.py",
        "if hashlib.sha256(content).hexdigest() != self.manifest.files[name]:",
        "if False:",
        "tests/models/test_artifact.py::test_a_changed_byte_is_refused_with_the_files_name",
    ),
    Guard(
        "models/artifact.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NONBLOCK",
        "tests/models/test_artifact.py::test_a_linked_file_is_refused",
    ),
    Guard(
        "models/artifact.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NOFOLLOW",
        "tests/models/test_artifact.py::test_a_pipe_is_refused_and_not_waited_for",
    ),
    # The end of a process, and of its child.
    Guard(
        "service/app.py",
        "call_later(0.5, os._exit, 1)",
        "call_later(0.5, int)",
        f"{_T}test_process.py::test_an_engine_that_hangs_answers_its_callers_and_ends_the_process",
    ),
    Guard(
        "service/routing.py",
        "    if request.app.state.stopping:",
        "    if False:",
        f"{_T}test_stopping.py::test_at_sigterm_it_is_not_ready_but_answers_until_the_port_closes",
    ),
    Guard(
        "service/server.py",
        "timeout_graceful_shutdown=settings.grace_s,",
        "",
        f"{_T}test_stopping.py::test_a_body_that_never_comes_does_not_keep_it",
    ),
    Guard(
        "service/server.py",
        "call_later(drain_s, self._close)",
        "call_soon(self._close)",
        f"{_T}test_stopping.py::test_at_sigterm_it_is_not_ready_but_answers_until_the_port_closes",
    ),
    Guard(
        "service/server.py",
        "            os._exit(1)\n",
        "            return\n",
        f"{_T}test_stopping.py::test_a_second_signal_ends_it_at_once",
    ),
    Guard(
        "service/server.py",
        "            self._transport.writelines(waiting)",
        "            for piece in waiting:\n                self._transport.write(piece)",
        f"{_T}test_server.py::test_head_and_body_are_written_at_once_and_in_order",
    ),
    Guard(
        "service/debug/worker.py",
        "        os._exit(0)\n",
        "        pass\n",
        f"{_T}test_stopping.py::"
        "test_the_gradient_process_does_not_outlive_a_service_that_is_killed",
    ),
    Guard(
        "service/debug/process.py",
        "except (asyncio.IncompleteReadError, ConnectionError):",
        "except ZeroDivisionError:",
        f"{_T}debug/test_process.py::"
        "test_a_process_that_dies_gives_a_clear_error_and_the_next_job_works",
    ),
    Guard(
        "service/debug/process.py",
        "if self._callers > self._settings.max_waiting:",
        "if False:",
        f"{_T}debug/test_process.py::"
        "test_more_than_may_wait_are_refused_and_the_others_get_their_answers",
    ),
    Guard(
        "service/debug/access.py",
        "    if not names_one_of(host, settings.hosts):",
        "    if False:",
        f"{_T}debug/test_routes.py::test_pages_of_other_hosts_are_refused",
    ),
    # What must not leave the machine.
    Guard(
        "models/__init__.py",
        "ORT_DISABLE_TELEMETRY",
        "ORT_OF_ANOTHER_NAME",
        f"{_T}test_egress.py::test_it_reaches_out_to_nobody",
    ),
    Guard(
        "service/body.py",
        "    if len(body) <= _BYTES_AT_ONCE:",
        "    __import__('logging').getLogger('vitrine').info(body)\n"
        "    if len(body) <= _BYTES_AT_ONCE:",
        f"{_T}test_process.py::"
        "test_logs_are_json_if_wanted_and_hold_ids_but_nothing_of_what_was_sent",
    ),
)


def main() -> int:
    """Remove one guard after the other; return 1 where a test did not notice."""
    chosen = [guard for guard in GUARDS if not sys.argv[1:] or guard.file in sys.argv[1:]]
    print("first with all of them in place", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "vitrine"
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in tracked.rstrip("\0").split("\0"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        if _status({guard.test for guard in chosen}, copy, limit_s=None) != 0:
            print("a test fails as it is")
            return 1
        unnoticed = [guard for guard in chosen if not _notices(guard, copy)]
    print(f"of {len(chosen)} guards, the lack of {len(chosen) - len(unnoticed)} is noticed")
    return int(bool(unnoticed))


def _status(tests: Collection[str], copy: Path, limit_s: float | None) -> int:
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-qxp", "no:cacheprovider", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},  # before the tree that is installed
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return run.wait(limit_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # and what it has started


def _notices(guard: Guard, copy: Path) -> bool:
    file = copy / guard.file
    whole = file.read_text()
    file.write_text(whole.replace(guard.code, guard.without))
    began = time.monotonic()
    try:
        status = _status([guard.test], copy, _LIMIT_S)
    except subprocess.TimeoutExpired:
        status = 1
    finally:
        file.write_text(whole)
    # Anything but 1, that a test failed, says that pytest could not even begin.
    told = {0: "PASSES WITHOUT IT", 1: "fails"}.get(status, f"DID NOT RUN: status {status}")
    print(f"{time.monotonic() - began:4.0f} s  {told:18} {guard.test}", flush=True)
    return status == 1


if __name__ == "__main__":
    sys.exit(main())
