from __future__ import annotations

import pytest

from memopt.torch_compat import inductor_settings as settings


def test_settings_hold_within_and_are_read_as_they_are() -> None:
    before = settings.pads_in_place(), settings.may_multiply_convolutions(), settings.caches_code()
    changed = {"comprehensive_padding": False, "conv_1x1_as_mm": True, "force_disable_caches": True}
    with pytest.raises(ValueError, match="within"), settings.inductor_settings(changed):
        assert not settings.pads_in_place() and not settings.caches_code()
        assert settings.may_multiply_convolutions()
        raise ValueError("within")
    assert (settings.pads_in_place(), settings.may_multiply_convolutions(), settings.caches_code()) == before


def test_a_threshold_that_the_user_sets_holds_on_every_device() -> None:
    assert settings.threshold("opcount", on_cpu=False) > 0 and settings.threshold("acc_reads", on_cpu=True) > 0
    with settings.inductor_settings({"realize_opcount_threshold": 3}):
        assert settings.threshold("opcount", on_cpu=True) == settings.threshold("opcount", on_cpu=False) == 3
