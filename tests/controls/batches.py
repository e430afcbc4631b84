"""Guards of queues and batches."""

from tests.controls.guard import Guard

_T = "tests/service/api/"
_I = "tests/service/inference/"

GUARDS = (
    # Batches: faults, limits, cancellation.
    Guard(
        "service/inference/batching/batch_former.py",
        "tokens > max_tokens or ",
        "",
        "tests/service/inference/batching/test_batch_former.py::"
        "test_bulk_batches_are_small_beside_interactive_items_and_double_without",
    ),
    Guard(
        "service/inference/batching/runs.py",
        "elif len(entries) > 1:",
        "elif False:",
        f"{_I}batching/test_batcher_faults.py::test_failing_item_fails_only_its_own_request",
    ),
    Guard(
        "service/inference/batching/runs.py",
        "            await self._check_run(run)\n",
        "",
        f"{_T}test_app.py::test_broken_engine_fails_the_readiness_probe_and_reports_the_reason",
    ),
    Guard(
        "service/inference/batching/runs.py",
        "while (failure := await run(error_of, self._probe)) is not None:",
        "while (failure := None) is not None:",
        f"{_I}batching/test_batcher_faults.py::test_run_that_fails_on_the_probe_stops_the_batcher_and_calls_on_stop",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "            run.member.runner.cancel()\n",
        "",
        f"{_I}batching/test_batcher_faults.py::test_slow_run_is_cancelled_and_fails_only_its_own_request",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "self.clock.wait(ended, min(wait_s, left_s))",
        "asyncio.wait([ended])",
        f"{_T}test_app.py::test_stuck_engine_fails_its_requests_and_the_readiness_probe",
    ),
    Guard(
        "service/inference/batching/runs.py",
        "if not failure.is_own:",
        "if False:",
        f"{_I}batching/test_batcher_faults.py::test_run_cancelled_because_of_another_stream_is_repeated",
    ),
    Guard(
        "service/inference/batching/batcher.py",
        "raise QueueFull",
        "pass",
        f"{_I}batching/test_batcher.py::test_full_queue_raises_queue_full_until_it_has_room",
    ),
    Guard(
        "service/inference/batching/batcher.py",
        "            self._former.remove(queued)\n",
        "",
        f"{_I}batching/test_batcher.py::test_cancelled_request_is_removed_from_the_queue",
    ),
    Guard(
        "service/inference/batching/runs.py",
        "pending = [entry for entry in entries if not entry.request.done.done()]",
        "pending = list(entries)",
        f"{_I}batching/test_batcher_faults.py::test_other_items_of_a_failed_request_are_not_run_again",
    ),
    Guard(
        "service/inference/batching/batcher.py",
        "                request.done.set_exception(Stopped())",
        "                pass",
        f"{_I}batching/test_batcher_faults.py::test_defect_of_the_batcher_fails_all_requests_and_calls_on_stop",
    ),
    Guard(
        "service/inference/batching/runs.py",
        "if len(results) != len(pending):",
        "if False:",
        f"{_I}batching/test_batcher_faults.py::test_run_with_wrong_number_of_results_fails_its_request",
    ),
    Guard(
        "service/inference/batching/request_queue.py",
        "self.ring.append(turn)\n        return first",
        "self.ring.appendleft(turn)\n        return first",
        f"{_I}batching/test_batch_former.py::test_small_request_waits_for_one_batch_of_a_huge_one_at_most",
    ),
    Guard(
        "service/inference/batching/runs.py",
        "if failure.is_own:\n                raise",
        "if True:\n                raise",
        f"{_I}batching/test_batcher_faults.py::test_probe_cancelled_because_of_another_stream_is_repeated",
    ),
    Guard(
        "service/inference/batching/runs.py",
        "entry.request.progressed = now",
        "pass",
        f"{_I}batching/test_batcher.py::test_oldest_queued_age_restarts_when_a_request_progresses",
    ),
    Guard(
        "service/inference/batching/batcher.py",
        "        self._runner.cancel()\n",
        "",
        f"{_I}batching/test_batcher.py::test_close_cancels_the_runs_in_flight_and_fails_all_requests",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "        interactive.drop_removed()\n",
        "",
        f"{_I}batching/test_batch_former.py::test_removed_items_are_released_while_others_wait",
    ),
    Guard(
        "service/api/middleware.py",
        'self._dispatch_table.get((scope["method"], scope["path"]), self._app)',
        "self._app",
        f"{_T}test_routing.py::test_raw_routes_bypass_the_application",
    ),
    Guard(
        "service/app.py",
        "        gc.unfreeze()\n",
        "",
        f"{_T}test_lifespan.py::test_stopped_application_frees_its_model_and_engine",
    ),
    Guard(
        "service/app.py",
        "        gc.freeze()\n",
        "",
        f"{_T}test_lifespan.py::"
        "test_loaded_objects_are_frozen_before_the_application_becomes_ready",
    ),
    Guard(
        "service/inference/batching/batcher.py",
        "if not self.is_alive:\n            raise Stopped",
        "if False:\n            raise Stopped",
        f"{_I}batching/test_batcher_faults.py::test_hanging_run_fails_all_requests_and_calls_on_stop",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "if ended.done() or run is None or left_s > wait_s or ref(run) != looked_at:",
        "if ended.done() or run is None or left_s > wait_s:",
        f"{_I}batching/test_batcher_faults.py::test_timeout_applies_to_each_batch_separately",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "del run  # it would",
        "pass  # it would",
        f"{_I}batching/test_streams.py::test_closed_batcher_is_released_while_the_stream_is_busy",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "left_s > wait_s or ",
        "",
        f"{_I}batching/test_streams.py::test_shorter_limit_of_another_batcher_cancels_no_run",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "if took_too_long and not ended.done():",
        "if not ended.done():",
        f"{_I}batching/test_batcher_faults.py::"
        "test_run_that_returns_late_despite_cancellation_keeps_its_results",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "took_too_long = stream.run is run",
        "took_too_long = ended.done()",
        f"{_I}batching/test_batcher_faults.py::test_run_hit_by_a_late_cancellation_is_repeated",
    ),
    Guard(
        "service/inference/batching/runs.py",
        "        self._cancel()\n        self.cancellations += 1",
        "        self.cancellations += 1\n        self._cancel()",
        f"{_I}batching/test_batcher_faults.py::test_run_started_during_a_cancellation_is_repeated",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "self._lock = threading.Lock()",
        "self._lock = __import__('contextlib').nullcontext()",
        f"{_I}batching/test_batch_former.py::test_concurrent_add_and_form_neither_lose_nor_repeat_items",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "self._running_tokens -= batch.tokens",
        "pass",
        f"{_I}batching/test_batch_former.py::test_batch_leaves_other_streams_their_share_of_the_tokens",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "(queue.tokens + self._running_tokens)",
        "(self.tokens + self._running_tokens)",
        f"{_I}batching/test_batch_former.py::test_queued_bulk_items_do_not_keep_interactive_ones_in_one_batch",
    ),
    # Admission.
    Guard(
        "service/inference/results/loaded_model.py",
        "if needs_engine and self.cache is None and self.batcher.is_full(options.priority):",
        "if False:",
        f"{_T}test_app.py::test_full_queue_is_reported_before_tokenization",
    ),
    Guard(
        "service/inference/batching/batcher.py",
        "        if timeout_s is not None:\n            expiry =",
        "        if False:\n            expiry =",
        f"{_T}test_app.py::"
        "test_exceeded_deadline_returns_504_and_removes_the_request_from_the_queue",
    ),
    Guard(
        "service/api/deadline.py",
        "async with asyncio.timeout(deadline.remaining_s):",
        "async with asyncio.timeout(None):",
        f"{_T}test_app.py::test_tokenizer_routes_return_504_after_their_deadline",
    ),
    Guard(
        "service/api/deadline.py",
        "return min(seconds, longest_s)",
        "return seconds",
        f"{_T}test_app.py::test_client_cannot_extend_the_deadline_and_its_own_has_another_status_in_metrics",
    ),
    Guard(
        "service/api/deadline.py",
        "if not is_done:",
        "if True:",
        f"{_T}test_routing.py::test_disconnect_as_the_work_ends_does_not_cancel_what_follows",
    ),
    Guard(
        "service/api/http_protocol.py",
        "            cycle.on_disconnect()\n",
        "            pass\n",
        f"{_T}test_disconnects.py::test_texts_of_a_disconnected_client_are_removed_from_the_queue",
    ),
    Guard(
        "service/api/deadline.py",
        "        if cycle.disconnected:\n            caller.uncancel()\n",
        "        if cycle.disconnected:\n",
        f"{_T}test_routing.py::test_disconnect_cancels_the_work_and_not_its_task",
    ),
    Guard(
        "service/api/http_protocol.py",
        "is_whole = not (self.more_body or self.disconnected) and len(self.body) <= max_bytes",
        "is_whole = not (self.more_body or self.disconnected)",
        f"{_T}test_bodies.py::test_body_is_short_if_it_is_whole_and_within_the_limit",
    ),
    Guard(
        "service/api/deadline.py",
        "        if watch.done():\n            caller.uncancel()\n",
        "        if watch.done():\n",
        f"{_T}test_routing.py::test_disconnect_cancels_the_work_and_not_its_task",
    ),
    Guard(
        "service/api/deadline.py",
        "    cycle.watch(caller.cancel)\n",
        "",
        f"{_T}test_disconnects.py",
    ),
    Guard(
        "service/api/http_protocol.py",
        "        self.flow.resume_reading()\n\n    def short_body",
        "\n    def short_body",
        f"{_T}test_server.py::test_disconnect_is_seen_after_a_large_body",
    ),
    Guard(
        "service/api/deadline.py",
        "            caller.cancel()\n",
        "            pass\n",
        f"{_T}test_routing.py::test_disconnect_cancels_the_work_and_not_its_task",
    ),
    Guard(
        "service/inference/results/loaded_model.py",
        "return await self._executor.run(work, size)",
        "return work()",
        f"{_T}test_app.py::"
        "test_tokenization_and_serialization_of_large_requests_do_not_block_others",
    ),
    Guard(
        "service/inference/tokenizing/executor.py",
        "if self._size and self._size + size > self._limit:",
        "if False:",
        f"{_T}test_app.py::test_tokenizer_backlog_is_bounded_and_short_inputs_bypass_it",
    ),
    Guard(
        "service/inference/tokenizing/executor.py",
        "return await asyncio.shield(thread)",
        "return await thread",
        f"{_I}tokenizing/test_executor.py::test_cancelled_work_counts_until_its_thread_is_done",
    ),
    # Priorities.
    Guard(
        "service/inference/batching/batch_former.py",
        "(bulk, interactive) if self._is_bulk_due else (interactive, bulk)",
        "(bulk, interactive)",
        f"{_I}batching/test_batch_former.py::test_interactive_items_overtake_bulk_items_and_share_no_batch_with_them",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "return self._bulk_due >= _SMALL_BULK_TOKENS",
        "return False",
        f"{_I}batching/test_batch_former.py::test_bulk_requests_have_a_tenth_of_the_tokens_while_interactive_ones_are_queued",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "max(self._bulk_due - tokens, -float(tokens))",
        "self._bulk_due - tokens",
        f"{_I}batching/test_batch_former.py::test_bulk_items_in_idle_streams_are_not_paid_later",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        " or self._waited_s >= _MAX_WAITED_S",
        "",
        f"{_I}batching/test_batch_former.py::test_waits_for_interactive_items_end_after_some_time",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "        if bulk.tokens:\n            self._ramp",
        "        if True:\n            self._ramp",
        f"{_I}batching/test_batch_former.py::"
        "test_interactive_tokens_count_only_while_bulk_items_are_queued",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "self._bulk_due = max(self._bulk_due - tokens, -float(tokens))",
        "self._bulk_due = 0.0",
        f"{_I}batching/test_batch_former.py::test_a_long_bulk_item_is_paid_with_the_turns_after_it",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "                self._waiting_since.append(now)\n",
        "                pass\n",
        f"{_I}batching/test_batch_former.py::"
        "test_a_stream_that_has_run_interactive_items_waits_a_moment_before_bulk_ones",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "        bulk.drop_removed()\n",
        "",
        f"{_I}batching/test_batch_former.py::test_removed_bulk_items_are_released_while_interactive_ones_run",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "return interactive.tokens + bulk.tokens_ahead(tokens)",
        "return bulk.tokens_ahead(tokens)",
        f"{_I}batching/test_batch_former.py::test_tokens_ahead_respect_the_priority",
    ),
    Guard(
        "service/inference/batching/batcher.py",
        "queued_tokens = self._former.tokens_of(priority)",
        "queued_tokens = self._former.tokens",
        f"{_I}batching/test_batcher.py::test_queue_full_of_bulk_requests_accepts_interactive_ones",
    ),
    Guard(
        "service/inference/batching/batcher.py",
        "tokens_ahead(tokens, priority)",
        'tokens_ahead(tokens, "bulk")',
        f"{_I}batching/test_batcher.py::test_deadline_of_an_interactive_request_does_not_count_all_bulk_requests",
    ),
    Guard(
        "service/inference/batching/cached_batcher.py",
        '(run.priority, priority) == ("bulk", "interactive")',
        "False",
        f"{_I}batching/test_cache.py::test_interactive_request_does_not_wait_for_a_bulk_request",
    ),
    Guard(
        "service/inference/results/loaded_model.py",
        "items, timeout_s=options.remaining_s, priority=options.priority",
        "items, timeout_s=options.remaining_s",
        f"{_I}model/test_python_api.py::test_bulk_calls_are_queued_behind_interactive_ones",
    ),
    # Long rows and texts.
    Guard(
        "service/inference/batching/streams.py",
        "max(runner.timeout_s, _MARGIN * expected_s)",
        "runner.timeout_s",
        f"{_I}batching/test_batcher_faults.py::test_long_run_is_cancelled_after_ten_times_its_expected_duration",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "self._last_was_long if has_one_stream else self._running_long > 0",
        "False",
        f"{_I}batching/test_batch_former.py::test_long_items_take_every_second_turn_while_shorter_ones_wait",
    ),
    Guard(
        "service/inference/tokenizing/text_parts.py",
        "overflow(encoding) >= MARGIN",
        "True",
        f"{_I}tokenizing/test_tokenizer.py::test_part_of_a_text_gives_the_tokens_of_the_whole",
    ),
    Guard(
        "models/engines/__init__.py",
        "artifact.verify(graph.weights)",
        "artifact.path / graph.weights",
        "tests/service/test_wrong_starts.py::test_model_that_cannot_be_loaded_ends_the_start",
    ),
    Guard(
        "models/export/attention_nodes.py",
        'nodes("LessOrEqual", longest, nodes.constant(window + 1))',
        'nodes("LessOrEqual", longest, nodes.constant(window + 2))',
        "tests/models/export/test_attention_nodes.py::test_context_equals_attention_on_each_row_alone",
    ),
)
