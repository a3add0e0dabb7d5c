"""What a program takes: aliasing, liveness, timelines, optimizer state, operator workspace, measurement."""
