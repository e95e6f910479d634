"""Cases checked by tests of the rooms they belong to: case id -> node ids below tests/."""

from __future__ import annotations

ELSEWHERE: dict[str, list[str]] = {
    "A03": ["golden/test_public_cases.py::test_case_a03_one_far_token"],
    "A05": ["golden/test_public_cases.py::test_case_a05_a_batch_without_a_token"],
    "A06": ["golden/test_public_cases.py::test_case_a06_values_of_both_directions"],
    "A09": [
        "engine/test_step.py::test_a_penalty_in_the_advantage_steers_without_a_loss_term",
        "engine/test_step.py::test_each_accepted_setting_changes_the_weights",
    ],
    "A10": [
        "engine/test_train_resume.py::test_a_run_killed_anywhere_and_resumed_is_the_run_left_alone",
        "golden/test_beta_traces.py::test_resuming_anywhere_continues_the_series",
    ],
    "A12": ["golden/test_public_cases.py::test_case_a12_the_proportional_rule"],
    "A13": [
        "engine/test_train.py::test_the_beta_series_follows_from_the_kl_series",
        "engine/test_train.py::test_the_total_loss_is_the_sum_of_its_terms",
    ],
    "A14": [
        "engine/test_train_resume.py::test_a_run_killed_anywhere_and_resumed_is_the_run_left_alone",
        "engine/test_train_resume.py::test_another_base_model_is_refused_by_its_sha256",
    ],
    "B01": ["golden/test_public_cases.py::test_case_b01_a_group_of_one"],
    "B03": ["golden/test_public_cases.py::test_case_b03_normalised_within_the_group"],
    "B05": [
        "golden/test_public_cases.py::test_case_b05_rewards_equal_in_meaning",
        "golden/test_public_cases.py::test_case_b05_a_singleton_stays_below_its_bound",
    ],
    "B11": ["golden/test_public_cases.py::test_case_b11_the_constant_divisor"],
    "B13": [
        "engine/test_step.py::test_the_result_does_not_depend_on_how_the_step_is_cut",
        "engine/test_logprob.py::test_rollout_stats_keep_row_order_and_gradients_off",
    ],
    "C01": ["engine/test_dataset.py::test_messages_go_through_the_template_with_one_begin_token"],
    "C03": ["engine/test_engine_cli.py::test_a_model_without_chat_template_is_a_config_error"],
    "C04": [
        "engine/test_policy.py::test_pad_equal_to_eos_stays_an_end_token",
        "engine/test_rollout.py::test_the_end_token_is_kept_and_its_absence_is_called_truncated",
    ],
    "C05": [
        "engine/test_logprob.py::test_plain_forward_equals_transformers_row_by_row",
        "engine/test_logprob.py::test_results_do_not_depend_on_the_split",
        "engine/test_reference.py::test_step_one_kl_is_exactly_zero",
    ],
    "C09": ["engine/test_policy.py::test_a_bigger_embedding_is_kept_and_a_smaller_one_refused"],
    "E01": [
        "engine/test_checkpoint.py::test_the_directory_appears_only_when_complete",
        "jobs/test_dispatcher.py::test_a_damaged_checkpoint_is_passed_over_for_an_older_one",
    ],
    "E03": ["jobs/test_dispatcher.py::test_old_checkpoints_are_retired_and_pinned_ones_stay"],
    "E05": ["engine/test_policy.py::test_published_weights_load_as_they_are_and_hold_the_masters"],
    "E09": [
        "engine/test_checkpoint.py::test_a_failed_write_leaves_nothing_and_keeps_the_older_one",
        "engine/test_engine_cli.py::test_the_final_weights_failing_fail_the_run",
    ],
    "E11": [
        "engine/test_dataset.py::test_a_cursor_continues_the_order_exactly",
        "engine/test_train_resume.py::test_a_run_killed_anywhere_and_resumed_is_the_run_left_alone",
    ],
    "E12": [
        "api/test_checkpoints.py::test_a_download_outlives_the_deletion",
        "jobs/test_dispatcher.py::test_old_checkpoints_are_retired_and_pinned_ones_stay",
    ],
    "F01": [
        "api/test_jobs.py::test_twenty_at_once_make_one_job",
        "api/test_jobs.py::test_another_body_is_refused",
        "api/test_jobs.py::test_without_a_key_two_requests_are_two_jobs",
    ],
    "F03": [
        "api/test_jobs.py::test_pages_show_every_job_once_while_more_arrive",
        "jobs/test_ledger.py::test_jobs_of_one_moment_are_still_in_one_order",
    ],
    "F04": [
        "api/test_openai_sdk.py::test_an_answer_validates_against_the_sdks_own_models",
        "api/test_openai_sdk.py::test_events_and_checkpoints_page_to_their_end",
    ],
    "F05": [
        "api/test_jobs.py::test_a_bad_spec_names_its_field_and_nothing_is_created",
        "jobs/test_dispatcher.py::test_one_broken_job_does_not_stop_the_others",
    ],
    "F07": ["api/test_openai_sdk.py::test_an_answer_validates_against_the_sdks_own_models"],
    "F09": [
        "api/test_streams.py::test_readers_that_leave_free_their_slot_and_their_redis_connection",
        "api/test_streams.py::test_a_frozen_reader_is_dropped",
        "api/test_streams.py::test_resuming_at_random_gives_each_step_once",
    ],
    "F11": [
        "api/test_jobs.py::test_the_nearest_key_is_offered",
        "api/test_jobs.py::test_a_job_is_created_with_every_setting_resolved",
    ],
    "F13": [
        "engine/test_step.py::test_a_step_with_broken_numbers_leaves_weights_and_beta_alone",
        "api/test_strict_json.py::test_refused",
    ],
    "G01": [
        "worker/test_worker_process.py::test_a_second_delivery_is_dropped_while_the_first_runs",
        "jobs/test_live.py::test_the_celery_settings_that_keep_long_jobs_single",
    ],
    "G03": [
        "jobs/test_lifecycle.py::test_a_job_that_dies_three_times_at_the_same_step_is_poison",
        "jobs/test_lifecycle.py::test_crashes_wait_longer_each_time",
    ],
    "G05": ["worker/test_worker_process.py::test_cancel_ends_a_stubborn_engine_and_its_helper_within_ten_seconds"],
    "G07": ["worker/test_worker_process.py::test_a_message_is_carried_out_by_a_process_without_torch"],
    "G08": [
        "engine/grader/test_pool.py::test_processes_end_with_a_parent_that_is_killed",
        "journeys/test_first_job.py::test_a_job_trains_and_its_checkpoint_loads",
    ],
    "G09": ["jobs/test_live.py::test_the_celery_settings_that_keep_long_jobs_single"],
    "G11": [
        "jobs/test_live.py::test_every_key_has_a_time_to_live",
        "jobs/test_live.py::test_the_stream_is_capped",
        "jobs/test_dispatcher.py::test_a_read_only_redis_is_treated_as_down",
    ],
}
