"""Runs that lose their parts, one after the other, until they are done."""
