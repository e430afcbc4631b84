"""Guards of `models`: the export, the artifact and the engines."""

from tests.controls.guard import Guard

_T = "tests/service/api/"
_E = "tests/models/export/test_families.py::"
_I = "tests/models/export/test_int8.py::"

GUARDS = (
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
        "bounds.broken(by_length) + broken_check(check)",
        "bounds.broken(by_length)",
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
)
