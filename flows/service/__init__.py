"""Processes around the flows: the Prefect server, `make up` and `make down`, the doctor."""
