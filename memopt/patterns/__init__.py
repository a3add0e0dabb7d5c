"""What passes recognise in graphs of ATen operators, each pattern once for all passes that need it."""
