"""Remove each guard of the service once and show that its test fails: `make controls`.

A test that passes without the code that it tests proves nothing. The tree is copied, a guard in the
copy is replaced by a plausible mistake, and the test named beside it must fail.
`--sample 12 --seed 7` runs 12 of the guards: consecutive seeds cover the whole table.
"""

import argparse
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
_LIMIT_S = 120  # a hanging test counts as failing


class Guard(NamedTuple):
    """A piece of code and the test that requires it.

    Attributes:
        file: File of the code.
        code: Code, which occurs once in the file.
        mistake: Replacement of the code.
        test: Test that fails with the replacement.
    """

    file: str
    code: str
    mistake: str
    test: str


_T = "tests/service/api/"
_I = "tests/service/inference/"
_D = "tests/service/debug/"
_G = "tests/models/gradients/"
_B = "tests/service/bulk/"
_E = "tests/models/export/test_families.py::"

GUARDS = (
    # Bulk encoding.
    Guard(
        "service/bulk/journal.py",
        "        if before != now:\n",
        "        if False:\n",
        f"{_B}test_resume.py::test_other_settings_are_refused_by_name",
    ),
    Guard(
        "service/bulk/journal.py",
        "        _drop_torn_line(file)\n",
        "",
        f"{_B}test_resume.py::test_torn_last_line_of_the_journal_is_dropped",
    ),
    Guard(
        "service/bulk/journal.py",
        "        _lock(lock, folder, is_shared=shard[1] > 1)\n",
        "",
        f"{_B}test_resume.py::test_process_that_locks_the_output_meanwhile_is_not_joined",
    ),
    Guard(
        "service/bulk/job.py",
        "        check_unlocked(options.output, options.shard)\n",
        "        pass\n",
        f"{_B}test_resume.py::test_lock_is_tried_before_the_input_is_hashed",
    ),
    Guard(
        "service/bulk/pipeline.py",
        "return self.block.rows if self.block.columns else 1",
        "return self.block.rows",
        f"{_B}test_job.py::test_skipped_blocks_do_not_wait_for_the_engine",
    ),
    Guard(
        "service/bulk/job.py",
        "plan.last is None or plan.rows_from(total) > 0",
        "True",
        f"{_B}test_job.py::test_stop_ends_the_job_after_the_current_part_and_a_second_run_does_the"
        "_rest",
    ),
    Guard(
        "service/bulk/job.py",
        "if part is not None and digest != part.records_sha256:",
        "if False:",
        f"{_B}test_resume.py::test_other_standard_input_is_refused",
    ),
    Guard(
        "service/bulk/encoder.py",
        "parts = [indices[:failed], *_halves(indices[failed + 1 :])]",
        "parts = [indices[:failed]]",
        f"{_B}test_job.py::test_item_that_fails_in_the_engine_is_an_error_and_the_others_are_encode"
        "d",
    ),
    Guard(
        "service/bulk/sources.py",
        "                file.check_unchanged(status.st_size, status.st_mtime_ns)\n",
        "",
        f"{_B}test_readers.py::test_file_that_changes_while_it_is_read_is_an_error",
    ),
    # Long documents.
    Guard(
        "service/inference/chunking.py",
        "    is_free = (starts >= reached[:-1]) & ",
        "    is_free = ",
        f"{_I}test_chunking.py::test_token_of_parts_of_two_characters_is_never_split",
    ),
    Guard(
        "service/inference/chunked_texts.py",
        "return tokens, max(tokens - size, whole - taken - room)",
        "return tokens, 0",
        f"{_I}test_chunking.py::test_chunk_that_grows_when_tokenised_alone_is_shortened",
    ),
    Guard(
        "service/inference/chunked_texts.py",
        "whole = self._count(prompt.text + part) if prompt.text else tokens",
        "whole = tokens + taken",
        f"{_I}test_chunking.py::test_chunk_fits_with_a_prompt_whose_tokens_merge_with_the_chunks",
    ),
    Guard(
        "service/inference/chunked_texts.py",
        "            if len(pieces) == room:\n",
        "            if False:\n",
        f"{_I}test_chunking.py::test_number_of_chunks_is_limited",
    ),
    Guard(
        "service/inference/chunked_texts.py",
        "                error.set_index(self.owners[error.index])\n",
        "                pass\n",
        f"{_T}test_chunks.py::test_failure_names_the_text_of_the_chunk",
    ),
    Guard(
        "service/inference/late_chunking.py",
        "        begin = 0 if is_first else self.first + reached - start\n",
        "        begin = 0 if is_first else self.first\n",
        f"{_I}test_late_chunking.py::test_vectors_equal_the_reference_implementation",
    ),
    Guard(
        "service/inference/late_chunking.py",
        "min(max(start, self.unpooled), end - 1), end",
        "start, end",
        f"{_I}test_late_chunking.py::test_only_chunk_of_a_text_has_the_vector_of_the_text",
    ),
    Guard(
        "service/inference/similarity.py",
        "    if count not in (1, len(pairs)):  # chunks of documents\n",
        "    if False:\n",
        f"{_T}test_chunks.py::test_document_has_the_cosine_of_its_best_chunk",
    ),
    # Several models.
    Guard(
        "service/inference/model_version.py",
        "if self._on_closed is not None and not self.leases:",
        "if self._on_closed is not None:",
        f"{_I}test_registry.py::test_swap_serves_the_new_version_and_closes_the_old_after_its_last"
        "_lease",
    ),
    Guard(
        "service/inference/registry.py",
        "                self._retire(previous)\n",
        "",
        f"{_I}test_registry.py::test_swap_serves_the_new_version_and_closes_the_old_after_its_last"
        "_lease",
    ),
    Guard(
        "service/inference/registry.py",
        "        if entry.loading is None:\n",
        "        if True:\n",
        f"{_I}test_registry.py::test_requests_for_an_unloaded_model_share_one_load",
    ),
    Guard(
        "service/inference/registry.py",
        "        if self._clock.now() < entry.retry_at:\n",
        "        if False:\n",
        f"{_I}test_registry.py::test_failed_load_on_demand_is_reported_and_tried_again",
    ),
    Guard(
        "service/inference/registry.py",
        "victim = min(others, key=_is_busy)",
        "victim = others[0]",
        f"{_I}test_registry.py::test_idle_model_is_unloaded_before_a_busy_one",
    ),
    Guard(
        "service/inference/registry.py",
        "        if self._is_closed:\n            await model.close()\n",
        "        if False:\n            await model.close()\n",
        f"{_I}test_registry.py::test_load_that_ends_after_the_registry_is_closed_closes_its_model",
    ),
    Guard(
        "service/inference/registry.py",
        "                await version.closed.wait()\n",
        "                pass\n",
        f"{_I}test_registry.py::test_busy_model_is_unloaded_only_after_its_requests",
    ),
    Guard(
        "service/inference/registry.py",
        "            except BaseException:\n                await version.close()\n",
        "            except BaseException:\n",
        f"{_I}test_registry.py::test_failed_check_closes_the_new_version_and_leaves_the_old_one"
        "_serving",
    ),
    Guard(
        "service/inference/loaded_model.py",
        "        self.engine.close()\n",
        "",
        f"{_I}test_registry.py::test_weights_of_a_replaced_version_are_freed_without_the_garbage"
        "_collector",
    ),
    Guard(
        "service/api/middleware.py",
        "                lease.release()\n",
        "                pass\n",
        f"{_T}test_models.py::test_models_beyond_the_memory_budget_are_loaded_on_demand",
    ),
    Guard(
        "service/api/auth.py",
        'if keys.is_open and scope == "admin":',
        "if False:",
        f"{_T}test_models.py::test_changes_are_refused_if_there_are_no_keys",
    ),
    Guard(
        "service/api/models.py",
        "    if not agreement.cosine >= body.min_cosine:",
        "    if False:",
        f"{_T}test_models.py::test_shadow_comparison_decides_about_the_swap",
    ),
    Guard(
        "service/api/call_options.py",
        'case "interactive" if not is_bulk_only:',
        'case "interactive":',
        f"{_T}test_priority.py::test_key_for_bulk_requests_refuses_interactive_requests",
    ),
    Guard(
        "service/inference/streams.py",
        "(member.running or runner.queued_s > _SPARE_S)",
        "member.running",
        f"{_I}test_streams.py::test_spare_stream_takes_no_large_queue",
    ),
    Guard(
        "service/inference/streams.py",
        "(member.running or runner.queued_s > _SPARE_S)",
        "runner.queued_s > _SPARE_S",
        f"{_I}test_streams.py::test_spare_stream_runs_no_batch_of_a_batcher_that_runs_one",
    ),
    Guard(
        "service/inference/streams.py",
        "            if stream.is_spare:\n",
        "            if False:\n",
        f"{_I}test_streams.py::test_batch_that_the_spare_stream_may_not_take_runs_after_the_spare"
        "_stream",
    ),
    # Cache, and several outputs of a pass.
    Guard(
        "service/inference/cached_batcher.py",
        "run.length <= length",
        "run.length > 0",
        f"{_I}test_cache.py::test_request_does_not_wait_for_one_with_more_tokens",
    ),
    Guard(
        "service/inference/cached_batcher.py",
        "            future.set_exception(error)\n",
        "            future.cancel()\n",
        f"{_I}test_cache.py::test_failure_of_an_item_concerns_those_who_wait_for_it_alone",
    ),
    Guard(
        "service/inference/cached_batcher.py",
        "            kept = self._cache.get(key)\n",
        "            kept = None\n",
        f"{_I}test_cache.py::test_item_computed_twice_keeps_its_first_result",
    ),
    Guard(
        "service/inference/cache.py",
        "        self._results.move_to_end(key)\n",
        "",
        f"{_I}test_cache.py::test_least_recently_used_results_are_evicted",
    ),
    Guard(
        "service/inference/cache.py",
        "        if size > self.max_bytes:\n            return\n",
        "",
        f"{_I}test_cache.py::test_result_larger_than_the_cache_is_not_kept_and_evicts_nothing",
    ),
    Guard(
        "service/inference/opening.py",
        "key=lambda item: prefix + item.key,",
        "key=lambda item: item.key,",
        f"{_T}test_cache.py::test_model_does_not_get_results_of_another_graph_or_engine",
    ),
    Guard(
        "service/inference/loaded_model.py",
        "row.prompt_tokens, row.adapter, row.unattended)",
        "row.prompt_tokens, 0, row.unattended)",
        f"{_T}test_cache.py::test_keys_cover_everything_that_results_depend_on",
    ),
    Guard(
        "service/inference/results.py",
        "    is_kept[: rules.first] = False\n",
        "",
        f"{_T}test_hybrid.py::test_one_request_gives_all_outputs",
    ),
    Guard(
        "service/inference/results.py",
        " & ~np.isin(ids, rules.unweighted)",
        "",
        f"{_T}test_hybrid.py::test_one_request_gives_all_outputs",
    ),
    # Scores and sparse vectors.
    Guard(
        "service/inference/pairs.py",
        "kept = self._kept(*limited)",
        "kept = self._kept(*lengths)",
        f"{_T}test_classify.py::test_query_and_documents_are_truncated_to_limits_of_their_own",
    ),
    Guard(
        "service/inference/scoring.py",
        "error.index = None if is_query else index - queries",
        "error.index = index",
        f"{_T}test_score.py",
    ),
    Guard(
        "service/inference/explanations.py",
        "weights[: row.prompt_tokens] = 0",
        "weights[:0] = 0",
        f"{_T}test_explanations.py::test_terms_of_a_cosine_are_products_of_token_vectors",
    ),
    Guard(
        "service/inference/scoring.py",
        "explanations = {best[i]: explanation",
        "explanations = {i: explanation",
        f"{_T}test_explanations.py::test_rerank_explains_the_best_documents_alone",
    ),
    Guard(
        "models/export/sentence_config.py",
        'is_first = tuple(pooling) == ("cls",) and include_prompt',
        'is_first = tuple(pooling) == ("cls",)',
        "tests/models/export/test_export.py::"
        "test_pooling_of_first_tokens_needs_no_other_token_of_the_last_layer",
    ),
    Guard(
        "models/network/sparse.py",
        "self._log((pad(torch.relu(logits)) * mask).amax(1))",
        "self._log(pad(torch.relu(logits)).amax(1))",
        "tests/models/export/test_masked_lm.py::"
        "test_graphs_equal_the_sparse_encoder_of_sentence_transformers",
    ),
    Guard(
        "models/network/heads.py",
        "result: Tensor = out + self.residual(x)",
        "result: Tensor = out",
        "tests/models/export/test_checkpoint.py::"
        "test_residual_dense_head_vectors_equal_sentence_transformers",
    ),
    # Prompts of rerankers.
    Guard(
        "service/inference/tokenizer.py",
        "pairs = [(prompted[first], second) for first, second in pairs]",
        "pairs = [(first, prompt + second) for first, second in pairs]",
        f"{_T}test_reranker_prompts.py::test_scores_equal_those_of_the_cross_encoder",
    ),
    Guard(
        "service/inference/tokenizer.py",
        "limits = limits[0] + len(self.encode_plain([prompt])[0].ids), limits[1]",
        "pass",
        f"{_T}test_reranker_prompts.py::test_limit_of_a_query_does_not_count_the_prompt",
    ),
    Guard(
        "service/inference/tokenizer.py",
        "None if index == 0 and 0 < end <= len(prompt) else index",
        "index",
        f"{_T}test_reranker_prompts.py::test_attribution_leaves_the_prompt_out_of_the_words",
    ),
    # Weights of queries from a table.
    Guard(
        "models/export/query_table.py",
        "if (own.to_str(), side) != (tokenizer.to_str(), config.truncation_side):",
        "if False:",
        "tests/models/export/test_query_table.py::test_other_models_are_refused",
    ),
    Guard(
        "models/export/query_table.py",
        '"": rules[routes.default]',
        '"": document',
        "tests/models/export/test_query_table.py::"
        "test_default_route_is_that_of_sentence_transformers",
    ),
    Guard(
        "service/inference/tokenizer.py",
        "limit, has_special = rules.max_tokens, not rules.looks_up",
        "limit, has_special = rules.max_tokens, True",
        f"{_T}test_inference_free.py::"
        "test_weights_of_queries_are_exactly_those_of_sentence_transformers",
    ),
    Guard(
        "service/inference/query_table.py",
        "is_weighted = found != 0",
        "is_weighted = found > 0",
        f"{_T}test_inference_free.py::"
        "test_weights_of_queries_are_exactly_those_of_sentence_transformers",
    ),
    Guard(
        "service/inference/loaded_model.py",
        "index = indices[error.index]",
        "index = error.index",
        f"{_T}test_inference_free.py::test_failing_document_has_its_own_index",
    ),
    Guard(
        "service/inference/model.py",
        "needs_engine=not rules.looks_up",
        "needs_engine=True",
        f"{_T}test_inference_free.py::test_queries_need_neither_engine_nor_queue",
    ),
    Guard(
        "service/debug/texts.py",
        "if tokenized.row.is_looked_up:",
        "if False:",
        f"{_T}test_inference_free.py::test_gradients_explain_documents_only",
    ),
    # Tags of tokens.
    Guard(
        "models/engines/__init__.py",
        "len(row) if OUTPUTS[output].per_token else 1",
        "1",
        "tests/models/export/test_token_classifier.py::test_engines_compute_the_logits_of_all_tokens",
    ),
    Guard(
        "service/inference/tags.py",
        "is_first[1:] |= numbers[1:] != numbers[:-1]",
        "pass",
        f"{_I}test_tags.py::test_prefixes_of_labels_delimit_entities",
    ),
    Guard(
        "service/inference/loaded_model.py",
        'if any(OUTPUTS[output].per_token for output in outputs if output != "weights"):',
        "if False:",
        f"{_T}test_tag.py::test_number_of_tokens_is_limited",
    ),
    # Multi-vectors.
    Guard(
        "models/export/attention_nodes.py",
        'nodes("Where", is_key, row, constant(-2))',
        "row",
        "tests/models/export/test_attention_nodes.py::test_context_equals_attention_on_each_row_alone",
    ),
    Guard(
        "models/packing.py",
        "(positions < attended[:, None])",
        "is_token",
        f"{_I}test_multi_vectors.py::test_expanded_queries",
    ),
    Guard(
        "service/inference/results.py",
        "is_kept = ~np.isin(row.ids, rules.skipped)",
        "is_kept = np.ones(len(row.ids), bool)",
        f"{_T}test_multi.py::test_vectors_equal_those_of_sentence_transformers",
    ),
    Guard(
        "service/inference/tokenizer.py",
        'return self._rules.get(prompt_name or "", self._rules[""])',
        'return self._rules[""]',
        f"{_T}test_multi.py::test_lengths_of_queries_and_documents",
    ),
    Guard(
        "models/export/token_rules.py",
        "tokenizer.add_special_tokens([AddedToken(token, normalized=False)])",
        "pass",
        f"{_I}test_multi_vectors.py::test_folders_of_stanford",
    ),
    # Long rows and texts.
    Guard(
        "service/inference/streams.py",
        "max(runner.timeout_s, _MARGIN * expected_s)",
        "runner.timeout_s",
        f"{_I}test_batcher_faults.py::test_long_run_is_cancelled_after_ten_times_its_expected_duration",
    ),
    Guard(
        "service/inference/batch_former.py",
        "self._last_was_long if has_one_stream else self._running_long > 0",
        "False",
        f"{_I}test_batch_former.py::test_long_items_take_every_second_turn_while_shorter_ones_wait",
    ),
    Guard(
        "service/inference/tokenizer.py",
        "self._overflow(encoding, has_special) >= MARGIN",
        "True",
        f"{_I}test_tokenizer.py::test_part_of_a_text_gives_the_tokens_of_the_whole",
    ),
    Guard(
        "models/engines/__init__.py",
        "artifact.verify(graph.weights)",
        "artifact.path / graph.weights",
        "tests/service/api/test_process.py::test_damaged_artifact_is_refused_with_the_name_of_the_file",
    ),
    Guard(
        "models/export/attention_nodes.py",
        'nodes("LessOrEqual", longest, nodes.constant(window + 1))',
        'nodes("LessOrEqual", longest, nodes.constant(window + 2))',
        "tests/models/export/test_attention_nodes.py::test_context_equals_attention_on_each_row_alone",
    ),
    # Batches: faults, limits, cancellation.
    Guard(
        "service/inference/runs.py",
        "elif len(entries) > 1:",
        "elif False:",
        f"{_I}test_batcher_faults.py::test_failing_item_fails_only_its_own_request",
    ),
    Guard(
        "service/inference/runs.py",
        "            await self._check_run(run)\n",
        "",
        f"{_T}test_app.py::test_broken_engine_fails_the_readiness_probe_and_reports_the_reason",
    ),
    Guard(
        "service/inference/runs.py",
        "while (failure := await run(error_of, self._probe)) is not None:",
        "while (failure := None) is not None:",
        f"{_I}test_batcher_faults.py::test_run_that_fails_on_the_probe_stops_the_batcher_and_calls_on_stop",
    ),
    Guard(
        "service/inference/streams.py",
        "            run.member.runner.cancel()\n",
        "",
        f"{_I}test_batcher_faults.py::test_slow_run_is_cancelled_and_fails_only_its_own_request",
    ),
    Guard(
        "service/inference/streams.py",
        "self.clock.wait(calls, run.began + run.limit_s - self.clock.now())",
        "asyncio.wait([calls])",
        f"{_T}test_app.py::test_stuck_engine_fails_its_requests_and_the_readiness_probe",
    ),
    Guard(
        "service/inference/runs.py",
        "if not failure.is_own:",
        "if False:",
        f"{_I}test_batcher_faults.py::test_run_cancelled_because_of_another_stream_is_repeated",
    ),
    Guard(
        "service/inference/batcher.py",
        "raise QueueFull",
        "pass",
        f"{_I}test_batcher.py::test_full_queue_raises_queue_full_until_it_has_room",
    ),
    Guard(
        "service/inference/batcher.py",
        "            self._former.remove(queued)\n",
        "",
        f"{_I}test_batcher.py::test_cancelled_request_is_removed_from_the_queue",
    ),
    Guard(
        "service/inference/runs.py",
        "pending = [entry for entry in entries if not entry.request.done.done()]",
        "pending = list(entries)",
        f"{_I}test_batcher_faults.py::test_other_items_of_a_failed_request_are_not_run_again",
    ),
    Guard(
        "service/inference/batcher.py",
        "                request.done.set_exception(Stopped())",
        "                pass",
        f"{_I}test_batcher_faults.py::test_defect_of_the_batcher_fails_all_requests_and_calls_on_stop",
    ),
    Guard(
        "service/inference/runs.py",
        "if len(results) != len(pending):",
        "if False:",
        f"{_I}test_batcher_faults.py::test_run_with_wrong_number_of_results_fails_its_request",
    ),
    Guard(
        "service/inference/request_queue.py",
        "self.ring.append(turn)\n        return first",
        "self.ring.appendleft(turn)\n        return first",
        f"{_I}test_batch_former.py::test_small_request_waits_for_one_batch_of_a_huge_one_at_most",
    ),
    Guard(
        "service/inference/runs.py",
        "if failure.is_own:\n                raise",
        "if True:\n                raise",
        f"{_I}test_batcher_faults.py::test_probe_cancelled_because_of_another_stream_is_repeated",
    ),
    Guard(
        "service/inference/runs.py",
        "entry.request.progressed = now",
        "pass",
        f"{_I}test_batcher.py::test_oldest_queued_age_restarts_when_a_request_progresses",
    ),
    Guard(
        "service/inference/batcher.py",
        "        self._runner.cancel()\n",
        "",
        f"{_I}test_batcher.py::test_close_cancels_the_runs_in_flight",
    ),
    Guard(
        "service/inference/batch_former.py",
        "        interactive.drop_removed()\n",
        "",
        f"{_I}test_batch_former.py::test_removed_items_are_released_while_others_wait",
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
        "service/inference/batcher.py",
        "if not self.is_alive:\n            raise Stopped",
        "if False:\n            raise Stopped",
        f"{_I}test_batcher_faults.py::test_hanging_run_fails_all_requests_and_calls_on_stop",
    ),
    Guard(
        "service/inference/streams.py",
        "if calls.done() or stream.run is not run:",
        "if calls.done():",
        f"{_I}test_batcher_faults.py::test_timeout_applies_to_each_batch_separately",
    ),
    Guard(
        "service/inference/streams.py",
        "if took_too_long and not calls.done():",
        "if not calls.done():",
        f"{_I}test_batcher_faults.py::"
        "test_run_that_returns_late_despite_cancellation_keeps_its_results",
    ),
    Guard(
        "service/inference/streams.py",
        "took_too_long = stream.run is run",
        "took_too_long = calls.done()",
        f"{_I}test_batcher_faults.py::test_run_hit_by_a_late_cancellation_is_repeated",
    ),
    Guard(
        "service/inference/runs.py",
        "        self._cancel()\n        self.cancellations += 1",
        "        self.cancellations += 1\n        self._cancel()",
        f"{_I}test_batcher_faults.py::test_run_started_during_a_cancellation_is_repeated",
    ),
    Guard(
        "service/inference/batch_former.py",
        "self._lock = threading.Lock()",
        "self._lock = __import__('contextlib').nullcontext()",
        f"{_I}test_batch_former.py::test_concurrent_add_and_form_neither_lose_nor_repeat_items",
    ),
    Guard(
        "service/inference/batch_former.py",
        "self._running_tokens -= batch.tokens",
        "pass",
        f"{_I}test_batch_former.py::test_batch_leaves_other_streams_their_share_of_the_tokens",
    ),
    # Model families: numbers, and refusals.
    Guard(
        "models/network/positions.py",
        "second * cos + first * sin",
        "second * cos - first * sin",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/network/positions.py",
        "distance < -self.window",
        "distance <= -self.window",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/network/positions.py",
        "latest = 0 if self.causal else self.window",
        "latest = self.window",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/network/attention.py",
        "            k, v = self.repeated(k), self.repeated(v)\n",
        "            k, v = (x.repeat(1, q.shape[-1] // x.shape[-1]) for x in (k, v))\n",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/network/positions.py",
        "range(0, 2 * power, 2)",
        "range(power)",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/export/checkpoint.py",
        "    for start, family in FAMILIES_OF_CODE.items():\n",
        "    for start, family in ():\n",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/export/families/gemma3.py",
        "lambda weight, _: 1.0 + weight",
        "lambda weight, _: weight",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/export/attention_nodes.py",
        'nodes("Greater", distance, nodes.constant(0))',
        'nodes("GreaterOrEqual", distance, nodes.constant(0))',
        "tests/models/export/test_attention_nodes.py::"
        "test_attention_in_blocks_equals_attention_on_each_row_alone",
    ),
    Guard(
        "models/add_layer_norm/op.py",
        "    rows = _centre(rows) if centred else rows\n",
        "    rows = _centre(rows)\n",
        "tests/models/test_add_layer_norm.py::"
        "test_first_and_second_gradients_of_rms_norm_equal_finite_differences",
    ),
    Guard(
        "models/gradients/graph_weights.py",
        'sorted(parts, key=lambda name: order.index(name.split(".")[0]))',
        "parts",
        "tests/models/gradients/test_parity.py::"
        "test_families_with_gates_windows_and_shared_layers_pass",
    ),
    Guard(
        "models/network/encoder.py",
        "int(i / (count / distinct))",
        "i % distinct",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/export/families/modernbert.py",
        '(Part("layers.{i}.mlp.Wi", 0, 2),)',
        '(Part("layers.{i}.mlp.Wi", 1, 2),)',
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/export/families/rotary.py",
        "Rotary(base * factor, scale=",
        "Rotary(base, scale=",
        f"{_E}test_gte_files_of_alibaba_equal_transformers",
    ),
    Guard(
        "models/export/checkpoint.py",
        'if config.get("quantization_config"):',
        "if False:",
        f"{_E}test_model_of_another_kind_is_refused_with_the_field_name",
    ),
    # Results of an engine.
    Guard(
        "service/inference/loaded_model.py",
        "if not all(np.isfinite(result).all() for result in results):",
        "if False:",
        f"{_T}test_app.py::test_failed_input_is_named_and_the_next_request_works",
    ),
    Guard(
        "service/inference/loaded_model.py",
        "tuple(columns[output][index] for output in item.outputs)",
        "tuple(columns[output][-1 - index] for output in item.outputs)",
        f"{_T}test_faults.py",
    ),
    Guard(
        "models/engines/__init__.py",
        "if not worst.is_within(bounds):",
        "if not bounds:",
        "tests/models/test_engines.py",
    ),
    Guard(
        "models/engines/outputs.py",
        "self.cosine >= bounds.cosine and self.norm <= bounds.norm",
        "self.cosine >= bounds.cosine",
        "tests/models/test_engines.py",
    ),
    Guard(
        "models/engines/outputs.py",
        "self.cosine >= bounds.cosine and self.norm <= bounds.norm",
        "self.norm <= bounds.norm",
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
        "service/inference/loaded_model.py",
        "if needs_engine and self.cache is None and self.batcher.is_full(priority):",
        "if False:",
        f"{_T}test_app.py::test_full_queue_is_reported_before_tokenization",
    ),
    Guard(
        "service/inference/loaded_model.py",
        "async with asyncio.timeout(timeout_s):",
        "async with asyncio.timeout(None):",
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
        f"{_T}test_app.py::test_client_cannot_extend_the_deadline_of_the_service",
    ),
    Guard(
        "service/api/deadline.py",
        "if not is_done:",
        "if True:",
        f"{_T}test_routing.py::test_disconnect_as_the_work_ends_does_not_cancel_what_follows",
    ),
    Guard(
        "service/api/deadline.py",
        "            caller.uncancel()\n",
        "",
        f"{_T}test_routing.py::test_disconnect_cancels_the_work_and_not_its_task",
    ),
    Guard(
        "service/api/deadline.py",
        "            caller.cancel()\n",
        "            pass\n",
        f"{_T}test_disconnects.py",
    ),
    Guard(
        "service/inference/loaded_model.py",
        "return await self._executor.run(work, size)",
        "return work()",
        f"{_T}test_app.py::"
        "test_tokenization_and_serialization_of_large_requests_do_not_block_others",
    ),
    Guard(
        "service/inference/executor.py",
        "if self._size and self._size + size > self._limit:",
        "if False:",
        f"{_T}test_app.py::test_tokenizer_backlog_is_bounded_and_short_inputs_bypass_it",
    ),
    Guard(
        "service/inference/executor.py",
        "return await asyncio.shield(thread)",
        "return await thread",
        f"{_I}test_executor.py::test_cancelled_work_counts_until_its_thread_is_done",
    ),
    # Request bodies.
    Guard(
        "service/api/body.py",
        "            json.loads(body, object_pairs_hook=_reject_equal_keys)\n",
        "            pass\n",
        f"{_T}test_bad_input.py::test_malformed_json_returns_400",
    ),
    Guard(
        "service/api/body.py",
        "    except RecursionError:",
        "    except ZeroDivisionError:",
        f"{_T}test_bad_input.py::test_deeply_nested_body_is_refused",
    ),
    Guard(
        "service/api/body.py",
        "            async with asyncio.timeout(timeout_s):\n                body =",
        "            if True:\n                body =",
        f"{_T}test_process.py::test_body_timeout_returns_408_and_closes_the_connection",
    ),
    Guard(
        "service/api/body.py",
        '        if len(body) > max_bytes:\n            raise TooLarge(f"the body exceeds',
        '        if False:\n            raise TooLarge(f"the body exceeds',
        f"{_T}test_bad_input.py::"
        "test_body_over_the_limit_returns_413_with_and_without_content_length",
    ),
    Guard(
        "service/api/body.py",
        '            if len(body) > max_bytes:\n                raise TooLarge(f"the decompressed',
        '            if False:\n                raise TooLarge(f"the decompressed',
        f"{_T}test_bodies.py::test_gzip_bomb_returns_413_at_the_limit",
    ),
    Guard(
        "service/api/body.py",
        "    if decompressor.unused_data:",
        "    if False:",
        f"{_T}test_bodies.py::test_invalid_gzip_body_returns_400",
    ),
    Guard(
        "service/api/body.py",
        "if not part and not rest and not decompressor.eof:",
        "if not part and not rest and (body := body.strip()):",
        f"{_T}test_bodies.py::test_invalid_gzip_body_returns_400",
    ),
    Guard(
        "service/api/body.py",
        "        reserve(int(declared))\n",
        "",
        f"{_T}test_http_protocol.py::"
        "test_memory_of_a_thousand_incomplete_bodies_stays_within_the_budget",
    ),
    Guard(
        "service/api/body.py",
        "            self._used -= reserved\n",
        "            pass\n",
        f"{_T}test_bodies.py::"
        "test_budget_refuses_large_bodies_beyond_it_and_accepts_all_small_ones",
    ),
    Guard(
        "service/api/body.py",
        "    if media_type != JSON:",
        "    if False:",
        f"{_T}test_bad_input.py::test_unsupported_content_type_or_encoding_returns_415",
    ),
    Guard(
        "service/api/body.py",
        "error.errors(include_url=False, include_input=False)[0]",
        'error.errors(include_url=False)[0]; found["msg"] += repr(found["input"])',
        f"{_T}test_bad_input.py::test_errors_do_not_repeat_content_of_the_request",
    ),
    Guard(
        "service/inference/tokenizer.py",
        "        self._check_ids(inputs)\n",
        "",
        f"{_T}test_bad_input.py::test_invalid_value_returns_422_with_its_index",
    ),
    # Middleware.
    Guard(
        "service/api/middleware.py",
        'return VitrineError("internal error; see the log of the service")',
        "raise",
        f"{_T}test_app.py::test_unexpected_error_returns_500_without_its_message",
    ),
    Guard(
        "service/api/middleware.py",
        'route = getattr(scope.get("route"), "path", "none")',
        'route = scope["path"]',
        f"{_T}test_attacks.py::test_names_in_requests_add_no_metrics",
    ),
    Guard(
        "service/api/middleware.py",
        'return host_matches(Headers(scope=scope).get("host", ""), self._hosts)',
        "return True",
        f"{_T}test_browsers.py::test_unknown_host_names_return_403_except_for_probes",
    ),
    Guard(
        "service/inference/tokenizer.py",
        'raise RuntimeError("the tokenizer panicked") from panic',
        "raise",
        f"{_T}test_app.py::test_tokenizer_panic_returns_500_and_the_next_request_works",
    ),
    # API keys.
    Guard(
        "service/api/auth.py",
        "if accepted.isdisjoint(matches[0].scopes):",
        "if False:",
        f"{_T}test_auth.py::test_route_accepts_only_keys_with_its_scope",
    ),
    Guard(
        "service/api/models.py",
        '    summary="Default model",\n    dependencies=[require_scope("encode")],\n',
        '    summary="Default model",\n',
        f"{_T}test_auth.py::test_every_route_requires_one_scope_unless_it_is_listed_as_public",
    ),
    # The artifact and its reference model.
    Guard(
        "models/artifact.py",
        "if actual != self.manifest.files[name]:",
        "if False:",
        "tests/models/test_artifact.py::test_changed_byte_raises_artifact_error_naming_the_file",
    ),
    Guard(
        "models/artifact.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NONBLOCK",
        "tests/models/test_artifact.py::test_symbolic_link_is_rejected",
    ),
    Guard(
        "models/artifact.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NOFOLLOW",
        "tests/models/test_artifact.py::test_named_pipe_is_rejected_without_blocking",
    ),
    # Shutdown of the service and of its child process.
    Guard(
        "service/app.py",
        "call_later(0.5, os._exit, 1)",
        "call_later(0.5, int)",
        f"{_T}test_process.py::test_stuck_engine_fails_its_requests_and_ends_the_process",
    ),
    Guard(
        "service/api/state.py",
        "        if self.stopping:",
        "        if False:",
        f"{_T}test_stopping.py::test_service_is_unready_and_answers_during_the_drain_period",
    ),
    Guard(
        "service/api/server.py",
        "_LISTENERS = 8",
        "_LISTENERS = 1",
        f"{_T}test_listeners.py::test_an_iteration_of_the_event_loop_accepts_several_connections",
    ),
    Guard(
        "service/api/server.py",
        "timeout_graceful_shutdown=settings.grace_s,",
        "",
        f"{_T}test_stopping.py::test_incomplete_body_is_answered_503_after_the_grace_period",
    ),
    Guard(
        "service/api/server.py",
        "call_later(drain_s, self._close)",
        "call_soon(self._close)",
        f"{_T}test_stopping.py::test_service_is_unready_and_answers_during_the_drain_period",
    ),
    Guard(
        "service/api/server.py",
        "            os._exit(1)\n",
        "            return\n",
        f"{_T}test_stopping.py::test_second_signal_ends_the_process_immediately",
    ),
    Guard(
        "service/api/http_protocol.py",
        "            self._transport.writelines(pending)",
        "            for piece in pending:\n                self._transport.write(piece)",
        f"{_T}test_server.py::test_head_and_body_are_written_in_one_piece_and_in_order",
    ),
    Guard(
        "service/api/http_protocol.py",
        "        if self.more_body and not self.response_started:",
        "        if False:",
        f"{_T}test_wire.py::test_each_request_has_one_response",
    ),
    Guard(
        "service/api/http_protocol.py",
        "        if self._in_head:\n",
        "        if True:\n",
        f"{_T}test_wire.py::test_each_request_has_one_response",
    ),
    Guard(
        "service/api/http_protocol.py",
        'if name != b"upgrade"]',
        "]",
        f"{_T}test_wire.py::test_each_request_has_one_response",
    ),
    Guard(
        "service/api/http_protocol.py",
        "                end = start + upgrade.args[0]\n",
        "                end = len(data)\n",
        f"{_T}test_wire.py::test_each_request_has_one_response",
    ),
    Guard(
        "service/api/http_protocol.py",
        '        if method == b"CONNECT":',
        "        if False:",
        f"{_T}test_wire.py::test_each_request_has_one_response",
    ),
    Guard(
        "service/api/http_protocol.py",
        "            self.flow.pause_reading()\n\n    def _parse",
        "            pass\n\n    def _parse",
        f"{_T}test_server.py::test_connection_is_not_read_while_pipelined_input_is_held",
    ),
    Guard(
        "service/api/http_protocol.py",
        "        if self._discarded_bytes > _LINGER_BYTES:",
        "        if False:",
        f"{_T}test_http_protocol.py::test_bounded_part_of_the_body_is_read_after_413",
    ),
    Guard(
        "service/api/http_protocol.py",
        "elif hosts > 1 or",
        "elif",
        f"{_T}test_wire.py::test_each_request_has_one_response",
    ),
    Guard(
        "service/api/http_protocol.py",
        "            cycle.message_event.set()\n",
        "            pass\n",
        f"{_T}test_wire.py::test_each_request_has_one_response",
    ),
    Guard(
        "service/inference/batcher.py",
        "        if needed_s > timeout_s:",
        "        if False:",
        f"{_I}test_batcher.py::test_request_that_would_miss_its_deadline_raises_too_late",
    ),
    Guard(
        "service/inference/batcher.py",
        "        if not self.queued_tokens or self._finish_s(",
        "        if self._finish_s(",
        f"{_I}test_batcher.py::test_empty_queue_accepts_a_request_whatever_its_deadline",
    ),
    Guard(
        "service/inference/batch_former.py",
        "                entry.request.tokens -= entry.length\n",
        "",
        f"{_I}test_batch_former.py::test_tokens_ahead_ignores_finished_and_removed_items",
    ),
    # Priorities.
    Guard(
        "service/inference/batch_former.py",
        "(bulk, interactive) if is_bulk_turn else (interactive, bulk)",
        "(bulk, interactive)",
        f"{_I}test_batch_former.py::test_interactive_items_overtake_bulk_items_and_share_no_batch_with_them",
    ),
    Guard(
        "service/inference/batch_former.py",
        "is_bulk_turn = self._interactive_turns >= _TURNS_BEFORE_BULK",
        "is_bulk_turn = False",
        f"{_I}test_batch_former.py::test_bulk_requests_have_every_tenth_turn_while_interactive_ones_are_queued",
    ),
    Guard(
        "service/inference/batch_former.py",
        "            elif bulk.tokens:",
        "            else:",
        f"{_I}test_batch_former.py::test_interactive_turns_count_only_while_bulk_items_are_queued",
    ),
    Guard(
        "service/inference/batch_former.py",
        "        bulk.drop_removed()\n",
        "",
        f"{_I}test_batch_former.py::test_removed_bulk_items_are_released_while_interactive_ones_run",
    ),
    Guard(
        "service/inference/batch_former.py",
        "return interactive.tokens + bulk.tokens_ahead(tokens)",
        "return bulk.tokens_ahead(tokens)",
        f"{_I}test_batch_former.py::test_tokens_ahead_respect_the_priority",
    ),
    Guard(
        "service/inference/batcher.py",
        "queued_tokens = self._former.tokens_of(priority)",
        "queued_tokens = self._former.tokens",
        f"{_I}test_batcher.py::test_queue_full_of_bulk_requests_accepts_interactive_ones",
    ),
    Guard(
        "service/inference/batcher.py",
        "tokens_ahead(tokens, priority)",
        'tokens_ahead(tokens, "bulk")',
        f"{_I}test_batcher.py::test_deadline_of_an_interactive_request_does_not_count_all_bulk_requests",
    ),
    Guard(
        "service/inference/cached_batcher.py",
        '(run.priority, priority) == ("bulk", "interactive")',
        "False",
        f"{_I}test_cache.py::test_interactive_request_does_not_wait_for_a_bulk_request",
    ),
    Guard(
        "service/inference/loaded_model.py",
        "self.batcher.submit(items, timeout_s, priority=priority)",
        "self.batcher.submit(items, timeout_s)",
        f"{_I}test_python_api.py::test_bulk_calls_are_queued_behind_interactive_ones",
    ),
    # Streams that several models share.
    Guard(
        "service/inference/streams.py",
        "member.virtual_s += (now - ended.started - ended.expected_s) / member.runner.share",
        "pass",
        f"{_I}test_streams.py::test_time_of_a_stream_is_divided_by_share",
    ),
    Guard(
        "service/inference/streams.py",
        'key=attrgetter("virtual_s")',
        "key=lambda _: 0",
        f"{_I}test_streams.py::test_flood_delays_a_batch_of_another_batcher_by_one_batch",
    ),
    Guard(
        "service/inference/streams.py",
        "member.virtual_s = self._virtual_s + expected_s",
        "member.virtual_s += expected_s",
        f"{_I}test_streams.py::test_idle_batcher_collects_no_credit",
    ),
    Guard(
        "service/inference/streams.py",
        "self._virtual_s + expected_s / runner.share",
        "self._virtual_s",
        f"{_I}test_streams.py::test_running_batches_count_by_their_expected_duration",
    ),
    Guard(
        "service/inference/streams.py",
        "if member.running == runner.streams:",
        "if False:",
        f"{_I}test_streams.py::test_batcher_runs_no_more_batches_at_a_time_than_its_own_limit",
    ),
    Guard(
        "service/inference/streams.py",
        "members = self._members if stream in self._streams else ()",
        "members = self._members",
        f"{_I}test_streams.py::test_hanging_run_that_returns_takes_no_further_batch",
    ),
    Guard(
        "service/inference/streams.py",
        "                    self._streams.discard(stream)\n",
        "",
        f"{_I}test_streams.py::test_hanging_run_stops_its_batcher_and_the_others_get_a_new_thread",
    ),
    Guard(
        "service/inference/streams.py",
        "self._loop.call_soon_threadsafe(runner.stop, error)",
        "pass",
        f"{_I}test_streams.py::test_defect_of_a_batcher_affects_no_other",
    ),
    Guard(
        "service/inference/streams.py",
        "(work_s + others_s) / self.streams",
        "work_s / self.streams",
        f"{_I}test_streams.py::test_drain_time_includes_the_share_of_the_other_batchers",
    ),
    Guard(
        "service/inference/batcher.py",
        "        self._pool.remove(self._runner)\n",
        "",
        f"{_I}test_streams.py::test_defect_of_a_batcher_affects_no_other",
    ),
    Guard(
        "models/engines/engine.py",
        "is_long and not self._running_long",
        "is_long",
        "tests/models/test_engines.py::test_runs_of_other_engines_on_the_cpu_overlap_too",
    ),
    Guard(
        "models/engines/__init__.py",
        "cpu_runs or CpuRuns()",
        "CpuRuns()",
        f"{_I}test_python_api.py::test_models_of_a_process_share_its_devices",
    ),
    # Faithfulness of attributions.
    Guard(
        "models/gradients/inputs.py",
        "token_types=[row.token_types[position] for position in kept] if row.token_types else (),",
        "token_types=row.token_types[: len(kept)],",
        f"{_G}test_faithfulness.py::test_removal_keeps_the_other_fields_of_the_tokens",
    ),
    Guard(
        "models/gradients/faithfulness.py",
        "for tokens in (first, everything - first)",
        "for tokens in (first, everything)",
        f"{_G}test_faithfulness.py::test_faithfulness_equals_transformers_on_ids_without_the_tokens",
    ),
    Guard(
        "models/gradients/faithfulness.py",
        "np.argsort(-unit_scores",
        "np.argsort(unit_scores",
        f"{_G}test_faithfulness.py::test_faithfulness_equals_transformers_on_ids_without_the_tokens",
    ),
    Guard(
        "service/debug/model_inputs.py",
        "            key = word.text, word.start, word.end\n",
        "            key = tuple(word.tokens)\n",
        f"{_D}test_faithfulness.py::test_words_of_a_query_are_removed_from_both_pairs",
    ),
    Guard(
        "service/debug/routes.py",
        "        steps += faithfulness_token_steps(length, len(units.tokens))\n",
        "",
        f"{_D}test_faithfulness.py::test_cost_of_faithfulness_is_part_of_the_budget",
    ),
    # Activations and patches.
    Guard(
        "models/network/taps.py",
        "total = self.change(x + residual)",
        "total = x + residual",
        f"{_G}test_activations.py::test_patch_equals_a_hook_that_replaces_the_vectors",
    ),
    Guard(
        "models/gradients/activations.py",
        "output[versions, positions] = source[origins]",
        "output[versions, positions] = source[positions]",
        f"{_G}test_activations.py::test_patch_equals_a_hook_that_replaces_the_vectors",
    ),
    Guard(
        "models/gradients/activations.py",
        "        if 0 <= to - start < len(row.ids)\n",
        "        if to - start < len(row.ids)\n",
        f"{_G}test_activations.py::test_patches_of_each_position_equal_patches_of_one",
    ),
    Guard(
        "models/gradients/budget.py",
        "return lengths * (1 + taps * patches) + source_length",
        "return lengths * (1 + taps) + source_length",
        f"{_D}test_taps.py::test_cost_of_a_patch_counts_every_forward_pass",
    ),
    Guard(
        "service/debug/tap_routes.py",
        "    if size > limit:\n",
        "    if False:\n",
        f"{_D}test_taps.py::test_activations_beyond_the_byte_limit_are_refused",
    ),
    Guard(
        "service/debug/patches.py",
        "elif owners[position] != source_owners[source]:",
        "elif False:",
        f"{_D}test_taps.py::test_pair_of_positions_in_different_inputs_is_refused",
    ),
    Guard(
        "service/debug/process.py",
        "reply = Completed(reply, vectors, await frames.receive(process.stdout))",
        'reply = Completed(reply, vectors, b"")',
        f"{_D}test_process.py::test_vectors_and_file_of_a_job_follow_its_reply",
    ),
    Guard(
        "service/debug/running.py",
        "            encoding = cancel_on_disconnect(request, encode(model, job.compare))\n",
        "            encoding = encode(model, job.compare)\n",
        f"{_D}test_running.py::test_comparison_ends_when_the_client_disconnects",
    ),
    Guard(
        "models/gradients/activations.py",
        "return x.cpu().clone()",
        "return x.cpu()",
        f"{_G}test_activations.py::test_reduced_activations_do_not_keep_the_whole_outputs",
    ),
    # Gradients of every kind of model.
    Guard(
        "models/gradients/reference_model.py",
        "x = encoder.embeddings(x, positions.expand(len(x), -1), types, scales=scales)",
        "x = encoder.embeddings(x, positions.expand(len(x), -1), scales=scales)",
        "tests/models/gradients/test_attribution_oracles.py::"
        "test_token_types_change_the_vectors_at_every_layer",
    ),
    Guard(
        "models/network/sparse.py",
        "parameter[list(entries)]",
        "parameter[sorted(entries)]",
        "tests/models/gradients/test_attribution_oracles.py::"
        "test_entries_of_sparse_vectors_are_those_of_the_whole_vectors",
    ),
    Guard(
        "service/debug/words.py",
        "if groups and min(own) <= last:",
        "if groups and min(own) < last:",
        f"{_D}test_words.py::test_words_of_a_text_are_the_same_for_every_tokenizer",
    ),
    Guard(
        "service/debug/served.py",
        "agrees=agreement.is_within(_bounds(model)),",
        "agrees=agreement.cosine >= _bounds(model).cosine,",
        f"{_D}test_routes.py::test_reference_model_that_differs_from_the_engine_returns_200_with_a_warning",
    ),
    Guard(
        "service/debug/worker.py",
        "        os._exit(0)\n",
        "        pass\n",
        f"{_T}test_stopping.py::test_gradient_process_ends_when_the_service_is_killed",
    ),
    Guard(
        "service/debug/process.py",
        "except (asyncio.IncompleteReadError, ConnectionError):",
        "except ZeroDivisionError:",
        f"{_D}test_process.py::test_dead_process_gives_a_clear_error_and_the_next_job_works",
    ),
    Guard(
        "service/debug/process.py",
        "if self._callers > self._settings.max_waiting:",
        "if False:",
        f"{_D}test_process.py::test_full_queue_refuses_at_once_and_the_other_jobs_finish",
    ),
    Guard(
        "service/debug/access.py",
        "    if not host_matches(host, settings.hosts):",
        "    if False:",
        f"{_D}test_routes.py::test_pages_of_other_hosts_are_refused",
    ),
    Guard(
        "service/debug/access.py",
        'origin.partition("://")[2] != host',
        "False",
        f"{_D}test_routes.py::test_pages_of_other_hosts_are_refused",
    ),
    Guard(
        "service/debug/page/runs.js",
        "  const isStale = asked !== section.asked;\n",
        "  const isStale = false;\n",
        f"{_D}page/test_use.py::test_edited_text_marks_the_result_as_old_and_removes_its_checks",
    ),
    Guard(
        "service/debug/page/export.js",
        "  const safe = /^[=+\\-@\\t]/.test(value)",
        "  const safe = /^[]/.test(value)",
        f"{_D}page/test_export.py::test_csv_has_the_exact_numbers_of_the_tables",
    ),
    Guard(
        "service/debug/page/faithfulness.js",
        "(sufficiency < random.sufficiency)",
        "(sufficiency > random.sufficiency)",
        f"{_D}page/test_explain.py::test_faithfulness_is_judged_by_random_words",
    ),
    Guard(
        "service/debug/page/whatif.js",
        "struckOf(side.side).value = [...struck].join();",
        "",
        f"{_D}page/test_explain.py::test_struck_word_moves_the_similarity_of_the_served_model",
    ),
    Guard(
        "service/debug/page/colours.js",
        'return luminance > 0.179 ? "#000000" : "#ffffff";',
        'return luminance > 0.5 ? "#000000" : "#ffffff";',
        f"{_D}page/test_attribute.py::test_numbers_on_colours_have_contrast",
    ),
    Guard(
        "service/api/middleware.py",
        "            if not self._is_stopping():\n                raise\n",
        "",
        f"{_T}test_lifespan.py::test_cancellation_is_answered_only_while_the_service_is_stopping",
    ),
    # Quantised vectors.
    Guard(
        "models/quantization.py",
        "np.clip(np.floor((vectors - starts) / steps), 0, 255).astype(np.uint8)",
        "np.floor((vectors - starts) / steps).astype(np.int64).astype(np.uint8)",
        "tests/models/test_quantization.py::test_values_outside_the_ranges_are_clipped",
    ),
    Guard(
        "models/export/calibration.py",
        "calibrating, evaluated = vectors[::2], vectors[1::2]",
        "calibrating, evaluated = vectors, vectors[1::2]",
        "tests/models/export/test_calibration.py::test_ranges_are_those_of_every_second_text"
        "_truncated_and_normalized",
    ),
    Guard(
        "models/export/calibration.py",
        "    scores[np.arange(len(indices)), indices] = -np.inf\n",
        "",
        "tests/models/export/test_calibration.py::test_recall_equals_that_of_a_search_with_codes_of"
        "_sentence_transformers",
    ),
    Guard(
        "service/inference/quantization.py",
        "is_start = not manifest.normalize or (truncate_dim is not None and normalize is None)",
        "is_start = not manifest.normalize or truncate_dim is not None",
        f"{_I}test_quantization.py::test_codes_have_the_ranges_of_calibration_texts_with_the_same"
        "_arguments",
    ),
    Guard(
        "service/inference/quantization.py",
        "if normalize not in (None, manifest.normalize):",
        "if False:",
        f"{_I}test_quantization.py::test_vectors_without_ranges_are_refused",
    ),
    Guard(
        "service/api/compat/cohere.py",
        "_FIELDS.get(field, field)",
        "field",
        f"{_T}compat/test_cohere.py::test_errors_have_coheres_format_and_names",
    ),
    # Traces, and the check before a start.
    Guard(
        "service/api/tracing.py",
        "if span.is_recording() else None",
        "if True else None",
        f"{_T}test_tracing.py::test_unsampled_requests_are_not_exported",
    ),
    Guard(
        "service/api/tracing.py",
        "            TRACE.set(None)  # a pipelined",
        "            pass  # a pipelined",
        f"{_T}test_tracing.py::test_log_lines_of_a_traced_request_have_its_ids",
    ),
    Guard(
        "service/api/tracing.py",
        "            start_ns = end_ns\n",
        "",
        f"{_T}test_tracing.py::test_stages_are_child_spans_that_add_up_to_the_request",
    ),
    Guard(
        "service/api/tracing.py",
        "        if span_id != trace.ids",
        "        if span_id and trace.ids",
        f"{_T}test_tracing.py::test_batch_span_has_links_to_the_other_requests",
    ),
    Guard(
        "service/api/tracing.py",
        "status >= HTTPStatus.INTERNAL_SERVER_ERROR",
        "status >= HTTPStatus.BAD_REQUEST",
        f"{_T}test_tracing.py::test_errors_of_the_service_have_error_status_and_those_of_clients_do_not",
    ),
    Guard(
        "service/api/tracing.py",
        "    if route is not None:\n        span.update_name",
        "    span.set_attribute('url.path', scope['path'])\n"
        "    if route is not None:\n        span.update_name",
        f"{_T}test_tracing.py::test_unknown_paths_and_methods_are_not_exported",
    ),
    Guard(
        "service/api/tracing.py",
        "closing.join(_CLOSE_S)",
        "closing.join()",
        f"{_T}test_tracing.py::test_shutdown_does_not_wait_for_an_unreachable_receiver",
    ),
    Guard(
        "service/app.py",
        "            await asyncio.to_thread(exporter.close)\n",
        "            pass\n",
        f"{_T}test_tracing.py::test_log_lines_of_a_traced_request_have_its_ids",
    ),
    Guard(
        "service/app.py",
        "    if endpoint is None:\n        return None\n",
        "    if endpoint is None:\n        import service.api.tracing\n\n        return None\n",
        f"{_T}test_tracing.py::test_nothing_is_imported_for_traces_that_are_off",
    ),
    Guard(
        "service/settings.py",
        'if not endpoint or is_disabled or exporter == "none":',
        "if not endpoint:",
        f"{_T}test_tracing.py::test_endpoint_is_that_of_the_standard_variables",
    ),
    Guard(
        "service/inference/loaded_model.py",
        "    for trace in traces.values():\n        trace.batched.update(ids)\n",
        "",
        f"{_T}test_tracing.py::test_requests_of_a_batch_are_linked",
    ),
    Guard(
        "service/check.py",
        "    passes = [_passes(run, problems) for run in checks]\n",
        "    passes = (_passes(run, problems) for run in checks)\n",
        "tests/service/test_check.py::test_check_names_every_problem_and_exits_with_status_2",
    ),
    Guard(
        "service/check.py",
        '        log.exception("cannot start")\n        return False\n',
        '        log.exception("cannot start")\n',
        "tests/service/test_check.py::test_check_runs_the_self_check",
    ),
    # Outgoing connections and leaks.
    Guard(
        "models/engines/with_onnxruntime.py",
        "ORT_DISABLE_TELEMETRY",
        "ORT_OF_ANOTHER_NAME",
        f"{_T}test_egress.py::test_service_opens_no_connections",
    ),
    Guard(
        "service/api/body.py",
        "        if len(body) <= _INLINE_BYTES:",
        "        __import__('logging').getLogger('vitrine').info(body)\n"
        "        if len(body) <= _INLINE_BYTES:",
        f"{_T}test_process.py::test_json_logs_have_request_ids_and_no_content_of_requests",
    ),
    # Bulk encoding on a cluster.
    Guard(
        "deploy/ray_encode.py",
        "        check_settings(job.output.path, job.settings, opened.settings)\n",
        "",
        "tests/deploy/test_ray_encode.py::test_actor_with_another_artifact_at_the_path_ends_the_job",
    ),
    Guard(
        "deploy/ray_encode.py",
        "            entry.file.check_unchanged(info.size, info.mtime_ns)\n",
        "",
        "tests/deploy/test_ray_encode.py::test_input_that_changes_during_the_job_is_an_error",
    ),
    Guard(
        "deploy/ray_encode.py",
        "return max(0, (self.first if first < self.first else self.end) - first)",
        "return max(0, self.end - first)",
        "tests/deploy/test_ray_encode.py::test_damaged_part_of_a_cluster_is_encoded_again",
    ),
    # Benchmarks.
    Guard(
        "tests/benchmarks/bench_servers.py",
        "        if not cosine.min() >= bound:",
        "        if cosine.min() < bound:",
        "tests/benchmarks/test_bench_servers.py::test_peer_with_other_vectors_is_refused_by_name",
    ),
    Guard(
        "tests/benchmarks/peers.py",
        "            if vectors is None or len(vectors) != len(part):\n",
        "            if vectors is None:\n",
        "tests/benchmarks/test_bench_servers.py::test_peer_that_drops_texts_is_named",
    ),
)


