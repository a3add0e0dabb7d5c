"""Engines that run programs, one per file."""
