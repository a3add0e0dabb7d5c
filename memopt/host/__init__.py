"""Values that wait in the host's memory between forward and backward."""
