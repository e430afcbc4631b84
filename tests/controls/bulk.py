"""Guards of bulk encoding and evaluation."""

from tests.controls.guard import Guard

_B = "tests/service/bulk/"
_E = "tests/service/evaluation/"

GUARDS = (
    # Evaluation.
    Guard(
        "service/evaluation/ranking.py",
        "np.lexsort((self._order[rows], scores))",
        "np.lexsort((rows, scores))",
        f"{_E}test_evaluation.py::test_documents_with_equal_texts_are_ranked_by_the_greater_id",
    ),
    Guard(
        "service/evaluation/ranking.py",
        "chosen = scores >= self._scores[-1]",
        "chosen = scores > self._scores[-1]",
        f"{_E}test_ranking.py::test_best_documents_of_many_blocks_are_those_of_all",
    ),
    Guard(
        "service/evaluation/ranking.py",
        "compared = first + (last + 1 - first)",
        "compared = (last + 1 - first)",
        f"{_E}test_ranking.py::test_best_documents_of_many_blocks_are_those_of_all",
    ),
    Guard(
        "service/evaluation/evaluation.py",
        'pq.ParquetFile(native_file(path)).read(["error"])',
        'pq.read_table(native_file(path), columns=["error"])',
        f"{_E}test_evaluation.py::"
        "test_evaluation_without_a_comparison_imports_no_package_that_it_does_not_need",
    ),
    Guard(
        "service/evaluation/server.py",
        "if self.version is None or (is_full and all(vector is None for vector in vectors)):",
        "if self.version is None:",
        f"{_E}test_server.py::test_part_of_which_the_server_refuses_all_texts_is_an_error",
    ),
    Guard(
        "service/evaluation/collection.py",
        "    if _content(target) != content.encode():\n",
        "    if False:\n",
        f"{_E}test_evaluation.py::test_folder_of_other_settings_or_texts_is_refused",
    ),
    Guard(
        "service/evaluation/comparison.py",
        "if old.collection != new.collection:",
        "if False:",
        f"{_E}test_comparison.py::test_other_collections_and_unfinished_evaluations_are_refused",
    ),
    # Bulk encoding.
    Guard(
        "service/bulk/verification.py",
        " / np.maximum(1, abs(b))",
        "",
        "tests/service/bulk/test_verification.py::test_large_scores_differ_relative_to_their_size",
    ),
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
        f"{_B}test_resume.py::test_second_process_on_an_output_is_refused_before_it_hashes_the_input",
    ),
    Guard(
        "service/bulk/encoder.py",
        "                refuse_empty(texts)\n",
        "",
        f"{_B}test_job.py::test_pairs_with_an_empty_text_are_rows_with_errors",
    ),
    Guard(
        "service/bulk/pipeline.py",
        "return self.block.rows if self.block.columns else 1",
        "return self.block.rows",
        f"{_B}test_pipeline.py::test_skipped_blocks_do_not_wait_for_the_engine",
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
        "service/bulk/opening.py",
        '"model version": model.identity,',
        '"model version": model.graph_sha256,',
        f"{_B}test_resume.py::test_same_weights_with_other_settings_are_refused",
    ),
    Guard(
        "service/bulk/journal.py",
        '        if not name.startswith("input file"):',
        "        if False:",
        f"{_B}test_resume.py::test_journal_of_an_earlier_version_of_vitrine_is_refused",
    ),
    Guard(
        "service/bulk/encoder.py",
        "parts = [indices[:failed], *_halves(indices[failed + 1 :])]",
        "parts = [indices[:failed]]",
        f"{_B}test_job.py::test_item_that_fails_in_the_engine_is_an_error_and_the_others_are_encode"
        "d",
    ),
    Guard(
        "service/bulk/input_files.py",
        "if hashlib.sha256(block).digest() != digest:",
        "if False:",
        f"{_B}test_input_files.py::test_changed_byte_is_an_error_and_the_blocks_before_it_are_read",
    ),
    Guard(
        "service/bulk/sources.py",
        "        yield with_verification(raw, file)\n",
        "        yield raw\n",
        f"{_B}test_input_files.py::test_parquet_that_changes_while_it_is_read_is_an_error_of_the_job",
    ),
    Guard(
        "service/bulk/sources.py",
        "    files = tuple(map(_hash, paths))\n"
        "    return Source(format_, files, texts, columns(map(_open_verified, files)))\n",
        "    known = columns(map(_open, paths))\n"
        "    return Source(format_, tuple(map(_hash, paths)), texts, known)\n",
        f"{_B}test_input_files.py::test_columns_are_those_of_the_hashed_content",
    ),
    Guard(
        "service/bulk/job.py",
        "            self._source.check_unchanged()\n",
        "",
        f"{_B}test_input_files.py::test_input_that_is_changed_after_it_was_read_is_an_error",
    ),
    Guard(
        "service/bulk/job.py",
        "                self._journal.check_files(self._own_parts)\n",
        "                pass\n",
        f"{_B}test_resume.py::test_part_that_is_removed_or_changed_during_the_job_is_an_error_at_it"
        "s_end",
    ),
    Guard(
        "service/bulk/job.py",
        "            journal.check_files(parts)  # as they are when they have been read\n",
        "",
        f"{_B}test_resume.py::test_part_that_is_changed_while_parts_are_joined_is_an_error",
    ),
    Guard(
        "service/bulk/journal.py",
        "flags | os.O_NOFOLLOW | os.O_NONBLOCK",
        "flags | os.O_NONBLOCK",
        f"{_B}test_resume.py::test_link_or_other_thing_in_place_of_a_file_of_the_output_is_refused",
    ),
    Guard(
        "service/bulk/journal.py",
        "    if not stat.S_ISREG(mode):\n        raise _irregular(path)\n",
        "",
        f"{_B}test_resume.py::test_link_or_other_thing_in_place_of_a_file_of_the_output_is_refused",
    ),
    Guard(
        "service/bulk/journal.py",
        "checked.append(_check_line(parse_json(line), is_first=number == 1))",
        "checked.append(json.loads(line))",
        f"{_B}test_resume.py::test_damaged_line_of_a_journal_is_an_error_with_its_number",
    ),
    Guard(
        "service/bulk/journal.py",
        '_FileName = Annotated[str, Field(pattern=f"^{_FILE}$")]',
        "_FileName = str",
        f"{_B}test_resume.py::test_part_of_another_name_is_damage_of_the_journal",
    ),
    Guard(
        "service/bulk/journal.py",
        "return finished if finished == self.input_rows else None",
        "return self.input_rows",
        f"{_B}test_resume.py::test_complete_output_without_the_journal_of_a_shard_is_encoded_again",
    ),
    Guard(
        "service/bulk/parts.py",
        "        self.remove()  # a killed job's, or a link, whose file would be written\n",
        "",
        f"{_B}test_resume.py::test_file_that_a_temporary_name_links_to_is_not_written",
    ),
    Guard(
        "service/bulk/readers.py",
        "    check_depth(_check(line))\n",
        "",
        f"{_B}test_damaged_records.py::test_line_that_is_not_json_is_an_error_in_the_sample_and_aft"
        "er_it",
    ),
    Guard(
        "service/bulk/readers.py",
        "    if may_repeat_keys(line, len(record)) or _LONG_NUMBER.search(line):\n",
        "    if _LONG_NUMBER.search(line):\n",
        f"{_B}test_readers.py::test_duplicate_key_of_json_is_an_error_of_its_record",
    ),
    Guard(
        "service/bulk/readers.py",
        "        record = orjson.loads(line)\n",
        "        record = {} if _LONG_NUMBER.search(line) else orjson.loads(line)\n",
        f"{_B}test_damaged_records.py::test_line_that_is_not_json_is_an_error_in_the_sample_and_aft"
        "er_it",
    ),
    Guard(
        "service/bulk/readers.py",
        "        if rest and size <= MAX_RECORD_BYTES:\n",
        "        if rest:\n",
        f"{_B}test_damaged_records.py::test_no_more_than_a_chunk_beyond_the_limit_is_kept_of_a_line",
    ),
    Guard(
        "service/bulk/readers.py",
        "            lines.give_back()\n",
        "",
        f"{_B}test_damaged_records.py::test_unclosed_quote_takes_no_other_record_with_it",
    ),
    Guard(
        "service/bulk/readers.py",
        "                if rows.nbytes > MAX_RECORD_BYTES:\n",
        "                if False:\n",
        f"{_B}test_damaged_records.py::test_value_of_parquet_beyond_the_limit_is_an_error",
    ),
    Guard(
        "service/bulk/texts.py",
        "            array.validate(full=True)  # Arrow does not check the strings of a file\n",
        "",
        f"{_B}test_damaged_records.py::test_nested_text_that_is_not_utf8_is_an_error_of_its_record_"
        "alone",
    ),
    Guard(
        "service/bulk/texts.py",
        "            converted += convert(pa.concat_arrays([values.slice(index, 1)]))\n",
        "            converted += convert(values.slice(index, 1))\n",
        f"{_B}test_damaged_records.py::test_nested_text_that_is_not_utf8_is_an_error_of_its_record_"
        "alone",
    ),
    Guard(
        "service/bulk/texts.py",
        '        if options.format != "parquet":\n',
        "        if False:\n",
        f"{_B}test_damaged_records.py::test_time_that_json_cannot_be_written_of_is_an_error_in_json"
        "_alone",
    ),
    Guard(
        "service/bulk/encoder.py",
        "            async with self._long_item:\n",
        "            if True:\n",
        f"{_B}test_damaged_records.py::test_long_texts_are_encoded_one_at_a_time",
    ),
    Guard(
        "service/bulk/pipeline.py",
        "_MAX_CHARS // (PASSES if has_chunks else self._passes)",
        "_MAX_CHARS",
        f"{_B}test_pipeline.py::test_texts_in_chunks_never_exceed_what_may_be_tokenised_at_once",
    ),
    Guard(
        "service/inference/tokenizing/encodings.py",
        "        if longest > self.max_whole_chars:\n",
        "        if False:\n",
        f"{_B}test_damaged_records.py::test_text_that_must_be_tokenised_whole_beyond_the_limit_is_a"
        "n_error",
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
        "                file = with_verification(raw, entry.file)\n",
        "                file = raw\n",
        "tests/deploy/test_ray_encode.py::test_input_that_changes_during_the_job_is_an_error",
    ),
    Guard(
        "deploy/ray_encode.py",
        "        entry.file.check_unchanged(now)\n",
        "        pass\n",
        "tests/deploy/test_ray_encode.py::test_input_that_changes_after_it_was_read_is_an_error_of_"
        "a_cluster",
    ),
    Guard(
        "deploy/ray_encode.py",
        "    if missing:\n",
        "    if False:\n",
        "tests/deploy/test_ray_encode.py::test_part_that_vanishes_during_the_job_is_an_error_of_a_c"
        "luster",
    ),
    Guard(
        "service/bulk/readers.py",
        "end = self.start if first < self.start else (part + 1) * self.part_rows",
        "end = (part + 1) * self.part_rows",
        "tests/deploy/test_ray_encode.py::test_damaged_part_of_a_cluster_is_encoded_again",
    ),
    Guard(
        "service/bulk/job.py",
        "max(block.share, (block.first + block.count) / limit)",
        "block.share",
        "tests/service/bulk/test_job.py::test_progress_ends_at_all_of_the_input_or_of_the_limit",
    ),
)
