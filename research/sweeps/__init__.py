"""Many runs of one experiment: its grammar, and where its points are run."""
