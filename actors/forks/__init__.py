"""Worker processes as forks of one that has imported the heavy libraries: `server` imports and forks, `client` asks for a fork."""
