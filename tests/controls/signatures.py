"""Guards of signed artifacts and of what is known about their origin."""

from tests.controls.guard import Guard

_T = "tests/models/test_signing.py::"
_S = "tests/service/test_signed_models.py::"
_B = "tests/models/test_bom.py::"

GUARDS = (
    Guard(
        "models/artifact.py",
        "            signature.check(path.name, {MANIFEST: hashlib.sha256(content).hexdigest()})\n",
        "            pass\n",
        f"{_T}test_replaced_file_is_refused_even_if_the_manifest_has_its_hash",
    ),
    Guard(
        "models/artifact.py",
        "        signature.check(path.name, manifest.files)\n",
        "",
        f"{_T}test_signature_of_some_files_is_refused_with_a_file_that_is_not_signed",
    ),
    Guard(
        "models/artifact.py",
        "signed = {*signature.files} if signature else set()",
        "signed = set()",
        f"{_T}test_signed_file_that_is_missing_is_refused",
    ),
    Guard(
        "models/signing.py",
        "        key.verify(own, _pre_authentication(payload),",
        "        (lambda *_: None)(own, _pre_authentication(payload),",
        f"{_T}test_signature_of_another_key_is_refused_with_both_hints",
    ),
    Guard(
        "models/signing.py",
        '            _require_hint(material["publicKey"].get("hint"), hint)',
        "            pass",
        f"{_T}test_signature_of_another_key_is_refused_with_both_hints",
    ),
    Guard(
        "models/artifact.py",
        "        self.verify_all()\n",
        "",
        f"{_T}test_artifact_with_a_changed_file_is_not_signed",
    ),
    Guard(
        "models/signing.py",
        "ordered = sorted(files, key=PurePosixPath)",
        "ordered = sorted(files, reverse=True)",
        f"{_T}test_signature_of_the_package_is_verified_and_signs_the_same_statement",
    ),
    Guard(
        "models/signing.py",
        '_require("method", serialization["method"], "files")',
        "pass",
        f"{_T}test_shards_are_refused_by_name",
    ),
    Guard(
        "models/signing.py",
        "    if len({*names}) < len(names):",
        "    if False:",
        f"{_T}test_signed_statement_of_another_format_is_refused_by_name",
    ),
    Guard(
        "service/inference/model/opening.py",
        "        if artifact.signed_by is not None or not is_large:\n",
        "        if not is_large:\n",
        f"{_S}test_files_that_no_start_reads_are_verified_too",
    ),
    Guard(
        "service/inference/registry/served_models.py",
        "Artifact.load(spec.path, spec.options.verify)",
        "Artifact.load(spec.path)",
        f"{_S}test_models_on_demand_must_have_signed_manifests_at_the_start",
    ),
    Guard(
        "service/inference/model/opening.py",
        "artifact = Artifact.load(path, options.verify)\n",
        "artifact = Artifact.load(path)\n",
        f"{_S}test_tampered_artifact_is_not_opened",
    ),
    Guard(
        "service/debug/child/jobs.py",
        "Artifact.load(path, verify)",
        "Artifact.load(path)",
        f"{_S}test_gradient_process_verifies_the_signature_for_itself",
    ),
    Guard(
        "service/model_cache.py",
        "        if not may_export:\n",
        "        if False:\n",
        f"{_S}test_model_that_is_no_artifact_is_exported_only_without_required_signatures",
    ),
    Guard(
        "service/bulk/opening.py",
        "        verify=options.signer,\n",
        "",
        f"{_S}test_commands_open_signed_artifacts_alone",
    ),
    Guard(
        "service/bulk/command_line.py",
        "signer=required_signer()",
        "signer=None",
        f"{_S}test_commands_open_signed_artifacts_alone",
    ),
    Guard(
        "service/evaluation/command_line.py",
        '"signer": required_signer()',
        '"signer": None',
        f"{_S}test_commands_open_signed_artifacts_alone",
    ),
    Guard(
        "service/evaluation/migration.py",
        'Artifact.load(Path(jobs[0]["artifact"]), required_signer())',
        'Artifact.load(Path(jobs[0]["artifact"]))',
        "tests/service/evaluation/test_migration.py::"
        "test_artifacts_of_a_migration_must_be_signed_if_signatures_are_required",
    ),
    Guard(
        "deploy/ray_serve.py",
        "settings.models.verify and settings.models.verify.resolve()",
        "settings.models.verify",
        "tests/deploy/test_ray_serve.py::"
        "test_ray_application_has_absolute_paths_because_replicas_run_in_other_folders",
    ),
    Guard(
        "service/check.py",
        "        read_public_key(settings.models.verify)\n",
        "",
        f"{_S}test_start_ends_with_a_sentence_about_a_file_without_key",
    ),
    Guard(
        "models/export/exporter.py",
        '        _sign(folder, key, out.name, report)\n    report(f"Wrote {out}")',
        '    report(f"Wrote {out}")',
        "tests/models/export/test_model_card.py::"
        "test_static_model_is_exported_with_its_license_and_signed",
    ),
    Guard(
        "models/artifact.py",
        '        new = self.path / f"{SIGNATURE}.{os.getpid()}"\n',
        "        new = self.path / SIGNATURE\n",
        f"{_T}test_signature_that_cannot_be_written_leaves_the_old_one",
    ),
    Guard(
        "models/export/sources.py",
        "get_cached_repo_tree(model, revision=folder.name, cache_dir=folder.parents[2])",
        "pass",
        "tests/models/export/test_sources.py::"
        "test_files_that_another_library_has_cached_are_not_the_whole_model",
    ),
    Guard(
        "models/export/sources.py",
        ', "README.md"]',
        "]",
        "tests/models/export/test_model_card.py::test_changed_license_is_another_export",
    ),
    Guard(
        "models/bom.py",
        "    artifact.verify_all()\n",
        "",
        f"{_B}test_changed_file_is_refused",
    ),
    Guard(
        "models/bom.py",
        '{"id": _SPDX[name.lower()]} if name.lower() in _SPDX else {"name": name}',
        '{"id": name}',
        f"{_B}test_licenses_have_ids_of_spdx_where_there_are_some",
    ),
)
