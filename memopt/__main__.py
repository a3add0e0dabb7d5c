"""`python -m memopt`: the command line."""

from memopt.cli import main

main(prog_name="memopt")
