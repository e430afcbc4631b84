"""Guards of results of the model in the service."""

from tests.controls.guard import Guard

_T = "tests/service/api/"
_I = "tests/service/inference/"

_Y = f"{_T}test_yes_no_reranker.py::"

GUARDS = (
    # Pairs in a template.
    Guard(
        "service/inference/tokenizing/shared_tokenizers.py",
        "tokenizer.encode_special_tokens = encodes_special",
        "pass",
        f"{_Y}test_text_cannot_close_its_turn",
    ),
    Guard(
        "service/inference/tokenizing/templated_pairs.py",
        "max(begin, start) - start",
        "begin - start",
        f"{_I}tokenizing/test_templated_pairs.py::test_tokens_have_the_spans_of_their_texts",
    ),
    Guard(
        "service/inference/tokenizing/templated_pairs.py",
        "for begin, end in body.spans if begin < stop)",
        "for begin, end in body.spans)",
        f"{_I}tokenizing/test_templated_pairs.py::test_texts_that_are_left_give_the_same_row",
    ),
    Guard(
        "service/inference/model/variant_texts.py",
        "self.limits, instruction=self.options.instruction)",
        "self.limits)",
        f"{_Y}test_explanation_of_a_long_document_is_of_the_part_that_is_read",
    ),
    Guard(
        "service/inference/results/chunked_texts.py",
        "excess = max(excess, -room(query, part))",
        "pass",
        f"{_I}tokenizing/test_templated_pairs.py::"
        "test_chunk_fits_although_its_tokens_depend_on_the_text_before_it",
    ),
    # Static models.
    Guard(
        "service/inference/tokenizing/tokenizer.py",
        "prompted = [text[: rules.max_chars] for text in prompted]",
        "pass",
        f"{_I}results/test_static_models.py::test_text_is_cut_by_characters_before_it_is_cut_by_tokens",
    ),
    Guard(
        "service/inference/results/chunked_texts.py",
        "if (chars := len(prompt.text) + len(part) - max_chars) > 0:",
        "if (chars := 0) > 0:",
        f"{_I}results/test_static_models.py::test_text_is_cut_by_characters_before_it_is_cut_by_tokens",
    ),
    *(
        Guard(
            "service/inference/tokenizing/shared_tokenizers.py",
            line,
            "pass",
            f"{_I}tokenizing/test_shared_tokenizers.py::"
            "test_divisions_of_equal_probability_are_those_of_the_scores_in_the_file",
        )
        for line in (
            "self._first.model = _exact_unigram(content)",
            "tokenizer.model = self._first.model  # see `_exact_unigram`",
        )
    ),
    Guard(
        "service/inference/tokenizing/plain_texts.py",
        "contents = [*added, *map(normalizer.normalize_str, added)]",
        "contents = added",
        f"{_I}tokenizing/test_shared_tokenizers.py::"
        "test_plain_texts_have_the_tokens_that_they_have_with_the_normalizer",
    ),
    Guard(
        "service/inference/tokenizing/plain_texts.py",
        "isinstance(tokenizer.pre_tokenizer, BertPreTokenizer) and ",
        "",
        f"{_I}tokenizing/test_shared_tokenizers.py::test_other_pre_tokenizers_have_no_words",
    ),
    Guard(
        "service/inference/tokenizing/plain_texts.py",
        "        if len(known) + len(new) > _MAX_WORDS:",
        "        if False:",
        f"{_I}tokenizing/test_shared_tokenizers.py::test_plain_texts_have_the_tokens_of_their_words",
    ),
    Guard(
        "service/inference/tokenizing/encodings.py",
        "if ids is None or len(ids) > limit:",
        "if ids is None:",
        f"{_I}tokenizing/test_shared_tokenizers.py::"
        "test_short_texts_are_tokenised_by_their_words_unless_they_are_too_long_for_the_model",
    ),
    # Token pooling.
    Guard(
        "service/inference/results/token_pooling.py",
        "if len(vectors) > MAX_POOLED:",
        "if False:",
        f"{_I}results/test_token_pooling.py::test_text_with_too_many_vectors_is_refused",
    ),
    # Long documents.
    Guard(
        "service/inference/tokenizing/chunking.py",
        "    is_free = (starts >= reached[:-1]) & ",
        "    is_free = ",
        f"{_I}tokenizing/test_chunking.py::test_token_of_parts_of_two_characters_is_never_split",
    ),
    Guard(
        "service/inference/results/chunked_texts.py",
        "excess = max(tokens - size, whole - taken - room)",
        "excess = 0",
        f"{_I}tokenizing/test_chunking.py::test_chunk_that_grows_when_tokenised_alone_is_shortened",
    ),
    Guard(
        "service/inference/results/chunked_texts.py",
        "whole = self._tokenizer.count(prompt.text + part) if prompt.text else tokens",
        "whole = tokens + taken",
        f"{_I}tokenizing/test_chunking.py::test_chunk_fits_with_a_prompt_whose_tokens_merge_with_the_chunks",
    ),
    Guard(
        "service/inference/results/chunked_texts.py",
        "            if len(pieces) == room:\n",
        "            if False:\n",
        f"{_I}tokenizing/test_chunking.py::test_number_of_chunks_is_limited",
    ),
    Guard(
        "service/inference/model/chunk_embeddings.py",
        "lambda row: chunked.owners[row]",
        "lambda row: row",
        f"{_T}test_chunks.py::test_failure_names_the_text_of_the_chunk",
    ),
    Guard(
        "service/inference/results/late_chunking.py",
        "        begin = 0 if is_first else self.first + reached - start\n",
        "        begin = 0 if is_first else self.first\n",
        f"{_I}results/test_late_chunking.py::test_vectors_equal_the_reference_implementation",
    ),
    Guard(
        "service/inference/results/late_chunking.py",
        "min(max(start, self.unpooled), end - 1), end",
        "start, end",
        f"{_I}results/test_late_chunking.py::test_only_chunk_of_a_text_has_the_vector_of_the_text",
    ),
    Guard(
        "service/inference/model/similarity.py",
        "queries = vectors[:1] if count == 1 else vectors[query_rows]",
        "queries = vectors[:count]",
        f"{_T}test_chunks.py::test_document_has_the_cosine_of_its_best_chunk",
    ),
    # Similarities.
    Guard(
        "service/inference/results/scores.py",
        '"euclidean": _euclidean,',
        '"euclidean": _manhattan,',
        f"{_I}model/test_similarity.py::test_dense_similarities_equal_sentence_transformers",
    ),
    Guard(
        "service/inference/results/scores.py",
        "np.vecdot(difference, difference) + max(others, 0.0)",
        "np.vecdot(difference, difference)",
        f"{_I}model/test_similarity.py::test_sparse_similarities_equal_sentence_transformers",
    ),
    Guard(
        "service/inference/model/similarity.py",
        '    if manifest.normalize and kind != "cosine":',
        "    if False:",
        f"{_T}test_similarity.py::test_scores_equal_the_similarity_of_sentence_transformers",
    ),
    Guard(
        "service/inference/model/similarity.py",
        'return manifest.normalize or manifest.similarity == "cosine"',
        "return True",
        f"{_T}test_similarity.py::test_compatible_embeddings_have_the_similarities_of_the_model",
    ),
    Guard(
        "service/inference/model/similarity.py",
        'length = 1.0 if kind == "cosine" else ',
        "length = 1.0 if True else ",
        f"{_T}test_similarity.py::"
        "test_terms_of_a_score_are_products_of_the_compared_vectors_tokens",
    ),
    Guard(
        "service/inference/explain/terms.py",
        "    if unit_length and values.any():\n",
        "    if False:\n",
        f"{_T}test_similarity.py::test_terms_of_sparse_vectors_are_products_of_weights",
    ),
    Guard(
        "service/inference/explain/terms.py",
        "    if manifest.similarity in DISTANCES:\n",
        "    if False:\n",
        f"{_T}test_similarity.py::test_distances_have_no_terms",
    ),
    Guard(
        "service/inference/tokenizing/chunking.py",
        "            if not is_blank:\n",
        "            if True:\n",
        f"{_I}tokenizing/test_chunking.py::test_text_without_tokens_is_one_chunk",
    ),
    Guard(
        "service/inference/tokenizing/chunking.py",
        "[is_blank or not char.isspace() for char in text]",
        "[not char.isspace() for char in text]",
        f"{_I}tokenizing/test_chunking.py::test_white_space_that_has_tokens_is_divided_like_other_characters",
    ),
    Guard(
        "service/inference/results/chunked_texts.py",
        "            if len(mask) <= prompt.tokens:\n",
        "            if False:\n",
        f"{_I}tokenizing/test_chunking.py::"
        "test_chunks_are_ordered_cover_the_text_and_have_at_most_size_tokens",
    ),
    Guard(
        "service/inference/model/chunk_embeddings.py",
        "        refuse_empty(texts)\n",
        "",
        f"{_T}test_chunks.py::test_invalid_requests_name_the_field_or_input",
    ),
    # Texts without tokens of their own.
    Guard(
        "service/inference/tokenizing/tokenizer.py",
        '    if "" in inputs:\n',
        "    if False:\n",
        f"{_T}test_bad_input.py::test_invalid_value_returns_422_with_its_index",
    ),
    Guard(
        "service/inference/tokenizing/pair_rows.py",
        "            if not tokens.ids:\n",
        "            if False:\n",
        f"{_I}tokenizing/test_tokenizer.py::test_text_without_any_token_is_refused",
    ),
    Guard(
        "service/inference/tokenizing/tokenizer.py",
        "            if not rules.looks_up:  # the sum of no weights is an empty vector\n",
        "            if True:\n",
        f"{_T}test_inference_free.py::test_query_without_tokens_has_no_weights",
    ),
    Guard(
        "service/inference/tokenizing/tokenizer.py",
        "        if all(span is None for span in spans):\n",
        "        if False:\n",
        "tests/service/debug/test_attribute.py::"
        "test_invalid_attribution_request_has_code_and_pointer",
    ),
    Guard(
        "service/inference/tokenizing/tokenizer.py",
        "                text.encode()\n",
        "                pass\n",
        f"{_I}tokenizing/test_tokenizer.py::test_first_text_that_cannot_be_encoded_is_named",
    ),
    Guard(
        "service/inference/results/tags.py",
        "    if not len(tokens):  # special tokens have no label\n",
        "    if False:\n",
        f"{_T}test_tag.py::test_entities_equal_the_pipeline",
    ),
    Guard(
        "service/api/compat/tei_embed.py",
        "partial(model.tokenizer.rows_of_texts, texts, parameters.prompt_name, on_overflow)",
        "partial(model.tokenizer.rows, texts, parameters.prompt_name, on_overflow)",
        f"{_T}compat/test_tei.py::test_similarity_takes_empty_texts",
    ),
    # Arguments of the Python API.
    Guard(
        "service/inference/model/arguments.py",
        "item if isinstance(item, str) else _ids(item, i) for i",
        "item for i",
        f"{_T}test_arguments.py::test_texts_and_ids",
    ),
    Guard(
        "service/inference/model/arguments.py",
        "        if not isinstance(item, str):\n",
        "        if False:\n",
        f"{_T}test_arguments.py::test_texts",
    ),
    Guard(
        "service/inference/model/arguments.py",
        " and not isinstance(row, _BYTES)",
        "",
        f"{_T}test_arguments.py::test_call_beside_an_invalid_one_is_answered",
    ),
    Guard(
        "service/inference/tokenizing/chunking.py",
        "return isinstance(value, Integral) and not isinstance(value, bool)",
        "return isinstance(value, Integral)",
        f"{_T}test_arguments.py::test_invalid_options_of_chunking_are_named",
    ),
    Guard(
        "service/inference/model/arguments.py",
        ' or hasattr(values, "columns")',
        "",
        f"{_T}test_arguments.py::test_what_is_no_list_of_inputs_is_refused",
    ),
    Guard(
        "service/inference/model/arguments.py",
        "        if not is_valid(value):\n",
        "        if False:\n",
        f"{_T}test_arguments.py::test_every_invalid_option_is_named",
    ),
    # The Python API in notebooks.
    Guard(
        "service/inference/model/arguments.py",
        'values.to_pylist() if hasattr(values, "to_pylist") else list(iterator)',
        "list(iterator)",
        f"{_T}test_arguments.py::test_columns_of_texts",
    ),
    Guard(
        "service/inference/model/sync_model.py",
        "            future.cancel()  # of a caller that was interrupted\n",
        "            pass\n",
        f"{_I}model/test_sync_model.py::"
        "test_interrupted_call_leaves_the_queue_and_the_model_usable",
    ),
    Guard(
        "service/inference/model/sync_model.py",
        "threading._register_atexit(_close_all)",
        "...",
        f"{_I}model/test_sync_model.py::test_interpreter_exits_silently_with_an_open_model",
    ),
    Guard(
        "service/inference/tokenizing/executor.py",
        "            thread.exception()",
        "            pass",
        f"{_I}tokenizing/test_executor.py::test_error_of_cancelled_work_is_not_reported",
    ),
    Guard(
        "service/inference/explain/notebook_html.py",
        "unit = escape(text[chip.start : chip.end])",
        "unit = text[chip.start : chip.end]",
        f"{_I}model/test_notebook_html.py::test_texts_are_text_and_never_markup",
    ),
    # Scores and sparse vectors.
    Guard(
        "service/inference/tokenizing/pairs.py",
        "kept = self._lengths_to_keep(*limited)",
        "kept = self._lengths_to_keep(*lengths)",
        f"{_T}test_classify.py::test_query_and_documents_are_truncated_to_limits_of_their_own",
    ),
    Guard(
        "service/inference/model/scoring.py",
        "error.index = None if is_query else index - queries",
        "error.index = index",
        f"{_T}test_score.py",
    ),
    Guard(
        "service/inference/explain/terms.py",
        "weights[: row.prompt_tokens] = 0",
        "weights[:0] = 0",
        f"{_T}test_explanations.py::test_terms_of_a_cosine_are_products_of_token_vectors",
    ),
    Guard(
        "service/inference/model/scoring.py",
        "explanations = {best[i]: explanation",
        "explanations = {i: explanation",
        f"{_T}test_explanations.py::test_rerank_explains_the_best_documents_alone",
    ),
    Guard(
        "models/export/sentence_config.py",
        'is_first = tuple(pooling) == ("cls",) and include_prompt',
        'is_first = tuple(pooling) == ("cls",)',
        "tests/models/export/test_export.py::"
        "test_pooling_of_first_tokens_has_token_vectors_if_prompts_are_not_pooled",
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
        "return out if self.residual is None else out + self.residual(x)",
        "return out",
        "tests/models/export/test_sentence_config.py::"
        "test_residual_dense_head_vectors_equal_sentence_transformers",
    ),
    # Prompts of rerankers.
    Guard(
        "service/inference/tokenizing/pair_rows.py",
        "pairs = [(prompted[first], second) for first, second in pairs]",
        "pairs = [(first, prompt + second) for first, second in pairs]",
        f"{_T}test_reranker_prompts.py::test_scores_equal_those_of_the_cross_encoder",
    ),
    Guard(
        "service/inference/tokenizing/pair_rows.py",
        "return limits[0] + self.tokenizer.count(prompt), limits[1]",
        "return limits",
        f"{_T}test_reranker_prompts.py::test_limit_of_a_query_does_not_count_the_prompt",
    ),
    Guard(
        "service/inference/tokenizing/pair_rows.py",
        "None if index == 0 and 0 < end <= len(prompt) else index",
        "index",
        f"{_T}test_reranker_prompts.py::test_attribution_leaves_the_prompt_out_of_the_words",
    ),
    # Weights of queries from a table.
    Guard(
        "models/export/query_table.py",
        "if (own.to_str(), settings.truncation_side) != of_documents:",
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
        "service/inference/tokenizing/tokenizer.py",
        "with_special=not rules.looks_up",
        "with_special=True",
        f"{_T}test_inference_free.py::"
        "test_weights_of_queries_are_exactly_those_of_sentence_transformers",
    ),
    Guard(
        "service/inference/results/query_table.py",
        "is_weighted = entry_weights != 0",
        "is_weighted = entry_weights > 0",
        f"{_T}test_inference_free.py::"
        "test_weights_of_queries_are_exactly_those_of_sentence_transformers",
    ),
    Guard(
        "service/inference/results/loaded_model.py",
        "index = indices[error.index]",
        "index = error.index",
        f"{_T}test_inference_free.py::test_failing_document_has_its_own_index",
    ),
    Guard(
        "service/inference/model/encoding.py",
        "needs_engine=not rules.looks_up",
        "needs_engine=True",
        f"{_T}test_inference_free.py::test_queries_need_neither_engine_nor_queue",
    ),
    Guard(
        "service/debug/pipeline/texts.py",
        "if tokenized.row.is_looked_up:",
        "if False:",
        f"{_T}test_inference_free.py::test_gradients_explain_documents_only",
    ),
    # Tags of tokens.
    Guard(
        "models/engines/__init__.py",
        "sizes = [len(check.rows[i]) for i in indices]",
        "pass",
        "tests/models/export/test_token_classifier.py::test_engines_compute_the_logits_of_all_tokens",
    ),
    Guard(
        "service/inference/results/tags.py",
        "is_first[1:] |= numbers[1:] != numbers[:-1]",
        "pass",
        f"{_I}results/test_tags.py::test_prefixes_of_labels_delimit_entities",
    ),
    Guard(
        "service/inference/results/loaded_model.py",
        "if any(spec.per_token or spec.per_pair for spec in specs):",
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
        f"{_I}results/test_multi_vectors.py::test_expanded_queries",
    ),
    Guard(
        "service/inference/results/vectors.py",
        "is_kept = ~np.isin(row.ids, rules.skipped)",
        "is_kept = np.ones(len(row.ids), bool)",
        f"{_T}test_multi.py::test_vectors_equal_those_of_sentence_transformers",
    ),
    Guard(
        "service/inference/tokenizing/tokenizer.py",
        'return self._rules.get(prompt_name or "", self._rules[""])',
        'return self._rules[""]',
        f"{_T}test_multi.py::test_lengths_of_queries_and_documents",
    ),
    Guard(
        "models/export/token_rules.py",
        "tokenizer.add_special_tokens([AddedToken(token, normalized=False)])",
        "pass",
        f"{_I}results/test_multi_vectors.py::test_folders_of_stanford",
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
        "service/inference/results/quantization.py",
        "is_start = not manifest.normalize or (truncate_dim is not None and normalize is None)",
        "is_start = not manifest.normalize or truncate_dim is not None",
        f"{_I}results/test_quantization.py::test_codes_have_the_ranges_of_calibration_texts_with_the_same"
        "_arguments",
    ),
    Guard(
        "service/inference/results/quantization.py",
        "if normalize not in (None, manifest.normalize):",
        "if False:",
        f"{_I}results/test_quantization.py::test_vectors_without_ranges_are_refused",
    ),
    Guard(
        "service/api/compat/cohere.py",
        "    error.rename(_FIELDS)\n",
        "",
        f"{_T}compat/test_cohere.py::test_errors_have_coheres_format_and_names",
    ),
    # Shapley values.
    Guard(
        "service/inference/explain/shapley.py",
        " / np.where(is_drawn, 1 - leverage, 1)",
        "",
        "tests/service/inference/explain/test_shapley.py::"
        "test_deviations_from_the_exact_values_agree_with_the_standard_errors",
    ),
    Guard(
        "service/inference/explain/shapley.py",
        "return size == 1 or draws",
        "return draws",
        "tests/service/inference/explain/test_shapley.py::test_subsets_are_pairs_of_complements",
    ),
    # Explanations by deletion.
    Guard(
        "service/inference/explain/deletion.py",
        "if not before[-1:].strip() and not after[:1].strip():",
        "if not after[:1].strip():",
        "tests/service/inference/explain/test_deletion.py::"
        "test_white_space_on_one_side_of_a_unit_goes_with_it_if_it_is_on_both",
    ),
    Guard(
        "service/inference/model/deletion_planner.py",
        "            whole = read[0] if isinstance(own, str) else (read[0], read[1])\n",
        "",
        "tests/service/inference/model/test_deletions.py::"
        "test_variants_of_a_truncated_text_are_of_the_part_that_is_read",
    ),
    Guard(
        "service/inference/model/deletion_planner.py",
        "            if reserved + (reserve if self._of else cost) <= self._limit:\n",
        "            if True:\n",
        "tests/service/inference/model/test_deletions.py::"
        "test_a_pair_whose_units_alone_take_too_many_tokens_leaves_the_others_theirs",
    ),
    Guard(
        "service/inference/model/deletion_planner.py",
        "return max(tokens, len(variant) // _CHARS_PER_TOKEN)",
        "return tokens",
        "tests/service/inference/model/test_deletions.py::"
        "test_variants_of_long_words_take_no_more_memory_than_those_of_tokens",
    ),
    Guard(
        "service/inference/model/deletion_planner.py",
        "[(read + start, read + end) for start, end in spans]",
        "list(spans)",
        "tests/service/inference/model/test_deletions.py::"
        "test_unknown_parts_are_those_of_the_part_that_is_read",
    ),
    Guard(
        "service/inference/model/explanations.py",
        "index: highlights_of(deletions, how.count)",
        "index: deletions",
        "tests/service/inference/model/test_highlights.py::"
        "test_highlights_are_the_best_sentences_of_an_explanation_by_deletion",
    ),
    Guard(
        "service/inference/explain/options.py",
        '"truncate" if options.on_overflow == "error" else options.on_overflow',
        '"truncate"',
        "tests/service/inference/model/test_deletions.py::test_variants_are_truncated_if_too_long",
    ),
    Guard(
        "service/inference/model/explanations.py",
        "limits=limits,\n        options=deletion.options_of_variants(options),",
        "limits=limits,\n        options=options,",
        "tests/service/inference/model/test_deletions.py::"
        "test_texts_and_variants_have_their_own_priority_within_that_of_the_call",
    ),
    Guard(
        "service/inference/model/deletion_planner.py",
        "self._known.add(whole)",
        "pass",
        "tests/service/inference/model/test_deletions.py::"
        "test_a_cut_text_runs_once_if_the_part_that_is_read_has_its_tokens",
    ),
    Guard(
        "service/inference/model/deletion_planner.py",
        "return int(logits.argmax())",
        "return int(logits.argmin())",
        "tests/service/inference/model/test_label_deletions.py::"
        "test_the_explained_label_is_that_of_the_result_even_if_later_results_differ",
    ),
    Guard(
        "service/inference/results/loaded_model.py",
        "self.metrics.inputs if count_tokens is None else self.metrics.variants",
        "self.metrics.inputs",
        f"{_T}test_deletions.py::test_variants_are_not_counted_as_inputs",
    ),
    Guard(
        "service/inference/model/deletion_planner.py",
        "remaining -= len(words) * (part.length + part.rest + 2) + part.length",
        "pass",
        "tests/service/inference/model/test_auto_deletions.py::"
        "test_what_passes_the_first_check_fits_into_the_tokens",
    ),
    Guard(
        "service/inference/model/deletion_planner.py",
        "column = self._column_of(part.index) if self.labels else 0",
        "column = 0",
        "tests/service/inference/model/test_label_deletions.py::"
        "test_each_number_is_the_difference_of_two_results",
    ),
    Guard(
        "service/inference/model/deletion_planner.py",
        "part.samples // 2 * (part.length + part.rest + 2)",
        "0",
        "tests/service/inference/model/test_shapley_values.py::"
        "test_too_many_texts_are_refused_before_they_are_made",
    ),
    Guard(
        "service/inference/explain/deletion.py",
        "for unit, is_kept in zip(reversed(units), reversed(kept), strict=True):",
        "for unit, is_kept in zip(units, kept, strict=True):",
        "tests/service/inference/explain/test_deletion.py::"
        "test_units_that_are_not_kept_are_removed_the_last_first",
    ),
    Guard(
        "service/inference/tokenizing/pairs.py",
        "kept = min(limited[0], self.room - limited[1]), limited[1]",
        "pass",
        "tests/service/inference/model/test_zero_shot.py::"
        "test_long_and_empty_texts_are_scored_as_by_the_pipeline",
    ),
    Guard(
        "service/inference/model/zero_shot.py",
        "contradicting = [1 - entailing[0]]",
        "pass",
        "tests/service/inference/model/test_zero_shot.py::test_scores_are_those_of_the_pipeline",
    ),
    Guard(
        "service/inference/model/variant_texts.py",
        "longest = max(self.candidates.hypotheses, key=self.model.tokenizer.count)",
        "longest = min(self.candidates.hypotheses, key=self.model.tokenizer.count)",
        "tests/service/inference/model/test_zero_shot.py::"
        "test_explanations_are_differences_of_scores_of_a_label",
    ),
    Guard(
        "service/inference/model/pair_texts.py",
        "self.queries = list(dict.fromkeys(queries))",
        "self.queries = list(queries)",
        "tests/service/inference/model/test_deletions.py::test_texts_that_variants_share_run_once",
    ),
    # Entities with labels of the request.
    Guard(
        "service/inference/tokenizing/labelled_texts.py",
        "start is None or marker in encoding.ids[start:end]",
        "start is None",
        f"{_T}test_tag_labels.py::test_invalid_requests_name_the_item",
    ),
    Guard(
        "service/inference/results/metrics.py",
        "vectors @ direction / np.maximum(norms, np.finfo(np.float32).tiny)",
        "vectors @ direction",
        "tests/service/api/test_metrics.py::"
        "test_computed_vectors_are_recorded_by_norm_and_distance_from_the_calibration",
    ),
    Guard(
        "service/inference/model/opening.py",
        "unit_vectors(calibration.mean[None])",
        "calibration.mean[None]",
        "tests/service/api/test_metrics.py::"
        "test_computed_vectors_are_recorded_by_norm_and_distance_from_the_calibration",
    ),
    Guard(
        "service/inference/tokenizing/labelled_texts.py",
        "missing = max(count, 1) - len(positions)",
        "missing = max(1 - len(positions), 0)",
        f"{_T}test_tag_labels.py::test_entities_of_200_texts_equal_the_package",
    ),
    Guard(
        "service/inference/results/spans.py",
        "is_inside = starts + extra < len(words)",
        "is_inside = starts >= 0",
        f"{_T}test_tag_labels.py::test_entities_of_200_texts_equal_the_package",
    ),
    Guard(
        "service/inference/results/spans.py",
        "return not (nested and contains)",
        "return True",
        f"{_T}test_tag_labels.py::test_entities_of_200_texts_equal_the_package",
    ),
)
