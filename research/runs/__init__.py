"""What a run leaves behind: its folder, its records, its checkpoints; nothing of it is lost and nothing read is changed."""
