"""What KL control is for: an update that is ten times too large, on the embedded default."""

from pathlib import Path

import pytest
from kl_collapse import rewards


@pytest.mark.slow
def test_a_step_ten_times_too_large_collapses_without_control_and_learns_with_it(tmp_path: Path) -> None:
    free = rewards(str(tmp_path), 30, schedule="constant", update_ratio=0.1, kl_budget=None)
    control = {"kl_budget": 0.1, "kl_budget_final": 0.02, "kl_probe_responses": 16}
    controlled = rewards(str(tmp_path), 60, schedule="constant", update_ratio=0.1, **control)
    assert sum(controlled[:3]) / 3 < 0.4  # the warm start: 0.27
    assert sum(free[-10:]) / 10 < 0.05
    assert sum(controlled[-10:]) / 10 > 0.5
