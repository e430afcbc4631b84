"""Guards of gradients, attributions and activations."""

from tests.controls.guard import Guard

_T = "tests/service/api/"
_D = "tests/service/debug/"
_P = "tests/service/page/"
_G = "tests/models/gradients/"

GUARDS = (
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
        "service/debug/target_inputs.py",
        "            key = word.text, word.start, word.end\n",
        "            key = tuple(word.tokens)\n",
        f"{_D}test_faithfulness.py::test_words_of_a_query_are_removed_from_both_pairs",
    ),
    Guard(
        "service/debug/attribute.py",
        "        steps += faithfulness_token_steps(length, units)\n",
        "",
        f"{_D}test_faithfulness.py::test_cost_of_faithfulness_is_part_of_the_budget",
    ),
    Guard(
        "models/gradients/faithfulness.py",
        "(np.cumsum(counts) - (counts - 1) / 2)[indices]",
        "np.cumsum(counts)[indices].astype(float)",
        f"{_G}test_faithfulness.py::test_rank_correlation_equals_scipy",
    ),
    Guard(
        "models/gradients/faithfulness.py",
        "    matters = np.abs(effects) >= _MATTERS * np.abs(effects).max()\n",
        "    matters = np.abs(effects) > 0\n",
        f"{_G}test_faithfulness.py::test_opposite_signs_are_counted_among_the_units_that_matter",
    ),
    Guard(
        "models/gradients/budget.py",
        "return length + without_each + points",
        "return length + points",
        f"{_G}test_faithfulness.py::test_cost_is_the_tokens_that_run_through_the_model",
    ),
    Guard(
        "service/debug/child/jobs.py",
        '            is_signed=request.method != "saliency",\n',
        "",
        f"{_D}test_faithfulness.py::test_faithfulness_of_a_sparse_weight_equals_transformers",
    ),
    # Attribution of one of two texts.
    Guard(
        "models/gradients/attribution.py",
        "    baseline[kept] = tokens[kept]\n",
        "",
        f"{_G}test_attribution_oracles.py::"
        "test_attribution_of_one_text_of_a_pair_equals_captum_on_the_model_of_transformers",
    ),
    Guard(
        "service/debug/target_inputs.py",
        "if number is None or not _is_replaced(each.fields[number], of)",
        "if number is not None and not _is_replaced(each.fields[number], of)",
        f"{_D}test_kinds.py::"
        "test_attribution_of_a_rerank_score_equals_captum_on_the_model_of_transformers",
    ),
    Guard(
        "service/debug/target_inputs.py",
        "            if _is_replaced(word.text, of):\n",
        "            if True:\n",
        f"{_D}test_faithfulness.py::test_faithfulness_of_one_text_of_a_pair_removes_its_units",
    ),
    Guard(
        "service/debug/pipeline/texts.py",
        "    if baseline == list(ids) and len(kept) < len(ids):\n",
        "    if baseline == list(ids):\n",
        f"{_D}test_kinds.py::test_scores_of_texts_that_the_baseline_keeps_are_zero",
    ),
    # Similarities other than the cosine.
    Guard(
        "models/gradients/pair.py",
        'is_cosine = model.normalize or model.similarity == "cosine"',
        "is_cosine = True",
        f"{_G}test_pair.py::"
        "test_matrix_and_reference_terms_sum_to_the_dot_product_of_served_vectors",
    ),
    Guard(
        "models/gradients/reference_model.py",
        "manifest.normalize, manifest.similarity)",
        "manifest.normalize)",
        f"{_D}test_similarity.py::test_attributed_similarity_is_the_served_score",
    ),
    Guard(
        "service/debug/target.py",
        'if is_cosine or target != "cosine"]',
        "if True]",
        f"{_D}test_similarity.py::test_cosine_is_no_target_of_other_similarities",
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
        f"{_D}test_patch.py::test_cost_of_a_patch_counts_every_forward_pass",
    ),
    Guard(
        "service/debug/activations.py",
        "    if size > limit:\n",
        "    if False:\n",
        f"{_D}test_activations.py::test_activations_beyond_the_byte_limit_are_refused",
    ),
    Guard(
        "service/debug/patch.py",
        "elif owners[position] != source_owners[source]:",
        "elif False:",
        f"{_D}test_patch.py::test_pair_of_positions_in_different_inputs_is_refused",
    ),
    Guard(
        "service/debug/pipeline/process.py",
        "if opened.manifest_sha256 != artifact.manifest.sha256:",
        "if False:",
        f"{_D}test_parity.py::test_gradients_are_never_those_of_an_artifact_that_has_replaced_the_served_one",
    ),
    Guard(
        "service/debug/pipeline/process.py",
        "reply = Completed(reply, vectors, await frames.receive(process.stdout))",
        'reply = Completed(reply, vectors, b"")',
        f"{_D}test_process.py::test_vectors_and_file_of_a_job_follow_its_reply",
    ),
    Guard(
        "service/debug/pipeline/call.py",
        "served = await self.within_deadline(encode(self.model, job.rows))",
        "served = await encode(self.model, job.rows)",
        f"{_D}test_call.py::test_comparison_ends_when_the_client_disconnects",
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
        "service/debug/pipeline/words.py",
        "if groups and min(own) <= last:",
        "if groups and min(own) < last:",
        f"{_D}test_words.py::test_words_of_a_text_are_the_same_for_every_tokenizer",
    ),
    Guard(
        "service/debug/pipeline/served_vectors.py",
        "agrees=agreement.is_within(_bounds(model)),",
        "agrees=agreement.cosine >= _bounds(model).cosine,",
        f"{_D}test_attribute.py::test_reference_model_that_differs_from_the_engine_returns_200_with_a_warning",
    ),
    Guard(
        "service/debug/child/__main__.py",
        "    _lower_priority()\n    _write",
        "    _write",
        f"{_D}test_process.py::test_output_of_libraries_does_not_mix_with_frames_and_encoding_has_priority",
    ),
    Guard(
        "service/debug/child/__main__.py",
        "        os._exit(0)\n",
        "        pass\n",
        f"{_T}test_stopping.py::test_gradient_process_ends_when_the_service_is_killed",
    ),
    Guard(
        "service/debug/pipeline/process.py",
        "except (asyncio.IncompleteReadError, ConnectionError):",
        "except ZeroDivisionError:",
        f"{_D}test_process.py::test_dead_process_gives_a_clear_error_and_the_next_job_works",
    ),
    Guard(
        "service/debug/pipeline/process.py",
        "return await asyncio.shield(starting)",
        "return await starting",
        f"{_D}test_process.py::test_start_survives_its_caller",
    ),
    Guard(
        "service/debug/pipeline/process.py",
        "if starting is not None and not starting.done():",
        "if False:",
        f"{_D}test_process.py::test_close_ends_a_start_that_has_no_process_yet",
    ),
    Guard(
        "service/debug/pipeline/process.py",
        "    if used_s < _BUSY * deadline_s:",
        "    if False:",
        f"{_D}test_process.py::test_deadline_error_blames_the_text_only_if_the_job_had_a_cpu",
    ),
    Guard(
        "service/debug/pipeline/process.py",
        "if self._callers > self._settings.max_waiting:",
        "if False:",
        f"{_D}test_process.py::test_full_queue_refuses_at_once_and_the_other_jobs_finish",
    ),
    Guard(
        "service/debug/pipeline/access.py",
        "    if not host_matches(host, settings.hosts):",
        "    if False:",
        f"{_D}test_access.py::test_pages_of_other_hosts_are_refused",
    ),
    Guard(
        "service/debug/pipeline/access.py",
        'origin.partition("://")[2] != host',
        "False",
        f"{_D}test_access.py::test_pages_of_other_hosts_are_refused",
    ),
    Guard(
        "service/page/static/results.js",
        "  const isStale = section.runs.length > 0 && "
        "!section.isRunning && !isCurrent(name, section.inputs);\n",
        "  const isStale = false;\n",
        f"{_P}test_use.py::test_edited_text_marks_the_result_as_old_and_removes_its_checks",
    ),
    Guard(
        "service/page/static/export.js",
        "  const safe = /^[=+\\-@\\t]/.test(value)",
        "  const safe = /^[]/.test(value)",
        f"{_P}test_export.py::test_csv_has_the_exact_numbers_of_the_tables",
    ),
    Guard(
        "service/page/static/faithfulness.js",
        "(sufficiency < random.sufficiency)",
        "(sufficiency > random.sufficiency)",
        f"{_P}test_second_opinion.py::test_faithfulness_is_judged_by_random_words",
    ),
    Guard(
        "service/page/static/whatif.js",
        "struckOf(side.side).value = [...struck].join();",
        "",
        f"{_P}test_explain.py::test_struck_word_has_the_number_of_the_explanation",
    ),
    Guard(
        "service/page/static/tokens.js",
        'joined = !isSpaced ? before + after : after ? before + after.replace(STARTS, "")',
        "joined = !isSpaced ? before + after : after ? before + after",
        f"{_P}test_explain.py::test_struck_word_has_the_number_of_the_explanation",
    ),
    Guard(
        "service/page/static/numbers.js",
        "values[other] - values[one]",
        "values[one] - values[other]",
        f"{_P}test_rank.py::test_list_has_the_order_and_the_scores_of_rerank",
    ),
    Guard(
        "service/page/static/rank_row.js",
        "unread(slice(text, { start: explained.end }))",
        "unread(slice(text, { start: explained.end + 1 }))",
        f"{_P}test_rank.py::test_cut_line_is_where_the_tokenizer_truncates",
    ),
    Guard(
        "service/page/static/rank_whatif.js",
        "scores[index] = result.scores[at];",
        "scores[at] = result.scores[at];",
        f"{_P}test_rank_edits.py::test_struck_sentence_has_the_score_and_the_rank_of_the_rest",
    ),
    Guard(
        "service/page/static/rank_page.js",
        "sections.rank.controller?.abort();",
        "",
        f"{_P}test_rank.py::"
        "test_list_is_there_before_the_explanations_which_an_edited_input_cancels",
    ),
    Guard(
        "service/page/static/second.js",
        "unit.score * gradient < 0",
        "unit.score * gradient > 0",
        f"{_P}test_second_opinion.py::test_gradients_of_both_texts_follow_the_first_answer",
    ),
    Guard(
        "service/page/static/deletion.js",
        "score: less(0, unit.score), alone: less(0, unit.alone)",
        "score: unit.score, alone: unit.alone",
        f"{_P}test_explain.py::test_two_documents_are_explained_by_the_difference_of_their_scores",
    ),
    Guard(
        "service/page/static/deletion.js",
        "[[raising, up, above], [lowering, down, below]]",
        "[[raising, up, below], [lowering, down, above]]",
        f"{_P}test_sentences.py::test_words_of_two_documents_speak_for_one_of_them",
    ),
    Guard(
        "service/page/static/deletion.js",
        "const isPlain = (unit) => isWord(unit) && unit.leftOut",
        "const isPlain = (unit) => unit.leftOut",
        f"{_P}test_sentences.py::test_punctuation_is_never_named_as_evidence",
    ),
    Guard(
        "service/page/static/second.js",
        'deletion.result.explanations[1] ? all : { ...all, c: "" }',
        "all",
        f"{_P}test_sentences.py::"
        "test_second_opinion_is_of_a_difference_only_if_the_first_answer_is",
    ),
    Guard(
        "service/page/static/metrics.js",
        "scores[j] - scores[i] || relevance[i] - relevance[j]",
        "scores[j] - scores[i]",
        f"{_P}test_questions.py::test_equal_scores_count_against_the_expected_documents",
    ),
    Guard(
        "service/page/static/inputs.js",
        "!isLocal(inputOf(name)) && String",
        "String",
        f"{_P}test_questions.py::test_file_is_opened_or_dropped_and_is_not_in_the_url",
    ),
    Guard(
        "service/page/routes.py",
        "if not state_of(request).settings.server.page:",
        "if False:",
        f"{_P}test_explain.py::test_page_is_absent_if_it_is_disabled",
    ),
    Guard(
        "service/page/static/colours.js",
        'return luminance > 0.179 ? "#000000" : "#ffffff";',
        'return luminance > 0.5 ? "#000000" : "#ffffff";',
        f"{_P}test_attribute.py::test_numbers_on_colours_have_contrast",
    ),
    Guard(
        "service/api/middleware.py",
        "            if not self._is_stopping():\n                raise\n",
        "",
        f"{_T}test_lifespan.py::test_cancellation_is_answered_only_while_the_service_is_stopping",
    ),
)
