"""Guards of `models`: the export, the artifact and the engines."""

from tests.controls.guard import Guard

_T = "tests/service/api/"
_E = "tests/models/export/test_families.py::"
_X = "tests/models/export/test_experts.py::"
_D = "tests/models/export/test_decoders.py::"
_HOSTILE = "tests/service/inference/model/test_hostile_artifacts.py"
_K = "tests/models/export/test_tokenizer.py::"
_M = "tests/models/export/test_mutations.py::"
_I = "tests/models/export/test_int8.py::"
_Y = "tests/models/export/test_yes_no.py::"
_G = "tests/models/export/test_gliner.py::"

GUARDS = (
    # Rerankers that are language models.
    Guard(
        "models/export/logit_score.py",
        "        row = row - other\n",
        "        pass\n",
        f"{_Y}test_logits_equal_the_published_formula",
    ),
    Guard(
        "models/export/logit_score.py",
        "if own is not None and embeddings is not None and not _are_equal(own, embeddings):",
        "if False:",
        f"{_Y}test_matrix_of_the_logits_must_be_the_one_that_config_json_names",
    ),
    Guard(
        "models/export/pair_template.py",
        'if rendered != "".join(pieces):',
        "if False:",
        f"{_Y}test_chat_templates_are_refused",
    ),
    Guard(
        "models/export/pair_template.py",
        "if any(token in within for token in special):",
        "if False:",
        f"{_Y}test_chat_templates_are_refused",
    ),
    Guard(
        "models/export/checkpoint.py",
        'if sentence_config.outputs[0] == "pooled" and not is_named:',
        "if False:",
        f"{_Y}test_language_model_without_a_purpose_is_refused",
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
        "            k, v = self.repeat(k), self.repeat(v)\n",
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
        "models/export/similarity.py",
        "        if declared == similarity:\n",
        "        if True:\n",
        "tests/models/export/test_similarity.py::test_unknown_similarity_is_refused_by_name",
    ),
    Guard(
        "models/artifact.py",
        "    if manifest.similarity not in allowed:\n",
        "    if False:\n",
        f"{_T}test_similarity.py::test_manifest_with_a_similarity_of_other_vectors_is_refused",
    ),
    Guard(
        "models/export/families/gemma3.py",
        "(1.0 + weight) * config.query_scale",
        "1.0 + weight",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    # Tokenizers of transformers.
    Guard(
        "models/export/transformers_tokenizer.py",
        "for file in TOKEN_FILES:",
        "for file in ():",
        f"{_K}test_tokens_with_settings_in_four_files_are_those_of_transformers",
    ),
    Guard(
        "models/export/transformers_tokenizer.py",
        "(copy / CONFIG).write_text(json.dumps(config))",
        "pass",
        f"{_K}test_tokens_with_settings_in_four_files_are_those_of_transformers",
    ),
    Guard(
        "models/export/transformers_tokenizer.py",
        "if tokenizer.split_special_tokens:",
        "if False:",
        f"{_K}test_setting_that_tokenizer_json_cannot_have_is_refused",
    ),
    Guard(
        "models/export/transformers_tokenizer.py",
        'if isinstance(code, list) or (isinstance(code, dict) and code.get("AutoTokenizer")):',
        "if False:",
        f"{_K}test_setting_that_tokenizer_json_cannot_have_is_refused",
    ),
    Guard(
        "models/export/transformers_tokenizer.py",
        "if largest > MAX_SIZE:",
        "if False:",
        f"{_K}test_tokenizer_with_a_huge_id_is_refused_before_it_is_built",
    ),
    Guard(
        "models/export/tokenizer_file.py",
        "    _check_tokens(tokenizer, reference, folder.name)\n",
        "",
        f"{_K}test_class_that_changes_texts_in_python_is_refused",
    ),
    Guard(
        "models/export/tokenizer_file.py",
        'if token["content"] not in beyond - named]',
        'if token["content"] not in beyond]',
        f"{_K}test_token_of_a_class_without_an_embedding_is_left_out",
    ),
    Guard(
        "models/export/tokenizer_file.py",
        'if "Lowercase" not in',
        'if "" not in',
        f"{_K}test_do_lower_case_equals_sentence_transformers",
    ),
    Guard(
        "models/export/token_rules.py",
        'if prompt and truncation_side == "right" and len(ids) >= rule.max_tokens:',
        "if False:",
        f"{_K}test_prompt_that_leaves_no_room_for_a_text_is_refused",
    ),
    Guard(
        "models/export/exporter.py",
        "        baseline_ids=config.baseline_ids,\n",
        "",
        f"{_K}test_baselines_have_the_tokens_that_the_tokenizer_names",
    ),
    Guard(
        "models/export/modules.py",
        '    check_known(config, ("dimension",), name)\n',
        "",
        "tests/models/export/test_sentence_config.py::"
        "test_field_that_a_module_of_sentence_transformers_refuses_is_refused",
    ),
    Guard(
        "models/export/pair_template.py",
        'unchanged = (*_TEXTS, " ".join(special))',
        'unchanged = (*_TEXTS, "")',
        f"{_Y}test_chat_templates_are_refused",
    ),
    Guard(
        "models/export/sentence_config.py",
        "tokenizer = overrides.tokenizer or read_settings(",
        "tokenizer = read_settings(",
        "tests/models/gradients/test_reference_model.py::"
        "test_reference_model_opens_without_transformers",
    ),
    # Checkpoints from elsewhere.
    Guard(
        "models/export/checkpoint.py",
        "        _build(files, config, sentence_config, lambda _: None)\n",
        "        pass\n",
        f"{_M}test_terabytes_that_a_config_claims_are_not_allocated",
    ),
    Guard(
        "models/export/checkpoint.py",
        "smallest <= value <= _LARGEST.get(field, MAX_SIZE)",
        "smallest <= value",
        f"{_M}test_sizes_are_compared_with_the_weights",
    ),
    Guard(
        "models/export/classifier.py",
        "or number > _MAX_LABELS:",
        "or False:",
        f"{_M}test_number_of_labels_is_limited",
    ),
    Guard(
        "models/export/model_folder.py",
        "if path.exists() and not path.is_file():",
        "if False:",
        f"{_M}test_folder_in_place_of_a_file_is_named",
    ),
    Guard(
        "models/export/model_folder.py",
        "if (size := file.stat().st_size) > limit:",
        "if (size := 0) > limit:",
        f"{_M}test_only_regular_files_of_limited_size_are_read",
    ),
    Guard(
        "models/export/model_folder.py",
        "if twice := tensors.keys() & own.keys():",
        "if twice := set():",
        f"{_M}test_tensor_of_two_shards_is_refused",
    ),
    Guard(
        "models/export/__main__.py",
        "{printable(_reason(error, options.out))}",
        "{error}",
        f"{_M}test_names_from_files_are_printed_on_one_line",
    ),
    Guard(
        "models/export/lora.py",
        "if _SLOW_PATTERN.search(key):",
        "if False:",
        f"{_M}test_slow_patterns_of_an_adapter_are_refused",
    ),
    Guard(
        "models/export/sentence_config.py",
        "(not isinstance(default, str) or default not in prompts)",
        "default not in prompts",
        "tests/models/export/test_sentence_config.py::"
        "test_unsupported_sentence_config_raises_with_the_field_name",
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
        "test_first_and_second_gradients_equal_finite_differences",
    ),
    Guard(
        "models/gradients/graph_weights.py",
        'sorted(parts, key=lambda name: order.index(name.split(".")[0]))',
        "parts",
        "tests/models/gradients/parity/test_parity.py::"
        "test_families_with_gates_windows_shared_layers_and_experts_pass",
    ),
    Guard(
        "models/network/experts.py",
        ".sum(-2) + self.bias",
        ".sum(-2)",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/export/onnx_graph.py",
        "op.ScatterElements(order, order, indices, axis=0)",
        "order",
        f"{_X}test_served_vectors_equal_the_published_formulas",
    ),
    Guard(
        "models/engines/__init__.py",
        ' and precision != "float32":',
        ' and precision == "int8":',
        f"{_X}test_bfloat16_is_refused_on_every_cpu",
    ),
    Guard(
        "models/network/encoder.py",
        "int(i / (count / distinct))",
        "i % distinct",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/export/families/modernbert.py",
        '(TensorPart("layers.{i}.mlp.Wi", 0, 2),)',
        '(TensorPart("layers.{i}.mlp.Wi", 1, 2),)',
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/export/families/rotary_scaling.py",
        "Rotary(base * factor, ",
        "Rotary(base, ",
        f"{_E}test_gte_files_of_alibaba_equal_transformers",
    ),
    Guard(
        "models/export/families/rotary_scaling.py",
        "kept + (1 - kept) / factor",
        "1 / factor",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/export/families/llama.py",
        'family.derived({**config, "is_causal": False})',
        "family.derived(config)",
        f"{_D}test_vectors_of_published_files_equal_the_formula_on_transformers",
    ),
    Guard(
        "models/export/families/llama.py",
        "read_flag(config, both) == causal",
        "read_flag(config, both) is None",
        f"{_E}test_model_of_another_kind_is_refused_with_the_field_name",
    ),
    Guard(
        "models/export/families/llama.py",
        "4096) - causal",
        "4096) - 1",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/export/families/t5.py",
        "queries * math.sqrt(config.heads.width)",
        "queries",
        f"{_E}test_token_vectors_equal_transformers",
    ),
    Guard(
        "models/export/checkpoint.py",
        'if config.get("quantization_config"):',
        "if False:",
        f"{_E}test_model_of_another_kind_is_refused_with_the_field_name",
    ),
    # int8: calibration, quality, and the check's bounds.
    Guard(
        "models/export/int8/rows.py",
        "last = min(max_tokens, _LONGEST)",
        "last = min(max_tokens, _SHORT)",
        f"{_I}test_calibration_has_all_lengths_and_all_scripts_of_the_vocabulary",
    ),
    Guard(
        "models/export/int8/texts.py",
        "if is_other and self._others:",
        "if False:",
        f"{_I}test_calibration_has_all_lengths_and_all_scripts_of_the_vocabulary",
    ),
    Guard(
        "models/export/int8/texts.py",
        "if total >= length:",
        "if total:",
        f"{_I}test_rows_have_the_lengths_of_their_class",
    ),
    Guard(
        "models/export/int8/quality.py",
        "if not value >= bounds[name]",
        "if value < bounds[name]",
        f"{_I}test_nan_is_below_every_bound_and_the_lowest_result",
    ),
    Guard(
        "models/export/int8/quality.py",
        'if own.source == "own" or all(other.source != "own" for other in by_length):',
        "if True:",
        f"{_I}test_every_class_of_lengths_has_the_bounds",
    ),
    Guard(
        "models/export/int8/graph.py",
        "bounds.find_broken(by_length) + broken_check(check)",
        "bounds.find_broken(by_length)",
        f"{_I}test_export_refuses_a_graph_whose_check_is_below_the_bound",
    ),
    Guard(
        "models/engines/__init__.py",
        "if measured is None or not Agreement(**measured).is_within(bounds):",
        "if measured is None:",
        f"{_I}test_start_refuses_a_manifest_whose_check_is_below_the_bound",
    ),
    Guard(
        "models/engines/outputs.py",
        'max(widest.cosine, 1 - 2 * (1 - measured["cosine"]))',
        "widest.cosine",
        f"{_I}test_start_holds_twice_the_deviations_that_the_export_measured",
    ),
    Guard(
        "models/engines/with_openvino.py",
        'return _has_bf16() and "amx_tile" not in cpu_flags()',
        "return _has_bf16()",
        f"{_I}test_values_between_int8_products_are_in_bfloat16_except_with_amx",
    ),
    Guard(
        "models/engines/with_openvino.py",
        "            self._current = None\n",
        "            pass\n",
        "tests/models/test_engines.py::test_runs_after_a_cancelled_one_have_the_same_vectors",
    ),
    Guard(
        "models/engines/with_openvino.py",
        "            requests.is_cancelled = True\n",
        "",
        "tests/models/test_engines.py::test_runs_after_a_cancelled_one_have_the_same_vectors",
    ),
    Guard(
        "models/engines/with_openvino.py",
        "if self._in_caller:",
        "if False:",
        "tests/models/test_engines.py::test_runs_after_a_cancelled_one_have_the_same_vectors",
    ),
    Guard(
        "models/engines/with_openvino.py",
        "return results if requests is self._current else None",
        "return results",
        "tests/models/test_engines.py::test_run_beside_a_failed_one_is_repeated_and_does_not_fail",
    ),
    # Results of an engine.
    Guard(
        "service/inference/results/batch_run.py",
        "if not all(np.isfinite(result).all() for result in results):",
        "if False:",
        f"{_T}test_app.py::test_failed_input_is_named_and_the_next_request_works",
    ),
    Guard(
        "service/inference/results/batch_run.py",
        "tuple(columns[output][index] for output in item.outputs)",
        "tuple(columns[output][-1 - index] for output in item.outputs)",
        f"{_T}test_faults.py",
    ),
    Guard(
        "models/engines/__init__.py",
        "if not worst.is_within(bounds):",
        "if not bounds:",
        "tests/models/test_engines.py::test_self_check_rejects_wrong_vectors",
    ),
    Guard(
        "models/engines/outputs.py",
        "self.cosine >= bounds.cosine and self.norm <= bounds.norm",
        "self.cosine >= bounds.cosine",
        "tests/models/test_outputs.py",
    ),
    Guard(
        "models/engines/outputs.py",
        "self.cosine >= bounds.cosine and self.norm <= bounds.norm",
        "self.norm <= bounds.norm",
        "tests/models/test_outputs.py",
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
    # The artifact and its reference model.
    Guard(
        "models/artifact.py",
        "if actual != self.manifest.files[name]:",
        "if False:",
        "tests/models/test_artifact.py::test_changed_file_raises_artifact_error_with_its_name",
    ),
    Guard(
        "models/artifact.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NONBLOCK",
        "tests/models/test_artifact.py::test_file_that_becomes_a_link_later_is_not_read",
    ),
    Guard(
        "models/artifact.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NOFOLLOW",
        "tests/models/test_artifact.py::test_file_that_becomes_a_pipe_later_is_rejected_without_blocking",
    ),
    Guard(
        "models/artifact.py",
        "            elif entry.is_file(follow_symlinks=False):\n",
        "            elif entry.is_file():\n",
        "tests/models/test_artifact.py::test_every_file_must_be_regular",
    ),
    Guard(
        "models/artifact.py",
        "            if entry.is_dir(follow_symlinks=False):\n",
        "            if entry.is_dir():\n",
        "tests/models/test_artifact.py::test_folder_that_is_a_link_is_rejected",
    ),
    Guard(
        "models/identity.py",
        '"manifest": _without(manifest, EXCLUDED_FIELDS),',
        '"manifest": manifest["prompts"],',
        "tests/models/test_identity.py::test_each_field_is_part_of_the_identity_or_listed_as"
        "_excluded",
    ),
    Guard(
        "models/identity.py",
        '        "graph": _without(graph, EXCLUDED_GRAPH_FIELDS),\n',
        "",
        "tests/models/test_identity.py::test_each_field_of_the_own_graph_is_part_or_listed_as"
        "_excluded",
    ),
    Guard(
        "models/identity.py",
        "if name not in graph_files and ",
        "if ",
        "tests/models/test_identity.py::test_other_graphs_are_not_part_of_the_identity",
    ),
    Guard(
        "models/identity.py",
        '        "precision": precision,\n',
        "",
        "tests/models/test_identity.py::test_engines_and_precisions_have_different_identities",
    ),
    Guard(
        "service/inference/results/loaded_model.py",
        "return self.identity[:12]",
        "return self.graph_sha256[:12]",
        "tests/service/api/models/test_selection.py::test_settings_of_the_same_weights_are_different_versions"
        "_everywhere",
    ),
    Guard(
        "service/inference/model/opening.py",
        "            artifact.verify(name)\n",
        "            pass\n",
        "tests/service/test_check.py::test_start_verifies_all_files_but_the_reference_model_and"
        "_unused_weights",
    ),
    Guard(
        "service/check.py",
        "    artifact.verify_all()",
        "    pass",
        "tests/service/test_check.py::test_check_verifies_every_file_of_the_artifact",
    ),
    # Artifacts of unknown origin.
    Guard(
        "models/typed_json.py",
        "        if not bound.admits(result):\n",
        "        if False:\n",
        "tests/models/test_manifest.py::test_manifest_with_a_wrong_value_is_refused_with_the_field",
    ),
    Guard(
        "models/typed_json.py",
        "        else type(value) in _SCALARS[kind][0]\n",
        "        else True\n",
        "tests/models/test_typed_json.py::test_wrong_value_is_named_with_its_field",
    ),
    Guard(
        "models/typed_json.py",
        "    for name in value.keys() - known.keys():\n",
        "    for name in ():\n",
        "tests/models/test_typed_json.py::test_wrong_value_is_named_with_its_field",
    ),
    Guard(
        "models/typed_json.py",
        "for end in (min(values), max(values)))",
        "for end in (min(values),))",
        "tests/models/test_typed_json.py::test_wrong_value_is_named_with_its_field",
    ),
    Guard(
        "models/json_reader.py",
        'rb"(?<!\\\\)\\\\u',
        'rb"\\\\u',
        "tests/models/test_json_reader.py::test_invalid_content_is_refused",
    ),
    Guard(
        "models/artifact.py",
        "        check_manifest(manifest)\n",
        "",
        "tests/models/test_manifest.py::test_manifest_with_a_wrong_value_is_refused_with_the_field",
    ),
    Guard(
        "models/artifact.py",
        "            check_self_check(check, self.manifest)\n",
        "",
        "tests/models/test_manifest.py::test_self_check_with_a_wrong_value_is_refused_with_the_field",
    ),
    Guard(
        "models/artifact.py",
        "    if limit is not None and len(content) > limit:\n",
        "    if False:\n",
        "tests/models/test_manifest.py::test_file_larger_than_its_limit_is_refused_before_it_is_read",
    ),
    Guard(
        "models/quantization.py",
        "        if any(low > high for low, high in zip(*own, strict=True)):\n",
        "        if False:\n",
        "tests/models/test_quantization.py::test_invalid_calibration_raises_artifact_error",
    ),
    Guard(
        "models/engines/__init__.py",
        "    if others := file.files - {graph.weights}:\n",
        "    if others := set[str]():\n",
        f"{_HOSTILE}::test_faulty_graph_is_refused",
    ),
    Guard(
        "models/engines/__init__.py",
        "    if refused := file.operators & ENGINES[graph.engine].refused_operators:\n",
        "    if refused := set[str]():\n",
        f"{_HOSTILE}::test_loop_is_refused_for_an_engine_that_cannot_cancel_it",
    ),
    Guard(
        "models/engines/__init__.py",
        "    if actual.shape[1:] != shape[1:] or len(actual) < shape[0]:\n",
        "    if False:\n",
        f"{_HOSTILE}::test_faulty_graph_is_refused",
    ),
    Guard(
        "models/engines/onnx_file.py",
        '"tensor": {13: "external_data"},',
        '"tensor": {},',
        "tests/models/test_onnx_file.py::test_files_and_operators_are_found_wherever_they_are",
    ),
    Guard(
        "models/engines/onnx_file.py",
        '25: "function"',
        "",
        "tests/models/test_onnx_file.py::test_files_and_operators_are_found_wherever_they_are",
    ),
    Guard(
        "models/engines/engine.py",
        "    if unknown := {*own} - known:\n",
        "    if unknown := set[str]():\n",
        f"{_HOSTILE}::test_faulty_graph_is_refused",
    ),
    Guard(
        "service/inference/model/opening.py",
        "                engine.cancel()  #",
        "                pass  #",
        f"{_HOSTILE}::test_graph_without_end_is_stopped_with_its_caller",
    ),
    Guard(
        "service/inference/model/opening.py",
        "        async with asyncio.timeout(limit_s):\n",
        "        async with asyncio.timeout(None):\n",
        f"{_HOSTILE}::test_graph_without_end_is_stopped_at_the_limit_of_the_self_check",
    ),
    Guard(
        "service/inference/tokenizing/shared_tokenizers.py",
        "            if getattr(self._first, name) is not None:\n",
        "            if False:\n",
        f"{_HOSTILE}::test_faulty_tokenizer_is_refused",
    ),
    Guard(
        "service/inference/tokenizing/shared_tokenizers.py",
        "max([*texts, *pairs, *vocabulary.values()], default=-1)",
        "max([*vocabulary.values()], default=-1)",
        f"{_HOSTILE}::test_faulty_tokenizer_is_refused",
    ),
    Guard(
        "service/inference/tokenizing/shared_tokenizers.py",
        "        if len(ids) > len(plain) + added:\n",
        "        if False:\n",
        f"{_HOSTILE}::test_faulty_tokenizer_is_refused",
    ),
    Guard(
        "service/inference/tokenizing/shared_tokenizers.py",
        '        with panics_as_errors("the tokenizers library"):\n            yield\n',
        "        yield\n",
        f"{_HOSTILE}::test_faulty_tokenizer_is_refused",
    ),
    Guard(
        "service/inference/tokenizing/tokenizer.py",
        "        if largest >= vocab_size:\n",
        "        if False:\n",
        f"{_HOSTILE}::test_faulty_tokenizer_is_refused",
    ),
    Guard(
        "service/inference/tokenizing/tokenizer.py",
        "            if shortest <= count:\n",
        "            if False:\n",
        f"{_HOSTILE}::test_maximum_length_without_room_for_text_is_refused",
    ),
    Guard(
        "service/inference/results/query_table.py",
        "    if not np.isfinite(weights).all():\n",
        "    if False:\n",
        f"{_HOSTILE}::test_faulty_weights_of_queries_are_refused",
    ),
    Guard(
        "service/inference/registry/registry.py",
        "            check_name(alias)\n",
        "",
        "tests/service/inference/registry/test_served_models.py::"
        "test_invalid_name_of_a_model_is_refused_wherever_it_is",
    ),
    Guard(
        "service/inference/registry/served_models.py",
        "if problem := name_problem(path.name):",
        "if problem := None:",
        "tests/service/inference/registry/test_served_models.py::"
        "test_folders_whose_names_are_invalid_are_skipped_and_logged_once",
    ),
    Guard(
        "service/inference/registry/served_models.py",
        "@lru_cache(maxsize=1024)",
        "@lru_cache(maxsize=0)",
        "tests/service/inference/registry/test_served_models.py::"
        "test_folders_whose_names_are_invalid_are_skipped_and_logged_once",
    ),
    Guard(
        "service/inference/registry/model_names.py",
        "    if not name.isprintable():\n",
        "    if False:\n",
        "tests/service/inference/registry/test_model_names.py",
    ),
    # GLiNER.
    Guard(
        "models/network/spans.py",
        "index = torch.where(is_word, counts[:, None] - 1 - position, position)",
        "index = torch.where(is_word, K - 1 - position, position)",
        f"{_G}test_engines_compute_the_logits_of_the_package",
    ),
    Guard(
        "models/network/spans.py",
        "is_inside = position + extra < word_counts[:, None]",
        "is_inside = position < word_counts[:, None]",
        f"{_G}test_logits_equal_the_package",
    ),
    Guard(
        "models/export/gliner.py",
        "max_positions=max(config.max_positions, _MAX_TOKENS)",
        "max_positions=config.max_positions",
        f"{_G}test_rows_longer_than_the_position_table_of_deberta",
    ),
    Guard(
        "models/export/gliner_rows.py",
        "if begin not in (None, ids[0]) or end not in (None, ids[-1]):",
        "if False:",
        f"{_G}test_tokenizers_that_differ_from_the_package_are_refused",
    ),
)
