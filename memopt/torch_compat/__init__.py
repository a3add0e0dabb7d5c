"""Every use of private parts of torch, behind names that say what they give and on which versions they were tried.

CONTRIBUTING.md says what is private; `tests/test_rooms.py` forbids it elsewhere. A file has one topic. Topics of
Inductor and Dynamo take long to import: nothing that `import memopt` loads may import them.
"""
