"""Guards of several models, their streams, and the cache."""

from tests.controls.guard import Guard

_T = "tests/service/api/"
_I = "tests/service/inference/"
_S = "tests/service/test_model_cache.py::"

GUARDS = (
    # Several models.
    Guard(
        "service/inference/registry/model_version.py",
        "if self._on_closed is not None and not self.leases:",
        "if self._on_closed is not None:",
        f"{_I}registry/test_registry.py::test_swap_serves_the_new_version_and_closes_the_old_after_its_last"
        "_lease",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "            self._memory.retire(old)\n",
        "            pass\n",
        f"{_I}registry/test_registry.py::test_swap_serves_the_new_version_and_closes_the_old_after_its_last"
        "_lease",
    ),
    Guard(
        "service/inference/registry/model_watch.py",
        " if _is_gone(key[0])}",
        "}",
        f"{_I}registry/test_model_watch.py::test_model_whose_artifact_cannot_be_read_stays_in_service",
    ),
    Guard(
        "service/inference/registry/model_watch.py",
        "            if not self._registry.is_open:\n                return\n",
        "",
        f"{_I}registry/test_model_watch.py::test_scans_before_the_models_are_open_load_nothing_twice",
    ),
    Guard(
        "service/inference/registry/model_watch.py",
        "    return spec.path, spec.options.name\n",
        "    return spec.path, None\n",
        f"{_I}registry/test_model_watch.py::test_all_models_of_a_replaced_artifact_are_loaded_again_with_their"
        "_own_options",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "        if old is not None and not allow_incompatible:\n",
        "        if False:\n",
        f"{_I}registry/test_compatibility.py::test_incompatible_version_is_refused_unless_it_is_allowed",
    ),
    Guard(
        "service/inference/registry/memory.py",
        "            check_replacement(entry.manifest, model.artifact.manifest)\n",
        "            pass\n",
        f"{_I}registry/test_compatibility.py::"
        "test_unloaded_model_whose_artifact_became_incompatible_is_not_served",
    ),
    Guard(
        "service/inference/registry/compatibility.py",
        "or not {*old.outputs} <= {*new.outputs}:",
        "or False:",
        f"{_I}registry/test_compatibility.py::test_difference_names_both_values",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "        if entry.loading is None:\n",
        "        if True:\n",
        f"{_I}registry/test_memory.py::test_failed_load_fails_all_its_requests_and_is_not_repeated_for_each",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "        if (retry_after_s := entry.retry_at - self._clock.now()) > 0:\n",
        "        if False:\n",
        f"{_I}registry/test_memory.py::test_failed_load_on_demand_is_reported_and_tried_again",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "                self._memory.unload(entry)\n            self._remove_metrics(name)\n",
        "                self._memory.unload(entry)\n",
        f"{_I}registry/test_registry.py::test_metrics_are_those_of_the_served_models",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "            if old is None:\n                self._remove_metrics(entry.name)\n",
        "",
        f"{_I}registry/test_registry.py::test_metrics_are_those_of_the_served_models",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "            self._check_path(alias)\n",
        "",
        f"{_I}registry/test_registry.py::test_name_or_alias_that_is_refused_is_not_served",
    ),
    Guard(
        "service/app.py",
        "        check_path=tei.check_name,\n",
        "",
        f"{_T}models/test_changes.py::test_names_that_are_ambiguous_under_tei_are_refused",
    ),
    Guard(
        "service/inference/registry/memory.py",
        'victim = min(self._others(keep), key=attrgetter("is_busy"), default=None)',
        "victim = next(iter(self._others(keep)), None)",
        f"{_I}registry/test_memory.py::test_idle_model_is_unloaded_before_a_busy_one",
    ),
    Guard(
        "service/inference/registry/memory.py",
        "        if self.is_closed:\n            await model.close()\n",
        "        if False:\n            await model.close()\n",
        f"{_I}registry/test_registry.py::test_load_that_ends_after_the_registry_is_closed_closes_its_model",
    ),
    Guard(
        "service/inference/registry/memory.py",
        "            await self._has_closed.wait()\n",
        "            pass\n",
        f"{_I}registry/test_memory.py::test_busy_model_is_unloaded_only_after_its_requests",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "        except BaseException:\n            await version.close()\n",
        "        except BaseException:\n",
        f"{_I}registry/test_registry.py::test_failed_check_closes_the_new_version_and_leaves_the_old_one"
        "_serving",
    ),
    # State that changes while a load waits.
    Guard(
        "service/inference/registry/model_version.py",
        "        if self._closing is None:\n",
        "        if True:\n",
        f"{_I}registry/test_registry.py::test_retired_version_closes_once_and_gives_no_leases",
    ),
    Guard(
        "service/inference/registry/model_version.py",
        "if self._on_closed is not None or self._closing is not None:",
        "if False:",
        f"{_I}registry/test_registry.py::test_retired_version_closes_once_and_gives_no_leases",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "check(previous.model, version.model)\n            self._memory.check_not_closed()\n",
        "check(previous.model, version.model)\n",
        f"{_I}registry/test_registry.py::test_registry_that_closes_during_a_comparison_closes_both_versions",
    ),
    Guard(
        "service/inference/registry/memory.py",
        "        # At once, because the next load might unload the model again.\n"
        "        entry.answer()\n",
        "",
        f"{_I}registry/test_registry_races.py::test_any_interleaving_keeps_the_budget_and_closes_each_version"
        "_once",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "        if old is not None:\n            old.answer()\n",
        "",
        f"{_I}registry/test_registry_races.py::test_any_interleaving_keeps_the_budget_and_closes_each_version"
        "_once",
    ),
    Guard(
        "service/inference/registry/memory.py",
        "        while not self.fits(size, keep):\n",
        "        while False:\n",
        f"{_I}registry/test_registry_races.py::test_any_interleaving_keeps_the_budget_and_closes_each_version"
        "_once",
    ),
    Guard(
        "service/inference/registry/memory.py",
        "(await asyncio.to_thread(read_artifact, entry.spec))[1]) > room",
        "entry.size) > room",
        f"{_I}registry/test_registry_races.py::test_any_interleaving_keeps_the_budget_and_closes_each_version"
        "_once",
    ),
    Guard(
        "service/inference/registry/memory.py",
        "        if version.size > room:",
        "        if False:",
        f"{_I}registry/test_registry_races.py::test_any_interleaving_keeps_the_budget_and_closes_each_version"
        "_once",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "                self._replace(entry)\n                return None\n",
        "                return None\n",
        f"{_I}registry/test_model_watch.py::test_new_artifact_of_an_unloaded_model_has_its_own_size_and_is_tried"
        "_at_once",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "            if path is not None and (",
        "            if False and (",
        f"{_I}registry/test_model_watch.py::test_model_whose_artifact_is_gone_is_kept_if_it_has_another_one_by"
        "_now",
    ),
    Guard(
        "service/inference/results/loaded_model.py",
        "        self.engine.close()\n",
        "",
        f"{_I}registry/test_registry.py::test_weights_of_a_replaced_version_are_freed_without_the_garbage"
        "_collector",
    ),
    Guard(
        "service/api/middleware.py",
        "                lease.release()\n",
        "                pass\n",
        f"{_T}models/test_on_demand.py::test_models_beyond_the_memory_budget_are_loaded_on_demand",
    ),
    Guard(
        "service/api/auth.py",
        'if keys.is_open and scope == "admin":',
        "if False:",
        f"{_T}models/test_changes.py::test_changes_are_refused_if_there_are_no_keys",
    ),
    Guard(
        "service/api/models.py",
        "    if not agreement.cosine >= body.min_cosine:",
        "    if False:",
        f"{_T}models/test_changes.py::test_shadow_comparison_decides_about_the_swap",
    ),
    Guard(
        "service/inference/model/encoding.py",
        "unit_vectors(vectors) if space.info.normalizes else vectors",
        "unit_vectors(vectors)",
        "tests/service/evaluation/test_migration.py::"
        "test_second_space_of_a_model_without_unit_length",
    ),
    Guard(
        "service/evaluation/maps.py",
        " - unit * (unit * by_unit).sum(1, keepdims=True)",
        "",
        "tests/service/evaluation/test_migration.py::test_ranked_map_is_that_of_torch",
    ),
    Guard(
        "service/evaluation/gate.py",
        "if not own.difference >= -max_drop - _ROUNDING:",
        "if False:",
        "tests/service/evaluation/test_gate.py::"
        "test_worse_version_is_refused_and_a_better_one_served_under_load",
    ),
    Guard(
        "service/evaluation/gate.py",
        "any(pair != (served, new) for pair in versions)",
        "(served, new) not in versions",
        "tests/service/evaluation/test_gate.py::"
        "test_comparison_of_other_versions_or_settings_does_not_decide",
    ),
    Guard(
        "service/api/lease.py",
        'case "interactive" if not is_bulk_only:',
        'case "interactive":',
        f"{_T}test_priority.py::test_key_for_bulk_requests_refuses_interactive_requests",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "(member.running or runner.queued_s > _SPARE_S)",
        "member.running",
        f"{_I}batching/test_streams.py::test_spare_stream_takes_no_large_queue",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "(member.running or runner.queued_s > _SPARE_S)",
        "runner.queued_s > _SPARE_S",
        f"{_I}batching/test_streams.py::test_spare_stream_runs_no_batch_of_a_batcher_that_runs_one",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "if run is not None or stream.is_spare:",
        "if run is not None:",
        f"{_I}batching/test_streams.py::test_batch_that_the_spare_stream_may_not_take_runs_after_the_spare"
        "_stream",
    ),
    # Streams that several models share.
    Guard(
        "service/inference/batching/streams.py",
        "if run is not None or stream.is_spare:",
        "if stream.is_spare:",
        f"{_I}batching/test_streams.py::test_running_batches_count_by_their_expected_duration",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "member.virtual_s += (now - ended.started - ended.expected_s) / member.runner.share",
        "pass",
        f"{_I}batching/test_streams.py::test_time_of_a_stream_is_divided_by_share",
    ),
    Guard(
        "service/inference/batching/streams.py",
        'key=attrgetter("virtual_s")',
        "key=lambda _: 0",
        f"{_I}batching/test_streams.py::test_flood_delays_a_batch_of_another_batcher_by_one_batch",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "member.virtual_s = self._virtual_s + expected_s",
        "member.virtual_s += expected_s",
        f"{_I}batching/test_streams.py::test_idle_batcher_collects_no_credit",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "self._virtual_s + expected_s / runner.share",
        "self._virtual_s",
        f"{_I}batching/test_streams.py::test_running_batches_count_by_their_expected_duration",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "if member.running == runner.streams or not runner.has_queued:",
        "if not runner.has_queued:",
        f"{_I}batching/test_streams.py::test_batcher_runs_no_more_batches_at_a_time_than_its_own_limit",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "members = self._members if stream in self._streams else ()",
        "members = self._members",
        f"{_I}batching/test_streams.py::test_hanging_run_that_returns_takes_no_further_batch",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "                    self._streams.discard(stream)\n",
        "",
        f"{_I}batching/test_streams.py::test_hanging_run_stops_its_batcher_and_the_others_get_a_new_thread",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "self._loop.call_soon_threadsafe(runner.stop, error)",
        "pass",
        f"{_I}batching/test_streams.py::test_defect_of_a_batcher_affects_no_other",
    ),
    Guard(
        "service/inference/batching/streams.py",
        "(work_s + others_s) / self.streams",
        "work_s / self.streams",
        f"{_I}batching/test_streams.py::test_drain_time_includes_the_share_of_the_other_batchers",
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
        f"{_I}model/test_python_api.py::test_models_of_a_process_share_its_devices",
    ),
    # Cache, and several outputs of a pass.
    Guard(
        "service/inference/batching/cached_batcher.py",
        "run.length <= length",
        "run.length > 0",
        f"{_I}batching/test_cache.py::test_request_does_not_wait_for_one_with_more_tokens",
    ),
    Guard(
        "service/inference/batching/cached_batcher.py",
        "            future.set_exception(error)\n",
        "            future.cancel()\n",
        f"{_I}batching/test_cache.py::test_failure_of_an_item_concerns_those_who_wait_for_it_alone",
    ),
    Guard(
        "service/inference/batching/cached_batcher.py",
        "            kept = self._cache.get(key)\n",
        "            kept = None\n",
        f"{_I}batching/test_cache.py::test_item_computed_twice_keeps_its_first_result",
    ),
    Guard(
        "service/inference/batching/cache.py",
        "        self._results.move_to_end(key)\n",
        "",
        f"{_I}batching/test_cache.py::test_least_recently_used_results_are_evicted",
    ),
    Guard(
        "service/inference/batching/cache.py",
        "        if size > self.max_bytes:\n            return\n",
        "",
        f"{_I}batching/test_cache.py::test_result_larger_than_the_cache_is_not_kept_and_evicts_nothing",
    ),
    Guard(
        "service/inference/model/opening.py",
        "key=lambda item: prefix + item.key,",
        "key=lambda item: item.key,",
        f"{_T}test_cache.py::test_model_does_not_get_results_of_another_graph_or_engine",
    ),
    Guard(
        "service/inference/results/batch_run.py",
        "row.prompt_tokens, row.adapter, row.unattended)",
        "row.prompt_tokens, 0, row.unattended)",
        f"{_T}test_cache.py::test_keys_cover_everything_that_results_depend_on",
    ),
    Guard(
        "service/inference/results/vectors.py",
        "    is_kept[: rules.first] = False\n",
        "",
        f"{_T}test_hybrid.py::test_one_request_gives_all_outputs",
    ),
    Guard(
        "service/inference/model/encoding.py",
        " & ~np.isin(ids, rules.unweighted)",
        "",
        f"{_T}test_hybrid.py::test_one_request_gives_all_outputs",
    ),
    # The cache of exported models.
    Guard(
        "service/model_cache.py",
        "            commit = None if refresh else self._commit()",
        "            commit = None",
        f"{_S}test_new_version_of_the_export_keeps_the_commit_of_a_hub_id",
    ),
    Guard(
        "service/model_cache.py",
        "            # Another process may have exported the model meanwhile.\n"
        "            if not refresh and (path := self._find()):",
        "            if False:",
        f"{_S}test_two_starts_at_once_export_once",
    ),
    Guard(
        "service/model_cache.py",
        "            shutil.rmtree(left, ignore_errors=True)",
        "            pass",
        f"{_S}test_killed_exports_leave_nothing_that_a_later_start_takes",
    ),
    Guard(
        "service/model_cache.py",
        ', "TMPDIR": str(work)}',
        "}",
        f"{_S}test_export_that_the_system_kills_ends_the_start_with_a_remedy",
    ),
    Guard(
        "service/model_cache.py",
        '        (work / "new").rename(path)',
        '        shutil.copytree(work / "new", path)',
        f"{_S}test_export_killed_before_any_change_of_a_file_leaves_nothing_that_a_later_start_takes",
    ),
    Guard(
        "service/bulk/command_line.py",
        "        type=model_path,\n",
        "        type=Path,\n",
        f"{_S}test_bulk_encoding_takes_names_from_the_same_cache",
    ),
    Guard(
        "service/serve_command.py",
        "        check_settings(settings)\n",
        "",
        "tests/service/test_wrong_starts.py::test_start_is_refused_before_an_export",
    ),
    Guard(
        "service/model_cache.py",
        '    if not (isinstance(name, str) and name.startswith(".")):',
        "    if True:",
        f"{_S}test_missing_folder_is_no_hub_id",
    ),
)
