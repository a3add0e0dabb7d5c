"""memopt in the loops of other libraries: a file each, and each imports its library only where it is used."""
