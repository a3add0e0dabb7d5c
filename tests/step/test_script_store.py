"""Records that later runs of a script read."""

from memopt.step.script_store import ScriptStore


def test_what_is_put_is_got_by_the_same_script_model_budget_and_graph():
    store = ScriptStore("kinds")
    assert store.get("Net", "1MB", "a") == {}
    store.put("Net", "1MB", "a", {"needed": "2 MB"})
    assert ScriptStore("kinds").get("Net", "1MB", "a") == {"needed": "2 MB"}
    others = ("Net", "2MB", "a"), ("Net", "1MB", "b"), ("Other", "1MB", "a")
    assert [store.get(*key) for key in others] == [{}] * 3 and ScriptStore("others").get("Net", "1MB", "a") == {}


def test_another_script_s_are_not_known(monkeypatch):
    ScriptStore("kinds").put("Net", "1MB", "a", {"needed": "2 MB"})
    monkeypatch.setattr("__main__.__file__", "/elsewhere/train.py", raising=False)
    assert ScriptStore("kinds").get("Net", "1MB", "a") == {}