def main() -> int:
    """Remove the chosen guards one after the other; return 1 if a test does not fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=len(GUARDS), help="number of guards to run")
    parser.add_argument("--seed", type=int, default=0, help="position of the sample in the table")
    arguments = parser.parse_args()
    guards = sample(arguments.sample, arguments.seed)
    print(f"{len(guards)} of {len(GUARDS)} guards, first with all of them in place", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "vitrine"
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in tracked.rstrip("\0").split("\0"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        log = Path(folder) / "log"
        if _status({guard.test for guard in guards}, copy, log, limit_s=None) != 0:
            print(f"{log.read_text()}\na test fails with all guards in place")
            return 1
        unnoticed = [guard for guard in guards if not _notices(guard, copy, log)]
    for guard in unnoticed:
        print(f"not noticed: {guard.file}: {guard.code.strip()}")
    print(f"{len(guards) - len(unnoticed)} of {len(guards)} removals are noticed")
    return int(bool(unnoticed))


def sample(size: int, seed: int) -> list[Guard]:
    """Return guards at even distances; seeds 0 to len(GUARDS) / size choose each one once."""
    windows = -(-len(GUARDS) // size)
    return list(GUARDS[seed % windows :: windows])


def _status(tests: Collection[str], copy: Path, log: Path, limit_s: float | None) -> int:
    with log.open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-qxp", "no:cacheprovider", *sorted(tests)],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},  # takes precedence over the installed tree
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return run.wait(limit_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # with its children


def _notices(guard: Guard, copy: Path, log: Path) -> bool:
    file = copy / guard.file
    whole = file.read_text()
    file.write_text(whole.replace(guard.code, guard.mistake))
    began = time.monotonic()
    try:
        status = _status([guard.test], copy, log, _LIMIT_S)
    except subprocess.TimeoutExpired:
        status = 1
    finally:
        file.write_text(whole)
    # pytest exits with 1 if a test failed, and with more if it could not run.
    result = {0: "PASSES WITHOUT IT", 1: "fails"}.get(status, f"DID NOT RUN: status {status}")
    print(f"{time.monotonic() - began:4.0f} s  {result:18} {guard.test}", flush=True)
    return status == 1


if __name__ == "__main__":
    sys.exit(main())
