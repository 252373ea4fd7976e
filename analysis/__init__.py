"""Results of sweeps as tables and plots."""
