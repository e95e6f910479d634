"""The bookkeeper: what is true about every job. Knows the database, Redis, Celery's send side and files; never torch or the web."""
