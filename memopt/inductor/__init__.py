"""What the engine `inductor` is made of: tracing, partition, both graphs in planned order, their peaks in advance."""
