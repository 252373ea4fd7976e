"""One question a file; `research.experiment` says what such a file defines."""
