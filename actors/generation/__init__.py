"""Responses from vLLM: engines, the pool that spreads requests over them, and the way new weights get in."""
