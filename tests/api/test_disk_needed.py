"""The disk estimate of a job covers what its checkpoints really take."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.catalogue import disk_needed, find_model
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.intake import resolve_spec
from grpo_engine.contract.job import JobSpec
from tests.engine.runs import make_job, make_spec, train
from tests.tiny import make_model

KEEP = 1


def spec_of(root: Path, adapter: dict[str, object] | None) -> JobSpec:
    sections = {"checkpoints": {"every": 1, "resume_every": 1, "keep": KEEP}, "limits": {"num_steps": 2}, "adapter": adapter}
    raw = make_spec(root, **{name: section for name, section in sections.items() if section is not None})
    return resolve_spec({**raw, "training_file": "file-1"})


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


@pytest.mark.parametrize("adapter", [None, {"type": "lora", "rank": 4}, {"type": "lora", "rank": 64}])
def test_what_a_run_writes_fits_its_estimate(tmp_path: Path, adapter: dict[str, object] | None) -> None:
    root = make_job(tmp_path, "TINY")
    spec = spec_of(root, adapter)
    needed = disk_needed(spec, find_model("model", tmp_path))
    run_dir = train(root, spec=spec.model_dump(mode="json"))
    checkpoints = run_dir / "checkpoints"
    written = 2 * weight_bytes(checkpoints / "resume-000002") + (KEEP + 1) * weight_bytes(checkpoints / "step-000002")
    assert needed is not None
    assert written * 0.95 <= needed, "headers of the files aside"
    assert needed < 3 * written


def test_an_adapter_saves_the_disk_of_its_resume_states(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    model = find_model("model", tmp_path)
    full, small = (disk_needed(spec_of(tmp_path, adapter), model) for adapter in (None, {"type": "lora", "rank": 2}))
    assert full is not None
    assert small is not None
    assert small < full / 2


def test_a_folder_with_an_adapter_beside_its_weights_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="merge it"):
        find_model("model", tmp_path)
