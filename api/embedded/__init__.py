"""The whole server in one terminal: Valkey, API, dispatcher and one worker as child processes."""
