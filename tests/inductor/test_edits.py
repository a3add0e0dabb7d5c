"""The edits of every graph that Inductor lowers."""

from __future__ import annotations

import pickle

from torch._inductor import config

from memopt.inductor import edits as room
from memopt.inductor.edits import edits
from memopt.inductor.own_memory import note_memory


def test_code_of_another_version_is_kept_apart(monkeypatch):
    names = {"joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass"}
    names.add("post_grad_custom_post_pass")
    first = edits(note_memory)
    assert set(first) == names
    monkeypatch.setattr(room, "versions", lambda: "another")
    other = edits(note_memory)
    for name in names:
        assert first[name].uuid() != other[name].uuid()
        assert pickle.loads(pickle.dumps(first[name])).uuid() == first[name].uuid()


def test_a_users_own_edit_is_let_stand():
    with config.patch(joint_custom_pre_pass=lambda graph: None):
        assert "joint_custom_pre_pass" not in edits(note_memory)
