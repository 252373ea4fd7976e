"""Measurements: what schedules, backends and models cost, always with the effective settings beside the number."""
