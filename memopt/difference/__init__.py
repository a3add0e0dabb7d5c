"""What differs between two graphs or models, and which rewrite made the difference."""
