"""Guards of bulk encoding."""

from tests.controls.guard import Guard

_B = "tests/service/bulk/"

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
        "service/bulk/encoder.py",
        "                refuse_empty(texts)\n",
        "",
        f"{_B}test_job.py::test_pairs_with_an_empty_text_are_rows_with_errors",
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
)
