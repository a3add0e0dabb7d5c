"""One model's compilation: from captured graphs to code and a report."""
