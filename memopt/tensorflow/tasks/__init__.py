"""What runs in processes of their own: one task a file, importing nothing of memopt, so that torch stays out."""
