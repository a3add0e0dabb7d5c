"""What every room may use and that knows no other: caches on disk, cores, the collector, progress, logs."""
