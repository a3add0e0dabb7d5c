"""What the engine `inductor` is made of: tracing, partition, halves in planned order, their peak known beforehand."""
