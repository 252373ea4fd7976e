"""Command-line programs; the work is done in `research`."""
