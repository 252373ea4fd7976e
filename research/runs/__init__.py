"""What a run leaves: its folder, records and checkpoints. Nothing of it is lost, and reading changes nothing."""
