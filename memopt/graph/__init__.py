"""A program's graph: values of its nodes, what rewrites share, and what a report keeps of it."""
