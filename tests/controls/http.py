"""Guards of HTTP, API keys, shutdown and traces."""

from tests.controls.guard import Guard

_T = "tests/service/api/"
_I = "tests/service/inference/"

GUARDS = (
    # Request bodies.
    Guard(
        "service/api/body.py",
        "            parse_json(body, has_unique_keys=True)\n",
        "            pass\n",
        f"{_T}test_bad_input.py::test_malformed_json_returns_400",
    ),
    Guard(
        "service/api/body.py",
        "        check_depth(body)\n",
        "",
        f"{_T}test_depth.py::test_every_route_refuses_a_body_beyond_the_limit",
    ),
    Guard(
        "service/api/headers.py",
        'values[name] += f",{value}"',
        "pass",
        f"{_T}test_headers.py::test_several_content_encodings_are_one_list",
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
        "test_large_body_beyond_the_budget_is_refused_before_it_arrives",
    ),
    Guard(
        "service/api/body_budget.py",
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
        "service/inference/tokenizing/tokenizer.py",
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
        "if not host_matches(host, self._hosts):",
        "if False:",
        f"{_T}test_browsers.py::test_unknown_host_names_return_403_except_for_probes",
    ),
    Guard(
        "models/panics.py",
        'raise LibraryPanic(f"{self._subject} panicked: {error}") from error',
        "pass",
        f"{_T}test_app.py::test_tokenizer_panic_returns_500_and_the_next_request_works",
    ),
    Guard(
        "service/api/middleware.py",
        '            with panics_as_errors("a library"):\n                await serve',
        "            if True:\n                await serve",
        f"{_T}test_app.py::test_panic_of_a_library_returns_500_as_json",
    ),
    Guard(
        "service/app.py",
        "    except BaseException:  # a panic",
        "    except Exception:  # a panic",
        f"{_T}test_lifespan.py::"
        "test_panic_of_a_library_during_the_start_is_logged_and_reported_as_fatal",
    ),
    Guard(
        "service/logs.py",
        "        return printable(message)\n",
        "        return message\n",
        f"{_T}test_logs.py::test_values_from_outside_forge_no_records_and_send_no_escape_sequences",
    ),
    Guard(
        "service/logs.py",
        'return "\\n".join(f"  {printable(line)}" for line in lines)',
        'return "\\n".join(lines)',
        f"{_T}test_logs.py::test_values_from_outside_forge_no_records_and_send_no_escape_sequences",
    ),
    Guard(
        "service/api/models.py",
        "await within(deadline, loading)",
        "await loading",
        f"{_T}models/test_changes.py::"
        "test_load_of_a_graph_without_end_stops_at_the_deadline_of_the_request",
    ),
    Guard(
        "service/api/models.py",
        "    if problem := name_problem(name):\n",
        "    if problem := None:\n",
        f"{_T}models/test_changes.py::test_invalid_load_is_refused_without_repeating_names",
    ),
    Guard(
        "service/api/middleware.py",
        "if ambiguous is not None:",
        "if False:",
        f"{_T}test_headers.py::test_two_different_values_are_refused_in_both_orders",
    ),
    Guard(
        "service/api/middleware.py",
        '                    headers.append((b"connection", b"close"))\n',
        "                    pass\n",
        f"{_T}test_stopping.py::test_service_is_unready_and_answers_during_the_drain_period",
    ),
    # Content negotiation.
    Guard(
        "service/api/accept.py",
        '(offer, f"{kind}/*", "*/*")',
        '("*/*", f"{kind}/*", offer)',
        f"{_T}test_accept.py::test_preferred_type_has_the_highest_quality_of_werkzeug",
    ),
    Guard(
        "service/api/accept.py",
        "        if quality and key > best_key:",
        "        if key > best_key:",
        f"{_T}test_accept.py::test_preferred_type_has_the_highest_quality_of_werkzeug",
    ),
    Guard(
        "service/api/accept.py",
        "gzip > 0 and gzip >= weights",
        "gzip > 0 or gzip > weights",
        f"{_T}test_accept.py::test_gzip_is_accepted_unless_excluded_or_less_preferred",
    ),
    Guard(
        "service/api/routes.py",
        "state.metrics.exposition(preferred_type(request, FORMATS))",
        "state.metrics.exposition()",
        f"{_T}test_accept.py::test_accept_header_selects_the_format_of_the_metrics",
    ),
    # API keys.
    Guard(
        "service/api/keys.py",
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
        "        self.headers = []",
        "        pass",
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
        "        if hosts > 1 or",
        "        if",
        f"{_T}test_wire.py::test_each_request_has_one_response",
    ),
    Guard(
        "service/api/http_protocol.py",
        "    if _BAD_PERCENT.search(raw_path):",
        "    if False:",
        f"{_T}test_paths.py::test_routes_get_the_decoded_path_or_nothing",
    ),
    Guard(
        "service/api/http_protocol.py",
        "    if _CONTROL.search(path):",
        "    if False:",
        f"{_T}test_paths.py::test_routes_get_the_decoded_path_or_nothing",
    ),
    Guard(
        "service/api/http_protocol.py",
        '        if b"#" in self.url:',
        "        if False:",
        f"{_T}test_paths.py::test_fragments_are_refused",
    ),
    Guard(
        "deploy/gateway/haproxy.cfg",
        "    http-request deny deny_status 400 unless { path -m reg",
        "    # { path -m reg",
        "tests/deploy/test_gateway.py::test_no_spelling_of_a_closed_route_passes",
    ),
    Guard(
        "service/serve_command.py",
        "    faulthandler.enable()\n",
        "",
        f"{_T}test_stopping.py::test_crash_of_a_library_leaves_the_running_functions_on_stderr",
    ),
    Guard(
        "service/api/http_protocol.py",
        "            cycle.message_event.set()\n",
        "            pass\n",
        f"{_T}test_wire.py::test_each_request_has_one_response",
    ),
    Guard(
        "service/inference/batching/batcher.py",
        "        if needed_s > timeout_s:",
        "        if False:",
        f"{_I}batching/test_batcher.py::test_request_that_would_miss_its_deadline_raises_too_late",
    ),
    Guard(
        "service/inference/batching/batcher.py",
        "        if not queued_tokens or self._finish_s(",
        "        if self._finish_s(",
        f"{_I}batching/test_batcher.py::test_empty_queue_accepts_a_request_whatever_its_deadline",
    ),
    Guard(
        "service/inference/batching/batch_former.py",
        "                entry.request.tokens -= entry.length\n",
        "",
        f"{_I}batching/test_batch_former.py::test_tokens_ahead_ignores_finished_and_removed_items",
    ),
    # Traces, and the check before a start.
    Guard(
        "service/api/tracing.py",
        "if span.is_recording():",
        "if True:",
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
        "service/api/tracing.py",
        "keeps_content=self._has_genai_attributes",
        "keeps_content=True",
        f"{_T}test_tracing.py::test_request_has_a_server_span_with_the_attributes_of_the_conventions",
    ),
    Guard(
        "service/api/state.py",
        "trace.model = name, self.registry.resolve(name)",
        'trace.model = name, name or ""',
        f"{_T}test_genai_attributes.py::test_failed_embedding_request_has_the_attributes_known_before_the_failure",
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
        "service/inference/results/batch_run.py",
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
)
