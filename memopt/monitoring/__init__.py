"""What fills the memory in any loop: step by step, module by module, leaks, and what was there when it ran out."""
