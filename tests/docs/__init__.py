"""The documentation: its commands, its site, its tutorial."""
