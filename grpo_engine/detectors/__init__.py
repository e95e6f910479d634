"""The conditions a run is watched for, one pure function each. `grpo_engine.diagnostics` runs them."""
