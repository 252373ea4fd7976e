"""Every setting, once: frozen dataclasses with defaults, meanings and checks, of which configs are made."""
