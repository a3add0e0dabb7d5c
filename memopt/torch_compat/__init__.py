"""Every use of private parts of torch, behind functions that say what they give and on which versions they were tried.

New uses go here, a file per topic; older ones move here as their rooms are rebuilt.
"""
