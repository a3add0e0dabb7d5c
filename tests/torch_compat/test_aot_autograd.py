"""AOTAutograd's settings."""

from torch._functorch import config

from memopt.torch_compat.aot_autograd import aot_settings, has_joint_pass, merges_equal_nodes, set_activation_budget


def test_settings_hold_within():
    before = config.cse
    with aot_settings(cse=not before):
        assert merges_equal_nodes() is not before
    assert merges_equal_nodes() is before


def test_an_activation_budget_stays():
    before = config.activation_memory_budget
    try:
        set_activation_budget(0.5)
        assert config.activation_memory_budget == 0.5
    finally:
        config.activation_memory_budget = before


def test_a_pass_of_the_users_own_is_seen():
    assert not has_joint_pass()
    if hasattr(config, "joint_custom_pass"):
        with config.patch(joint_custom_pass=lambda graph, inputs: graph):
            assert has_joint_pass()
