"""One question a file; `research.sweeps.experiment` says what such a file defines."""
