"""docs/kl-handbook.md says what the code does: every detector, preset and setting it names exists, every claim is listed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from grpo_engine.contract.beta import Calibration, DeadbandBeta, PpoBeta, ScheduleBeta, ZieglerBeta
from grpo_engine.contract.diagnostics import DETECTOR_NAMES, DiagnosticsConfig
from grpo_engine.contract.kl import KlConfig
from grpo_engine.contract.presets import PRESETS
from grpo_engine.contract.telemetry import is_known

ROOT = Path(__file__).resolve().parents[2]
HANDBOOK = (ROOT / "docs" / "kl-handbook.md").read_text(encoding="utf-8")
QUOTED = set(re.findall(r"`([^`\n]+)`", HANDBOOK))


def test_every_detector_and_preset_is_described() -> None:
    assert set(DETECTOR_NAMES) <= QUOTED
    assert {card.name for card in PRESETS} <= QUOTED


def test_every_setting_and_metric_it_names_exists() -> None:
    beta = {name for model in (DeadbandBeta, PpoBeta, ZieglerBeta, ScheduleBeta, Calibration) for name in model.model_fields}
    for word in QUOTED:
        if match := re.fullmatch(r"kl\.(\w+)", word.split(":")[0]):
            assert match[1] in KlConfig.model_fields, word
        elif match := re.fullmatch(r"beta\.(\w+)", word):
            assert match[1] in beta, word
        elif re.fullmatch(r"(?:beta|reward|loss|grad_norm|completion)/\w+", word) or word.startswith("kl/"):
            assert is_known(word) or word == "kl/ref", word


def test_every_claim_is_listed_with_its_verdict() -> None:
    claims = json.loads((ROOT / "tests" / "golden" / "kl_rows.json").read_text(encoding="utf-8"))["claims"]
    listed = dict(re.findall(r"^\| (\d+) \| .* \| (.*) \|$", HANDBOOK, flags=re.MULTILINE))
    for row in claims:
        verdict = row["verdict"].replace("|", r"\|")
        assert listed[str(int(row["id"].removeprefix("claim_")))].lower() == verdict.lower()


def test_the_thresholds_it_quotes_are_the_defaults() -> None:
    limits = DiagnosticsConfig()
    assert (limits.kl_out_of_control.kl, limits.kl_out_of_control.updates) == (0.1, 3)
    assert (limits.collapse.entropy_ratio, limits.collapse.rep_ngram4, limits.collapse.target_ratio) == (0.2, 0.3, 2.0)
    assert (limits.target_too_small.target, limits.target_too_large.target) == (0.005, 0.1)
    assert (limits.beta_high.beta, limits.beta_low.beta, limits.length_bias.correlation) == (0.1, 0.001, 0.8)
    assert (limits.estimator_unreliable.se_ratio, limits.estimator_unreliable.token_max, limits.negative_kl.standard_errors) == (
        0.5,
        10.0,
        3.0,
    )
    assert (limits.length_collapse.ratio, KlConfig().log_ratio_clip) == (0.5, 20.0)
    assert DeadbandBeta.model_fields["update_every"].default == 50
