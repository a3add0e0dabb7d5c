"""What each operator takes: time and workspace, measured on the device it will run on, or estimated for another."""
