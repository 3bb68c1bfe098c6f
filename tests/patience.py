"""How long a test waits for what must come."""

WAIT_S = 600.0  # machines are shared: an actor whose start takes 5 s on one took 150 s on another. Only a failing test waits this long.
